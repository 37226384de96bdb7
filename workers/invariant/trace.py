"""`batch_invariant`: the logits of a position are the same bits whatever is computed beside it, and however.

A forward is a list of operators. Under the mode `Invariant` each is one of three kinds: one that only moves numbers, or
rounds each result exactly (sums and products of pairs), and so gives the same bits anywhere; one whose bits depend on
shapes or places in torch (matrix products, sums over rows, exp and its like, which treat the tail of a loop in another
way than its body), for which there is one of ours; or one about which nothing is known, which is refused at start.
"""

import operator
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import cache, partial, reduce
from typing import Any, cast

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from protos.errors import ConfigError
from workers.compile import TRIALS, Forward, Outputs, Trial
from workers.invariant import ops
from workers.weights.building import BUILDING

LONGEST_SUM = 256
"""Sums, such as those over chosen experts, have few terms; longer ones are refused. Means may have any number."""

SIZES = (*TRIALS, (20, 5))
"""(tokens, wanted) with which a list of operators must give the bits that looking at each gives."""

EXACT = frozenset({
    # They move numbers, or make them.
    "alias", "arange", "as_strided", "cat", "chunk", "clone", "contiguous", "copy_", "detach", "empty", "empty_like",
    "expand", "expand_as", "fill_", "flatten", "full", "full_like", "gather", "index", "index_put_", "index_select",
    "lift_fresh", "masked_fill", "masked_fill_", "movedim", "narrow", "new_empty", "new_ones", "new_zeros", "ones",
    "ones_like", "permute", "repeat", "repeat_interleave", "reshape", "scatter", "scatter_", "select", "slice", "split",
    "split_with_sizes", "squeeze", "stack", "t", "to", "_to_copy", "transpose", "type_as", "unbind", "unflatten",
    "unsqueeze", "view", "view_as", "_unsafe_view", "where", "zeros", "zeros_like", "embedding", "mT", "item",
    "_local_scalar_dense", "is_same_size", "sym_size",
    # They round once, number by number, or not at all.
    "abs", "add", "add_", "clamp", "clamp_", "clamp_max", "clamp_min", "div", "div_", "maximum", "minimum", "mul",
    "mul_", "neg", "reciprocal", "relu", "rsub", "sqrt", "square", "sub", "sub_",
    # They compare, order and count.
    "argmax", "argsort", "bitwise_and", "bitwise_not", "bitwise_or", "cumsum", "eq", "floor_divide", "ge", "gt",
    "histc", "le", "logical_and", "logical_not", "logical_or", "lt", "ne", "one_hot", "remainder", "sort", "topk",
})  # fmt: skip
WHOLE_NUMBERS_ONLY = frozenset({"cumsum", "floor_divide", "remainder"})
"""They round, or add up, unless they are given whole numbers."""
PLAIN_ONLY: Mapping[str, int] = {
    "add": 2,
    "add_": 2,
    "sub": 2,
    "sub_": 2,
    "rsub": 2,
    "index_put_": 3,
    "scatter": 4,
    "scatter_": 4,
}
"""With so many arguments, and without a factor or an accumulation: else they have sums of their own to round."""
OURS = frozenset({"slipstream", "slipstream_invariant", "c10d", "prim"})
"""Namespaces of our own operators, of exchanges between ranks, and of questions about tensors."""

UNLISTED = "batch-invariant, every operator looked at: "

Rule = Callable[..., Any]
Agree = Callable[[bool], bool]


class Invariant(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's own lacks annotations
    """While it is active in a thread, every operator there gives a row the same bits, whatever rows come with it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = _rule_of(func)(*args, **(kwargs or {}))
        if found is not NotImplemented:
            return found
        with self:  # what is made of other operators is looked at again
            found = func.decompose(*args, **(kwargs or {}))
        if found is NotImplemented:
            name = func.overloadpacket._qualified_op_name.replace("::", ".")
            raise ConfigError(f"batch_invariant: the model uses {name}, whose bits may depend on the batch")
        return found

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled while it is active, and keeping dynamo out takes longer than most operators


@cache
def _rule_of(func: Any) -> Rule:
    """Return what is called instead of *func*, and says NotImplemented where nothing is known of it."""
    namespace, _, name = func.overloadpacket._qualified_op_name.partition("::")
    for names, rule in ((WHOLE_NUMBERS_ONLY, _of_whole_numbers), (PLAIN_ONLY, _plainly)):
        if name in names:
            return partial(rule, func)
    if namespace in OURS or name in EXACT:
        return cast(Rule, func)
    return RULES.get(name, _unknown)


def _of_whole_numbers(func: Any, *args: Any, **named: Any) -> Any:
    wanted = [named["dtype"]] if named.get("dtype") else [x.dtype for x in args if isinstance(x, torch.Tensor)]
    return NotImplemented if any(dtype.is_floating_point for dtype in wanted) else func(*args, **named)


def _plainly(func: Any, *args: Any, **named: Any) -> Any:
    plain = {"alpha": 1, "accumulate": False, "reduce": None}
    does_more = any(named.get(key, value) != value for key, value in plain.items())
    return NotImplemented if does_more or len(args) > PLAIN_ONLY[func.overloadpacket.__name__] else func(*args, **named)


def _unknown(*_: Any, **__: Any) -> Any:
    return NotImplemented


def _linear(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    # A layer whose sums ranks may share is a `SummedLinear`, on one rank, too; all other sums need no parts.
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
    """Batches of products are only met where their inner size is one: frequencies times positions."""
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
    normed = wide * ops.each(ops.mean(wide * wide) + epsilon, ops.what("rsqrt"))
    found: torch.Tensor = (normed if weight is None else normed * weight.float()).to(x.dtype)
    return found


def _pow(x: torch.Tensor, exponent: float) -> torch.Tensor:
    if exponent not in (2, 3):
        raise ConfigError(f"batch_invariant: the model raises numbers to the power {exponent}; 2 and 3 are known")
    return x * x if exponent == 2 else x * x * x


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if train and p:
        raise ConfigError("batch_invariant: the model drops numbers at random")
    return x


def _gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    return _each("gelu_erf" if approximate == "none" else "gelu_tanh")(x)


def _each(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    number = ops.what(name)

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
"""By the name of an operator of torch, what is computed instead."""


def active() -> AbstractContextManager[Invariant]:
    """Return the mode, to be entered for the time of a forward."""
    mode: AbstractContextManager[Invariant] = Invariant()  # type: ignore[no-untyped-call]
    return mode


def invariant(forward: Forward) -> Forward:
    """Return *forward*, every operator of which is looked at as it runs."""

    def run(tokens_1T: torch.Tensor, positions_1T: torch.Tensor, wanted_N: torch.Tensor) -> Outputs:
        with active():
            return forward(tokens_1T, positions_1T, wanted_N)

    return run


def traced(
    forward: Forward, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], trial: Trial, agree: Agree
) -> tuple[Forward, str]:
    """List the operators of an `invariant` *forward* once, for all sizes: they then run without being looked at again.

    Args:
        forward: what is traced.
        inputs: tokens `[1, T]`, positions `[1, T]` and wanted `[N]` to trace it with; T and N differ, neither is one.
        trial: runs a forward on T made-up tokens with N wanted ones, and returns the logits, the wanted ranks' alone.
            Ranks try together: each makes the same trials, whatever came of tracing.
        agree: says whether something is so on all ranks. Only rank 0 sees logits, and they may be wrong for what
            another rank has listed.

    Returns:
        What runs the list and a line for the user; *forward* itself where no list gives the same bits.
    """
    started = time.monotonic()
    expected = [trial(forward, *sizes) for sizes in SIZES]
    graph, problem = _listed(forward, inputs)
    try:
        found = [trial(graph or forward, *sizes) for sizes in SIZES]
    except Exception as error:  # a list that does for the sizes it was made with alone
        return forward, UNLISTED + _failure(error)
    if not agree(all(map(torch.equal, found, expected))) or graph is None:
        return forward, UNLISTED + (problem or "traced logits differ")
    return graph, f"batch-invariant, {len(graph.graph.nodes)} operators listed in {time.monotonic() - started:.0f} s"


def _listed(forward: Forward, inputs: tuple[torch.Tensor, ...]) -> tuple[GraphModule | None, str]:
    """Return a list of the operators of *forward*, or what is wrong."""
    try:
        with BUILDING, torch.inference_mode():
            graph: GraphModule = make_fx(forward, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
    except Exception as error:  # whatever tracing trips over, looking at each operator works
        return None, _failure(error)
    _shorten(graph)
    return graph, ""


def _failure(error: Exception) -> str:
    reason = (str(error).strip().splitlines() or [""])[0][:200]
    return f"tracing failed: {type(error).__name__}: {reason}"


def _shorten(graph: GraphModule) -> None:
    """Call our operators directly, and drop what nobody reads."""
    for node in graph.graph.nodes:
        with suppress(KeyError, TypeError):
            node.target = ops.ON_CPU[node.target]
    graph.graph.eliminate_dead_code()
    graph.recompile()
