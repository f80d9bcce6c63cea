"""Rotary position embedding and the write of new keys and values to the paged cache, in one launch.

    q = rotated(q) in place;   k_cache[slot] = rotated(k), v_cache[slot] = v as cached,   slot = slot_mapping[token] >= 0

Rotation as in `rotary`. Program (token, 0) owns the token's key and value heads, program (token, i) part i - 1 of its query
heads: chains of loads that need not wait for each other. `k` is only read: after this op nobody needs it outside the
cache.

Bytes moved: num_tokens * (2 * num_q_heads * rotary_size * element_size + 4 * rotary_size + 8)
             + num_slots * (num_kv_heads * (head_size + head_size_v) * (element_size + cache_element_size) + 4 * rotary_size + 16)
Reference:   `reference.rope_and_cache`
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._checks import check_key_value, check_rotary
from ._quantise import as_cached, largest_bits, scale_of, scale_operands
from .cache_write import reshape_and_cache, write_operands
from .rotary import load_cos_sin, load_rotated, rotate_heads, store_rotated


@triton.jit
def _head_scales(scale_ptr, stride_head, bits, num_heads, cache_ptr, HEADS: tl.constexpr):
    """Scales of all heads, [HEADS, 1], or None. With `bits`, they are those of rows with these `largest_bits`, and stored."""
    scale = None
    if scale_ptr is not None:
        heads = tl.arange(0, HEADS)
        if bits is not None:
            scale = scale_of(bits, cache_ptr)
            tl.store(scale_ptr + heads * stride_head, scale, mask=heads < num_heads)
        else:
            scale = tl.load(scale_ptr + heads * stride_head, mask=heads < num_heads, other=1.0)
        scale = scale[:, None]
    return scale


@triton.jit
def _load_dims(
    x_ptr, stride_head, num_heads,
    FIRST: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Dims [FIRST, SIZE) of all heads, and where they lie: (heads, dims, x, mask)."""
    heads = tl.arange(0, HEADS)[:, None]
    dims = FIRST + tl.arange(0, DIM)[None, :]
    mask = (heads < num_heads) & (dims < SIZE)  # [HEADS, DIM]
    return heads, dims, tl.load(x_ptr + heads * stride_head + dims, mask=mask, other=0.0), mask


# Nothing about the number of tokens may choose a variant: a new batch size must not compile.
@triton.jit(
    do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["k_scale_ptr", "v_scale_ptr"]
)
def _rope_and_cache_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, positions_ptr, cos_sin_ptr, slot_mapping_ptr,
    num_slots, num_q_heads, num_kv_heads,
    q_stride_token, q_stride_head, k_stride_token, k_stride_head, v_stride_token, v_stride_head,
    k_cache_stride_block, k_cache_stride_slot, k_cache_stride_head,
    v_cache_stride_block, v_cache_stride_slot, v_cache_stride_head,
    k_scale_stride_block, k_scale_stride_slot, k_scale_stride_head,
    v_scale_stride_block, v_scale_stride_slot, v_scale_stride_head, cos_sin_stride_position,
    BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_SIZE_V: tl.constexpr,
    HALF: tl.constexpr, HALF_DIM: tl.constexpr, REST_DIM: tl.constexpr, V_DIM: tl.constexpr,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, IS_NEOX: tl.constexpr,
):  # fmt: skip
    """Grid (num_tokens, 1 + cdiv(num_q_heads, Q_HEADS))."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if part > 0:
        cos, sin = load_cos_sin(
            cos_sin_ptr, cos_sin_stride_position, positions_ptr, token, HALF, HALF_DIM
        )
        rotate_heads(
            q_ptr + token * q_stride_token, q_stride_head, (part - 1) * Q_HEADS, num_q_heads, cos, sin,
            HALF, HALF_DIM, Q_HEADS, IS_NEOX,
        )  # fmt: skip
    else:
        slot = tl.load(slot_mapping_ptr + token, mask=token < num_slots, other=-1)  # int64
        if slot >= 0:
            block = slot // BLOCK_SIZE
            offset = slot - block * BLOCK_SIZE
            k_ptr += token * k_stride_token
            v_ptr += token * v_stride_token
            k_cache_ptr += block * k_cache_stride_block + offset * k_cache_stride_slot
            v_cache_ptr += block * v_cache_stride_block + offset * v_cache_stride_slot
            heads, dims, x, v_mask = _load_dims(
                v_ptr, v_stride_head, num_kv_heads, 0, HEAD_SIZE_V, V_DIM, KV_HEADS
            )
            bits = None
            if v_scale_stride_block is not None:
                v_scale_ptr += block * v_scale_stride_block + offset * v_scale_stride_slot
                bits = largest_bits(x)
            v_scale = _head_scales(
                v_scale_ptr, v_scale_stride_head, bits, num_kv_heads, v_cache_ptr, KV_HEADS
            )
            v_places = v_cache_ptr + heads * v_cache_stride_head + dims
            tl.store(v_places, as_cached(x, v_scale, v_cache_ptr), mask=v_mask)
            cos, sin = load_cos_sin(
                cos_sin_ptr, cos_sin_stride_position, positions_ptr, token, HALF, HALF_DIM
            )
            a, b = load_rotated(
                k_ptr, k_stride_head, num_kv_heads, cos, sin, HALF, HALF_DIM, KV_HEADS, IS_NEOX
            )
            if 2 * HALF < HEAD_SIZE:
                _, rest_dims, rest, rest_mask = _load_dims(
                    k_ptr, k_stride_head, num_kv_heads, 2 * HALF, HEAD_SIZE, REST_DIM, KV_HEADS
                )
            bits = None
            if k_scale_stride_block is not None:
                k_scale_ptr += block * k_scale_stride_block + offset * k_scale_stride_slot
                bits = tl.maximum(largest_bits(a), largest_bits(b))
                if 2 * HALF < HEAD_SIZE:
                    bits = tl.maximum(bits, largest_bits(rest))
            k_scale = _head_scales(
                k_scale_ptr, k_scale_stride_head, bits, num_kv_heads, k_cache_ptr, KV_HEADS
            )
            store_rotated(
                k_cache_ptr, k_cache_stride_head, num_kv_heads, a, b, k_scale,
                HALF, HALF_DIM, KV_HEADS, IS_NEOX,
            )  # fmt: skip
            if 2 * HALF < HEAD_SIZE:
                rest_ptr = k_cache_ptr + heads * k_cache_stride_head + rest_dims
                tl.store(rest_ptr, as_cached(rest, k_scale, k_cache_ptr), mask=rest_mask)


@dataclass(frozen=True)
class RopeAndCachePlan:
    """Launch choices of one fused rotation and write."""

    q_heads: int  # query heads of one program, a power of two
    num_warps: int


def plan_rope_and_cache(*, num_q_heads: int, num_kv_heads: int, head_size: int) -> RopeAndCachePlan:
    """A warp per 1024 elements of all keys, and parts of the queries as large: in either half of a head a lane then has 16
    bytes, also of 64 lanes.
    """
    width = triton.next_power_of_2(head_size)
    heads = max(triton.next_power_of_2(num_kv_heads), 1024 // width)
    return RopeAndCachePlan(
        q_heads=min(triton.next_power_of_2(max(1, num_q_heads)), heads),
        num_warps=max(1, min(8, heads * width // 1024)),
    )


def rope_and_cache(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    is_neox: bool = True,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    plan: RopeAndCachePlan | None = None,
) -> None:
    """Rotate `q` in place and write the rotated `k`, and `v`, to the slots of the caches; `k` itself is not changed.

    Arguments as in `rotary_embedding` and `reshape_and_cache`. A token whose slot is negative, or that is past the end
    of `slot_mapping`, has its queries rotated and nothing written.
    Raises ValueError naming the argument, what was expected and what came.
    """
    check_rotary(positions, q, k, cos_sin)
    check_key_value(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    num_tokens, num_q_heads, head_size = q.shape
    num_kv_heads, head_size_v, rotary_size = k.shape[1], v.shape[2], cos_sin.shape[1]
    if rotary_size == 0:
        reshape_and_cache(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
        return
    if num_tokens == 0:
        return
    if plan is None:
        plan = plan_rope_and_cache(
            num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_size=head_size
        )
    _rope_and_cache_kernel[(num_tokens, 1 + triton.cdiv(num_q_heads, plan.q_heads))](
        q_ptr=q,
        **write_operands(k, v, k_cache, v_cache, slot_mapping),
        **scale_operands(k_scale, v_scale),
        positions_ptr=positions,
        cos_sin_ptr=cos_sin,
        num_q_heads=num_q_heads,
        q_stride_token=q.stride(0),
        q_stride_head=q.stride(1),
        cos_sin_stride_position=cos_sin.stride(0),
        HALF=rotary_size // 2,
        HALF_DIM=triton.next_power_of_2(rotary_size // 2),
        REST_DIM=triton.next_power_of_2(max(1, head_size - rotary_size)),
        V_DIM=triton.next_power_of_2(head_size_v),
        Q_HEADS=plan.q_heads,
        KV_HEADS=triton.next_power_of_2(num_kv_heads),
        IS_NEOX=is_neox,
        num_warps=plan.num_warps,
        enable_fp_fusion=True,
    )
