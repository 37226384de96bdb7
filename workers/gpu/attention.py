"""The attention backend of GPUs: one paged kernel for every kind of row (`workers.gpu.kernels.attention`)."""

from importlib.util import find_spec
from typing import ClassVar

import numpy as np
import torch

from protos.config.kv_window import KVWindow
from workers.attention.backend import AttentionBackend, Options
from workers.attention.batch import AttentionMetadata, TreeMasks
from workers.attention.kv import KVCache
from workers.attention.native import pick_attention
from workers.attention.quantized_kv import LARGEST
from workers.attention.torch import TorchAttention
from workers.gpu.metadata import DeviceMetadata


class TritonAttention:
    """Writes and attends by Triton kernels. Holds the rows of one forward.

    Every call of `attend` starts a fixed number of kernels with fixed grids, so it may be captured in a CUDA graph.
    """

    takes_padding: ClassVar[bool] = True

    def __init__(self, cache: KVCache) -> None:
        from workers.gpu.kernels.attention import LayerPages, paged_attention  # noqa: PLC0415 - triton may be missing
        from workers.gpu.kernels.cache import write_cache  # noqa: PLC0415

        self.cache = cache
        self.device = cache.keys[0].device
        self._attend, self._write = paged_attention, write_cache
        self._pages = [
            LayerPages(keys, values, values_in_keys=shape.values_in_keys)
            for keys, values, shape in zip(cache.keys, cache.values, cache.shapes, strict=True)
        ]
        self._metadata: DeviceMetadata | None = None
        self._kv_window: KVWindow | None = None

    def plan(self, metadata: AttentionMetadata) -> None:
        """Copy the rows of the next forward to the device."""
        self.use(device_metadata(metadata, self.device), metadata.kv_window)

    def use(self, metadata: DeviceMetadata, kv_window: KVWindow | None = None) -> None:
        """Attend for rows that are on the device already, or will be when the kernels run."""
        self._metadata, self._kv_window = metadata, kv_window

    def attend(
        self, layer: int, query_1HTD: torch.Tensor, key_1GTD: torch.Tensor, value_1GTE: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`. Tokens after those of the rows are padding."""
        if self._metadata is None:
            raise RuntimeError("attend was called before plan or use")
        planned, tokens = len(self._metadata.rows_T), query_1HTD.shape[2]
        query_HTD, key_GTD, value_GTE = query_1HTD[0], key_1GTD[0], value_1GTE[0]
        if tokens > planned:
            query_HTD, key_GTD, value_GTE = query_HTD[:, :planned], key_GTD[:, :planned], value_GTE[:, :planned]
        pages = self._pages[layer]
        self._write(key_GTD, value_GTE, pages, self._metadata.cache_index_T)
        output_THE = self._attend(query_HTD, pages, self._metadata, options, self._kv_window)
        if tokens > planned:
            padding = output_THE.new_zeros(tokens - planned, *output_THE.shape[1:])
            output_THE = torch.cat((output_THE, padding))
        return output_THE.unsqueeze(0)


def device_metadata(metadata: AttentionMetadata, device: torch.device) -> DeviceMetadata:
    """Copy *metadata* to *device*, without padding: one copy of all int32 numbers, and one of all int64 ones."""
    rows_T = np.repeat(np.arange(len(metadata.starts_R)), metadata.lengths_R)
    masks = metadata.tree_masks or _no_trees(metadata)
    first_valid_R = np.zeros_like(metadata.starts_R) if metadata.first_valid_R is None else metadata.first_valid_R
    tables_RB = metadata.tables_RB
    starts_R, lengths_R, offsets_R, tables, rows, first_R, sizes_R, positions_RA, valid_R = _packed(
        (
            metadata.starts_R,
            metadata.lengths_R,
            metadata.offsets_R,
            tables_RB,
            rows_T,
            masks.first_R,
            masks.sizes_R,
            masks.positions_RA,
            first_valid_R,
        ),
        np.dtype(np.int32),
        device,
    )
    cache_index_T, visible_TW = _packed(
        (metadata.cache_index_T, masks.visible_TW.view(np.int64)), np.dtype(np.int64), device
    )
    return DeviceMetadata(
        starts_R=starts_R,
        lengths_R=lengths_R,
        offsets_R=offsets_R,
        tables_RB=tables,
        rows_T=rows,
        cache_index_T=cache_index_T,
        first_R=first_R,
        sizes_R=sizes_R,
        positions_RA=positions_RA,
        visible_TW=visible_TW,
        first_valid_R=valid_R,
        block_size=metadata.block_size,
        max_length=int(metadata.lengths_R.max()),
        max_blocks=tables_RB.shape[1],
    )


def _no_trees(metadata: AttentionMetadata) -> TreeMasks:
    rows, tokens = len(metadata.starts_R), int(metadata.lengths_R.sum())
    sizes_R = np.zeros(rows, np.int64)
    return TreeMasks(metadata.contexts_R, sizes_R, np.zeros((rows, 1), np.int64), np.zeros((tokens, 0), np.uint64))


def _packed(
    arrays: tuple[np.typing.NDArray[np.int64], ...],
    dtype: np.dtype[np.int32] | np.dtype[np.int64],
    device: torch.device,
) -> list[torch.Tensor]:
    """Return arrays as tensors on *device*, copied there as one."""
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]).astype(dtype, copy=False))
    parts = torch.split(packed.to(device, non_blocking=True), [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def attention_of(cache: KVCache) -> AttentionBackend:
    """Return the fastest attention that the device of *cache* has."""
    return pick_gpu_attention(cache) if cache.device.type == "cuda" else pick_attention(cache)


def pick_gpu_attention(cache: KVCache) -> AttentionBackend:
    """Return the attention of a CUDA device: Triton's kernels, or torch's operators.

    The latter where triton is not installed, and for caches with a scale for each token.
    """
    if cache.dtype in LARGEST or find_spec("triton") is None:
        return TorchAttention(cache)
    return TritonAttention(cache)
