"""`torch.compile` where it wins and a compiler exists; otherwise one line that says why not."""

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
"""Logits `[N, V]`; features `[T, F]` where somebody is fed them."""
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Outputs]
Trial = Callable[[Forward, int, int], torch.Tensor]

logger = logging.getLogger(__name__)

FREEZE_SHARE = 0.25  # of free memory that packed copies of the weights may take

TRIALS = ((7, 3), (1, 1))
"""(tokens, wanted) of the two graphs: any number of tokens, and one. Sizes differ so that none is taken for another."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference to eager, relative to the largest logit. In half precision fused operators round less often."""


FREEZING = {"freezing": True, "cpp.enable_concat_linear": True}
"""Weights become constants of the graph, packed for oneDNN, those that read the same input as one: about half the
time of a small forward in bf16. It holds the weights a second time.

Where oneDNN does not compute in the weights' dtype it cannot pack them either, and the constants, laid out for it, miss
torch's own products: a small forward in bf16 took eight times as long on a processor with AVX2 alone.
"""

WRAPPED = {"cpp_wrapper": True}
"""Operators are called from C++: a tenth of a small forward."""

GENERATED = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP"}
"""Matrix products are generated C++ too. One token through weights that stay in the processor's cache spends most of
its time on calls into oneDNN: 0.15 ms instead of 0.25 for a draft of 5 MB. Weights that come from memory lose."""

CACHED_BYTES = 16 << 20
"""Weights up to this size stay in the cache of one processor."""

STEPS = ((32, 1), (64, 4), (128, 8), (256, 16), (512, 32))
"""(up to so many tokens, multiples of this): the sizes that are run, all others being filled up to the next.

oneDNN makes a kernel for every product and number of tokens, and never gives it back: 0.3 ms and 0.3 to 0.6 MiB each
below 512 tokens, next to nothing above. A model has some ten products: without this, gigabytes in the long run.
"""


UNCHECKED = {"size_asserts": False, "alignment_asserts": False, "scalar_asserts": False}
"""Checks of the compiler's own work before each operator. A small forward is mostly such overhead."""


@dataclass(frozen=True)
class Weights:
    """What decides how a model is compiled: its dtype, its size, and the memory there is for packed copies."""

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
    """Whether oneDNN computes in *dtype* on this processor, rather than leave it to torch, which converts."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def compile_forward(forward: Forward, trial: Trial, weights: Weights) -> tuple[Forward, str]:
    """Compile *forward* for all sizes and check it against eager.

    Args:
        forward: tokens `[1, T]`, positions `[1, T]`, wanted `[N]` to `Outputs`.
        trial: runs a forward on T made-up tokens with N wanted ones, and returns the logits.
        weights: of the model.

    Returns:
        The compiled function and a line for the user; the function itself where compiling does not work.
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
    except Exception as error:  # whatever the compiler trips over, eager works
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        return forward, f"running eager: torch.compile failed: {type(error).__name__}: {reason}"
    off = max(_difference(a, b) for a, b in zip(expected, found, strict=True))
    if not off <= TOLERANCE[weights.dtype]:
        return forward, (
            f"running eager: compiled logits differ from eager by {off:.1e}, allowed {TOLERANCE[weights.dtype]:.0e}"
        )
    return in_few_sizes(compiled), f"compiled in {time.monotonic() - started:.0f} s"


def in_few_sizes(forward: Forward) -> Forward:
    """Return *forward* with what it is fed filled up to sizes of `STEPS`; what it says of the filling is cut off."""

    def padded(tokens_1T: torch.Tensor, positions_1T: torch.Tensor, wanted_N: torch.Tensor) -> Outputs:
        num_tokens, num_wanted = tokens_1T.shape[1], len(wanted_N)
        logits_NV, features_TF = forward(_filled(tokens_1T), _filled(positions_1T), _filled(wanted_N))
        return logits_NV[:num_wanted], None if features_TF is None else features_TF[:num_tokens]

    return padded


def size_for(num_tokens: int) -> int:
    """Return the size at which that many tokens are run."""
    step = next((step for most, step in STEPS if num_tokens <= most), 1)
    return -(-num_tokens // step) * step


def _filled(ids: torch.Tensor) -> torch.Tensor:
    extra = size_for(ids.shape[-1]) - ids.shape[-1]
    return F.pad(ids, (0, extra)) if extra else ids


def _first_call(compiled: Forward, trial: Trial, sizes: tuple[int, int], options: dict[str, Any]) -> torch.Tensor:
    """Run *trial* for the first time at these sizes, which compiles their graph."""
    # A model's own numbers (epsilons, scalings) are constants, not inputs to be wrapped at every call.
    with torch._dynamo.config.patch(specialize_float=True), torch._inductor.config.patch(options):
        return trial(compiled, *sizes)


def _compile(forward: Forward) -> Forward:
    # Compiled graphs are kept by code object, and ours do not check which model they belong to: so each gets its own.
    own = FunctionType(forward.__code__.replace(), forward.__globals__, forward.__name__, None, forward.__closure__)
    compiled: Forward = torch.compile(
        own, fullgraph=True, dynamic=True, options={"guard_filter_fn": _guards_on_inputs, **UNCHECKED}
    )
    return compiled


def _guards_on_inputs(guards: Seq[Any]) -> list[bool]:
    # The model never changes once it is loaded: only the sizes of what is fed need checking before each call.
    # Checking hundreds of module attributes as well costs about 0.3 ms a forward for 8 layers.
    return [g.guard_type == "SHAPE_ENV" or (g.guard_type == "TENSOR_MATCH" and "model" not in g.name) for g in guards]


def _quietly(run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """Compilers talk: keep their warnings and log lines out of the user's terminal."""
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
