"""Paged attention on CPUs by a small C++ kernel (`native/paged_attention.cpp`)."""

import ctypes

import numpy as np
import torch

from workers.attention import Options, Rows
from workers.attention_torch import CHUNK, TorchAttention
from workers.kv import KVCache
from workers.native_library import load_function

DTYPES = (torch.float32, torch.bfloat16)


class _Plan(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("rows", "tasks", "table_stride", "block_size", "tokens", "threads")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("starts", "lengths", "offsets", "tables", "places", "short_rows")]


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("keys", "values")]
    _fields_ += [(name, ctypes.c_int64) for name in ("heads", "kv_heads", "key_size", "value_size", "is_bf16")]


class _Call(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("query", "key", "value", "output")]
    _fields_ += [
        (f"{name}_{axis}", ctypes.c_int64) for name in ("query", "key", "value") for axis in ("head", "token")
    ]
    _fields_ += [("sinks", ctypes.c_void_p), ("scaling", ctypes.c_float), ("softcap", ctypes.c_float)]
    _fields_ += [("window", ctypes.c_int64)]


class NativeAttention:
    """Attends short rows with the kernel; rows with long chunks go through torch, whose matrix products are faster."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._kernel = load_function("paged_attention", "slipstream_attention")
        self._torch = TorchAttention(cache)
        self._plan = _Plan(block_size=cache.block_size)
        self._plan_ref = ctypes.byref(self._plan)
        self._call = _Call()
        self._call_ref = ctypes.byref(self._call)
        self._layers = [self._describe(index) for index in range(len(cache.shapes))]
        self._kept: tuple[object, ...] = ()
        self._has_long = False

    def plan(self, rows: Rows) -> None:
        """Point the kernel at this forward's rows."""
        is_long_R = rows.lengths_R > CHUNK
        self._has_long = bool(is_long_R.any())
        short_rows = np.flatnonzero(~is_long_R)
        arrays = {
            "starts": rows.starts_R, "lengths": rows.lengths_R, "offsets": rows.offsets_R,
            "tables": rows.tables_RB, "places": rows.places_T, "short_rows": short_rows,
        }  # fmt: skip
        kept = {name: np.ascontiguousarray(array, np.int64) for name, array in arrays.items()}
        for name, array in kept.items():
            setattr(self._plan, name, array.ctypes.data)
        self._kept = tuple(kept.values())
        plan = self._plan
        plan.rows, plan.table_stride = rows.tables_RB.shape
        plan.tasks, plan.tokens, plan.threads = len(short_rows), len(rows.places_T), torch.get_num_threads()
        if self._has_long:
            self._torch.plan_members(rows, np.flatnonzero(is_long_R))

    def attend(
        self, layer: int, query_HTD: torch.Tensor, key_GTD: torch.Tensor, value_GTE: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        heads, tokens, _ = query_HTD.shape
        output_THE = query_HTD.new_empty(tokens, heads, value_GTE.shape[2])
        call, described = self._call, self._layers[layer]
        described.heads = heads
        call.query, call.key, call.value = query_HTD.data_ptr(), key_GTD.data_ptr(), value_GTE.data_ptr()
        call.output = output_THE.data_ptr()
        call.query_head, call.query_token, _ = query_HTD.stride()
        call.key_head, call.key_token, _ = key_GTD.stride()
        call.value_head, call.value_token, _ = value_GTE.stride()
        sinks_H = None if options.sinks_H is None else options.sinks_H.float().contiguous()
        call.sinks = None if sinks_H is None else sinks_H.data_ptr()
        call.scaling, call.softcap, call.window = options.scaling, options.softcap, options.window
        self._kernel(self._plan_ref, ctypes.byref(described), self._call_ref)
        if self._has_long:
            self._torch.attend_groups_into(output_THE, layer, query_HTD.transpose(0, 1), options)
        return output_THE

    def _describe(self, index: int) -> _Layer:
        shape, keys = self.cache.shapes[index], self.cache.keys[index]
        return _Layer(
            keys=keys.data_ptr(),
            values=self.cache.values[index].data_ptr(),
            kv_heads=shape.kv_heads,
            key_size=shape.key_size,
            value_size=shape.value_size,
            is_bf16=keys.dtype == torch.bfloat16,
        )
