"""Train the demo pair: a byte-level BPE tokenizer, a Llama target, and a draft distilled from it.

    python -m demo.train                                   both models, on this Python's standard library
    python -m demo.train --target DIR --text DIR --out DIR  a draft for a target of your own
    python -m demo.train --target DIR --draft DIR ...       the same, going on from a draft there is
    python -m demo.train --heads                            heads for the demo target, of every kind
    python -m demo.train --target DIR --text DIR --heads medusa,eagle3 --out DIR

Runs on a GPU where there is one (minutes), else on the CPU at the lowest priority (under two hours on
two cores), and goes on from its last checkpoint when started again. Matrices are trained with Muon
(Jordan et al. 2024), everything else with AdamW; the learning rate falls linearly to zero over the
time given. The draft learns the target's distribution (Hinton et al. 2015), one half on the text and one
half on what the target itself goes on to write (Zhou et al. 2023, DistillSpec), which is what it will meet; so do
heads (`demo.heads`), all of them from the same pass of the target.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from demo import HERE, corpus, own_text, train_heads
from demo.losses import distillation_loss, next_token_loss
from demo.trainer import Trainer, TrainingRun, device, encode

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
# The demo completes code, so its chat is written the way a source file would hold one: as comments.
CHAT_TEMPLATE = (
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:\n{% endif %}"
)


def train_tokenizer(texts: Sequence[str], folder: Path) -> None:
    """Train a byte-level BPE tokenizer of `VOCAB_SIZE` entries and save it in Hugging Face format."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def target_config() -> LlamaConfig:
    """25.7 M parameters: eight layers of 512."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def draft_config(target: Any, hidden: int = 256, layers: int = 2) -> LlamaConfig:
    """Two layers: the fewest that can copy from context (induction), the draft's best trick."""
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=target.max_position_embeddings,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        pad_token_id=target.pad_token_id,
    )


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write *model* as bf16 safetensors with its tokenizer, loadable by plain transformers."""
    model.to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)


def train_target(work: Path, run: TrainingRun, out: Path) -> None:
    """Train tokenizer and target on the standard library, and list what was held out."""
    train_files, heldout = corpus.split(corpus.stdlib_root())
    names = [path.relative_to(corpus.stdlib_root()).as_posix() for path in heldout]
    corpus.HELDOUT_LIST.write_text("\n".join(names) + "\n")
    texts = list(corpus.read(train_files))
    if not (work / "tokenizer" / "tokenizer.json").exists():
        train_tokenizer(texts, work / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    torch.manual_seed(run.seed)
    model = AutoModelForCausalLM.from_config(target_config()).to(device())
    trainer = Trainer(model, [encode(texts, tokenizer)], run, work / "target.pt")
    trainer.train(next_token_loss(model), "target")
    save(model, tokenizer, out)


def train_draft(
    target_folder: Path, text: Path, work: Path, run: TrainingRun, *, out: Path, start: Path | None = None
) -> None:
    """Distil a draft for the target in *target_folder* on the text below *text* and the target's own.

    It begins with the weights in *start*, or with random ones.
    """
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    train_files, _ = corpus.split(text)
    stream = encode(list(corpus.read(train_files)), tokenizer)
    streams = [stream, own_text.load_or_write(target_folder, stream, work / "own_text.safetensors")]
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).to(device())
    torch.manual_seed(run.seed)
    draft = (
        _new_draft(target_folder) if start is None else AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    )
    draft.to(device())
    trainer = Trainer(draft, streams, run, work / "draft.pt")
    trainer.train(distillation_loss(draft, target), "draft")
    save(draft, tokenizer, out)


def _new_draft(target_folder: Path) -> Any:
    return AutoModelForCausalLM.from_config(draft_config(AutoConfig.from_pretrained(target_folder)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, help="train only a draft or heads, for the model in this folder")
    parser.add_argument("--draft", type=Path, help="a draft to go on from (default: a new one)")
    parser.add_argument(
        "--heads",
        nargs="?",
        type=_methods,
        const=tuple(train_heads.MAKERS),
        metavar="METHODS",
        help=f"train heads instead: all, or some of {', '.join(train_heads.MAKERS)}",
    )
    parser.add_argument("--text", type=Path, default=corpus.stdlib_root(), help="folder of text to distil on")
    parser.add_argument("--out", type=Path, help="where they go (default: TARGET-draft, TARGET-heads)")
    parser.add_argument("--work", type=Path, help="folder for checkpoints (default: one for each target in demo/.work)")
    parser.add_argument("--own-texts", type=int, default=own_text.NUM_TEXTS, help="how many the target writes itself")
    parser.add_argument("--target-minutes", type=float, default=75.0)
    parser.add_argument("--draft-minutes", type=float, default=40.0)
    parser.add_argument("--head-minutes", type=float, default=60.0)
    return parser.parse_args()


def _methods(names: str) -> tuple[str, ...]:
    methods = tuple(names.split(","))
    for method in methods:
        if method not in train_heads.MAKERS:
            raise argparse.ArgumentTypeError(f"{method!r} is not one of {', '.join(train_heads.MAKERS)}")
    return methods


def _train_heads(args: argparse.Namespace, target: Path, out: Path) -> None:
    run = TrainingRun(minutes=args.head_minutes, learning_rate=1.5e-3, length=384, batch=2, warm_up=10)
    material = train_heads.Material(args.text, args.own_texts)
    for method, shares in train_heads.train_heads(target, args.heads, material, args.work, run, out=out).items():
        *right, length = (f"{share:.3f}" for share in shares)
        sys.stdout.write(f"{method}: right up to each guess {' '.join(right)}, {length} guesses a draft\n")


def main() -> None:
    """Train what the command line asks for."""
    args = _arguments()
    os.nice(19)
    args.work = args.work or HERE / ".work" / (args.target.resolve().name if args.target else "")
    args.work.mkdir(parents=True, exist_ok=True)
    target: Path = args.target or HERE / "target"
    kind = "heads" if args.heads else "draft"
    out: Path = args.out or (target.with_name(f"{target.name}-{kind}") if args.target else HERE / kind)
    if args.target is None and not (target / "model.safetensors").exists():
        train_target(args.work, TrainingRun(minutes=args.target_minutes), target)
    if args.heads:
        _train_heads(args, target, out)
    else:
        train_draft(target, args.text, args.work, TrainingRun(minutes=args.draft_minutes), out=out, start=args.draft)


if __name__ == "__main__":
    main()
