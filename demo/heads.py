"""Training of draft heads: the teacher, the base class of heads, and the loss.

A head is a torch module whose `state_dict` has the public tensor names of its format. It is trained on *anchors*,
positions t after which it drafts: it is given the target's states up to t and the token at t + 1, and its prediction
number i, from 0, is of the token at t + 2 + i. The target's distributions there are known, since the text is, and every
prediction is distilled from them (Hinton et al. 2015), later ones with less weight.

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

DECAY = 0.8  # weight of a prediction relative to the one before it
ROWS_AT_ONCE = 256  # the logits of this many rows fit in the processor's cache

Follow = Callable[[int, torch.Tensor], torch.Tensor]
"""Returns the ids `[B, M]` that follow prediction number i, given i and the states it was read from."""


@dataclass(frozen=True)
class Lesson:
    """One forward of the target over a batch of texts, and the anchors to draft from.

    Attributes:
        teacher: the target.
        ids_BL: the text, int64.
        states_BLH: the states that the target's head reads, after the final norm.
        aux_BLF: the inputs of the layers `teacher.inputs_of`, concatenated.
        logits_BLV: the target's logits after each token.
        anchors_BM: positions, int64; at least `depth` short of the end.
    """

    teacher: "Teacher"
    ids_BL: torch.Tensor
    states_BLH: torch.Tensor
    aux_BLF: torch.Tensor
    logits_BLV: torch.Tensor
    anchors_BM: torch.Tensor

    def at(self, what_BLx: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """Return the values of *what*, `[B, M, ...]`, *offset* positions after the anchors."""
        rows_B1 = torch.arange(len(what_BLx), device=what_BLx.device)[:, None]
        found: torch.Tensor = what_BLx[rows_B1, self.anchors_BM + offset]
        return found

    def tokens(self, offset: int) -> torch.Tensor:
        """Return the ids `[B, M]`, *offset* positions after the anchors."""
        return self.at(self.ids_BL, offset)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the target's embedding of *ids*."""
        embedding: torch.Tensor = self.teacher.embedding(ids).detach()
        return embedding

    @cached_property
    def at_anchors_BMH(self) -> torch.Tensor:
        """The target's states at the anchors."""
        return self.at(self.states_BLH)

    def true_tokens(self, index: int, _: torch.Tensor) -> torch.Tensor:
        """A `Follow` that returns the text itself: teacher forcing."""
        return self.tokens(2 + index)


class Teacher:
    """A frozen target: its states and logits for a text, its embedding, and its head."""

    def __init__(self, model: Any) -> None:
        """Raise `ValueError` for a family whose logits `output` cannot compute."""
        self.model = model.eval().requires_grad_(False)
        self.config = model.config
        self.embedding: nn.Module = model.get_input_embeddings()
        self.output_layer: nn.Module = model.get_output_embeddings()
        layers = self.config.num_hidden_layers
        self.inputs_of = tuple(min(max(i, 0), layers - 1) for i in (2, layers // 2, layers - 3))
        self._check()

    @torch.no_grad()
    def teach(self, ids_BL: torch.Tensor, anchors_BM: torch.Tensor) -> Lesson:
        """Run the target once over int64 ids, for all heads."""
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
    """The head of one method.

    Attributes:
        method: its name in `speculative_config`.
        file_name: of its tensors.
        depth: number of predictions per anchor in training.
    """

    method: str
    file_name = "model.safetensors"
    depth: int

    @abstractmethod
    def states(self, lesson: Lesson, follow: Follow) -> list[torch.Tensor]:
        """Return, for each prediction, the states of its logits, `[B, M, X]`."""

    @abstractmethod
    def logits(self, lesson: Lesson, index: int, states: torch.Tensor) -> torch.Tensor:
        """Return the logits `[..., V]` of prediction number *index* from its states `[..., X]`."""

    def output_weights(self, index: int) -> tuple[nn.Parameter, ...]:
        """Return the parameters that `logits` reads for prediction *index*; none if the target's head is used."""
        return ()

    @abstractmethod
    def describe(self, target: Any) -> dict[str, Any]:
        """Return the `config.json` of its format for a target with the config *target*."""

    def loss(self, lesson: Lesson) -> torch.Tensor:
        """Return the weighted mean of the predictions' losses, with teacher forcing."""
        return self.predictions_loss(lesson, self.states(lesson, lesson.true_tokens))

    def predictions_loss(self, lesson: Lesson, states: list[torch.Tensor]) -> torch.Tensor:
        """Return the weighted mean divergence of the predictions from *states*."""
        total = torch.zeros((), device=lesson.ids_BL.device)
        for i, states_BMX in enumerate(states):
            total = total + DECAY**i * self._prediction_loss(lesson, i, states_BMX)
        return total / sum(DECAY**i for i in range(len(states)))

    def _prediction_loss(self, lesson: Lesson, index: int, states_BMX: torch.Tensor) -> torch.Tensor:
        def score(states_NX: torch.Tensor, wanted_NV: torch.Tensor) -> torch.Tensor:
            return divergence(self.logits(lesson, index, states_NX), wanted_NV)

        wanted_BMV = self.comparable(lesson.at(lesson.logits_BLV, 1 + index))
        loss: torch.Tensor = _InSlices.apply(  # type: ignore[no-untyped-call]
            score, states_BMX.flatten(0, 1), wanted_BMV.flatten(0, 1), *self.output_weights(index)
        )
        return loss

    def comparable(self, logits: torch.Tensor) -> torch.Tensor:
        """Return those of the target's logits `[..., V]` whose tokens this head can predict."""
        return logits

    def best(self, lesson: Lesson, index: int, states: torch.Tensor) -> torch.Tensor:
        """Return the most likely id after states `[..., X]`; as a `Follow`, greedy drafting."""
        return self.logits(lesson, index, states).argmax(-1)


class _InSlices(torch.autograd.Function):
    """A mean over rows, and its gradient, computed a few rows at a time to limit memory."""

    @staticmethod
    def forward(
        ctx: Any,
        score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        states_NX: torch.Tensor,
        wanted_NV: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        """Return the mean of `score(states, wanted)`, which also depends on *weights*."""
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
        """Return the gradients computed in `forward`."""
        states, *weights = (slopes[0] * kept for kept in ctx.saved_tensors)
        return None, states, None, *weights


def anchors(ids_BL: torch.Tensor, count: int, depth: int) -> torch.Tensor:
    """Return *count* anchors per text, int64 `[B, M]` ascending; the same for the same text."""
    generator = torch.Generator().manual_seed(int(ids_BL.sum()))
    room = ids_BL.shape[1] - depth - 1
    drawn = torch.stack([torch.randperm(room, generator=generator)[:count] for _ in ids_BL])
    return drawn.sort().values.to(ids_BL.device)
