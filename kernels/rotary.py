"""Rotary position embedding of queries and keys, in place.

    (a, b) = (a * cos - b * sin, b * cos + a * sin)      for each pair (a, b) of the first `rotary_size` dims of a head

Pairs are (i, i + rotary_size / 2) in the neox layout, else (2i, 2i + 1). Program t owns all heads of token t: it loads
the token's row of `cos_sin` once.

Bytes moved: num_tokens * (2 * (num_q_heads + num_kv_heads) * rotary_size * element_size + 4 * rotary_size + 8)
Reference:   `reference.rotary_embedding`
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._checks import check_rotary


@triton.jit
def load_cos_sin(
    cos_sin_ptr, cos_sin_stride_position, positions_ptr, token,
    HALF: tl.constexpr, HALF_DIM: tl.constexpr,
):  # fmt: skip
    """The cosines and sines of a token's position, each [1, HALF_DIM]."""
    position = tl.load(positions_ptr + token)  # int64
    pairs = tl.arange(0, HALF_DIM)
    cos_ptr = cos_sin_ptr + position * cos_sin_stride_position
    cos = tl.load(cos_ptr + pairs, mask=pairs < HALF, other=0.0)
    sin = tl.load(cos_ptr + HALF + pairs, mask=pairs < HALF, other=0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def load_rotated(
    x_ptr, stride_head, num_heads, cos, sin,
    HALF: tl.constexpr, HALF_DIM: tl.constexpr, HEADS: tl.constexpr, IS_NEOX: tl.constexpr,
):  # fmt: skip
    """Rotated pairs of all heads in fp32, and where they lie: (heads, first dims, second dims, a, b, mask)."""
    heads = tl.arange(0, HEADS)[:, None]
    pairs = tl.arange(0, HALF_DIM)[None, :]
    first = pairs if IS_NEOX else 2 * pairs
    second = first + (HALF if IS_NEOX else 1)
    mask = (heads < num_heads) & (pairs < HALF)  # [HEADS, HALF_DIM]
    row_ptr = x_ptr + heads * stride_head
    a = tl.load(row_ptr + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(row_ptr + second, mask=mask, other=0.0).to(tl.float32)
    return heads, first, second, a * cos - b * sin, b * cos + a * sin, mask


@triton.jit
def rotate_heads(
    x_ptr, stride_head, num_heads, cos, sin,
    HALF: tl.constexpr, HALF_DIM: tl.constexpr, HEADS: tl.constexpr, IS_NEOX: tl.constexpr,
):  # fmt: skip
    heads, first, second, a, b, mask = load_rotated(
        x_ptr, stride_head, num_heads, cos, sin, HALF, HALF_DIM, HEADS, IS_NEOX
    )
    row_ptr = x_ptr + heads * stride_head
    tl.store(row_ptr + first, a.to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(row_ptr + second, b.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rotary_embedding_kernel(
    q_ptr, k_ptr, positions_ptr, cos_sin_ptr, num_q_heads, num_kv_heads,
    q_stride_token, q_stride_head, k_stride_token, k_stride_head, cos_sin_stride_position,
    HALF: tl.constexpr, HALF_DIM: tl.constexpr,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, IS_NEOX: tl.constexpr,
):  # fmt: skip
    """Grid (num_tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    cos, sin = load_cos_sin(
        cos_sin_ptr, cos_sin_stride_position, positions_ptr, token, HALF, HALF_DIM
    )
    rotate_heads(
        q_ptr + token * q_stride_token, q_stride_head, num_q_heads, cos, sin,
        HALF, HALF_DIM, Q_HEADS, IS_NEOX,
    )  # fmt: skip
    rotate_heads(
        k_ptr + token * k_stride_token, k_stride_head, num_kv_heads, cos, sin,
        HALF, HALF_DIM, KV_HEADS, IS_NEOX,
    )  # fmt: skip


@dataclass(frozen=True)
class RotaryPlan:
    """Launch choices of one rotary embedding."""

    num_warps: int


def plan_rotary_embedding(*, num_q_heads: int, rotary_size: int) -> RotaryPlan:
    """A warp per 512 elements of a token's queries (16-byte loads, two a thread)."""
    elements = triton.next_power_of_2(num_q_heads) * triton.next_power_of_2(rotary_size)
    return RotaryPlan(num_warps=max(1, min(8, elements // 512)))


def rotary_embedding(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    is_neox: bool = True,
    *,
    plan: RotaryPlan | None = None,
) -> None:
    """Rotate `q` and `k` in place, each head by the angles of its token's position.

    positions  [num_tokens] int64                     each below max_position; not checked, for it lives on the device
    q          [num_tokens, num_q_heads, head_size]   fp32 | fp16 | bf16, any strides, last axis contiguous
    k          [num_tokens, num_kv_heads, head_size]  dtype of q
    cos_sin    [max_position, rotary_size] fp32       cosines, then sines; dims past rotary_size are left as they are
    Raises ValueError naming the argument, what was expected and what came.
    """
    check_rotary(positions, q, k, cos_sin)
    num_tokens, num_q_heads, _ = q.shape
    num_kv_heads, rotary_size = k.shape[1], cos_sin.shape[1]
    if num_tokens == 0 or rotary_size == 0:
        return
    if plan is None:
        plan = plan_rotary_embedding(num_q_heads=num_q_heads, rotary_size=rotary_size)
    _rotary_embedding_kernel[(num_tokens,)](
        q_ptr=q,
        k_ptr=k,
        positions_ptr=positions,
        cos_sin_ptr=cos_sin,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        q_stride_token=q.stride(0),
        q_stride_head=q.stride(1),
        k_stride_token=k.stride(0),
        k_stride_head=k.stride(1),
        cos_sin_stride_position=cos_sin.stride(0),
        HALF=rotary_size // 2,
        HALF_DIM=triton.next_power_of_2(rotary_size // 2),
        Q_HEADS=triton.next_power_of_2(num_q_heads),
        KV_HEADS=triton.next_power_of_2(num_kv_heads),
        IS_NEOX=is_neox,
        num_warps=plan.num_warps,
        enable_fp_fusion=True,
    )
