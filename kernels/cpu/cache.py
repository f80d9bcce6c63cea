"""What moves keys and values."""

from __future__ import annotations

import math

import numpy as np
import torch

from .._checks import QUANTISED_DTYPES, check_block_pairs, check_key_value

Tensor = torch.Tensor


def reshape_and_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    check_key_value(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    write_checked(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def write_checked(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    block_size = k_cache.shape[1]
    num_slots = slot_mapping.shape[0]
    slots = slot_mapping.numpy()
    k, v = k[:num_slots], v[:num_slots]
    if (slots < 0).any():
        tokens = np.flatnonzero(slots >= 0)
        k, v, slots = k[tokens], v[tokens], slots[tokens]
    if len(slots) == 1 and k_scale is None and v_scale is None and k_cache.dtype == k.dtype:
        # what a single request waits for in every layer: two views cost half of what two index tensors do
        block, offset = divmod(int(slots[0]), block_size)
        k_cache[block, offset], v_cache[block, offset] = k[0], v[0]
        return
    blocks = torch.from_numpy(slots // block_size)
    offsets = torch.from_numpy(slots % block_size)
    for cache, x, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        if scale is not None and scale.dim() == 3:
            row_scales = _row_scales(x, cache.dtype)
            scale[blocks, offsets] = row_scales
            scale = row_scales
        if cache.dtype in QUANTISED_DTYPES:
            # by its bits: indexing does not know the small formats
            cache.view(torch.uint8)[blocks, offsets] = _as_cached(x, scale, cache.dtype)
        else:
            cache[blocks, offsets] = x.to(cache.dtype)


def _row_scales(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales of every token and head, [T, Hkv]: see `_quantise`."""
    magnitudes = torch.linalg.vector_norm(x.float(), torch.inf, dim=-1)  # a NaN goes through
    largest = 127.0 if dtype == torch.int8 else 57344.0 if dtype == torch.float8_e5m2 else 448.0
    scales = magnitudes.clamp_min(2.0**-100) / largest
    return scales.masked_fill_(~magnitudes.isfinite(), math.nan)


def _as_cached(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The bits of x / scale in a quantised format: nearest even, saturating. NaN becomes 0 in int8."""
    x = x.float()
    if scale is not None:
        x = x / (scale.view(-1) if scale.dim() < 2 else scale).unsqueeze(-1)
    if dtype == torch.int8:
        return x.nan_to_num(0.0, 127, -127).clamp(-127, 127).round().to(dtype).view(torch.uint8)
    stored = torch.float8_e4m3fn if dtype == torch.uint8 else dtype
    largest = torch.finfo(stored).max
    return x.clamp(-largest, largest).to(stored).view(torch.uint8)


def copy_blocks(pool: Tensor, pairs: Tensor) -> None:
    swap_blocks(pool, pool, pairs)


def swap_blocks(src_pool: Tensor, dst_pool: Tensor, pairs: Tensor) -> None:
    check_block_pairs(src_pool, dst_pool, pairs)
    for source, destination in pairs.tolist():
        dst_pool[destination] = src_pool[source]
