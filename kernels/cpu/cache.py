"""What moves keys and values."""

from __future__ import annotations

import numpy as np
import torch

from .._checks import check_block_pairs, check_key_value

Tensor = torch.Tensor


def reshape_and_cache(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    check_key_value(k, v, k_cache, v_cache, slot_mapping)
    block_size = k_cache.shape[1]
    num_slots = slot_mapping.shape[0]
    slots = slot_mapping.numpy()
    k, v = k[:num_slots], v[:num_slots]
    if (slots < 0).any():
        tokens = np.flatnonzero(slots >= 0)
        k, v, slots = k[tokens], v[tokens], slots[tokens]
    blocks = torch.from_numpy(slots // block_size)
    offsets = torch.from_numpy(slots % block_size)
    k_cache[blocks, offsets] = k
    v_cache[blocks, offsets] = v


def copy_blocks(pool: Tensor, pairs: Tensor) -> None:
    swap_blocks(pool, pool, pairs)


def swap_blocks(src_pool: Tensor, dst_pool: Tensor, pairs: Tensor) -> None:
    check_block_pairs(src_pool, dst_pool, pairs)
    for source, destination in pairs.tolist():
        dst_pool[destination] = src_pool[source]
