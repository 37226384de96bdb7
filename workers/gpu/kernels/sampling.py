"""Sampling on the device: `workers.sampling.sample.sample` and `greedy` for all rows at once, target and draft alike.

Without limits two kernels run: one that finds the best id of every block of the vocabulary, and one that takes the best
block of each row. Top-k and top-p add passes over the logits (`workers.gpu.kernels.limits`), none of which sorts.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from workers.gpu.kernels.limits import PASSES, search_kernel
from workers.gpu.kernels.sampling_kernels import choose_kernel, greatest_kernel, pick_kernel, ties_kernel
from workers.gpu.kernels.shape import power_of_two

BLOCK = 4096
"""Ids of a block."""
PART = 512
"""Ids that are compared with 16 candidates at a time."""
CANDIDATES = 16
WARPS = 8


@dataclass(frozen=True)
class KernelLimits:
    """`workers.sampling.sample.SamplingLimits` of N rows, and the ids that may be sampled, as device tensors.

    Attributes:
        temperature_N: float32; rows below `MIN_TEMPERATURE` are greedy, and have no limits.
        top_k_N: int32 or int64, 0: off. None if it is off for all rows, now and whenever a captured graph is replayed;
            so are the others.
        top_p_N: float64, 1: off.
        min_p_N: float64, 0: off.
        bits_MW: int32, bit `v % 32` of word `v // 32` is set if id v is allowed: grammars and allowed ids.
        bits_row_N: int32; each row's mask in it, -1: none.
    """

    temperature_N: torch.Tensor
    top_k_N: torch.Tensor | None = None
    top_p_N: torch.Tensor | None = None
    min_p_N: torch.Tensor | None = None
    bits_MW: torch.Tensor | None = None
    bits_row_N: torch.Tensor | None = None

    @property
    def flags(self) -> dict[str, bool]:
        """What is compiled in."""
        return {
            "HAS_TOP_K": self.top_k_N is not None,
            "HAS_TOP_P": self.top_p_N is not None,
            "HAS_MIN_P": self.min_p_N is not None,
            "HAS_BITS": self.bits_MW is not None,
        }

    def contiguous(self) -> "KernelLimits":
        """Return the same limits in contiguous tensors."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(self, **{name: tensor.contiguous() for name, tensor in given.items() if tensor is not None})


def sample_tokens(logits_NV: torch.Tensor, keys_N: torch.Tensor, limits: KernelLimits) -> torch.Tensor:
    """Return the sampled ids, int64 `[N]`; -1 for rows whose greatest logit is not finite.

    Args:
        logits_NV: float32, after bias and penalties; rows of any stride, columns contiguous.
        keys_N: int64, of any stride, from `workers.sampling.noise.row_keys`; not read for greedy rows.
        limits: of each row, of any strides.
    """
    return _Sampling(logits_NV, keys_N, limits).run()


class _Sampling:
    """One call of `sample_tokens`."""

    def __init__(self, logits_NV: torch.Tensor, keys_N: torch.Tensor, limits: KernelLimits) -> None:
        self._rows, self._vocab = logits_NV.shape
        self._blocks = -(-self._vocab // BLOCK)
        limits = limits.contiguous()  # what is repeated for the tokens of a single row is not, nor columns of keys
        self._logits_NV, self._keys_N, self._limits = logits_NV, keys_N.contiguous(), limits
        self._blocks_padded = power_of_two(self._blocks)
        self._words = 0 if limits.bits_MW is None else limits.bits_MW.shape[1]
        self._input = (logits_NV, logits_NV.stride(0), limits.temperature_N, limits.bits_MW, limits.bits_row_N)
        self._greatest_NB = self._empty(torch.float32)

    def run(self) -> torch.Tensor:
        limits, flags = self._limits, self._limits.flags
        has_limits = flags["HAS_TOP_K"] or flags["HAS_TOP_P"] or flags["HAS_MIN_P"]
        if has_limits:
            self._start(greatest_kernel, *self._input, self._greatest_NB, self._vocab, self._blocks, self._words)
        kth: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        mass, ties_NB3 = kth, None
        if limits.top_k_N is not None:
            kth = self._search(limits.top_k_N, (None, None), by_mass=False)
        if limits.top_p_N is not None:
            mass = self._search(limits.top_p_N, kth, by_mass=True)
            ties_NB3 = self._empty(torch.int64, 3)
        found = (limits.top_k_N, limits.top_p_N, limits.min_p_N, *kth, *mass, ties_NB3)
        sizes = (self._rows, self._vocab, self._blocks, self._words)
        if ties_NB3 is not None:
            self._start(ties_kernel, *self._input, self._greatest_NB, *found, *sizes)
        scores_NB, ids_NB = self._empty(torch.float64), self._empty(torch.int32)
        logits = self._input[:2]
        self._start(
            choose_kernel, *logits, self._keys_N, *self._input[2:], self._greatest_NB, *found, scores_NB, ids_NB, *sizes
        )
        return self._pick(scores_NB, ids_NB)

    def _search(
        self, target_N: torch.Tensor, kth: tuple[torch.Tensor | None, torch.Tensor | None], *, by_mass: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the last value that a limit leaves; return the sums and digits of all passes."""
        new = self._logits_NV.new_empty
        sums = new((PASSES, self._rows, self._blocks, CANDIDATES), dtype=torch.int64)
        prefixes = new((PASSES, self._rows), dtype=torch.int64)
        limits = self._limits
        for step in range(PASSES):
            self._start(
                search_kernel,
                *self._input,
                self._greatest_NB,
                target_N,
                limits.min_p_N,
                sums,
                prefixes,
                *kth,
                limits.top_k_N,
                self._rows,
                self._vocab,
                self._blocks,
                self._words,
                step,
                PART=min(PART, BLOCK),
                BY_MASS=by_mass,
            )
        return sums, prefixes

    def _pick(self, scores_NB: torch.Tensor, ids_NB: torch.Tensor) -> torch.Tensor:
        ids_N = self._keys_N.new_empty(self._rows)
        arguments = (self._greatest_NB, scores_NB, ids_NB, ids_N, self._vocab, self._blocks)
        pick_kernel[(self._rows,)](*arguments, BLOCKS=self._blocks_padded, num_warps=1)
        return ids_N

    def _start(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        """Start a kernel with a program for every block of every row."""
        known = self._limits.flags | {"BLOCK": BLOCK, "BLOCKS": self._blocks_padded} | constants
        compiled_in = {name: value for name, value in known.items() if name in kernel.arg_names}
        kernel[(self._rows, self._blocks)](*arguments, **compiled_in, num_warps=WARPS)

    def _empty(self, dtype: torch.dtype, *last: int) -> torch.Tensor:
        return self._logits_NV.new_empty((self._rows, self._blocks, *last), dtype=dtype)
