"""`workers.sampling.sample.choose` on CPUs in C++ (`native/choice.cpp`)."""

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from workers.native.build import load_function
from workers.sampling.sample import COLDEST, Limits

Ints = npt.NDArray[np.int64]


class _Choice(ctypes.Structure):
    _fields_ = [("logits", ctypes.c_void_p)]
    _fields_ += [(name, ctypes.c_int64) for name in ("stride", "rows", "vocab", "threads")]
    _fields_ += [
        (name, ctypes.c_void_p) for name in ("slots", "index", "seeds", "temperature", "top_k", "top_p", "min_p")
    ]
    _fields_ += [("coldest", ctypes.c_float), ("chosen", ctypes.c_void_p)]


class NativeChooser:
    """Chooses for rows that name a slot; reads seeds and limits from arrays by slot, which must stay where they are.

    Args:
        seeds_S: int64, the bits of uint64 seeds.
        limits_S: of each slot; a temperature below `COLDEST` is greedy.

    Raises:
        KernelUnavailableError: it cannot be compiled here.
    """

    def __init__(self, seeds_S: Ints, limits_S: Limits) -> None:
        self._function = load_function("choice", "slipstream_choose")
        self._kept = (seeds_S, limits_S)
        self._choice = _Choice(
            seeds=seeds_S.ctypes.data,
            temperature=limits_S.temperature.ctypes.data,
            top_k=limits_S.top_k.ctypes.data,
            top_p=limits_S.top_p.ctypes.data,
            min_p=limits_S.min_p.ctypes.data,
            coldest=COLDEST,
        )
        self._choice_ref = ctypes.byref(self._choice)

    def choose(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        """Return the chosen ids, int64 `[N]`; -1 for rows whose greatest logit is not finite.

        Args:
            logits_NV: float32, after all edits; the last dimension is contiguous.
            slots_N: int64, contiguous.
            index_N: int64, contiguous: the position of the token being chosen.
        """
        chosen_N = torch.empty(len(slots_N), dtype=torch.int64)
        choice = self._choice
        choice.logits, choice.chosen = logits_NV.data_ptr(), chosen_N.data_ptr()
        choice.stride, (choice.rows, choice.vocab) = logits_NV.stride(0), logits_NV.shape
        choice.slots, choice.index = slots_N.ctypes.data, index_N.ctypes.data
        choice.threads = torch.get_num_threads()
        self._function(self._choice_ref)
        return chosen_N
