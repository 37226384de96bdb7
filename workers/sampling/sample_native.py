"""Sampling on CPUs by a C++ function (`native/sample.cpp`): the ids of `workers.sampling.sample.sample`, faster."""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from workers.native.build import load_function
from workers.sampling.sample import MIN_TEMPERATURE, Ints, SamplingLimits


class _Arguments(ctypes.Structure):
    """`struct SampleArguments` of `native/sample.cpp`."""

    _fields_ = [("logits", ctypes.c_void_p)]
    _fields_ += [(name, ctypes.c_int64) for name in ("stride", "rows", "vocab", "threads")]
    _fields_ += [
        (name, ctypes.c_void_p) for name in ("slots", "index", "seeds", "temperature", "top_k", "top_p", "min_p")
    ]
    _fields_ += [("min_temperature", ctypes.c_float), ("sampled", ctypes.c_void_p)]


class NativeSampler:
    """Samples rows by their slots; reads seeds and limits from arrays by slot, which must not be reallocated.

    Args:
        seeds_S: uint64.
        limits_S: of each slot; a temperature below `MIN_TEMPERATURE` is greedy.

    Raises:
        KernelUnavailableError: it cannot be compiled here.
    """

    def __init__(self, seeds_S: npt.NDArray[np.uint64], limits_S: SamplingLimits) -> None:
        self._function: Any = load_function("sample", "slipstream_sample")
        self._arrays = (seeds_S, limits_S)  # keeps alive the memory that the pointers refer to
        self._arguments = _Arguments(
            seeds=seeds_S.ctypes.data,
            temperature=limits_S.temperature.ctypes.data,
            top_k=limits_S.top_k.ctypes.data,
            top_p=limits_S.top_p.ctypes.data,
            min_p=limits_S.min_p.ctypes.data,
            min_temperature=MIN_TEMPERATURE,
        )
        self._arguments_ref = ctypes.byref(self._arguments)

    def sample(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        """Return the sampled ids, int64 `[N]`; -1 for rows whose greatest logit is not finite.

        Args:
            logits_NV: float32, processed; the last dimension is contiguous.
            slots_N: int64, contiguous.
            index_N: int64, contiguous: the position of the token being sampled.
        """
        sampled_N = torch.empty(len(slots_N), dtype=torch.int64)
        arguments = self._arguments
        arguments.logits, arguments.sampled = logits_NV.data_ptr(), sampled_N.data_ptr()
        arguments.stride, (arguments.rows, arguments.vocab) = logits_NV.stride(0), logits_NV.shape
        arguments.slots, arguments.index = slots_N.ctypes.data, index_N.ctypes.data
        arguments.threads = torch.get_num_threads()
        self._function(self._arguments_ref)
        return sampled_N
