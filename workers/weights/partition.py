"""Which part of each weight a rank holds: the arithmetic of tensor parallelism, without any weights."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from protos.errors import ModelError
from workers.weights.plan import Style

ATTENTION = frozenset({"self_attn", "attn", "attention"})
ONE_KV_HEAD_EACH = frozenset({"opt", "gpt2", "gpt_neox"})  # whatever else their configs may say
KEYS_AND_VALUES = frozenset({"k_proj", "v_proj"})


@dataclass(frozen=True)
class Cut:
    """A part of one tensor.

    Attributes:
        dim: the dimension that is cut.
        pieces: (start, stop) of what is kept, in order.
        length: of the dimension on this rank; where pieces are shorter together, zeros follow.
    """

    dim: int
    pieces: tuple[tuple[int, int], ...]
    length: int

    @classmethod
    def of(cls, dim: int, pieces: Seq[tuple[int, int]]) -> "Cut":
        """Keep *pieces*, without padding."""
        return cls(dim, tuple(pieces), sum(stop - start for start, stop in pieces))


@dataclass(frozen=True)
class TensorPart:
    """*width* consecutive rows that belong to *units* equal heads (or columns), which stay whole.

    `copied` says that with fewer units than ranks, several ranks may hold the same one.
    """

    width: int
    units: int
    what: str
    copied: bool = False


@dataclass(frozen=True)
class Shares:
    """The cuts of one rank of a group.

    Attributes:
        name: what the user called the model.
        rank, ranks: this rank, and how many there are.
        heads, kv_heads: of the whole model.
    """

    name: str
    rank: int
    ranks: int
    heads: int
    kv_heads: int

    def local(self, number: int) -> int:
        """Return what *number* becomes on this rank: a count of heads, or a width that is the same for every head."""
        if number == self.kv_heads != self.heads:
            return max(1, number // self.ranks)
        return number // self.ranks

    def cuts(self, module: nn.Module, name: str, style: Style) -> Mapping[str, Cut | None]:
        """Return the cut of each of the module's own parameters that is not whole; None: zeros on this rank.

        Raises:
            ModelError: something does not divide; with the numbers.
        """
        if style in {Style.EXPERTS, Style.EXPERTS_PAIRED}:
            return self._experts(module, name, paired=style is Style.EXPERTS_PAIRED)
        if style in {Style.HEADS, Style.KV_HEADS}:
            weights = module.named_parameters(recurse=False)
            return {key: self.head_rows(tuple(weight.shape), style) for key, weight in weights}
        shape = tuple(module.get_parameter("weight").shape)
        out_dim = 1 if isinstance(module, Conv1D) else 0
        if style in {Style.ROWS, Style.SPLIT_INPUT}:
            part = self._part(shape[1 - out_dim], name, in_heads=style is Style.ROWS)
            return {"weight": Cut.of(1 - out_dim, self._pieces([part])), **self._bias_once("bias")}
        width = shape[out_dim]
        parts = self._qkv(width) if style is Style.QKV else [self._part(width, name, in_heads=style is Style.COLUMNS)]
        pieces = self._pieces(parts)
        return {"weight": Cut.of(out_dim, pieces), "bias": Cut.of(0, pieces)}

    def head_rows(self, shape: Seq[int], style: Style) -> Cut:
        """Return the cut of a parameter with one row a head."""
        is_kv = style is Style.KV_HEADS
        return Cut.of(0, self._pieces([self._kv_part(shape[0]) if is_kv else self._head_part(shape[0])]))

    def vocabulary(self, rows: int) -> Cut:
        """Return the cut of the embedding and the head: rows padded to a multiple of the ranks."""
        length = -(-rows // self.ranks)
        start, stop = (min(rows, rank * length) for rank in (self.rank, self.rank + 1))
        return Cut(0, ((start, stop),), length)

    def kv_heads_here(self) -> tuple[int, int]:
        """Return the first and one past the last K/V head of this rank."""
        return self._pieces([self._kv_part(self.kv_heads)])[0]

    def heads_here(self) -> tuple[int, int]:
        """Return the first and one past the last query head of this rank."""
        return self._pieces([self._head_part(self.heads)])[0]

    def _experts(self, module: nn.Module, name: str, *, paired: bool) -> Mapping[str, Cut | None]:
        gate_up = module.get_parameter("gate_up_proj").shape
        down_dim = 1 if paired else 2
        width = module.get_parameter("down_proj").shape[down_dim]
        if gate_up[2 if paired else 1] != 2 * width:
            raise ModelError(f"{self.name}: {name} holds gates and ups of {gate_up}, but downs {width} wide")
        inner = TensorPart(width, width, f"inner columns in {name}")
        if not paired:
            return {
                "gate_up_proj": Cut.of(1, self._pieces([inner, inner])),
                "down_proj": Cut.of(2, self._pieces([inner])),
            }
        pairs = self._pieces([TensorPart(2 * width, width, inner.what)])
        return {
            "gate_up_proj": Cut.of(2, pairs),
            "gate_up_proj_bias": Cut.of(1, pairs),
            "down_proj": Cut.of(1, self._pieces([inner])),
            **self._bias_once("down_proj_bias"),
        }

    def _bias_once(self, key: str) -> Mapping[str, Cut | None]:
        # Outputs are summed over ranks, so one rank alone may add the bias.
        return {} if self.rank == 0 else {key: None}

    def _part(self, width: int, name: str, *, in_heads: bool) -> TensorPart:
        *_, parent, leaf = name.split(".")
        if not in_heads or parent not in ATTENTION:
            return TensorPart(width, width, f"columns in {name}")
        return self._kv_part(width) if leaf in KEYS_AND_VALUES else self._head_part(width)

    def _head_part(self, width: int) -> TensorPart:
        return TensorPart(width, self.heads, "attention heads")

    def _kv_part(self, width: int) -> TensorPart:
        return TensorPart(width, self.kv_heads, "key/value heads", copied=True)

    def _qkv(self, width: int) -> list[TensorPart]:
        size = width // (self.heads + 2 * self.kv_heads)
        keys = self._kv_part(self.kv_heads * size)
        return [self._head_part(self.heads * size), keys, keys]

    def _pieces(self, parts: Seq[TensorPart]) -> list[tuple[int, int]]:
        """Return this rank's rows of each of *parts*, which lie behind one another."""
        pieces = []
        offset = 0
        for part in parts:
            first, last = self._units(part)
            size = part.width // part.units
            pieces.append((offset + first * size, offset + last * size))
            offset += part.width
        return pieces

    def _units(self, part: TensorPart) -> tuple[int, int]:
        if part.units % self.ranks == 0:
            each = part.units // self.ranks
            return self.rank * each, (self.rank + 1) * each
        if part.copied and self.ranks % part.units == 0:
            first = self.rank * part.units // self.ranks
            return first, first + 1
        verb = "can neither share nor copy" if part.copied else "cannot share"
        raise ModelError(
            f"{self.name}: {self.ranks} ranks {verb} {part.units} {part.what} evenly; "
            "choose another tensor_parallel_size"
        )


def shares_of(config: Any, name: str, rank: int, ranks: int) -> Shares:
    """Return the shares of *rank* of *ranks*.

    Raises:
        ModelError: the heads do not divide; with the numbers.
    """
    heads = int(config.num_attention_heads)
    return Shares(name, rank, ranks, heads, _kv_heads(config, heads))


def _kv_heads(config: Any, heads: int) -> int:
    if config.model_type in ONE_KV_HEAD_EACH:
        return heads
    if config.model_type == "gpt_bigcode":
        return 1 if config.multi_query else heads
    return int(getattr(config, "num_key_value_heads", None) or heads)
