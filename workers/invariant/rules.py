"""The batch-invariant replacement of every torch operator that a model's forward may use.

An operator is of one of four kinds. It only moves numbers, or rounds every result once (sums and products of pairs), so
its results are the same bits in any batch: it runs as it is. Its bits depend on shapes or places (matrix products, sums
over rows, exp, whose vectorised loops treat their last elements differently): it is replaced by one of
`workers.invariant.ops`. It consists of other operators: these are looked up instead. Anything else is an error.
"""

import operator
from collections.abc import Callable, Mapping
from functools import cache, partial, reduce
from typing import Any, cast

import torch

from protos.errors import ConfigError
from workers.invariant import ops

LONGEST_SUM = 256
"""Sums with more terms are an error. Those over a token's experts have few. Means may have any number."""

EXACT = frozenset({
    # These move or create numbers.
    "alias", "arange", "as_strided", "cat", "chunk", "clone", "contiguous", "copy_", "detach", "empty", "empty_like",
    "expand", "expand_as", "fill_", "flatten", "full", "full_like", "gather", "index", "index_put_", "index_select",
    "lift_fresh", "masked_fill", "masked_fill_", "movedim", "narrow", "new_empty", "new_ones", "new_zeros", "ones",
    "ones_like", "permute", "repeat", "repeat_interleave", "reshape", "scatter", "scatter_", "select", "slice", "split",
    "split_with_sizes", "squeeze", "stack", "t", "to", "_to_copy", "transpose", "type_as", "unbind", "unflatten",
    "unsqueeze", "view", "view_as", "_unsafe_view", "where", "zeros", "zeros_like", "embedding", "mT", "item",
    "_local_scalar_dense", "is_same_size", "sym_size",
    # These round every result once, or not at all.
    "abs", "add", "add_", "clamp", "clamp_", "clamp_max", "clamp_min", "div", "div_", "maximum", "minimum", "mul",
    "mul_", "neg", "reciprocal", "relu", "rsub", "sqrt", "square", "sub", "sub_",
    # These compare, sort and count.
    "argmax", "argsort", "bitwise_and", "bitwise_not", "bitwise_or", "cumsum", "eq", "floor_divide", "ge", "gt",
    "histc", "le", "logical_and", "logical_not", "logical_or", "lt", "ne", "one_hot", "remainder", "sort", "topk",
})  # fmt: skip
INTEGERS_ONLY = frozenset({"cumsum", "floor_divide", "remainder"})
"""Exact only for integers: with floats they round, or add up."""
MAX_ARGUMENTS: Mapping[str, int] = {
    "add": 2,
    "add_": 2,
    "sub": 2,
    "sub_": 2,
    "rsub": 2,
    "index_put_": 3,
    "scatter": 4,
    "scatter_": 4,
}
"""Exact only with so many arguments, and without a factor or an accumulation, which would round again."""
OWN_NAMESPACES = frozenset({"slipstream", "slipstream_invariant", "c10d", "prim"})
"""Namespaces of this project's operators, of collectives, and of properties of tensors."""

Rule = Callable[..., Any]


@cache
def rule_of(func: Any) -> Rule:
    """Return the function to call instead of the operator *func*; it returns NotImplemented if none is known."""
    namespace, _, name = func.overloadpacket._qualified_op_name.partition("::")
    for names, rule in ((INTEGERS_ONLY, _if_integers), (MAX_ARGUMENTS, _if_plain)):
        if name in names:
            return partial(rule, func)
    if namespace in OWN_NAMESPACES or name in EXACT:
        return cast(Rule, func)
    return RULES.get(name, _unknown)


def _if_integers(func: Any, *args: Any, **named: Any) -> Any:
    wanted = [named["dtype"]] if named.get("dtype") else [x.dtype for x in args if isinstance(x, torch.Tensor)]
    return NotImplemented if any(dtype.is_floating_point for dtype in wanted) else func(*args, **named)


def _if_plain(func: Any, *args: Any, **named: Any) -> Any:
    plain = {"alpha": 1, "accumulate": False, "reduce": None}
    does_more = any(named.get(key, value) != value for key, value in plain.items())
    return (
        NotImplemented if does_more or len(args) > MAX_ARGUMENTS[func.overloadpacket.__name__] else func(*args, **named)
    )


def _unknown(*_: Any, **__: Any) -> Any:
    return NotImplemented


def _linear(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    # A layer whose sums may be split over ranks is a `SummedLinear`, on one rank, too. Other sums need one shard.
    found: torch.Tensor = ops.linear(x, weight_NK, bias_N, 1, False)
    return found


def _mm(x_MK: torch.Tensor, y_KN: torch.Tensor) -> torch.Tensor:
    return _linear(x_MK, y_KN.t())


def _addmm(
    bias_N: torch.Tensor, x_MK: torch.Tensor, y_KN: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    if (beta, alpha) != (1, 1) or bias_N.ndim != 1:
        raise ConfigError(f"batch_invariant: the model scales a matrix product by {alpha} and what it adds by {beta}")
    return _linear(x_MK, y_KN.t(), bias_N)


def _matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of batched products, only those with an inner size of one are supported: frequencies times positions."""
    if y.ndim == 2:
        return _linear(x, y.t())
    if x.ndim == y.ndim > 2 and x.shape[-1] == 1:
        return x * y
    raise ConfigError(f"batch_invariant: the model multiplies matrices of {tuple(x.shape)} and {tuple(y.shape)}")


def _grouped(x_MK: torch.Tensor, weight_EKN: torch.Tensor, offs: torch.Tensor, *_: Any, **named: Any) -> torch.Tensor:
    if any(value is not None for value in named.values()):
        raise ConfigError(f"batch_invariant: the model's experts are multiplied with {sorted(named)}")
    found: torch.Tensor = ops.grouped(x_MK, weight_EKN, offs, ops.SHARDS, False)
    return found


def _mean(
    x: torch.Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if dim is None or [axis % x.ndim for axis in dim] != [x.ndim - 1]:
        raise ConfigError(f"batch_invariant: the model takes means over the dimensions {dim} of {x.ndim}")
    found: torch.Tensor = ops.mean(x if dtype is None else x.to(dtype))
    return found if keepdim else found.squeeze(-1)


def _sum(
    x: torch.Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if dim is None or len(dim) != 1:
        raise ConfigError(f"batch_invariant: the model adds up the dimensions {dim} of {x.ndim}")
    terms = (x if dtype is None else x.to(dtype)).unbind(dim[0])
    if not 0 < len(terms) <= LONGEST_SUM:
        raise ConfigError(f"batch_invariant: the model adds up {len(terms)} terms, more than {LONGEST_SUM}")
    wide = torch.float32 if x.is_floating_point() and x.dtype != torch.float64 else terms[0].dtype
    total = reduce(operator.add, [term.to(wide) for term in terms]).to(terms[0].dtype)
    return total.unsqueeze(dim[0]) if keepdim else total


def _softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | bool | None = None) -> torch.Tensor:
    wanted = x if not isinstance(dtype, torch.dtype) else x.to(dtype)
    found: torch.Tensor = ops.softmax(wanted.movedim(dim, -1)).movedim(-1, dim)
    return found


def _layer_norm(
    x: torch.Tensor,
    shape: list[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> torch.Tensor:
    if len(shape) != 1:
        raise ConfigError(f"batch_invariant: the model normalises {len(shape)} dimensions together")
    found: torch.Tensor = ops.layer_norm(x, weight, bias, eps)
    return found


def _rms_norm(
    x: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    if len(shape) != 1:
        raise ConfigError(f"batch_invariant: the model normalises {len(shape)} dimensions together")
    wide = x.float()
    epsilon = torch.finfo(x.dtype).eps if eps is None else eps
    normed = wide * ops.each(ops.mean(wide * wide) + epsilon, ops.function_index("rsqrt"))
    found: torch.Tensor = (normed if weight is None else normed * weight.float()).to(x.dtype)
    return found


def _pow(x: torch.Tensor, exponent: float) -> torch.Tensor:
    if exponent not in (2, 3):
        raise ConfigError(f"batch_invariant: the model raises numbers to the power {exponent}; 2 and 3 are known")
    return x * x if exponent == 2 else x * x * x


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if train and p:
        raise ConfigError("batch_invariant: the model applies dropout")
    return x


def _gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    return _each("gelu_erf" if approximate == "none" else "gelu_tanh")(x)


def _each(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    number = ops.function_index(name)

    def rule(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = ops.each(x, number)
        return found

    return rule


RULES: Mapping[str, Rule] = {
    "linear": _linear, "mm": _mm, "addmm": _addmm, "matmul": _matmul, "bmm": _matmul, "mean": _mean, "sum": _sum,
    "softmax": _softmax, "_softmax": _softmax, "layer_norm": _layer_norm, "rms_norm": _rms_norm, "pow": _pow,
    "dropout": _dropout, "gelu": _gelu, **dict.fromkeys(ops.GROUPED, _grouped),
    **{name: _each(name) for name in ("exp", "silu", "sigmoid", "tanh", "cos", "sin", "rsqrt")},
}  # fmt: skip
"""By the name of a torch operator, its replacement."""
