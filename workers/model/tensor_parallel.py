"""Tensor parallelism: a `transformers` model of which this process holds one rank's share.

Modules keep their classes and hold fewer rows or columns; what ranks exchange hangs on them as hooks. So the model's
own code runs as it is, over this rank's heads and columns. Of the vocabulary every rank has an equal part: embeddings
are summed, and logits are gathered to rank 0, the only one that samples.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from protos.errors import ModelError
from workers.attention.backend import NAME
from workers.distributed.collectives import Exchanges
from workers.distributed.groups import Group, Solo
from workers.invariant.model import sum_in_order
from workers.weights.building import BUILDING
from workers.weights.load import Cuts, Filler
from workers.weights.partition import ATTENTION, Cut, Shares, shares_of
from workers.weights.plan import LOCAL_NUMBERS, Plan, Style, plan_for, style_of
from workers.weights.reader import opened

SUMMED = frozenset({Style.ROWS, Style.SPLIT_INPUT, Style.EXPERTS, Style.EXPERTS_PAIRED})


def build_share(
    folder: Path,
    name: str,
    config: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: Group,
    batch_invariant: bool = False,
) -> Any:
    """Return this rank's share of a causal LM, read as slices; no more than that is ever held.

    Args:
        folder: the checkpoint.
        name: what the user called it.
        config: its `transformers` config.
        dtype: of the weights.
        device: where they go.
        group: the ranks; the forward of the model exchanges over it.
        batch_invariant: sums over ranks have the order they have on one rank.

    Returns:
        The `transformers` model, in eval mode, without gradients.

    Raises:
        ModelError: the model cannot be split, or weights are missing or of the wrong shape.
        ConfigError: it cannot be split with `batch_invariant`.
    """
    kind = str(config.model_type)
    plan = plan_for(config, kind, name)
    shares = shares_of(config, name, group.rank, group.size)
    with BUILDING, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
    with opened(folder, kind, model.base_model_prefix) as checkpoint:
        Filler(name, checkpoint, _cuts(model, plan, shares), dtype, device).fill(model)
    _count_locally(model, kind, shares)
    if batch_invariant:
        _exchange_in_order(model, plan, group)
    else:
        _exchange(model, plan, group)
    return model.eval()


def _base_modules(model: Any) -> Mapping[str, nn.Module]:
    """Return the modules below the base model by name, counted from there."""
    return dict(model.base_model.named_modules())


def _cuts(model: Any, plan: Plan, shares: Shares) -> Cuts:
    cuts: dict[str, Cut | None] = {}
    for name, module in _base_modules(model).items():
        full = f"{model.base_model_prefix}.{name}"
        style = style_of(plan, name)
        if style is not Style.WHOLE:
            found = shares.cuts(module, full, style)
            cuts.update({f"{full}.{key}": cut for key, cut in found.items()})
        for key, weight in module.named_parameters(recurse=False):
            own = style_of(plan, f"{name}.{key}")
            if own in {Style.HEADS, Style.KV_HEADS}:
                cuts[f"{full}.{key}"] = shares.head_rows(tuple(weight.shape), own)
    return {**cuts, **_vocabulary_cuts(model, shares)}


def _vocabulary_cuts(model: Any, shares: Shares) -> Cuts:
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    return {
        f"{name}.{key}": shares.vocabulary(weight.shape[0])
        for name, module in model.named_modules()
        if id(module) in ends
        for key, weight in module.named_parameters(recurse=False)
    }


def _count_locally(model: Any, kind: str, shares: Shares) -> None:
    """Tell attention modules whose code counts heads how many there are here."""
    for name, module in _base_modules(model).items():
        if name.rpartition(".")[2] in ATTENTION:
            for key in LOCAL_NUMBERS.get(kind, ()):
                setattr(module, key, shares.local(getattr(module, key)))
            if kind == "stablelm" and module.qk_layernorm:
                _keep_norms(module.q_layernorm, *shares.heads_here())
                _keep_norms(module.k_layernorm, *shares.kv_heads_here())
        if isinstance(module, Conv1D):
            module.nx, module.nf = module.weight.shape


def _keep_norms(norm: Any, first: int, last: int) -> None:
    """Keep the norms of some heads, of a module with one norm a head."""
    norm.norms = nn.ModuleList(norm.norms[first:last])
    norm.num_heads = last - first


def _exchange(model: Any, plan: Plan, group: Group) -> None:
    """Hang on every module what ranks exchange when it runs."""
    for name, module in _base_modules(model).items():
        style = style_of(plan, name)
        if style in SUMMED:
            _split_input(module, module, style, group)
            module.register_forward_hook(_after(group.all_reduce))
        if style is Style.GATHERED:
            module.register_forward_hook(_after(group.all_gather))
    _exchange_vocabulary(model, group)


def _exchange_in_order(model: Any, plan: Plan, group: Group) -> None:
    """As `_exchange`; what is summed is summed as one rank alone would, and operators can be listed."""
    exchanges = Exchanges(group)
    for name, module in _base_modules(model).items():
        style = style_of(plan, name)
        if style in SUMMED:
            _split_input(module, sum_in_order(model.base_model, name, exchanges), style, group)
        if style is Style.GATHERED:
            module.register_forward_hook(_after(exchanges.all_gather))
    _exchange_vocabulary(model, exchanges)


def sum_as_ranks_would(model: Any, name: str) -> None:
    """Let a model that one rank has whole add up in parts what several ranks would share, as `batch_invariant` wants.

    Args:
        model: a `transformers` causal LM.
        name: what the user called it.
    """
    try:
        plan = plan_for(model.config, str(model.config.model_type), name)
    except ModelError:
        return  # it cannot be split: there is no other number of ranks to agree with
    alone = Exchanges(Solo())
    for layer, module in _base_modules(model).items():
        if style_of(plan, layer) in SUMMED and isinstance(module, (nn.Linear, Conv1D)):
            sum_in_order(model.base_model, layer, alone)


def _split_input(linear: nn.Module, runs: nn.Module, style: Style, group: Group) -> None:
    """Let *runs*, which has the weights of *linear*, take its own part of inputs that every rank has whole."""
    if style is Style.SPLIT_INPUT:
        width = linear.get_parameter("weight").shape[0 if isinstance(linear, Conv1D) else 1]
        runs.register_forward_pre_hook(partial(_take_own, group.rank * width, width))


def _exchange_vocabulary(model: Any, group: Group | Exchanges) -> None:
    vocab_size = int(model.config.vocab_size)
    model.get_output_embeddings().register_forward_hook(_after(partial(_gather_logits, group, vocab_size)))
    model.set_input_embeddings(SharedEmbedding(model.get_input_embeddings(), group))


def _after(exchange: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]:
    def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return exchange(output)

    return hook


def _take_own(start: int, width: int, _module: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    return inputs[0].narrow(-1, start, width)


def _gather_logits(group: Group | Exchanges, vocab_size: int, logits_1NV: torch.Tensor) -> torch.Tensor:
    """Return all logits on rank 0, without those of the padding, and `[1, N, 0]` elsewhere."""
    whole = group.gather(logits_1NV)
    if whole is None:
        return logits_1NV[..., :0]
    return whole if whole.shape[-1] == vocab_size else whole[..., :vocab_size].contiguous()


class SharedEmbedding(nn.Module):
    """An embedding of which each rank holds some rows; every id is looked up where its row is."""

    def __init__(self, rows: nn.Module, group: Group | Exchanges) -> None:
        super().__init__()
        self.rows, self._group = rows, group
        self._count = rows.get_parameter("weight").shape[0]
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
