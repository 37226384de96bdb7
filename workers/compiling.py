"""`torch.compile` where it wins and a compiler exists; otherwise one line that says why not."""

import logging
import shutil
import time
import warnings
from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import FunctionType
from typing import Any

import torch
import torch._inductor.config

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Trial = Callable[[Forward, int, int], torch.Tensor]

logger = logging.getLogger(__name__)

TRIALS = ((7, 3), (1, 1))
"""(tokens, wanted) of the two graphs: any number of tokens, and one. Sizes differ so that none is taken for another."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference to eager, relative to the largest logit. In half precision fused operators round less often."""


FREEZING = {"freezing": True, "cpp.enable_concat_linear": True}
"""Weights become constants of the graph, packed for oneDNN, those that read the same input as one: about half the
time of a small forward in bf16. It holds the weights a second time."""


UNCHECKED = {"size_asserts": False, "alignment_asserts": False, "scalar_asserts": False}
"""Checks of the compiler's own work before each operator. A small forward is mostly such overhead."""


def compile_forward(forward: Forward, trial: Trial, dtype: torch.dtype, *, may_freeze: bool) -> tuple[Forward, str]:
    """Compile *forward* for all sizes and check it against eager.

    Args:
        forward: tokens `[1, T]`, positions `[1, T]`, wanted `[N]` to logits `[N, V]`.
        trial: runs a forward on T made-up tokens with N wanted ones.
        dtype: the weights' dtype.
        may_freeze: whether there is memory for packed copies of the weights.

    Returns:
        The compiled function and a line for the user; the function itself where compiling does not work.
    """
    if shutil.which("c++") is None and shutil.which("g++") is None:
        return forward, "running eager: torch.compile needs a C++ compiler, and there is none"
    started = time.monotonic()
    expected = [trial(forward, *sizes) for sizes in TRIALS]
    try:
        compiled = _compile(forward)
        # A model's own numbers (epsilons, scalings) are constants, not inputs to be wrapped at every call.
        with torch._dynamo.config.patch(specialize_float=True), torch._inductor.config.patch(
            FREEZING if may_freeze else {}
        ):
            found = _quietly(lambda: [trial(compiled, *sizes) for sizes in TRIALS])
    except Exception as error:  # whatever the compiler trips over, eager works
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        return forward, f"running eager: torch.compile failed: {type(error).__name__}: {reason}"
    off = max(_difference(a, b) for a, b in zip(expected, found, strict=True))
    if not off <= TOLERANCE[dtype]:
        return forward, f"running eager: compiled logits differ from eager by {off:.1e}, allowed {TOLERANCE[dtype]:.0e}"
    return compiled, f"compiled in {time.monotonic() - started:.0f} s"


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
