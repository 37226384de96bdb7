"""Heads that guess what a target says next, in training: what a teacher shows, what a head is, and how it learns.

A head is a torch module whose `state_dict` has the public tensor names of its format. It is trained on *anchors*,
positions t behind which it guesses: it is given the target's states up to t and the token at t + 1, and its guess
number i, from 0, is of the token at t + 2 + i. What the target would say there is known, for the text is: so every
guess learns the target's distribution (Hinton et al. 2015), those further on with less weight.

Letters in names of tensors: B texts of L tokens, M anchors in each, N of them together; H wide states, V tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from demo.losses import divergence

DECAY = 0.8  # weight of a guess against the one before it
ROWS_AT_ONCE = 256  # logits of so many rows fit in a cache

Follow = Callable[[int, torch.Tensor], torch.Tensor]
"""Tells the ids `[B, M]` that stand where guess number i was made, by i and what the guess was read from."""


@dataclass(frozen=True)
class Lesson:
    """What one pass of the target shows, and the anchors to guess at.

    Attributes:
        teacher: whose it is.
        ids_BL: the text, int64.
        states_BLH: what the target's head reads, after the final norm.
        aux_BLF: the inputs of `teacher.inputs_of`, side by side.
        logits_BLV: what the target says behind each token.
        anchors_BM: positions, int64; at least `depth` short of the end.
    """

    teacher: "Teacher"
    ids_BL: torch.Tensor
    states_BLH: torch.Tensor
    aux_BLF: torch.Tensor
    logits_BLV: torch.Tensor
    anchors_BM: torch.Tensor

    def at(self, what_BLx: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """Return `[B, M, ...]`: *what* stands *offset* behind the anchors."""
        rows_B1 = torch.arange(len(what_BLx), device=what_BLx.device)[:, None]
        found: torch.Tensor = what_BLx[rows_B1, self.anchors_BM + offset]
        return found

    def tokens(self, offset: int) -> torch.Tensor:
        """Return the ids `[B, M]` that stand *offset* behind the anchors."""
        return self.at(self.ids_BL, offset)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the target's embedding of *ids*."""
        embedding: torch.Tensor = self.teacher.embedding(ids).detach()
        return embedding

    @cached_property
    def at_anchors_BMH(self) -> torch.Tensor:
        """The target's states at the anchors."""
        return self.at(self.states_BLH)

    def true_tokens(self, guess: int, _: torch.Tensor) -> torch.Tensor:
        """A `Follow` by the text itself: teacher forcing."""
        return self.tokens(2 + guess)


class Teacher:
    """A frozen target: what it computes of a text, its embedding, and its head."""

    def __init__(self, model: Any) -> None:
        """Raise `ValueError` for a family whose logits are not made as `output` makes them."""
        self.model = model.eval().requires_grad_(False)
        self.config = model.config
        self.embedding: nn.Module = model.get_input_embeddings()
        self.output_layer: nn.Module = model.get_output_embeddings()
        layers = self.config.num_hidden_layers
        self.inputs_of = tuple(min(max(i, 0), layers - 1) for i in (2, layers // 2, layers - 3))
        self._check()

    @torch.no_grad()
    def teach(self, ids_BL: torch.Tensor, anchors_BM: torch.Tensor) -> Lesson:
        """Read a text of int64 ids once, for every head."""
        seen = self.model(input_ids=ids_BL, use_cache=False, output_hidden_states=True)
        aux_BLF = torch.cat([seen.hidden_states[i] for i in self.inputs_of], -1)
        return Lesson(self, ids_BL, seen.hidden_states[-1], aux_BLF, seen.logits.float(), anchors_BM)

    def output(self, states: torch.Tensor) -> torch.Tensor:
        """Return the target's logits for states `[..., H]`, scaled and capped as its family does."""
        logits: torch.Tensor = self.output_layer(states).float()
        logits = logits * float(getattr(self.config, "logit_scale", None) or 1.0)
        logits = logits / float(getattr(self.config, "logits_scaling", None) or 1.0)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits

    @property
    def output_VH(self) -> torch.Tensor:
        """Weights of the target's head."""
        weight: torch.Tensor = self.output_layer.weight  # type: ignore[assignment]
        return weight.detach().float()

    def _check(self) -> None:
        ids_BL = torch.arange(16, device=self.output_layer.weight.device)[None]  # type: ignore[arg-type]
        lesson = self.teach(ids_BL, ids_BL[:, :1])
        if not torch.allclose(self.output(lesson.states_BLH), lesson.logits_BLV, atol=1e-2, rtol=1e-2):
            raise ValueError(
                f"heads cannot be trained for {self.config.model_type}: its logits are not a linear "
                "function of its last hidden state, scaled and capped"
            )


class Head(nn.Module, ABC):
    """One method's guesser.

    Attributes:
        method: what `speculative_config` calls it.
        file_name: where its tensors are stored.
        depth: guesses it learns to make behind an anchor.
    """

    method: str
    file_name = "model.safetensors"
    depth: int

    @abstractmethod
    def states(self, lesson: Lesson, follow: Follow) -> list[torch.Tensor]:
        """Return, for each guess, what its logits are read from, `[B, M, X]`."""

    @abstractmethod
    def logits(self, lesson: Lesson, guess: int, states: torch.Tensor) -> torch.Tensor:
        """Return `[..., V]` from states `[..., X]`."""

    def output_weights(self, guess: int) -> tuple[nn.Parameter, ...]:
        """Return what `logits` reads of this module: nothing where the target's head is used."""
        return ()

    @abstractmethod
    def describe(self, target: Any) -> dict[str, Any]:
        """Return the `config.json` of its format for a target with the config *target*."""

    def loss(self, lesson: Lesson) -> torch.Tensor:
        """Return the weighted mean of the guesses' losses, the text itself following each guess."""
        return self.guess_loss(lesson, self.states(lesson, lesson.true_tokens))

    def guess_loss(self, lesson: Lesson, states: list[torch.Tensor]) -> torch.Tensor:
        """Return the mean divergence of guesses that are read from *states*, later ones weighing less."""
        total = torch.zeros((), device=lesson.ids_BL.device)
        for i, states_BMX in enumerate(states):
            total = total + DECAY**i * self._guess_loss(lesson, i, states_BMX)
        return total / sum(DECAY**i for i in range(len(states)))

    def _guess_loss(self, lesson: Lesson, guess: int, states_BMX: torch.Tensor) -> torch.Tensor:
        def score(states_NX: torch.Tensor, wanted_NV: torch.Tensor) -> torch.Tensor:
            return divergence(self.logits(lesson, guess, states_NX), wanted_NV)

        wanted_BMV = self.comparable(lesson.at(lesson.logits_BLV, 1 + guess))
        loss: torch.Tensor = _InSlices.apply(  # type: ignore[no-untyped-call]
            score, states_BMX.flatten(0, 1), wanted_BMV.flatten(0, 1), *self.output_weights(guess)
        )
        return loss

    def comparable(self, logits: torch.Tensor) -> torch.Tensor:
        """Return of the target's logits `[..., V]` those that this head can guess."""
        return logits

    def best(self, lesson: Lesson, guess: int, states: torch.Tensor) -> torch.Tensor:
        """Return the likeliest id behind states `[..., X]`; as a `Follow`, what a greedy draft feeds itself."""
        return self.logits(lesson, guess, states).argmax(-1)


class _InSlices(torch.autograd.Function):
    """A mean over rows, and its gradient, a few rows at a time: logits of all rows are never in memory together."""

    @staticmethod
    def forward(
        ctx: Any,
        score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        states_NX: torch.Tensor,
        wanted_NV: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        """Return the mean of `score(states, wanted)`, which reads *weights* besides."""
        total, slopes, slopes_of = states_NX.new_zeros(()), [], [torch.zeros_like(weight) for weight in weights]
        pieces = torch.split(states_NX, ROWS_AT_ONCE), torch.split(wanted_NV, ROWS_AT_ONCE)
        for states, wanted in zip(*pieces, strict=True):
            with torch.enable_grad():
                piece = states.detach().requires_grad_()
                part = score(piece, wanted) * (len(states) / len(states_NX))
                slope, *others = torch.autograd.grad(part, (piece, *weights))
            total += part.detach()
            slopes.append(slope)
            for total_slope, other in zip(slopes_of, others, strict=True):
                total_slope.add_(other)
        ctx.save_for_backward(torch.cat(slopes), *slopes_of)
        return total

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients that `forward` kept."""
        states, *weights = (slopes[0] * kept for kept in ctx.saved_tensors)
        return None, states, None, *weights


def anchors(ids_BL: torch.Tensor, count: int, depth: int) -> torch.Tensor:
    """Return *count* positions a text to guess at, int64 `[B, M]` ascending; the same for the same text."""
    generator = torch.Generator().manual_seed(int(ids_BL.sum()))
    room = ids_BL.shape[1] - depth - 1
    drawn = torch.stack([torch.randperm(room, generator=generator)[:count] for _ in ids_BL])
    return drawn.sort().values.to(ids_BL.device)
