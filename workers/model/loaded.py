"""A model ready to run, and the mode in which its operators run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from protos.layers import LayerShape
from workers.attention.backend import AttentionBackend
from workers.attention.kv import KVCache
from workers.compile import Forward, Trial
from workers.distributed.groups import Group, Solo
from workers.recurrent.pool import RecurrentShapes
from workers.weights.plan import Plan


class ExecutionMode(Protocol):
    """How the operators of a model run. `workers.model.torch_mode` is the default.

    With `has_whole_biases`, every rank adds the biases of outputs that are summed over ranks; without, rank 0 alone.
    """

    has_whole_biases: ClassVar[bool]

    def check(self, name: str, device: torch.device, ranks: int) -> None:
        """Raise `ConfigError` if the mode cannot run here. Called before weights are read."""
        ...

    def connect(self, model: Any, plan: Plan, group: Group) -> None:
        """Attach the collectives of tensor parallelism to the modules of this rank's shard."""
        ...

    def prepare(self, model: Any, name: str, ranks: int) -> tuple[LayerShape, ...]:
        """Prepare loaded weights and run one token; return the shape of every layer's K and V."""
        ...

    def attention(self, cache: KVCache) -> AttentionBackend:
        """Return the attention that runs over *cache*."""
        ...

    def wrap(self, forward: Forward) -> Forward:
        """Return *forward*, set up to run in this mode."""
        ...

    def is_compiled(self, ranks: int) -> bool:
        """Return whether models are compiled ahead of time on a CPU; otherwise `optimize` is called."""
        ...

    def optimize(self, forward: Forward, trial: Trial, loaded: "LoadedModel") -> tuple[Forward, str]:
        """Trace a wrapped *forward* on a CPU; return it as it is if that fails, and a line for the user.

        *trial* runs a forward on made-up tokens and returns the logits. All ranks call this at once.
        """
        ...


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: the causal LM, in eval mode, without gradients, with paged attention.
        folder: the checkpoint.
        vocab_size: rows of the head, padding included.
        max_model_len: the model's context length, or the user's smaller limit.
        eos_ids: end-of-sequence ids of generation_config and config, ascending.
        layers: K and V shape of every layer; no heads for layers without attention.
        kv_dtype: of its cached K and V, see `workers.attention.kv`.
        mode: how its operators run.
        notes: lines for the user.
        group: the ranks that share it. With several, `model` and `layers` are one rank's, and only rank 0 gets logits.
        recurrent: the states of its recurrent layers.
    """

    model: torch.nn.Module
    folder: Path
    model_type: str
    vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...]
    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    mode: ExecutionMode
    notes: tuple[str, ...] = ()
    group: Group = field(default_factory=Solo)
    recurrent: RecurrentShapes = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """How many ranks share it."""
        return self.group.size
