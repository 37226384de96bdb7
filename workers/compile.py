"""`torch.compile` of a forward, checked against eager. Without it, models run eager and a line states why."""

import logging
import shutil
import time
import warnings
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch._inductor.config
import torch.nn.functional as F

Outputs = tuple[torch.Tensor, torch.Tensor | None]
"""Logits `[N, V]`; features `[T, F]`, None if no draft reads them."""
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Outputs]
Trial = Callable[[Forward, int, int], torch.Tensor]
Call = Callable[..., Any]
Result = TypeVar("Result")
CallT = TypeVar("CallT", bound=Callable[..., Any])

logger = logging.getLogger(__name__)

FREEZE_SHARE = 0.25  # largest part of free memory for packed copies of the weights

TRIALS = ((7, 3), (1, 1))
"""(tokens, wanted) of the two graphs: any number of tokens, and one. Sizes differ so that dynamo keeps them apart."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference from eager, relative to the largest logit. In half precision fused operators round less often."""


FREEZING = {"freezing": True, "cpp.enable_concat_linear": True}
"""Weights become constants of the graph, packed for oneDNN; those with the same input are concatenated. This halves the
time of a small forward in bf16, and holds the weights a second time.

If oneDNN does not compute in the weights' dtype, it cannot pack them, and their layout does not suit torch's own matrix
products: a small forward in bf16 took eight times as long on a processor with only AVX2.
"""

WRAPPED = {"cpp_wrapper": True}
"""Operators are called from C++, which saves a tenth of a small forward."""

GENERATED = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP"}
"""Matrix products are generated C++, too. With one token and weights in the processor's cache, calls into oneDNN take
most of the time: 0.15 ms instead of 0.25 for a draft of 5 MB. It is slower for weights read from memory."""

CACHED_BYTES = 16 << 20
"""Weights up to this size stay in the cache of one processor."""

SIZE_STEPS = ((32, 1), (64, 4), (128, 8), (256, 16), (512, 32))
"""(up to so many tokens, multiples of this): the sizes that are run; others are padded to the next.

oneDNN makes a kernel for every product and number of tokens, and never frees it: 0.3 ms and 0.3 to 0.6 MiB each below
512 tokens, almost nothing above. A model has about ten products, so memory would grow by gigabytes over time.
"""


NO_COMPILER = "torch.compile needs a C++ compiler, and there is none"

UNCHECKED = {"size_asserts": False, "alignment_asserts": False, "scalar_asserts": False}
"""The compiler's own checks before each operator. They are much of the time of a small forward."""


@dataclass(frozen=True)
class Weights:
    """Properties that determine how a model is compiled: dtype, size, and free memory for packed copies."""

    dtype: torch.dtype
    num_bytes: int
    free_bytes: int

    @property
    def options(self) -> list[dict[str, Any]]:
        """Compiler options of the graph for any number of tokens, and of the one for a single token."""
        is_small = self.num_bytes <= FREEZE_SHARE * self.free_bytes
        frozen = FREEZING if is_small and cpu_computes(self.dtype) else {}
        single = GENERATED if frozen and self.num_bytes <= CACHED_BYTES else {}
        return [{**frozen, **WRAPPED}, {**frozen, **WRAPPED, **single}]


def cpu_computes(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes in *dtype* on this processor; otherwise torch converts to fp32."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def compile_forward(forward: Forward, trial: Trial, weights: Weights) -> tuple[Forward, str]:
    """Compile *forward* for all sizes and check it against eager.

    Args:
        forward: tokens `[1, T]`, positions `[1, T]`, wanted `[N]` to `Outputs`.
        trial: runs a forward on T made-up tokens with N wanted ones, and returns logits.
        weights: of the model.

    Returns:
        The compiled function, or *forward* itself if compiling fails, and a line for the user.
    """
    if not has_compiler():
        return forward, f"running eager: {NO_COMPILER}"
    started = time.monotonic()
    expected = [trial(forward, *sizes) for sizes in TRIALS]
    try:
        compiled = _compile(forward)
        found = _quietly(
            lambda: [
                _first_call(lambda sizes=sizes: trial(compiled, *sizes), options)  # type: ignore[misc]
                for sizes, options in zip(TRIALS, weights.options, strict=True)
            ]
        )
        _check(expected, found, weights.dtype)
    except Exception as error:  # whatever fails in the compiler, eager works
        return forward, f"running eager: {_reason(error)}"
    return pad_to_sizes(compiled), f"compiled in {time.monotonic() - started:.0f} s"


class CompileError(Exception):
    """A function cannot be compiled, or computes something else when compiled; the message is one line."""


def compile_call(call: Call, inputs: Seq[torch.Tensor | None], weights: Weights, *, is_single: bool) -> Call:
    """Compile *call* and compare it with eager on *inputs*.

    Args:
        call: a function of tensors; what it closes over is constant.
        inputs: example inputs, not of one token unless *is_single*.
        weights: of the model that it is a part of.
        is_single: compile it for inputs of one token; else for any larger number.

    Raises:
        CompileError: the compiler failed, or results differ from eager.
    """
    if not has_compiler():
        raise CompileError(NO_COMPILER)
    expected = call(*inputs)
    try:
        compiled = _compile(call)
        found = _quietly(lambda: _first_call(lambda: compiled(*inputs), weights.options[is_single]))
        _check(_several(expected), _several(found), weights.dtype)
    except Exception as error:  # whatever fails in the compiler, eager works
        raise CompileError(_reason(error)) from error
    return compiled


def has_compiler() -> bool:
    """Return whether this machine has a C++ compiler."""
    return shutil.which("c++") is not None or shutil.which("g++") is not None


def pad_to_sizes(forward: Forward) -> Forward:
    """Return *forward* with inputs padded to sizes of `SIZE_STEPS`, and outputs of the padding removed."""

    def padded(tokens_1T: torch.Tensor, positions_1T: torch.Tensor, wanted_N: torch.Tensor) -> Outputs:
        num_tokens, num_wanted = tokens_1T.shape[1], len(wanted_N)
        logits_NV, features_TF = forward(_pad(tokens_1T), _pad(positions_1T), _pad(wanted_N))
        return logits_NV[:num_wanted], None if features_TF is None else features_TF[:num_tokens]

    return padded


def padded_size(num_tokens: int) -> int:
    """Return the size to which *num_tokens* are padded."""
    step = next((step for most, step in SIZE_STEPS if num_tokens <= most), 1)
    return -(-num_tokens // step) * step


def _pad(ids: torch.Tensor) -> torch.Tensor:
    extra = padded_size(ids.shape[-1]) - ids.shape[-1]
    return F.pad(ids, (0, extra)) if extra else ids


def _first_call(run: Callable[[], Result], options: dict[str, Any]) -> Result:
    """Call *run*, which compiles a graph."""
    # Floats of a model (epsilons, scalings) become constants instead of inputs that are wrapped in every call.
    constants = {"specialize_float": True, "specialize_int": True}
    with torch._dynamo.config.patch(constants), torch._inductor.config.patch(options):
        return run()


def _compile(call: CallT) -> CallT:
    # Dynamo caches graphs by code object, and ours have no guards on the model. So each model gets its own code object.
    function: Any = call
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__)
    compiled: CallT = torch.compile(  # type: ignore[assignment]
        own, fullgraph=True, dynamic=True, options={"guard_filter_fn": _guards_on_inputs, **UNCHECKED}
    )
    return compiled


def _guards_on_inputs(guards: Seq[Any]) -> list[bool]:
    # A loaded model never changes, so only sizes of inputs are checked before each call. Checking hundreds of module
    # attributes takes about 0.3 ms a forward with 8 layers.
    return [g.guard_type == "SHAPE_ENV" or (g.guard_type == "TENSOR_MATCH" and "model" not in g.name) for g in guards]


def _quietly(run: Callable[[], Result]) -> Result:
    """Call *run* without the compiler's warnings and log lines."""
    loud = [logging.getLogger(name) for name in ("torch._dynamo", "torch._inductor", "torch.fx")]
    levels = [log.level for log in loud]
    for log in loud:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run()
    finally:
        for log, level in zip(loud, levels, strict=True):
            log.setLevel(level)


def _check(expected: Seq[torch.Tensor], found: Seq[torch.Tensor], dtype: torch.dtype) -> None:
    """Raise `CompileError` if results differ by more than rounding."""
    difference = max(_difference(a, b) for a, b in zip(expected, found, strict=True))
    if not difference <= TOLERANCE[dtype]:
        raise CompileError(f"compiled results differ from eager by {difference:.1e}, allowed {TOLERANCE[dtype]:.0e}")


def _difference(expected_NX: torch.Tensor, found_NX: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value; infinities of both are equal."""
    is_finite_NX = expected_NX.isfinite()
    if not torch.equal(expected_NX[~is_finite_NX], found_NX[~is_finite_NX]):
        return float("inf")
    expected_N, found_N = expected_NX[is_finite_NX].float(), found_NX[is_finite_NX].float()
    scale = expected_N.abs().max().clamp(min=1.0)
    return float((expected_N - found_N).abs().max() / scale)


def _several(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _reason(error: Exception) -> str:
    if isinstance(error, CompileError):
        return str(error)
    line = (str(error).strip().splitlines() or [""])[0][:200]
    return f"torch.compile failed: {type(error).__name__}: {line}"
