"""Write the keys and values of new tokens to their slots in the paged cache.

    k_cache[slot // block_size, slot % block_size] = rounded(k[i] / k_scale),   slot = slot_mapping[i] >= 0;   v likewise

In the cache's own dtype that is a copy. Program i owns `tokens` neighbouring tokens, all heads of K and V, in a tile that may be
longer: its size is part of the compiled code, which must not depend on how many tokens there are. Quantised caches have a
kernel of their own, the rows of whose tile are one head of one token each: a row has one scale, given or, with
scale caches (`_quantise`), found and written to k_scale[slot // block_size, slot % block_size].

Bytes moved: num_slots * (num_kv_heads * (head_size + head_size_v) * (element_size + cache_element_size) + 8)
             + num_slots * num_kv_heads * 8 with scale caches
Reference:   `reference.reshape_and_cache`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ._checks import QUANTISED_DTYPES, check_key_value, multiprocessors
from ._quantise import addressable, as_cached, largest_bits, scale_of, scale_operands


@triton.jit
def _copy_tokens(
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


# Nothing about the number of tokens may choose a variant: a new batch size must not compile.
@triton.jit(do_not_specialize=["num_slots", "program_tokens"])
def _reshape_and_cache_kernel(
    k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, slot_mapping_ptr, num_slots, program_tokens, num_kv_heads,
    k_stride_token, k_stride_head, v_stride_token, v_stride_head,
    k_cache_stride_block, k_cache_stride_slot, k_cache_stride_head,
    v_cache_stride_block, v_cache_stride_slot, v_cache_stride_head,
    BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_SIZE_V: tl.constexpr,
    FEATURES: tl.constexpr, FEATURES_V: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Into a cache of the dtype of k and v. Grid (cdiv(num_slots, program_tokens),)."""
    own = tl.arange(0, TOKENS)
    tokens = tl.program_id(0).to(tl.int64) * program_tokens + own
    is_own = (own < program_tokens) & (tokens < num_slots)
    slots = tl.load(slot_mapping_ptr + tokens, mask=is_own, other=-1)  # int64
    _copy_tokens(
        k_cache_ptr, k_ptr, tokens, slots, k_stride_token, k_stride_head,
        k_cache_stride_block, k_cache_stride_slot, k_cache_stride_head, num_kv_heads, BLOCK_SIZE, HEAD_SIZE, FEATURES,
    )  # fmt: skip
    _copy_tokens(
        v_cache_ptr, v_ptr, tokens, slots, v_stride_token, v_stride_head,
        v_cache_stride_block, v_cache_stride_slot, v_cache_stride_head, num_kv_heads, BLOCK_SIZE, HEAD_SIZE_V, FEATURES_V,
    )  # fmt: skip


@triton.jit
def _quantise_rows(
    cache_ptr, scale_ptr, x_ptr, tokens, slots, heads, num_heads, x_stride_token, x_stride_head,
    cache_stride_block, cache_stride_slot, cache_stride_head,
    scale_stride_block, scale_stride_slot, scale_stride_head,
    BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Write head `heads[r]` of `x[tokens[r]]` to `slots[r]`; its scale is found and written too, loaded, or None."""
    dims = tl.arange(0, DIM)[None, :]
    block = slots // BLOCK_SIZE
    offset = slots - block * BLOCK_SIZE
    row_mask = (slots >= 0) & (heads < num_heads)
    mask = row_mask[:, None] & (dims < HEAD_SIZE)  # [ROWS, DIM]
    x_rows = tokens * x_stride_token + heads * x_stride_head
    x = tl.load(x_ptr + x_rows[:, None] + dims, mask=mask, other=0.0)
    scales = None
    if scale_ptr is not None:
        if scale_stride_block is not None:
            scales = scale_of(largest_bits(x), cache_ptr)
            places = block * scale_stride_block + offset * scale_stride_slot
            tl.store(scale_ptr + places + heads * scale_stride_head, scales, mask=row_mask)
        else:
            scales = tl.load(scale_ptr + heads * scale_stride_head, mask=row_mask, other=1.0)
        scales = scales[:, None]
    rows = block * cache_stride_block + offset * cache_stride_slot + heads * cache_stride_head
    tl.store(cache_ptr + rows[:, None] + dims, as_cached(x, scales, cache_ptr), mask=mask)


@triton.jit(
    do_not_specialize=["num_slots", "program_tokens"],
    do_not_specialize_on_alignment=["k_scale_ptr", "v_scale_ptr"],
)
def _quantise_and_cache_kernel(
    k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, k_ptr, v_ptr, slot_mapping_ptr, num_slots, program_tokens, num_kv_heads,
    k_stride_token, k_stride_head, v_stride_token, v_stride_head,
    k_cache_stride_block, k_cache_stride_slot, k_cache_stride_head,
    v_cache_stride_block, v_cache_stride_slot, v_cache_stride_head,
    k_scale_stride_block, k_scale_stride_slot, k_scale_stride_head,
    v_scale_stride_block, v_scale_stride_slot, v_scale_stride_head,
    BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_SIZE_V: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(num_slots, program_tokens),); row r of a tile is head r % HEADS of token r // HEADS."""
    rows = tl.arange(0, TOKENS * HEADS)
    own = rows // HEADS
    tokens = tl.program_id(0).to(tl.int64) * program_tokens + own
    heads = rows % HEADS
    is_own = (own < program_tokens) & (tokens < num_slots)
    slots = tl.load(slot_mapping_ptr + tokens, mask=is_own, other=-1)  # int64
    _quantise_rows(
        k_cache_ptr, k_scale_ptr, k_ptr, tokens, slots, heads, num_kv_heads, k_stride_token, k_stride_head,
        k_cache_stride_block, k_cache_stride_slot, k_cache_stride_head,
        k_scale_stride_block, k_scale_stride_slot, k_scale_stride_head, BLOCK_SIZE, HEAD_SIZE, DIM,
    )  # fmt: skip
    _quantise_rows(
        v_cache_ptr, v_scale_ptr, v_ptr, tokens, slots, heads, num_kv_heads, v_stride_token, v_stride_head,
        v_cache_stride_block, v_cache_stride_slot, v_cache_stride_head,
        v_scale_stride_block, v_scale_stride_slot, v_scale_stride_head, BLOCK_SIZE, HEAD_SIZE_V, DIM_V,
    )  # fmt: skip


def write_operands(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> dict[str, Any]:
    """The launch arguments that all kernels take which write checked keys and values to the cache."""
    k_cache, v_cache = addressable(k_cache, v_cache)
    return {
        "k_cache_ptr": k_cache,
        "v_cache_ptr": v_cache,
        "k_ptr": k,
        "v_ptr": v,
        "slot_mapping_ptr": slot_mapping,
        "num_slots": slot_mapping.shape[0],
        "num_kv_heads": k.shape[1],
        "k_stride_token": k.stride(0),
        "k_stride_head": k.stride(1),
        "v_stride_token": v.stride(0),
        "v_stride_head": v.stride(1),
        "k_cache_stride_block": k_cache.stride(0),
        "k_cache_stride_slot": k_cache.stride(1),
        "k_cache_stride_head": k_cache.stride(2),
        "v_cache_stride_block": v_cache.stride(0),
        "v_cache_stride_slot": v_cache.stride(1),
        "v_cache_stride_head": v_cache.stride(2),
        "BLOCK_SIZE": k_cache.shape[1],
        "HEAD_SIZE": k.shape[2],
        "HEAD_SIZE_V": v.shape[2],
    }


@dataclass(frozen=True)
class CacheWritePlan:
    """Launch choices of one cache write."""

    tile_tokens: int  # that a program has room for, a power of two
    tokens: int  # of one program, at most that many
    num_warps: int


def plan_reshape_and_cache(*, num_slots: int, features: int, num_sms: int) -> CacheWritePlan:
    """Tiles of up to 4096 elements (at four warps, four 16-byte loads a thread), not full where programs would be few.

    Two programs per multiprocessor are worth more than full tiles: a decode step writes one token per sequence.
    """
    tile_tokens = max(1, 4096 // triton.next_power_of_2(features))
    tokens = max(1, min(tile_tokens, num_slots // (2 * num_sms)))
    return CacheWritePlan(tile_tokens, tokens, num_warps=4)


def reshape_and_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    plan: CacheWritePlan | None = None,
) -> None:
    """Write as `octavo.kernels.reshape_and_cache` says.

    Raises ValueError naming the argument, what was expected and what came.
    """
    check_key_value(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
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
    operands = write_operands(k, v, k_cache, v_cache, slot_mapping)
    if k_cache.dtype not in QUANTISED_DTYPES:
        kernel = _reshape_and_cache_kernel
        tile = {
            "FEATURES": triton.next_power_of_2(num_kv_heads * head_size),
            "FEATURES_V": triton.next_power_of_2(num_kv_heads * head_size_v),
        }
    else:
        kernel = _quantise_and_cache_kernel
        operands |= scale_operands(k_scale, v_scale)
        tile = {
            "DIM": triton.next_power_of_2(head_size),
            "DIM_V": triton.next_power_of_2(head_size_v),
            "HEADS": triton.next_power_of_2(num_kv_heads),
        }
    kernel[(triton.cdiv(num_slots, plan.tokens),)](
        **operands,
        **tile,
        program_tokens=plan.tokens,
        TOKENS=plan.tile_tokens,
        num_warps=plan.num_warps,
        enable_fp_fusion=True,
    )
