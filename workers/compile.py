"""`torch.compile` of a forward, checked against eager. Without it, models run eager and a line states why."""

import logging
import shutil
import time
import warnings
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch._inductor.config
import torch.nn.functional as F

Outputs = tuple[torch.Tensor, torch.Tensor | None]
"""Logits `[N, V]`; features `[T, F]`, None if no draft reads them."""
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Outputs]
Trial = Callable[[Forward, int, int], torch.Tensor]

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
    if shutil.which("c++") is None and shutil.which("g++") is None:
        return forward, "running eager: torch.compile needs a C++ compiler, and there is none"
    started = time.monotonic()
    expected = [trial(forward, *sizes) for sizes in TRIALS]
    try:
        compiled = _compile(forward)
        found = _quietly(
            lambda: [
                _first_call(compiled, trial, sizes, options)
                for sizes, options in zip(TRIALS, weights.options, strict=True)
            ]
        )
    except Exception as error:  # whatever fails in the compiler, eager works
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        return forward, f"running eager: torch.compile failed: {type(error).__name__}: {reason}"
    difference = max(_difference(a, b) for a, b in zip(expected, found, strict=True))
    if not difference <= TOLERANCE[weights.dtype]:
        return forward, (
            f"running eager: compiled logits differ from eager by {difference:.1e}, "
            f"allowed {TOLERANCE[weights.dtype]:.0e}"
        )
    return pad_to_sizes(compiled), f"compiled in {time.monotonic() - started:.0f} s"


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


def _first_call(compiled: Forward, trial: Trial, sizes: tuple[int, int], options: dict[str, Any]) -> torch.Tensor:
    """Run *trial* for the first time at these sizes, which compiles a graph."""
    # Floats of a model (epsilons, scalings) become constants instead of inputs that are wrapped in every call.
    with torch._dynamo.config.patch(specialize_float=True), torch._inductor.config.patch(options):
        return trial(compiled, *sizes)


def _compile(forward: Forward) -> Forward:
    # Dynamo caches graphs by code object, and ours have no guards on the model. So each model gets its own code object.
    own = FunctionType(forward.__code__.replace(), forward.__globals__, forward.__name__, None, forward.__closure__)
    compiled: Forward = torch.compile(
        own, fullgraph=True, dynamic=True, options={"guard_filter_fn": _guards_on_inputs, **UNCHECKED}
    )
    return compiled


def _guards_on_inputs(guards: Seq[Any]) -> list[bool]:
    # A loaded model never changes, so only sizes of inputs are checked before each call. Checking hundreds of module
    # attributes takes about 0.3 ms a forward with 8 layers.
    return [g.guard_type == "SHAPE_ENV" or (g.guard_type == "TENSOR_MATCH" and "model" not in g.name) for g in guards]


def _quietly(run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
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


def _difference(expected_NV: torch.Tensor, found_NV: torch.Tensor) -> float:
    scale = expected_NV.abs().max().clamp(min=1.0)
    return float((expected_NV - found_NV).abs().max() / scale)
