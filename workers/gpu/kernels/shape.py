"""What the attention kernels are compiled for: sizes of tiles, and settings of the compiler."""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from workers.attention.backend import Options

LONG_TILE, WIDE_LONG_TILE = 64, 32
"""Most queries of a tile: with keys or values wider than `WIDE`, fewer stay in registers."""
WIDE = 192
WIDE_KEY, WIDE_KEY_TILE = 256, 16
"""With wider keys, as latents have, a program takes some of the heads that share a K/V head: so many sums stay in
registers."""
MANY_KEYS, KEYS, FEW_KEYS = 64, 32, 16
"""Keys read at a time, whatever the tile: an online softmax depends on it, in the last bits. See `Shape.reads_many`."""
WIDE_BYTES = 256
SM_90, SM_100 = 90, 100
MOST_REGISTERS = 255
SMALLEST = 16
"""Tensor cores multiply no smaller matrices."""


@dataclass(frozen=True)
class Shape:
    """What the kernels are compiled for.

    Attributes:
        heads, kv_heads, key_size, value_size: of the layer.
        block_size: of the cache.
        options: which options the layer has; their values do not matter, but for the two of blocks.
        has_kv_window, has_trees: whether there are any in the forward.
        item_size: bytes of a number of the queries.
        arch: compute capability of the device, 10 times the major one added to the minor one.
        values_in_keys: see `LayerPages`.
    """

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    block_size: int
    options: Options
    has_kv_window: bool = False
    has_trees: bool = True
    item_size: int = 2
    arch: int = SM_90
    values_in_keys: bool = False

    @property
    def reads_many(self) -> bool:
        """Whether `MANY_KEYS` are read at a time: a tenth to a third faster on an H200.

        Before sm_90 the tiles of chunks would not stay in registers, and wider keys not in shared memory.
        """
        return self.arch >= SM_90 and self._widest * self.item_size <= WIDE_BYTES

    @property
    def has_wide_keys(self) -> bool:
        """Whether keys are wider than `WIDE_KEY`."""
        return self.key_size > WIDE_KEY

    @property
    def _widest(self) -> int:
        return max(self.key_size, self.value_size)

    @property
    def share(self) -> int:
        """Query heads of a program, which share a K/V head."""
        group = self.heads // self.kv_heads
        if not self.has_wide_keys:
            return group
        return max(share for share in range(1, WIDE_KEY_TILE + 1) if group % share == 0)

    def tile(self, length: int) -> int:
        """Return the number of queries of a tile for rows that feed up to *length* tokens."""
        smallest = max(SMALLEST, power_of_two(self.share))
        largest = WIDE_KEY_TILE if self.has_wide_keys else WIDE_LONG_TILE if self._widest > WIDE else LONG_TILE
        return max(smallest, min(power_of_two(length * self.share), largest))

    def constants(self, tile: int) -> dict[str, Any]:
        """Return the arguments that are compiled in."""
        whole = 1 << (self.key_size.bit_length() - 1)
        first = whole if self.key_size >= SMALLEST else SMALLEST
        rest = max(0, self.key_size - first)
        value_tile = max(SMALLEST, power_of_two(self.value_size))
        return {
            "HEADS": self.heads,
            "KV_HEADS": self.kv_heads,
            "SHARE": self.share,
            "KEY": self.key_size,
            "D": first,
            "F": max(SMALLEST, power_of_two(rest)) if rest else 0,
            "VALUE": self.value_size,
            "VALUE_STRIDE": self.key_size if self.values_in_keys else self.value_size,
            "E": value_tile,
            "BLOCK": self.block_size,
            "M": tile,
            "N": MANY_KEYS if self.reads_many else FEW_KEYS if self.has_wide_keys else KEYS,
            "HAS_SINKS": self.options.sinks_H is not None,
            "HAS_SOFTCAP": self.options.softcap != 0.0,
            "HAS_WINDOW": self.options.window > 0,
            "HAS_KV_WINDOW": self.has_kv_window,
            "HAS_TREES": self.has_trees,
            "FROM_BLOCK": self.options.window_from_block and self.has_trees,
            "CAUSAL_BLOCK": self.options.causal_block and self.has_trees,
            "VALUES_IN_KEYS": self.values_in_keys and value_tile == first,
            "MASKED_STAGES": 1 if self.reads_many else None,
        }

    def settings(self, tile: int) -> dict[str, Any]:
        """Return the compiler's settings.

        Multiplications and additions are not fused: whether they are differs from kernel to kernel, and both must give
        the same result. From sm_100 on products lie in a memory of their own, and four warps cannot hold what they read
        of it; there the compiler would rather spill than use more than half of the registers.
        """
        common = {"enable_fp_fusion": False} | ({"maxnreg": MOST_REGISTERS} if self.arch >= SM_100 else {})
        if self.reads_many:
            warps = 8 if self.arch >= SM_100 and tile >= LONG_TILE else 4
            return {"num_warps": warps, "num_stages": 2, **common}
        is_large = tile * self._widest >= LONG_TILE * 128
        return {"num_warps": 8 if is_large else 4, "num_stages": 2 if is_large else 3, **common}


@functools.cache
def arch(device: torch.device) -> int:
    """Return `Shape.arch` of a device; interpreted kernels take sm_90's."""
    if device.type != "cuda":
        return SM_90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below *number*, at least 1."""
    return 1 << max(0, number - 1).bit_length()
