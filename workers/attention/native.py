"""Paged attention on CPUs by a small C++ kernel (`native/paged_attention.cpp`)."""

import ctypes
import logging
from functools import cache as cached
from typing import ClassVar

import numpy as np
import torch

from workers.attention.backend import TOLD, AttentionBackend, Options
from workers.attention.batch import AttentionMetadata, Ints, TreeMasks
from workers.attention.kv import KVCache, Pages
from workers.attention.quantized_kv import LARGEST
from workers.attention.row_groups import CHUNK
from workers.attention.torch import TorchAttention
from workers.native.build import QUANTIZED_KV, KernelUnavailableError, load_for_graphs, load_function
from workers.native.dtypes import DTYPE_CODES
from workers.native.shims import SHIMS, Shim

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16, *LARGEST)
"""Caches that the kernel reads."""


class _Plan(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("rows", "tasks", "table_stride", "block_size", "threads")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("starts", "lengths", "offsets", "slots", "blocks", "short_rows")]
    _fields_ += [
        (name, ctypes.c_void_p) for name in ("first_valid", "trees", "tree_sizes", "tree_positions", "visible")
    ]
    _fields_ += [(name, ctypes.c_int64) for name in ("tree_stride", "visible_words", "kv_window", "kv_sinks")]


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("keys", "values", "key_scales", "value_scales")]
    _fields_ += [
        (name, ctypes.c_int64) for name in ("heads", "kv_heads", "key_size", "value_size", "stored", "computed")
    ]


class _Call(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("query", "key", "value", "output")]
    _fields_ += [(f"{name}_{axis}", ctypes.c_int64) for name in ("query", "key", "value") for axis in ("head", "token")]
    _fields_ += [("sinks", ctypes.c_void_p), ("scaling", ctypes.c_float), ("softcap", ctypes.c_float)]
    _fields_ += [(name, ctypes.c_int64) for name in ("window", "window_from_block", "causal_block")]


class _Forward(ctypes.Structure):
    """What a compiled graph's layers share: see `native/attention_shim.cpp`."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("kernel", "plan", "layers")]
    _fields_ += [(name, ctypes.c_int64) for name in ("tokens", "is_whole")]


class NativeAttention:
    """Attends short rows with the kernel, and rows with long chunks with torch, whose matrix products are faster."""

    LONGEST = CHUNK  # most tokens of a row that the kernel attends
    KERNEL: tuple[str, ...] = ("paged_attention", "slipstream_attention")
    takes_padding: ClassVar[bool] = True

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._kernel = load_function(*self.KERNEL, *((QUANTIZED_KV,) if cache.dtype in LARGEST else ()))
        self._torch = TorchAttention(cache)
        self._plan = _Plan(block_size=cache.block_size)
        self._plan_ref = ctypes.byref(self._plan)
        self._call = _Call()
        self._call_ref = ctypes.byref(self._call)
        self._layers = (_Layer * len(cache.shapes))(*map(self._describe, range(len(cache.shapes))))
        self._layer_refs = [ctypes.byref(layer) for layer in self._layers]
        self._forward = _Forward(
            kernel=ctypes.cast(self._kernel, ctypes.c_void_p).value,
            plan=ctypes.addressof(self._plan),
            layers=ctypes.addressof(self._layers),
        )
        self.forward_ref = ctypes.byref(self._forward)  # for graphs
        self._metadata: AttentionMetadata | None = None
        self._num_tokens = 0
        self._short_rows: Ints = np.empty(0, np.int64)
        self._has_long = False

    def plan(self, metadata: AttentionMetadata) -> None:
        """Pass this forward's rows to the kernel."""
        self._metadata = metadata  # keeps the arrays alive
        self._num_tokens = int(metadata.lengths_R.sum())
        self._has_long = int(metadata.lengths_R.max()) > self.LONGEST
        plan = self._plan
        plan.rows = plan.tasks = len(metadata.starts_R)
        plan.starts, plan.lengths = metadata.starts_R.ctypes.data, metadata.lengths_R.ctypes.data
        plan.offsets, plan.slots = metadata.offsets_R.ctypes.data, metadata.slots_R.ctypes.data
        plan.blocks, plan.table_stride = metadata.blocks_SB.ctypes.data, metadata.blocks_SB.shape[1]
        plan.threads, plan.short_rows = torch.get_num_threads(), None
        plan.first_valid = None if metadata.first_valid_R is None else metadata.first_valid_R.ctypes.data
        plan.kv_window, plan.kv_sinks = metadata.kv_window or (0, 0)
        plan.trees = None
        if metadata.tree_masks is not None:
            self._plan_trees(metadata.tree_masks)
        if self._has_long:
            self._plan_long(metadata)
        self._forward.tokens, self._forward.is_whole = self._num_tokens, not self._has_long

    def _plan_trees(self, masks: TreeMasks) -> None:
        plan = self._plan
        plan.trees, plan.tree_sizes = masks.first_R.ctypes.data, masks.sizes_R.ctypes.data
        plan.tree_positions, plan.tree_stride = masks.positions_RA.ctypes.data, masks.positions_RA.shape[1]
        plan.visible, plan.visible_words = masks.visible_TW.ctypes.data, masks.visible_TW.shape[1]

    def _plan_long(self, metadata: AttentionMetadata) -> None:
        """Leave rows with long chunks to torch."""
        is_long_R = metadata.lengths_R > self.LONGEST
        self._short_rows = np.flatnonzero(~is_long_R)
        self._plan.tasks, self._plan.short_rows = len(self._short_rows), self._short_rows.ctypes.data
        self._torch.plan_rows(metadata, np.flatnonzero(is_long_R))

    def attend(
        self, layer: int, query_1HTD: torch.Tensor, key_1GTD: torch.Tensor, value_1GTE: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        _, heads, tokens, _ = query_1HTD.shape
        output_1THE = query_1HTD.new_empty(1, tokens, heads, value_1GTE.shape[3])
        size = self._num_tokens
        if tokens > size:
            output_1THE[:, size:].zero_()
        call, described = self._call, self._layers[layer]
        described.heads, described.computed = heads, DTYPE_CODES[query_1HTD.dtype]
        call.query, call.key, call.value = query_1HTD.data_ptr(), key_1GTD.data_ptr(), value_1GTE.data_ptr()
        call.output = output_1THE.data_ptr()
        _, call.query_head, call.query_token, _ = query_1HTD.stride()
        _, call.key_head, call.key_token, _ = key_1GTD.stride()
        _, call.value_head, call.value_token, _ = value_1GTE.stride()
        sinks_H = None if options.sinks_H is None else options.sinks_H.float().contiguous()
        call.sinks = None if sinks_H is None else sinks_H.data_ptr()
        call.scaling, call.softcap, call.window = options.scaling, options.softcap, options.window
        call.window_from_block, call.causal_block = options.window_from_block, options.causal_block
        self._kernel(self._plan_ref, self._layer_refs[layer], self._call_ref)
        if self._has_long:
            query_THD = query_1HTD[0].transpose(0, 1)
            self._torch.attend_groups_into(output_1THE[0, :size], layer, query_THD[:size], options)
        return output_1THE

    def _describe(self, index: int) -> _Layer:
        shape, keys, values = self.cache.shapes[index], self.cache.key_pages[index], self.cache.value_pages[index]
        return _Layer(
            keys=keys.stored.data_ptr(),
            values=values.stored.data_ptr(),
            key_scales=_scales(keys),
            value_scales=_scales(values),
            kv_heads=shape.kv_heads,
            key_size=shape.key_size,
            value_size=shape.value_size,
            stored=DTYPE_CODES[self.cache.dtype],
        )


def _scales(pages: Pages) -> int | None:
    return None if pages.scales is None else pages.scales.data_ptr()


@cached
def _load_shim() -> None:
    """Load the shim, and tell it of every forward from now on."""
    tell = load_for_graphs("attention_shim").slipstream_attention_current
    tell.restype = None
    TOLD.append(lambda backend: tell(getattr(backend, "forward_ref", None)))


SHIM = Shim(
    torch.ops.slipstream.paged_attention.default,
    "AOTITorchError aoti_torch_cpu_paged_attention(AtenTensorHandle query, AtenTensorHandle key, "
    "AtenTensorHandle value, const AtenTensorHandle* sinks, int64_t layer, double scaling, int64_t window, "
    "double softcap, int32_t window_from_block, int32_t causal_block, AtenTensorHandle* output)",
    _load_shim,
)
SHIMS.append(SHIM)


def pick_attention(cache: KVCache) -> AttentionBackend:
    """Return the fastest attention this machine has for *cache*."""
    if cache.device.type != "cpu" or cache.dtype not in DTYPES:
        return TorchAttention(cache)
    try:
        return NativeAttention(cache)
    except KernelUnavailableError as error:
        logger.info("attention runs in plain torch: %s", error)
        return TorchAttention(cache)
