"""Heads without attention: each predicts from the target's last state and the tokens since.

Medusa (Cai et al. 2024, arXiv 2401.10774), Hydra (Ankner et al. 2024, arXiv 2402.05109), the MLP speculator (Wertheimer
et al. 2024, arXiv 2404.19124) and ReDrafter (Cheng et al. 2024, arXiv 2403.09919). They are initialised
from the target's own head: with its weights, or with the best low-rank approximation.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from demo.heads import Follow, Head, Lesson, Teacher


class ResidualBlock(nn.Module):
    """`x + SiLU(W x + b)`, with a projection of x if widths differ; initialised as the identity."""

    def __init__(self, reads: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(reads, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.res_connection = None if reads == width else _selecting(reads, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[..., reads]` to `[..., width]`."""
        kept = x if self.res_connection is None else self.res_connection(x)
        return kept + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList, Head):
    """Head i is `{i}.0.linear`; all use the target's own head, as in TGI's variant."""

    method, file_name = "medusa", "medusa_lm_head.safetensors"

    def __init__(self, teacher: Teacher, depth: int = 4) -> None:
        width = teacher.config.hidden_size
        super().__init__(nn.ModuleList([ResidualBlock(width, width)]) for _ in range(depth))
        self.depth = depth

    def states(self, lesson: Lesson, follow: Follow) -> list[torch.Tensor]:
        """See `Head`; independent of the tokens before."""
        return [head[0](lesson.at_anchors_BMH) for head in self]  # type: ignore[index]

    def logits(self, lesson: Lesson, index: int, states: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        return lesson.teacher.output(states)

    def describe(self, target: Any) -> dict[str, Any]:
        """See `Head`."""
        return {
            "base_model_name_or_path": _base(target),
            "medusa_num_heads": self.depth,
            "medusa_num_layers": 1,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
        }


class HydraHeads(Head):
    """Grounded heads of the `mlp` form; few, because each has an output layer over the whole vocabulary."""

    method, file_name = "hydra", "hydra_lm_head.pt"

    def __init__(self, teacher: Teacher, depth: int = 1) -> None:
        super().__init__()
        width, self.depth = teacher.config.hidden_size, depth
        self.hydra_mlp = nn.ModuleList(nn.ModuleList([ResidualBlock((i + 2) * width, width)]) for i in range(depth))
        self.hydra_lm_head = nn.ModuleList(_linear(teacher.output_VH, bias=True) for _ in range(depth))

    def states(self, lesson: Lesson, follow: Follow) -> list[torch.Tensor]:
        """See `Head`."""
        states, read = [], [lesson.at_anchors_BMH, lesson.embedded(lesson.tokens(1))]
        for i, head in enumerate(self.hydra_mlp):
            states.append(head[0](torch.cat(read, -1)))  # type: ignore[index]
            read.append(lesson.embedded(follow(i, states[-1])))
        return states

    def logits(self, lesson: Lesson, index: int, states: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        logits: torch.Tensor = self.hydra_lm_head[index](states)
        return logits

    def output_weights(self, index: int) -> tuple[nn.Parameter, ...]:
        """See `Head`."""
        return tuple(self.hydra_lm_head[index].parameters())

    def describe(self, target: Any) -> dict[str, Any]:
        """See `Head`."""
        return {
            "base_model_name_or_path": _base(target),
            "hydra_num_heads": self.depth,
            "hydra_num_layers": 1,
            "hydra_head_arch": "mlp",
            "grounded_heads": True,
            "hidden_state_offset": 0,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
        }


class ScaledNorm(nn.Module):
    """`w x / rms(x) + b`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of *x*."""
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) + self.bias


class _TiedSpeculator(nn.Module):
    """The tensors of a tied MLP speculator: one of each, and a second projection for later predictions."""

    def __init__(self, teacher: Teacher, inner: int) -> None:
        super().__init__()
        output_Vr, basis_rH = low_rank(teacher.output_VH, inner)
        self.emb = nn.ModuleList([nn.Embedding(len(output_Vr), inner)])
        self.proj = nn.ModuleList([_linear(basis_rH), nn.Linear(inner, inner, bias=False)])
        self.ln = nn.ModuleList([ScaledNorm(inner)])
        self.head = nn.ModuleList([_linear(output_Vr)])


class MlpSpeculator(Head):
    """A tied speculator, whose states are normalised first."""

    method = "mlp_speculator"

    def __init__(self, teacher: Teacher, depth: int = 4) -> None:
        super().__init__()
        self.inner, self.depth = teacher.config.hidden_size // 4, depth
        self.speculator = _TiedSpeculator(teacher, self.inner)
        self.state_weight = 0.5 ** (0.5 / depth)
        self.token_weight = math.sqrt((1 - self.state_weight**2) * self.inner / 2)
        nn.init.normal_(self._embedding.weight, std=self.inner**-0.5)

    @property
    def _embedding(self) -> nn.Embedding:
        return self.speculator.emb[0]  # type: ignore[return-value]

    def states(self, lesson: Lesson, follow: Follow) -> list[torch.Tensor]:
        """See `Head`."""
        states: list[torch.Tensor] = []
        state, ids_BM = _unit(lesson.at_anchors_BMH) / math.sqrt(2), lesson.tokens(1)
        for i in range(self.depth):
            moved = self.speculator.proj[min(i, 1)](state) * self.state_weight
            state = F.gelu(self.speculator.ln[0](moved + self._embedding(ids_BM) * self.token_weight))
            states.append(state)
            ids_BM = follow(i, state)
        return states

    def logits(self, lesson: Lesson, index: int, states: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        logits: torch.Tensor = self.speculator.head[0](states)
        return logits

    def output_weights(self, index: int) -> tuple[nn.Parameter, ...]:
        """See `Head`."""
        return tuple(self.speculator.head[0].parameters())

    def describe(self, target: Any) -> dict[str, Any]:
        """See `Head`."""
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "emb_dim": target.hidden_size,
            "inner_dim": self.inner,
            "n_predict": self.depth,
            "n_candidates": 1,
            "top_k_tokens_per_head": [1] * self.depth,
            "vocab_size": target.vocab_size,
            "tie_weights": True,
            "scale_input": True,
        }


class RecurrentHeads(Head):
    """ReDrafter: a recurrent state of the tokens since, read together with the target's state."""

    method = "recurrent"

    def __init__(self, teacher: Teacher, depth: int = 4) -> None:
        super().__init__()
        width, self.depth = teacher.config.hidden_size, depth
        self.exit = width // 4
        output_Vr, basis_rH = low_rank(teacher.output_VH, self.exit)
        self.input_proj = _linear(torch.cat([basis_rH, torch.zeros_like(basis_rH)], 1), bias=True)
        self.lm_head = nn.ModuleList([ResidualBlock(self.exit, self.exit), _linear(output_Vr)])
        self.rnn_u, self.rnn_w = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def states(self, lesson: Lesson, follow: Follow) -> list[torch.Tensor]:
        """See `Head`."""
        states: list[torch.Tensor] = []
        state, ids_BM = torch.zeros_like(lesson.at_anchors_BMH), lesson.tokens(1)
        for i in range(self.depth):
            state = F.silu(self.rnn_w(lesson.embedded(ids_BM)) + self.rnn_u(state))
            states.append(self.lm_head[0](self.input_proj(torch.cat([lesson.at_anchors_BMH, state], -1))))
            ids_BM = follow(i, states[-1])
        return states

    def logits(self, lesson: Lesson, index: int, states: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        logits: torch.Tensor = self.lm_head[1](states)
        return logits

    def output_weights(self, index: int) -> tuple[nn.Parameter, ...]:
        """See `Head`."""
        return tuple(self.lm_head[1].parameters())

    def describe(self, target: Any) -> dict[str, Any]:
        """See `Head`."""
        return {
            "model_type": "recurrent_drafting_drafter",
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "exit_dim": self.exit,
            "num_draft_layers": 1,
            "num_lookback_tokens": 0,
            "rnn": True,
        }


def low_rank(weight_VH: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[V, r]` and `[r, H]` whose product is the nearest to *weight* of that rank; the latter's rows are units.

    By the eigenvectors of `[H, H]`: a vocabulary is long.
    """
    _, vectors_HH = torch.linalg.eigh(weight_VH.T @ weight_VH)
    basis_rH = vectors_HH[:, -rank:].T.contiguous()
    return weight_VH @ basis_rH.T, basis_rH


def _base(target: Any) -> str:
    """Return the target's Hub id, or the name of its folder without the path."""
    path = Path(target.name_or_path)
    return path.name if path.is_absolute() else str(path)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _linear(weight: torch.Tensor, *, bias: bool = False) -> nn.Linear:
    """Return a layer initialised with *weight* `[out, in]` and a zero bias."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias)
    layer.load_state_dict({"weight": weight} | ({"bias": torch.zeros(len(weight))} if bias else {}))
    return layer


def _selecting(reads: int, width: int) -> nn.Linear:
    """Return a layer initialised to return the first *width* elements of its input."""
    return _linear(torch.eye(width, reads), bias=True)
