"""Which slice of each weight a rank holds: the arithmetic of tensor parallelism, without any weights."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from protos.errors import ModelError
from workers.weights.plan import Style

ATTENTION = frozenset({"self_attn", "attn", "attention"})
ONE_KV_HEAD_EACH = frozenset({"opt", "gpt2", "gpt_neox"})  # regardless of their configs
KEYS_AND_VALUES = frozenset({"k_proj", "v_proj"})
PROJECTIONS = KEYS_AND_VALUES | {"q_proj", "o_proj"}


@dataclass(frozen=True)
class TensorSlice:
    """The slice of one tensor that a rank holds.

    Attributes:
        dim: the dimension that is split.
        ranges: (start, stop) of the rows or columns kept, in order.
        length: of the dimension on this rank; zeros follow if the ranges are shorter.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]
    length: int

    @classmethod
    def of(cls, dim: int, ranges: Seq[tuple[int, int]]) -> "TensorSlice":
        """Keep *ranges*, without padding."""
        return cls(dim, tuple(ranges), sum(stop - start for start, stop in ranges))


@dataclass(frozen=True)
class Segment:
    """*width* consecutive rows of *units* equal heads or columns, none of which is split.

    `can_replicate`: several ranks may hold the same unit if there are fewer units than ranks.
    """

    width: int
    units: int
    what: str
    can_replicate: bool = False


@dataclass(frozen=True)
class Partition:
    """Computes the slices of one rank.

    Attributes:
        name: the model as the user named it.
        rank, ranks: this rank, and the number of ranks.
        heads, kv_heads: of the whole model.
        has_whole_biases: whether this rank adds biases to outputs that are summed over ranks, after they are.
    """

    name: str
    rank: int
    ranks: int
    heads: int
    kv_heads: int
    has_whole_biases: bool = False

    def local_number(self, number: int) -> int:
        """Return this rank's share of *number*, a count of heads or the width of all heads."""
        if number == self.kv_heads != self.heads:
            return max(1, number // self.ranks)
        return number // self.ranks

    def slices(self, module: nn.Module, name: str, style: Style) -> Mapping[str, TensorSlice | None]:
        """Return the slice of each of the module's own parameters that is split; None: zeros on this rank.

        Raises:
            ModelError: a dimension does not divide; the message has the numbers.
        """
        if style is Style.EXPERTS_UNGATED:
            width = module.get_parameter("down_proj").shape[2]
            inner = self._ranges([Segment(width, width, f"inner columns in {name}")])
            return {"up_proj": TensorSlice.of(1, inner), "down_proj": TensorSlice.of(2, inner)}
        if style in {Style.EXPERTS, Style.EXPERTS_PAIRED}:
            return self._experts(module, name, paired=style is Style.EXPERTS_PAIRED)
        if style in {Style.HEADS, Style.KV_HEADS}:
            weights = module.named_parameters(recurse=False)
            return {key: self.head_rows(tuple(weight.shape), style) for key, weight in weights}
        shape = tuple(module.get_parameter("weight").shape)
        out_dim = 1 if isinstance(module, Conv1D) else 0
        if style in {Style.ROWS, Style.SPLIT_INPUT}:
            segment = self._segment(shape[1 - out_dim], name, in_heads=style is Style.ROWS)
            return {"weight": TensorSlice.of(1 - out_dim, self._ranges([segment])), **self._bias_once("bias")}
        width = shape[out_dim]
        in_heads = style is Style.COLUMNS
        segments = self._qkv(width) if style is Style.QKV else [self._segment(width, name, in_heads=in_heads)]
        ranges = self._ranges(segments)
        return {"weight": TensorSlice.of(out_dim, ranges), "bias": TensorSlice.of(0, ranges)}

    def head_rows(self, shape: Seq[int], style: Style) -> TensorSlice:
        """Return the slice of a parameter with one row a head."""
        is_kv = style is Style.KV_HEADS
        return TensorSlice.of(0, self._ranges([self._kv_heads_of(shape[0]) if is_kv else self._query_heads(shape[0])]))

    def vocabulary(self, rows: int) -> TensorSlice:
        """Return the slice of the embedding and the head: rows padded to a multiple of the ranks."""
        length = -(-rows // self.ranks)
        start, stop = (min(rows, rank * length) for rank in (self.rank, self.rank + 1))
        return TensorSlice(0, ((start, stop),), length)

    def local_kv_heads(self) -> tuple[int, int]:
        """Return the range of this rank's K/V heads."""
        return self._ranges([self._kv_heads_of(self.kv_heads)])[0]

    def local_heads(self) -> tuple[int, int]:
        """Return the range of this rank's query heads."""
        return self._ranges([self._query_heads(self.heads)])[0]

    def _experts(self, module: nn.Module, name: str, *, paired: bool) -> Mapping[str, TensorSlice | None]:
        gate_up = module.get_parameter("gate_up_proj").shape
        down_dim = 1 if paired else 2
        width = module.get_parameter("down_proj").shape[down_dim]
        if gate_up[2 if paired else 1] != 2 * width:
            raise ModelError(f"{self.name}: {name} has gate_up_proj of {gate_up}, but down_proj {width} wide")
        inner = Segment(width, width, f"inner columns in {name}")
        if not paired:
            return {
                "gate_up_proj": TensorSlice.of(1, self._ranges([inner, inner])),
                "down_proj": TensorSlice.of(2, self._ranges([inner])),
            }
        pairs = self._ranges([Segment(2 * width, width, inner.what)])
        return {
            "gate_up_proj": TensorSlice.of(2, pairs),
            "gate_up_proj_bias": TensorSlice.of(1, pairs),
            "down_proj": TensorSlice.of(1, self._ranges([inner])),
            **self._bias_once("down_proj_bias"),
        }

    def _bias_once(self, key: str) -> Mapping[str, TensorSlice | None]:
        # Before outputs are summed over ranks, one rank alone may add the bias.
        return {} if self.rank == 0 or self.has_whole_biases else {key: None}

    def _segment(self, width: int, name: str, *, in_heads: bool) -> Segment:
        *_, parent, leaf = name.split(".")
        if not in_heads or not (parent in ATTENTION or leaf in PROJECTIONS):
            return Segment(width, width, f"columns in {name}")
        return self._kv_heads_of(width) if leaf in KEYS_AND_VALUES else self._query_heads(width)

    def _query_heads(self, width: int) -> Segment:
        return Segment(width, self.heads, "attention heads")

    def _kv_heads_of(self, width: int) -> Segment:
        return Segment(width, self.kv_heads, "key/value heads", can_replicate=True)

    def _qkv(self, width: int) -> list[Segment]:
        size = width // (self.heads + 2 * self.kv_heads)
        keys = self._kv_heads_of(self.kv_heads * size)
        return [self._query_heads(self.heads * size), keys, keys]

    def _ranges(self, segments: Seq[Segment]) -> list[tuple[int, int]]:
        """Return this rank's rows of each of the consecutive *segments*."""
        ranges = []
        offset = 0
        for segment in segments:
            first, last = self._units(segment)
            size = segment.width // segment.units
            ranges.append((offset + first * size, offset + last * size))
            offset += segment.width
        return ranges

    def _units(self, segment: Segment) -> tuple[int, int]:
        if segment.units % self.ranks == 0:
            each = segment.units // self.ranks
            return self.rank * each, (self.rank + 1) * each
        if segment.can_replicate and self.ranks % segment.units == 0:
            first = self.rank * segment.units // self.ranks
            return first, first + 1
        verb = "can neither share nor copy" if segment.can_replicate else "cannot share"
        raise ModelError(
            f"{self.name}: {self.ranks} ranks {verb} {segment.units} {segment.what} evenly; "
            "choose another tensor_parallel_size"
        )


def partition_for(config: Any, name: str, rank: int, ranks: int) -> Partition:
    """Return the partition of *rank* of *ranks*."""
    heads = int(config.num_attention_heads)
    return Partition(name, rank, ranks, heads, _kv_heads(config, heads))


def splits(config: Any) -> tuple[int, ...]:
    """Return the numbers of ranks that can share the attention heads of a model with this configuration."""
    heads = int(getattr(config, "num_attention_heads", 1))
    kv_heads = _kv_heads(config, heads)
    return tuple(n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0))


def _kv_heads(config: Any, heads: int) -> int:
    if config.model_type in ONE_KV_HEAD_EACH:
        return heads
    if config.model_type == "gpt_bigcode":
        return 1 if config.multi_query else heads
    return int(getattr(config, "num_key_value_heads", None) or heads)
