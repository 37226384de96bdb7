"""The execution mode of `batch_invariant`: the one entry to this package."""

from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from protos.errors import ConfigError, ModelError
from protos.layers import LayerShape
from workers.attention.backend import AttentionBackend
from workers.attention.kv import KVCache
from workers.compile import Forward, Trial
from workers.distributed.collectives import Collectives
from workers.distributed.groups import Group, Solo, all_agree
from workers.invariant import native, ops
from workers.invariant.attention import InvariantAttention
from workers.invariant.attention_cuda import SplitAttention
from workers.invariant.model import lay_out, sum_in_order
from workers.invariant.trace import active, invariant, traced
from workers.model.loaded import LoadedModel
from workers.model.probe import probe
from workers.model.tensor_parallel import SUMMED, apply_to_output, base_modules, connect_vocabulary, split_input
from workers.native.build import KernelUnavailableError
from workers.weights.plan import Plan, Style, plan_for, style_of


class BatchInvariantMode:
    """Runs operators whose results for a row do not depend on the batch. See `ExecutionMode`."""

    has_whole_biases: ClassVar[bool] = True

    def check(self, name: str, device: torch.device, ranks: int) -> None:
        """Raise `ConfigError` without a C++ compiler on a CPU, or if the ranks do not divide the parts of sums."""
        if ops.SHARDS % ranks:
            raise ConfigError(
                f"batch_invariant adds up sums in {ops.SHARDS} parts, which {ranks} ranks cannot share: "
                f"tensor_parallel_size must be 1, 2, 4 or {ops.SHARDS}"
            )
        if device.type != "cpu":
            return
        try:
            native.check_available()
            InvariantAttention.check_available()
        except KernelUnavailableError as error:
            raise ConfigError(
                f"{name}: batch_invariant needs operators of its own on a CPU, and {error}; install a C++ "
                "compiler or leave batch_invariant out"
            ) from error

    def connect(self, model: Any, plan: Plan, group: Group) -> None:
        """Sum over ranks in the order in which one rank alone would."""
        collectives = Collectives(group)
        for name, module in base_modules(model).items():
            style = style_of(plan, name)
            if style in SUMMED:
                split_input(module, sum_in_order(model.base_model, name, collectives), style, group)
            if style is Style.GATHERED:
                module.register_forward_hook(apply_to_output(collectives.all_gather))
        connect_vocabulary(model, collectives)

    def prepare(self, model: Any, name: str, ranks: int) -> tuple[LayerShape, ...]:
        """Lay out weights, and check every operator of the model."""
        if ranks == 1:
            _sum_as_ranks_would(model, name)
        lay_out(model)
        try:
            with active():
                return probe(model, name, ranks)
        except ConfigError as error:
            raise ConfigError(f"{name} (model_type {model.config.model_type!r}): {error}") from error

    def attention(self, cache: KVCache) -> AttentionBackend:
        """Return attention whose results depend only on a query and the keys it attends to."""
        return InvariantAttention(cache) if cache.device.type == "cpu" else SplitAttention(cache)

    def wrap(self, forward: Forward) -> Forward:
        """Return *forward*, each operator of which is checked and replaced as it runs."""
        return invariant(forward)

    def is_compiled(self, ranks: int) -> bool:
        """Return False: the compiler would fuse and reorder what this mode keeps in order."""
        return False

    def optimize(self, forward: Forward, trial: Trial, loaded: LoadedModel) -> tuple[Forward, str]:
        """Trace the operators of the model once, instead of checking each in every forward."""
        # The three tensors differ from each other and from all that are tried afterwards: the trials then detect an
        # input that was taken for another one, or for a constant.
        inputs = (
            torch.arange(9, 2, -1).remainder(loaded.vocab_size).unsqueeze(0),
            torch.arange(11, 18).unsqueeze(0),
            torch.tensor([4, 1, 6]),
        )
        return traced(forward, inputs, trial, partial(all_agree, loaded.group.cpu_group))


def _sum_as_ranks_would(model: Any, name: str) -> None:
    """On one rank, split the sums that several ranks would share, so that results equal theirs."""
    try:
        plan = plan_for(model.config, str(model.config.model_type), name)
    except ModelError:
        return  # it cannot be split: there is no other number of ranks to agree with
    collectives = Collectives(Solo())
    for layer, module in base_modules(model).items():
        if style_of(plan, layer) in SUMMED and isinstance(module, (nn.Linear, Conv1D)):
            sum_in_order(model.base_model, layer, collectives)
