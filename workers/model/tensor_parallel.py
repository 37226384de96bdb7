"""Tensor parallelism: one rank's shard of a `transformers` model.

Modules keep their classes and hold fewer rows or columns; collectives run in their forward hooks. So the model's own
code runs unchanged over this rank's heads and columns. The vocabulary is split evenly: embeddings are summed, and
logits are gathered to rank 0, the only one that samples.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from workers.distributed.collectives import Collectives
from workers.distributed.groups import Group
from workers.quantization.linear import QuantizedEmbedding, QuantizedLinear
from workers.weights.building import on_meta
from workers.weights.keeping import Keeper
from workers.weights.load import Slices, fill
from workers.weights.partition import ATTENTION, Partition, TensorSlice, partition_for
from workers.weights.plan import LOCAL_NUMBERS, Plan, Style, plan_for, style_of

if TYPE_CHECKING:
    from workers.model.loaded import ExecutionMode

SUMMED = frozenset({Style.ROWS, Style.SPLIT_INPUT, Style.EXPERTS, Style.EXPERTS_PAIRED, Style.EXPERTS_UNGATED})


def build_shard(
    folder: Path,
    name: str,
    config: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: Group,
    mode: "ExecutionMode",
    keeper: Keeper,
) -> Any:
    """Return this rank's shard of a causal LM, reading only its slices of the weights.

    Args:
        folder: the checkpoint.
        name: the model as the user named it.
        config: its `transformers` config.
        dtype: of the weights.
        device: of the weights.
        group: the ranks.
        mode: attaches the collectives of the model's forward to its modules.
        keeper: decides which weights are held quantised.

    Returns:
        The `transformers` model, in eval mode, without gradients.

    Raises:
        ModelError: the model cannot be split, or weights are missing or of the wrong shape.
        ConfigError: it cannot be split in this mode.
    """
    kind = str(config.model_type)
    plan = plan_for(config, kind, name)
    partition = replace(partition_for(config, name, group.rank, group.size), has_whole_biases=mode.has_whole_biases)
    model = on_meta(config, dtype)
    fill(model, folder, name, _slices(model, plan, partition), dtype, device, keeper)
    _count_locally(model, kind, partition)
    mode.connect(model, plan, group)
    return model.eval()


def base_modules(model: Any) -> Mapping[str, nn.Module]:
    """Return the modules of the base model by their names in it."""
    return dict(model.base_model.named_modules())


def _slices(model: Any, plan: Plan, partition: Partition) -> Slices:
    slices: dict[str, TensorSlice | None] = {}
    for name, module in base_modules(model).items():
        full = f"{model.base_model_prefix}.{name}"
        style = style_of(plan, name)
        if style is not Style.WHOLE:
            found = partition.slices(module, full, style)
            slices.update({f"{full}.{key}": part for key, part in found.items()})
        for key, weight in module.named_parameters(recurse=False):
            own = style_of(plan, f"{name}.{key}")
            if own in {Style.HEADS, Style.KV_HEADS}:
                slices[f"{full}.{key}"] = partition.head_rows(tuple(weight.shape), own)
    return {**slices, **_vocabulary_slices(model, partition)}


def _vocabulary_slices(model: Any, partition: Partition) -> Slices:
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    return {
        f"{name}.{key}": partition.vocabulary(weight.shape[0])
        for name, module in model.named_modules()
        if id(module) in ends
        for key, weight in module.named_parameters(recurse=False)
    }


def _count_locally(model: Any, kind: str, partition: Partition) -> None:
    """Set the local number of heads in attention modules whose code counts heads."""
    for name, module in base_modules(model).items():
        if name.rpartition(".")[2] in ATTENTION:
            for key in LOCAL_NUMBERS.get(kind, ()):
                setattr(module, key, partition.local_number(getattr(module, key)))
            if kind == "stablelm" and module.qk_layernorm:
                _keep_norms(module.q_layernorm, *partition.local_heads())
                _keep_norms(module.k_layernorm, *partition.local_kv_heads())
        if isinstance(module, Conv1D):
            module.nx, module.nf = module.weight.shape


def _keep_norms(norm: Any, first: int, last: int) -> None:
    """Keep the norms of the heads first .. last - 1, in a module with one norm a head."""
    norm.norms = nn.ModuleList(norm.norms[first:last])
    norm.num_heads = last - first


def connect(model: Any, plan: Plan, group: Group) -> None:
    """Attach to every module the collective that follows it."""
    for name, module in base_modules(model).items():
        style = style_of(plan, name)
        if style in SUMMED:
            split_input(module, module, style, group)
            module.register_forward_hook(apply_to_output(group.all_reduce))
        if style is Style.GATHERED:
            module.register_forward_hook(apply_to_output(group.all_gather))
    connect_vocabulary(model, group)


def split_input(linear: nn.Module, runs: nn.Module, style: Style, group: Group) -> None:
    """Slice the inputs of *runs*, which has the weights of *linear*, if every rank computes them whole."""
    if style is Style.SPLIT_INPUT:
        width = _width(linear)
        runs.register_forward_pre_hook(partial(_take_own, group.rank * width, width))


def _width(linear: nn.Module) -> int:
    """Return this rank's number of inputs."""
    if isinstance(linear, QuantizedLinear):
        return linear.in_features
    return linear.get_parameter("weight").shape[0 if isinstance(linear, Conv1D) else 1]


def connect_vocabulary(model: Any, group: Group | Collectives) -> None:
    """Sum embeddings over ranks, and gather logits to rank 0."""
    vocab_size = int(model.config.vocab_size)
    model.get_output_embeddings().register_forward_hook(apply_to_output(partial(_gather_logits, group, vocab_size)))
    model.set_input_embeddings(SharedEmbedding(model.get_input_embeddings(), group))


def apply_to_output(
    exchange: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]:
    """Return a forward hook that replaces a module's output by what *exchange* returns for it."""

    def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return exchange(output)

    return hook


def _take_own(start: int, width: int, _module: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    return inputs[0].narrow(-1, start, width)


def _gather_logits(group: Group | Collectives, vocab_size: int, logits_1NV: torch.Tensor) -> torch.Tensor:
    """Return all logits on rank 0, those of padding removed, and `[1, N, 0]` elsewhere."""
    whole = group.gather(logits_1NV)
    if whole is None:
        return logits_1NV[..., :0]
    return whole if whole.shape[-1] == vocab_size else whole[..., :vocab_size].contiguous()


class SharedEmbedding(nn.Module):
    """An embedding whose rows are split over ranks; every id is looked up on the rank that has its row."""

    def __init__(self, rows: nn.Module, group: Group | Collectives) -> None:
        super().__init__()
        self.rows, self._group = rows, group
        self._count: int = (
            rows.num_embeddings if isinstance(rows, QuantizedEmbedding) else rows.get_parameter("weight").shape[0]
        )
        self._first = group.rank * self._count

    @property
    def weight(self) -> torch.Tensor:
        """This rank's rows."""
        return self.rows.get_parameter("weight")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of *ids*, `[..., H]`."""
        own = ids - self._first
        foreign = (own < 0) | (own >= self._count)
        found: torch.Tensor = self.rows(own.masked_fill(foreign, 0))
        return self._group.all_reduce(found.masked_fill(foreign.unsqueeze(-1), 0.0))
