"""The default execution mode: torch's operators, compiled on CPUs where one rank has the whole model."""

from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from protos.layers import LayerShape
from workers.attention.backend import AttentionBackend
from workers.attention.kv import KVCache
from workers.attention.latent import attend_over_latents, with_latents
from workers.compile import Forward, Trial
from workers.distributed.groups import Group
from workers.gpu.attention import attention_of
from workers.model.loaded import LoadedModel
from workers.model.probe import probe
from workers.model.tensor_parallel import connect
from workers.weights.plan import Plan


class TorchMode:
    """Runs torch's operators. See `ExecutionMode`."""

    has_whole_biases: ClassVar[bool] = False

    def check(self, name: str, device: torch.device, ranks: int) -> None:
        """Every model and device is supported."""

    def connect(self, model: Any, plan: Plan, group: Group) -> None:
        """Reduce and gather outputs with hooks."""
        connect(model, plan, group)

    def prepare(self, model: Any, name: str, ranks: int) -> tuple[LayerShape, ...]:
        """On a CUDA device, fuse layers and attend over latents; elsewhere leave all as they are."""
        attend_over_latents(model, model.device)
        if model.device.type == "cuda" and find_spec("triton") is not None:
            from workers.gpu.fused import fuse_layers  # noqa: PLC0415 - triton may be missing

            fuse_layers(model)
        return with_latents(model, probe(model, name, ranks))

    def attention(self, cache: KVCache) -> AttentionBackend:
        """Return the fastest attention of this machine."""
        return attention_of(cache)

    def wrap(self, forward: Forward) -> Forward:
        """Return *forward* itself."""
        return forward

    def is_compiled(self, ranks: int) -> bool:
        """Return whether one rank has the whole model."""
        return ranks == 1

    def optimize(self, forward: Forward, trial: Trial, loaded: LoadedModel) -> tuple[Forward, str]:
        """Return *forward* itself."""
        return forward, "running eager: exchanges between ranks are not compiled"
