"""The paged KV cache: K and V of every layer in blocks."""

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch

from protos.layers import LayerShape


def bytes_per_block(shapes: Seq[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block in all layers."""
    return block_size * sum(shape.elements_per_token for shape in shapes) * dtype.itemsize


class KVCache:
    """K and V of all layers.

    A block holds `block_size` tokens, token-major and contiguous, so gathering blocks is a few large copies. All
    positions are kept; sliding windows only mask them.

    Attributes:
        keys: one `[num_blocks, block_size, kv_heads, key_size]` a layer.
        values: one `[num_blocks, block_size, kv_heads, value_size]` a layer.
    """

    def __init__(
        self, shapes: Seq[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes = tuple(shapes)
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Zeros, since uninitialized memory could hold NaNs. The operating system allocates pages only when written.
        lead = (num_blocks, block_size)
        self.keys = [torch.zeros(*lead, s.kv_heads, s.key_size, dtype=dtype, device=device) for s in shapes]
        self.values = [torch.zeros(*lead, s.kv_heads, s.value_size, dtype=dtype, device=device) for s in shapes]

    def move(self, moves_M2: npt.NDArray[np.int64]) -> None:
        """Copy K and V of all layers between cache indices (block * block_size + offset); `[M, 2]`, from and to.

        All are read before the first is written, so an index may be both. No index may be written twice.
        """
        from_M, to_M = torch.from_numpy(moves_M2).to(self.keys[0].device).unbind(1)
        for pages in (*self.keys, *self.values):
            flat = pages.flatten(0, 1)
            flat.index_copy_(0, to_M, flat.index_select(0, from_M))
