"""What compiled forwards have in common: the compiler's options, sizes of inputs, and the check against eager."""

import shutil
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Outputs = tuple[torch.Tensor, torch.Tensor | None]
"""Logits `[N, V]`; features `[T, F]`, None if no draft reads them."""
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Outputs]
Trial = Callable[[Forward, int, int], torch.Tensor]

FREEZE_SHARE = 0.25  # largest part of free memory for packed copies of the weights

TRIALS = ((7, 3), (1, 1))
"""(tokens, wanted) of the two graphs: any number of tokens, and one. They differ, so that sizes stay apart."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference from eager, relative to the largest logit. In half precision fused operators round less often."""


FREEZING = {"freezing": True, "cpp.enable_concat_linear": True}
"""Weights become constants of the graph, packed for oneDNN; those with the same input are concatenated. This halves the
time of a small forward in bf16, and holds the weights a second time.

If oneDNN does not compute in the weights' dtype, it cannot pack them, and their layout does not suit torch's own matrix
products: a small forward in bf16 took eight times as long on a processor with only AVX2.
"""

GENERATED = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP"}
"""Matrix products are generated C++, too. With one token and weights in the processor's cache, calls into oneDNN take
most of the time: 0.15 ms instead of 0.25 for a draft of 5 MB. It is slower for weights read from memory. With AMX it is
faster for several tokens, too: 0.42 ms instead of 0.63 for 4 of them, and 6 % at 512. It was not measured elsewhere."""

CACHED_BYTES = 16 << 20
"""Weights up to this size stay in the cache of one processor."""

SIZE_STEPS = ((32, 1), (64, 4), (128, 8), (256, 16), (512, 32))
"""(up to so many tokens, multiples of this): the sizes that are run; others are padded to the next.

oneDNN makes a kernel for every product and number of tokens, and never frees it: 0.3 ms and 0.3 to 0.6 MiB each below
512 tokens, almost nothing above. A model has about ten products, so memory would grow by gigabytes over time.
"""


NO_COMPILER = "compiling needs a C++ compiler, and there is none"

UNCHECKED = {"size_asserts": False, "alignment_asserts": False, "scalar_asserts": False}
"""The compiler's own checks before each operator. They are much of the time of a small forward."""


@dataclass(frozen=True)
class Weights:
    """Properties that determine how a model is compiled: dtype, size, and free memory for packed copies."""

    dtype: torch.dtype
    num_bytes: int
    free_bytes: int

    @property
    def are_packed(self) -> bool:
        """Whether graphs hold packed copies of them."""
        return self.num_bytes <= FREEZE_SHARE * self.free_bytes and cpu_computes(self.dtype)

    @property
    def options(self) -> list[dict[str, Any]]:
        """Compiler options of the graph for any number of tokens, and of the one for a single token."""
        frozen = FREEZING if self.are_packed else {}
        single = GENERATED if frozen and self.num_bytes <= CACHED_BYTES else {}
        several = single if self.dtype == torch.bfloat16 and has_amx() else {}
        return [{**frozen, **several}, {**frozen, **single}]

    @property
    def suit_one_token(self) -> bool:
        """Whether a single token has a graph of its own.

        That graph would have packed copies of its own. Rounds with draft tokens and without them take turns: each would
        find the other's copies in the processor's cache, which made a round of 2.5 ms take 3.7. And oneDNN's product of
        two rows is faster than that of a vector.
        """
        return not self.are_packed or self.num_bytes <= CACHED_BYTES


def cpu_computes(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes in *dtype* on this processor; otherwise torch converts to fp32."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def has_amx() -> bool:
    """Whether this processor multiplies tiles of bf16 matrices."""
    return bool(torch.cpu._is_amx_tile_supported())


class CompileError(Exception):
    """A function cannot be compiled, or computes something else when compiled; the message is one line.

    Attributes:
        may_pass: whether it may be the machine's state, such as a full disk, so that another attempt may succeed.
    """

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


def has_compiler() -> bool:
    """Return whether this machine has a C++ compiler."""
    return shutil.which("c++") is not None or shutil.which("g++") is not None


def pad_to_sizes(forward: Forward, least: int = 1) -> Forward:
    """Return *forward* with inputs padded to sizes of `SIZE_STEPS`, and outputs of the padding removed.

    Args:
        forward: of any number of tokens from *least* on.
        least: 2 if there is no graph for a single token.
    """

    def padded(tokens_1T: torch.Tensor, positions_1T: torch.Tensor, wanted_N: torch.Tensor) -> Outputs:
        num_tokens, num_wanted = tokens_1T.shape[1], len(wanted_N)
        logits_NV, features_TF = forward(*(_pad(ids, least) for ids in (tokens_1T, positions_1T, wanted_N)))
        return logits_NV[:num_wanted], None if features_TF is None else features_TF[:num_tokens]

    return padded


def padded_size(num_tokens: int) -> int:
    """Return the size to which *num_tokens* are padded."""
    step = next((step for most, step in SIZE_STEPS if num_tokens <= most), 1)
    return -(-num_tokens // step) * step


def _pad(ids: torch.Tensor, least: int) -> torch.Tensor:
    extra = max(least, padded_size(ids.shape[-1])) - ids.shape[-1]
    return F.pad(ids, (0, extra)) if extra else ids


def check_results(expected: Seq[torch.Tensor], found: Seq[torch.Tensor], dtype: torch.dtype) -> None:
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
