"""Writing K and V of a forward's tokens into the paged cache."""

import torch
import triton
import triton.language as tl

from workers.gpu.kernels.attention import LayerPages
from workers.gpu.kernels.shape import power_of_two


@triton.jit
def store(
    new: tl.tensor,
    new_head: tl.tensor,
    new_token: tl.tensor,
    pages: tl.tensor,
    scale: tl.tensor,
    token: tl.tensor,
    index: tl.tensor,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Copy K or V of one token, of all heads, to a cache index."""
    head, x = tl.arange(0, HEADS_PADDED)[:, None], tl.arange(0, PADDED)[None, :]
    is_there = (head < KV_HEADS) & (x < SIZE)
    new_GX = tl.load(new + token * new_token + head * new_head + x, mask=is_there, other=0.0)
    if pages.dtype.element_ty != new.dtype.element_ty:
        new_GX = (new_GX.to(tl.float32) / scale).to(pages.dtype.element_ty)
    tl.store(pages + (index * KV_HEADS + head) * SIZE + x, new_GX, mask=is_there)


@triton.jit
def write_kernel(
    key: tl.tensor,
    key_head: tl.tensor,
    key_token: tl.tensor,
    value: tl.tensor,
    value_head: tl.tensor,
    value_token: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    cache_index_T: tl.tensor,
    key_scale: tl.tensor,
    value_scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
) -> None:
    """Write one token's K, and V unless it is in K; padding, whose index is -1, is skipped."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.load(cache_index_T + token)
    if index < 0:
        return
    store(key, key_head, key_token, key_pages, key_scale, token, index, KV_HEADS, KEY, HEADS_PADDED, KEY_PADDED)
    if not VALUES_IN_KEYS:
        store(
            value, value_head, value_token, value_pages, value_scale, token, index,
            KV_HEADS, VALUE, HEADS_PADDED, VALUE_PADDED,
        )  # fmt: skip


def write_cache(key_GTD: torch.Tensor, value_GTE: torch.Tensor, pages: LayerPages, cache_index_T: torch.Tensor) -> None:
    """Write K and V of T tokens into *pages*.

    Args:
        key_GTD, value_GTE: `[kv_heads, T, size]`, any strides, last dimension contiguous.
        pages: of the same dtype, or float8_e4m3fn: then K and V are divided by their scales.
        cache_index_T: int64, see `DeviceMetadata`; tokens with -1 are skipped.
    """
    kv_heads, tokens, key_size = key_GTD.shape
    value_size = value_GTE.shape[2]
    write_kernel[(tokens,)](
        key_GTD,
        key_GTD.stride(0),
        key_GTD.stride(1),
        value_GTE,
        value_GTE.stride(0),
        value_GTE.stride(1),
        pages.keys,
        pages.values,
        cache_index_T,
        pages.key_scale,
        pages.value_scale,
        KV_HEADS=kv_heads,
        KEY=key_size,
        VALUE=value_size,
        HEADS_PADDED=power_of_two(kv_heads),
        KEY_PADDED=power_of_two(key_size),
        VALUE_PADDED=power_of_two(value_size),
        VALUES_IN_KEYS=pages.values_in_keys,
    )
