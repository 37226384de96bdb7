"""EAGLE heads: one Llama layer over the target's states, then over its own (Li et al. 2024, 2025).

EAGLE-1 (arXiv 2401.15077) is trained on the target's next state (smooth L1) and its distribution (KL), from noisy
states. EAGLE-3 (arXiv 2503.01840) is trained on the distribution only, from three layers. A longer draft reads the
head's own states, so both are trained on chains of them ("training-time test"). The paper unrolls every position; here
one chain per anchor reads the target's states up to the anchor and its own after it, as in drafting. The input at
position i is token i + 1 and state i.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from demo.eagle_layer import Dims, Entry, Layer, NormedLayer, dims_of
from demo.heads import Follow, Head, Lesson, Teacher

NOISE = 0.1  # uniform noise on EAGLE-1's states, plus or minus
STATE_WEIGHT = 1.0  # weight of the state loss relative to the KL loss; published is 10
LARGEST_VOCABULARY = 32_000


class Eagle(Head):
    """Base of both: dense entries for the known tokens, and a chain after each anchor."""

    def __init__(self, dims: Dims, depth: int) -> None:
        super().__init__()
        self.dims, self.depth = dims, depth

    @property
    @abstractmethod
    def layer(self) -> Layer:
        """The one layer."""

    @abstractmethod
    def take_in(self, lesson: Lesson) -> torch.Tensor:
        """Return the target's states in the form of the layer's own, `[B, L, H]`."""

    @abstractmethod
    def enter(self, embedded: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the attention's input, `[..., reads]`, and the residual, `[..., H]`."""

    def states(self, lesson: Lesson, follow: Follow) -> list[torch.Tensor]:
        """See `Head`."""
        return [self.read(out) for out in self.chain(lesson, follow)]

    def read(self, out: torch.Tensor) -> torch.Tensor:
        """Return the states that the head reads, from the layer's output."""
        return out

    def chain(self, lesson: Lesson, follow: Follow) -> list[torch.Tensor]:
        """Return the layer's output for each prediction, `[B, M, H]`."""
        attention, places_BM = self.layer.self_attn, lesson.anchors_BM
        positions_L = torch.arange(lesson.ids_BL.shape[1] - 1, device=places_BM.device)
        known_x, residuals = self.enter(lesson.embedded(lesson.ids_BL[:, 1:]), self.take_in(lesson)[:, :-1])
        known, hidden_BML = attention.entry(known_x, positions_L[None]), positions_L > places_BM[..., None]
        x_BMX, residual_BMH = lesson.at(known_x), lesson.at(residuals)
        entries: list[Entry] = []
        outs: list[torch.Tensor] = []
        while True:
            places = places_BM + len(outs)
            attended = attention(x_BMX, places, known, hidden_BML, entries)
            outs.append(self.layer(residual_BMH, attended))
            ids_BM = follow(len(outs) - 1, self.read(outs[-1]))
            if len(outs) == self.depth:
                return outs
            x_BMX, residual_BMH = self.enter(lesson.embedded(ids_BM), outs[-1])
            entries.append(attention.entry(x_BMX, places + 1))

    def describe(self, target: Any) -> dict[str, Any]:
        """See `Head`."""
        dims = self.dims
        return {
            "model_type": "llama",
            "hidden_size": dims.hidden,
            "intermediate_size": dims.inner,
            "num_attention_heads": dims.heads,
            "num_key_value_heads": dims.kv_heads,
            "head_dim": dims.head_dim,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rms_norm_eps": dims.eps,
            "rope_theta": dims.theta,
            "max_position_embeddings": target.max_position_embeddings,
            "vocab_size": target.vocab_size,
            "tie_word_embeddings": False,
            "bos_token_id": target.bos_token_id,
            "eos_token_id": target.eos_token_id,
        }


class Eagle1(Eagle):
    """`h = fc(cat(embedding, state))`, and the target's own head after the layer."""

    method = "eagle"

    def __init__(self, teacher: Teacher, depth: int = 3) -> None:
        dims = dims_of(teacher.config, reads=1, inner=1.0)
        super().__init__(dims, depth)
        self.fc = nn.Linear(2 * dims.hidden, dims.hidden, bias=True)
        nn.init.zeros_(self.fc.bias)
        self.fc.weight.data[:, dims.hidden :] += torch.eye(dims.hidden)
        self.layers = nn.ModuleList([Layer(dims)])

    @property
    def layer(self) -> Layer:
        """See `Eagle`."""
        return self.layers[0]  # type: ignore[return-value]

    def take_in(self, lesson: Lesson) -> torch.Tensor:
        """See `Eagle`; with noise in training."""
        states = lesson.states_BLH
        return states + torch.empty_like(states).uniform_(-NOISE, NOISE) if self.training else states

    def enter(self, embedded: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Eagle`."""
        mixed = self.fc(torch.cat([embedded, state], -1))
        return mixed, mixed

    def logits(self, lesson: Lesson, index: int, states: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        return lesson.teacher.output(states)

    def loss(self, lesson: Lesson) -> torch.Tensor:
        """See `Head`; adds the loss of the states."""
        states = self.states(lesson, lesson.true_tokens)
        apart = [
            F.smooth_l1_loss(state.float(), lesson.at(lesson.states_BLH, 1 + i).float())
            for i, state in enumerate(states)
        ]
        return self.predictions_loss(lesson, states) + STATE_WEIGHT * torch.stack(apart).mean()

    def describe(self, target: Any) -> dict[str, Any]:
        """See `Head`."""
        return super().describe(target) | {"architectures": ["LlamaForCausalLM"], "bias": True}


class Eagle3(Eagle):
    """Reads three layers; attends to embedding and state, concatenated; feeds back its states before the norm.

    For a small vocabulary, the head is the target's. Otherwise it has its own head over the most frequent ids, which
    `d2t` and `t2d` map.
    """

    method = "eagle3"
    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, teacher: Teacher, depth: int = 4, frequent: torch.Tensor | None = None) -> None:
        """*frequent* are the ids it can predict, int64 `[Vd]` ascending; None: all."""
        dims = dims_of(teacher.config, reads=2, inner=1.5)
        super().__init__(dims, depth)
        self.inputs_of = teacher.inputs_of
        self.fc = nn.Linear(3 * dims.hidden, dims.hidden, bias=False)
        self.fc.weight.data[:, -dims.hidden :] += torch.eye(dims.hidden)
        self.midlayer = NormedLayer(dims)
        self.norm = nn.RMSNorm(dims.hidden, dims.eps)
        self.norm.weight.data.copy_(teacher.model.base_model.norm.weight)
        if frequent is not None:
            self._choose(teacher, frequent)

    def _choose(self, teacher: Teacher, frequent: torch.Tensor) -> None:
        self.lm_head = nn.Linear(self.dims.hidden, len(frequent), bias=False)
        self.lm_head.weight.data.copy_(teacher.output_VH[frequent])
        self.register_buffer("d2t", frequent - torch.arange(len(frequent)))
        self.register_buffer("t2d", torch.isin(torch.arange(teacher.config.vocab_size), frequent))

    @property
    def is_whole(self) -> bool:
        """Whether it uses the target's head, with all tokens."""
        return "t2d" not in self._buffers

    @property
    def layer(self) -> Layer:
        """See `Eagle`."""
        return self.midlayer

    def take_in(self, lesson: Lesson) -> torch.Tensor:
        """See `Eagle`."""
        mixed: torch.Tensor = self.fc(lesson.aux_BLF)
        return mixed

    def enter(self, embedded: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Eagle`."""
        layer = self.midlayer
        return torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(state)], -1), state

    def read(self, out: torch.Tensor) -> torch.Tensor:
        """See `Eagle`."""
        normed: torch.Tensor = self.norm(out)
        return normed

    def logits(self, lesson: Lesson, index: int, states: torch.Tensor) -> torch.Tensor:
        """See `Head`; with a vocabulary of its own `[..., Vd]`."""
        return lesson.teacher.output(states) if self.is_whole else self.lm_head(states).float()

    def output_weights(self, index: int) -> tuple[nn.Parameter, ...]:
        """See `Head`."""
        return () if self.is_whole else tuple(self.lm_head.parameters())

    def comparable(self, logits: torch.Tensor) -> torch.Tensor:
        """See `Head`: the target's distribution over the ids that it can predict."""
        return logits if self.is_whole else logits[..., self.t2d]

    def best(self, lesson: Lesson, index: int, states: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        ids = super().best(lesson, index, states)
        return ids if self.is_whole else ids + self.d2t[ids]

    def describe(self, target: Any) -> dict[str, Any]:
        """See `Head`."""
        size = target.vocab_size if self.is_whole else len(self.d2t)
        return super().describe(target) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": size,
            "target_hidden_size": target.hidden_size,
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": list(self.inputs_of),
        }


def most_frequent(ids_N: torch.Tensor, vocab_size: int) -> torch.Tensor | None:
    """Return the ids kept of a large vocabulary, int64 ascending; None if it is small."""
    if vocab_size <= LARGEST_VOCABULARY:
        return None
    counts = torch.bincount(ids_N.long(), minlength=vocab_size)
    return counts.topk(LARGEST_VOCABULARY).indices.sort().values
