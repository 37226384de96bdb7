"""A training run that can be stopped and resumed at any time, and counts its actual running time."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from demo.losses import Loss

CHECKPOINT_EVERY_S = 120.0


class TrainingError(Exception):
    """A model cannot be trained as asked; the message says what to change."""


@dataclass(frozen=True)
class TrainingRun:
    """The settings of a training run: sequences of *length* tokens, *batch* at a time, for *minutes*.

    *purpose* says what is trained: a checkpoint of another purpose is not resumed.
    """

    minutes: float
    learning_rate: float = 3e-3
    length: int = 512
    batch: int = 8
    seed: int = 0
    warm_up: int = 40  # warm-up steps of the learning rate
    purpose: str = ""


def encode(texts: Sequence[str], tokenizer: Any) -> torch.Tensor:
    """Return all *texts* as one int32 stream `[N]`, each closed by the end-of-text token."""
    stream: list[int] = []
    for ids in tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]:
        stream += [*ids, tokenizer.eos_token_id]
    return torch.tensor(stream, dtype=torch.int32)


def device() -> str:
    """Return the device for training."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def computes_bf16() -> bool:
    """Return whether bf16 is faster than fp32 here: on a CPU without such arithmetic it is a hundred times slower."""
    return torch.cuda.is_available() or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def optimizers(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon, which computes in bf16, for the matrices inside the layers; AdamW for embeddings and norms."""
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
    chosen = {id(p) for p in inner}
    others = [p for p in model.parameters() if id(p) not in chosen]
    if not computes_bf16():
        return [adamw([*inner, *others], rate)]
    return [torch.optim.Muon(inner, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"), adamw(others, rate)]


def adamw(parameters: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """Return AdamW with the settings used here."""
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)


class Trainer:
    """Trains one model for the time of its run; can be stopped and resumed at any time.

    Raises:
        TrainingError: there is too little text, or the checkpoint is one of another purpose.
    """

    def __init__(
        self,
        model: nn.Module,
        streams: Sequence[torch.Tensor],
        run: TrainingRun,
        state: Path,
        *,
        optimized_by: Callable[[nn.Module, float], list[torch.optim.Optimizer]] = optimizers,
    ) -> None:
        shortest = min(len(stream) for stream in streams)
        if shortest <= run.length:
            raise TrainingError(f"the text has {shortest} tokens, but sequences of {run.length} are cut from it")
        self.model, self.streams, self.run, self.state = model, streams, run, state
        self.optimizers = optimized_by(model, run.learning_rate)
        self.step, self.seconds = 0, 0.0
        if state.exists():
            self._resume()

    def _resume(self) -> None:
        saved = torch.load(self.state, weights_only=True)
        purpose = saved.get("purpose", self.run.purpose)
        if purpose != self.run.purpose:
            raise TrainingError(
                f"{self.state} is the checkpoint of {purpose}, not of {self.run.purpose}: delete it, or give "
                "another with --work"
            )
        self.model.load_state_dict(saved["model"])
        for optimizer, values in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        self.step, self.seconds = saved["step"], saved["seconds"]

    def _save(self) -> None:
        partial = self.state.with_suffix(".partial")
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizers": [o.state_dict() for o in self.optimizers],
                "step": self.step,
                "seconds": self.seconds,
                "purpose": self.run.purpose,
            },
            partial,
        )
        partial.replace(self.state)

    def _batch(self) -> torch.Tensor:
        """Return ids `[B, L]`, from alternating streams; the same for a resumed run."""
        generator = torch.Generator().manual_seed(self.run.seed * 1_000_003 + self.step)
        rows = [self._cut(self.streams[i % len(self.streams)], generator) for i in range(self.run.batch)]
        return torch.stack(rows).long().to(next(self.model.parameters()).device)

    def _cut(self, stream: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        start = int(torch.randint(len(stream) - self.run.length, (1,), generator=generator))
        return stream[start : start + self.run.length]

    def _set_rate(self, progress: float) -> None:
        scale = min(1.0, (self.step + 1) / self.run.warm_up) * max(0.0, 1.0 - progress)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.run.learning_rate * scale

    def _update(self, loss_of: Loss) -> float:
        ids = self._batch()
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=computes_bf16()):
            loss = loss_of(ids)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def train(self, loss_of: Loss, name: str) -> None:
        """Run until the time is used up; the progress bar counts seconds."""
        budget, saved_at, mean = self.run.minutes * 60, time.monotonic(), 0.0
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
            if time.monotonic() - saved_at > CHECKPOINT_EVERY_S:
                self._save()
                saved_at = time.monotonic()
        self._save()
        bar.close()


def _clock() -> float:
    """Seconds of work: on a CPU those really spent computing, so that a paused run loses no training."""
    return time.monotonic() if torch.cuda.is_available() else time.process_time() / torch.get_num_threads()
