"""Train the demo pair: a byte-level BPE tokenizer, a Llama target, and a draft distilled from it.

    python -m demo.train                                   both models, on this Python's standard library
    python -m demo.train --target DIR --text DIR --out DIR  a draft for a target of your own
    python -m demo.train --target DIR --draft DIR ...       the same, going on from a draft there is

Runs on a GPU where there is one (minutes), else on the CPU at the lowest priority (under two hours on
two cores), and goes on from its last checkpoint when started again. Matrices are trained with Muon
(Jordan et al. 2024), everything else with AdamW; the learning rate falls linearly to zero over the
time given. The draft learns the target's distribution (Hinton et al. 2015), one half on the text and one
half on what the target itself goes on to write (Zhou et al. 2023, DistillSpec), which is what it will meet.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from demo import corpus, own_text

HERE = Path(__file__).parent
VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
# The demo completes code, so its chat is written the way a source file would hold one: as comments.
CHAT_TEMPLATE = (
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:\n{% endif %}"
)
CHECKPOINT_EVERY_S = 120.0
SHARP = 0.7  # temperature at which total variation is taken

Loss = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Run:
    """What one training run needs: sequences of *length* tokens, *batch* at a time, for *minutes*."""

    minutes: float
    learning_rate: float = 3e-3
    length: int = 512
    batch: int = 8
    seed: int = 0


def train_tokenizer(texts: Sequence[str], folder: Path) -> None:
    """Train a byte-level BPE tokenizer of `VOCAB_SIZE` entries and save it in Hugging Face format."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT, pad_token=END_OF_TEXT,
        model_max_length=1024, clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def encode(texts: Sequence[str], tokenizer: Any) -> torch.Tensor:
    """Return all *texts* as one int32 stream `[N]`, each closed by the end-of-text token."""
    stream: list[int] = []
    for ids in tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]:
        stream += [*ids, tokenizer.eos_token_id]
    return torch.tensor(stream, dtype=torch.int32)


def target_config() -> LlamaConfig:
    """25.7 M parameters: eight layers of 512."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=512, intermediate_size=1408, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
        max_position_embeddings=1024, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )


def draft_config(target: Any, hidden: int = 256, layers: int = 2) -> LlamaConfig:
    """Two layers: the fewest that can copy from context (induction), the draft's best trick."""
    return LlamaConfig(
        vocab_size=target.vocab_size, hidden_size=hidden, intermediate_size=3 * hidden,
        num_hidden_layers=layers, num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128,
        head_dim=64, tie_word_embeddings=True, max_position_embeddings=target.max_position_embeddings,
        bos_token_id=target.bos_token_id, eos_token_id=target.eos_token_id, pad_token_id=target.pad_token_id,
    )


def next_token_loss(model: nn.Module) -> Loss:
    """Return the loss of plain language modelling over ids `[B, L]`."""
    compiled = torch.compile(model)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        logits = compiled(input_ids=ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    return loss


def distillation_loss(draft: nn.Module, target: nn.Module) -> Loss:
    """Return KL(target || draft) + their total variation at `SHARP`, a position, over ids `[B, L]`.

    KL covers everything the target might say; total variation is the share of guesses that optimal acceptance
    would refuse, taken at a lower temperature so that the likeliest tokens count most.
    """
    target.eval().requires_grad_(False)
    student, teacher, apart = torch.compile(draft), torch.compile(target), torch.compile(divergence)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(input_ids=ids, use_cache=False).logits
        return apart(student(input_ids=ids, use_cache=False).logits, wanted)

    return loss


def divergence(guessed_BLV: torch.Tensor, wanted_BLV: torch.Tensor) -> torch.Tensor:
    """Return KL + total variation, a mean over positions."""
    guessed, wanted = guessed_BLV.float().flatten(0, 1), wanted_BLV.float().flatten(0, 1)
    kl = F.kl_div(F.log_softmax(guessed, -1), F.log_softmax(wanted, -1), reduction="batchmean", log_target=True)
    apart = (F.softmax(guessed / SHARP, -1) - F.softmax(wanted / SHARP, -1)).abs().sum(-1).mean() / 2
    return kl + apart


def optimizers(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
    chosen = {id(p) for p in inner}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [torch.optim.Muon(inner, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)]


class Trainer:
    """Trains one model for the time of its run, and can be stopped and started at any moment."""

    def __init__(self, model: nn.Module, streams: Sequence[torch.Tensor], run: Run, state: Path) -> None:
        self.model, self.streams, self.run, self.state = model, streams, run, state
        self.optimizers = optimizers(model, run.learning_rate)
        self.step, self.seconds = 0, 0.0
        if state.exists():
            self._resume()

    def _resume(self) -> None:
        saved = torch.load(self.state, weights_only=True)
        self.model.load_state_dict(saved["model"])
        for optimizer, values in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        self.step, self.seconds = saved["step"], saved["seconds"]

    def _save(self) -> None:
        partial = self.state.with_suffix(".partial")
        torch.save({"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers],
                    "step": self.step, "seconds": self.seconds}, partial)
        partial.replace(self.state)

    def _batch(self) -> torch.Tensor:
        """Return ids `[B, L]`, the streams by turns; a function of the step alone: a resumed run sees the same data."""
        generator = torch.Generator().manual_seed(self.run.seed * 1_000_003 + self.step)
        rows = [self._cut(self.streams[i % len(self.streams)], generator) for i in range(self.run.batch)]
        return torch.stack(rows).long().to(next(self.model.parameters()).device)

    def _cut(self, stream: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        start = int(torch.randint(len(stream) - self.run.length, (1,), generator=generator))
        return stream[start : start + self.run.length]

    def _set_rate(self, progress: float) -> None:
        scale = min(1.0, (self.step + 1) / 40) * max(0.0, 1.0 - progress)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.run.learning_rate * scale

    def _update(self, loss_of: Loss) -> float:
        ids = self._batch()
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss = loss_of(ids)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def train(self, loss_of: Loss, name: str) -> None:
        """Run until the time is used up; the progress bar counts seconds."""
        budget, saved_at, mean = self.run.minutes * 60, self.seconds, 0.0
        bar = tqdm(total=round(budget), initial=round(self.seconds), desc=name, unit="s", mininterval=5.0)
        while self.seconds < budget:
            began = _clock()
            self._set_rate(self.seconds / budget)
            loss = self._update(loss_of)
            self.step += 1
            self.seconds += _clock() - began
            mean = loss if self.step == 1 else 0.95 * (mean or loss) + 0.05 * loss
            bar.set_postfix(loss=f"{mean:.3f}", step=self.step, refresh=False)
            bar.update(max(0, min(round(self.seconds), bar.total) - bar.n))
            if self.seconds - saved_at > CHECKPOINT_EVERY_S:
                self._save()
                saved_at = self.seconds
        self._save()
        bar.close()


def _clock() -> float:
    """Seconds of work: on a CPU those really spent computing, so that a starved or paused run loses no training."""
    return time.monotonic() if torch.cuda.is_available() else time.process_time() / torch.get_num_threads()


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write *model* as bf16 safetensors with its tokenizer, loadable by plain transformers."""
    model.to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def train_target(work: Path, run: Run, out: Path) -> None:
    """Train tokenizer and target on the standard library, and list what was held out."""
    train_files, heldout = corpus.split(corpus.stdlib_root())
    names = [path.relative_to(corpus.stdlib_root()).as_posix() for path in heldout]
    corpus.HELDOUT_LIST.write_text("\n".join(names) + "\n")
    texts = list(corpus.read(train_files))
    if not (work / "tokenizer" / "tokenizer.json").exists():
        train_tokenizer(texts, work / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    torch.manual_seed(run.seed)
    model = AutoModelForCausalLM.from_config(target_config()).to(_device())
    trainer = Trainer(model, [encode(texts, tokenizer)], run, work / "target.pt")
    trainer.train(next_token_loss(model), "target")
    save(model, tokenizer, out)


def train_draft(
    target_folder: Path, text: Path, work: Path, run: Run, *, out: Path, start: Path | None = None
) -> None:
    """Distil a draft for the target in *target_folder* on the text below *text* and the target's own.

    It begins with the weights in *start*, or with random ones.
    """
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    train_files, _ = corpus.split(text)
    stream = encode(list(corpus.read(train_files)), tokenizer)
    streams = [stream, own_text.load_or_write(target_folder, stream, work / "own_text.safetensors")]
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).to(_device())
    torch.manual_seed(run.seed)
    draft = _new_draft(target_folder) if start is None else AutoModelForCausalLM.from_pretrained(
        start, dtype=torch.float32)
    draft.to(_device())
    trainer = Trainer(draft, streams, run, work / "draft.pt")
    trainer.train(distillation_loss(draft, target), "draft")
    save(draft, tokenizer, out)


def _new_draft(target_folder: Path) -> Any:
    return AutoModelForCausalLM.from_config(draft_config(AutoConfig.from_pretrained(target_folder)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, help="train only a draft, for the model in this folder")
    parser.add_argument("--draft", type=Path, help="a draft to go on from (default: a new one)")
    parser.add_argument("--text", type=Path, default=corpus.stdlib_root(), help="folder of text to distil on")
    parser.add_argument("--out", type=Path, help="where the draft of --target goes (default: TARGET-draft)")
    parser.add_argument("--work", type=Path, default=HERE / ".work", help="folder for checkpoints")
    parser.add_argument("--target-minutes", type=float, default=75.0)
    parser.add_argument("--draft-minutes", type=float, default=40.0)
    return parser.parse_args()


def main() -> None:
    """Train what the command line asks for."""
    args = _arguments()
    os.nice(19)
    args.work.mkdir(parents=True, exist_ok=True)
    target: Path = args.target or HERE / "target"
    if args.target is None and not (target / "model.safetensors").exists():
        train_target(args.work, Run(minutes=args.target_minutes), target)
    out: Path = args.out or (target.with_name(target.name + "-draft") if args.target else HERE / "draft")
    train_draft(target, args.text, args.work, Run(minutes=args.draft_minutes), out=out, start=args.draft)


if __name__ == "__main__":
    main()
