"""Write the keys and values of new tokens to their slots in the paged cache.

    k_cache[slot // block_size, slot % block_size] = k[i],   slot = slot_mapping[i] >= 0;   v likewise

Program i owns TOKENS neighbouring tokens, all heads of K and V.

Bytes moved: 2 * num_slots * num_kv_heads * (head_size + head_size_v) * element_size + 8 * num_slots
Reference:   `reference.reshape_and_cache`
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._checks import check_key_value, multiprocessors


@triton.jit
def _write_tokens(
    cache_ptr, x_ptr, tokens, slots, x_stride_token, x_stride_head,
    cache_stride_block, cache_stride_slot, cache_stride_head, num_heads,
    BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Copy `x[tokens]` to `slots`; a row is its heads one after the other, so that a load may span heads."""
    features = tl.arange(0, FEATURES)[None, :]
    head = features // HEAD_SIZE
    dim = features - head * HEAD_SIZE
    block = slots // BLOCK_SIZE
    offset = slots - block * BLOCK_SIZE
    mask = (slots >= 0)[:, None] & (head < num_heads)  # [TOKENS, FEATURES]
    x_offsets = tokens[:, None] * x_stride_token + head * x_stride_head + dim
    x = tl.load(x_ptr + x_offsets, mask=mask, other=0.0)
    rows = block * cache_stride_block + offset * cache_stride_slot
    tl.store(cache_ptr + rows[:, None] + head * cache_stride_head + dim, x, mask=mask)


@triton.jit
def _reshape_and_cache_kernel(
    k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, slot_mapping_ptr, num_slots, num_kv_heads,
    k_stride_token, k_stride_head, v_stride_token, v_stride_head,
    k_cache_stride_block, k_cache_stride_slot, k_cache_stride_head,
    v_cache_stride_block, v_cache_stride_slot, v_cache_stride_head,
    BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_SIZE_V: tl.constexpr,
    FEATURES: tl.constexpr, FEATURES_V: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(num_slots, TOKENS),)."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slots = tl.load(slot_mapping_ptr + tokens, mask=tokens < num_slots, other=-1)  # int64
    _write_tokens(
        k_cache_ptr, k_ptr, tokens, slots, k_stride_token, k_stride_head,
        k_cache_stride_block, k_cache_stride_slot, k_cache_stride_head, num_kv_heads,
        BLOCK_SIZE, HEAD_SIZE, FEATURES,
    )  # fmt: skip
    _write_tokens(
        v_cache_ptr, v_ptr, tokens, slots, v_stride_token, v_stride_head,
        v_cache_stride_block, v_cache_stride_slot, v_cache_stride_head, num_kv_heads,
        BLOCK_SIZE, HEAD_SIZE_V, FEATURES_V,
    )  # fmt: skip


@dataclass(frozen=True)
class CacheWritePlan:
    """Launch choices of one cache write."""

    tokens: int  # tokens of one program, a power of two
    num_warps: int


def plan_reshape_and_cache(*, num_slots: int, features: int, num_sms: int) -> CacheWritePlan:
    """Tiles of up to 4096 elements (at four warps, four 16-byte loads a thread), smaller where programs would be few.

    Two programs per multiprocessor are worth more than large tiles: a decode step writes one token per sequence.
    """
    largest = max(1, 4096 // triton.next_power_of_2(features))
    wanted = max(1, num_slots // (2 * num_sms))
    return CacheWritePlan(tokens=min(largest, triton.next_power_of_2(wanted)), num_warps=4)


def reshape_and_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    plan: CacheWritePlan | None = None,
) -> None:
    """Write row i of `k` and `v` to slot `slot_mapping[i]` of the caches, in place.

    k, v              [num_tokens, num_kv_heads, head_size or head_size_v]               last axis contiguous
    k_cache, v_cache  [num_blocks, block_size, num_kv_heads, head_size or head_size_v]   dtype of k, any strides, last
                      axis contiguous
    slot_mapping      [num_slots] int64    block_id * block_size + offset; negative: skipped; num_slots <= num_tokens,
                      rows beyond it are padding and not read
    Two rows must not have the same slot. Raises ValueError naming the argument, what was expected and what came.
    """
    check_key_value(k, v, k_cache, v_cache, slot_mapping)
    num_slots = slot_mapping.shape[0]
    if num_slots == 0:
        return
    _, num_kv_heads, head_size = k.shape
    head_size_v = v.shape[2]
    features = num_kv_heads * max(head_size, head_size_v)
    if plan is None:
        plan = plan_reshape_and_cache(
            num_slots=num_slots, features=features, num_sms=multiprocessors(k.device)
        )
    _reshape_and_cache_kernel[(triton.cdiv(num_slots, plan.tokens),)](
        k_cache_ptr=k_cache,
        v_cache_ptr=v_cache,
        k_ptr=k,
        v_ptr=v,
        slot_mapping_ptr=slot_mapping,
        num_slots=num_slots,
        num_kv_heads=num_kv_heads,
        k_stride_token=k.stride(0),
        k_stride_head=k.stride(1),
        v_stride_token=v.stride(0),
        v_stride_head=v.stride(1),
        k_cache_stride_block=k_cache.stride(0),
        k_cache_stride_slot=k_cache.stride(1),
        k_cache_stride_head=k_cache.stride(2),
        v_cache_stride_block=v_cache.stride(0),
        v_cache_stride_slot=v_cache.stride(1),
        v_cache_stride_head=v_cache.stride(2),
        BLOCK_SIZE=k_cache.shape[1],
        HEAD_SIZE=head_size,
        HEAD_SIZE_V=head_size_v,
        FEATURES=triton.next_power_of_2(num_kv_heads * head_size),
        FEATURES_V=triton.next_power_of_2(num_kv_heads * head_size_v),
        TOKENS=plan.tokens,
        num_warps=plan.num_warps,
        enable_fp_fusion=True,
    )
