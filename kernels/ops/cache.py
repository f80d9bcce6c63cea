"""What moves keys and values: into the cache, between blocks, between pools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .. import cpu
from ._registry import SCALES, no_result, register, static_and_caches, triton_op, with_scales

if TYPE_CHECKING:
    from ..block_swap import SwapPlan

Tensor = torch.Tensor

_reshape_and_cache = register(
    "reshape_and_cache",
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping," + SCALES,
    with_scales(triton_op(".cache_write", "reshape_and_cache"), 5),
    no_result,
    with_scales(cpu.reshape_and_cache, 5),
)


def reshape_and_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write row i of `k` and `v` to slot `slot_mapping[i]` of the caches, in place.

    k, v              [num_tokens, num_kv_heads, head_size or head_size_v]               last axis contiguous
    k_cache, v_cache  [num_blocks, block_size, num_kv_heads, head_size or head_size_v]   dtype of k, or quantised:
                      float8_e4m3fn | float8_e5m2 | int8 | uint8 (e4m3 by its bits); any strides, last axis contiguous
    k_scale, v_scale  [] | [1] | [num_kv_heads] fp32   a quantised cache stores k / k_scale, rounded to nearest even and
                      saturating; NaN stays NaN, in int8 it becomes 0. Or both [num_blocks, block_size, num_kv_heads], any
                      strides: written too, at the slots, with a scale for every token and head that brings the row's
                      largest magnitude to the format's largest number. A row of zeros stays one; magnitudes below 2^-100
                      count as that; a row with a NaN or an infinity gets scale NaN, so that all of it reads as NaN
    slot_mapping      [num_slots] int64   block id * block_size + offset, no slot twice; negative: skipped. num_slots <=
                      num_tokens; rows of k and v beyond it are padding
    """
    _reshape_and_cache(k, v, k_cache, v_cache, slot_mapping, *static_and_caches(k_scale, v_scale))


_copy_blocks = register(
    "copy_blocks",
    "(Tensor(a!) pool, Tensor pairs) -> ()",
    triton_op(".block_copy", "copy_blocks"),
    no_result,
)


def copy_blocks(pool: Tensor, pairs: Tensor) -> None:
    """Copy block `pairs[i, 0]` of the pool over block `pairs[i, 1]`: all layers, K and V, in one launch.

    pool   [num_blocks, ...]              any dtype; each block contiguous
    pairs  [num_pairs, 2] int64, on CPU   ids in [0, num_blocks); each destination once, and none is also a source
    A bad batch is refused before anything moves.
    """
    _copy_blocks(pool, pairs)


_planned_swap = triton_op(".block_swap", "swap_blocks")
_swap_blocks = register(
    "swap_blocks",
    "(Tensor src_pool, Tensor(a!) dst_pool, Tensor pairs) -> ()",
    _planned_swap,
    no_result,
)


def swap_blocks(
    src_pool: Tensor, dst_pool: Tensor, pairs: Tensor, *, plan: SwapPlan | None = None
) -> None:
    """Copy block `pairs[i, 0]` of one pool over block `pairs[i, 1]` of another, in the order of the current stream.

    src_pool, dst_pool  [num_blocks, ...]             alike but for num_blocks and device; each block contiguous; on the
                        host pinned, or the copies are not asynchronous
    pairs               [num_pairs, 2] int64, on CPU  ids in range, each destination once
    plan                a `SwapPlan` for callers who measured their machine: calls the file of the kernel directly
    The host may touch either pool, and pairs that are pinned, again only after the stream has passed this point.
    """
    if plan is None:
        _swap_blocks(src_pool, dst_pool, pairs)
    else:
        _planned_swap(src_pool, dst_pool, pairs, plan=plan)
