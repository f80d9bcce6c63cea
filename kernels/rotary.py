"""Rotary position embedding of queries and keys, in place.

    (a, b) = (a * cos - b * sin, b * cos + a * sin)      for each pair (a, b) of the first `rotary_size` dims of a head

Pairs are (i, i + rotary_size / 2) in the neox layout, else (2i, 2i + 1). Program (t, i) owns part i of
the heads of token t, those of q first.

Bytes moved: num_tokens * (2 * (num_q_heads + num_kv_heads) * rotary_size * element_size + 4 * rotary_size + 8)
Reference:   `reference.rotary_embedding`
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._checks import check_rotary
from ._quantise import as_cached


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
    """The first and second numbers of all heads' rotated pairs in fp32, each [HEADS, HALF_DIM]."""
    heads = tl.arange(0, HEADS)[:, None]
    row_ptr = x_ptr + heads * stride_head
    if IS_NEOX:
        pairs = tl.arange(0, HALF_DIM)[None, :]
        mask = (heads < num_heads) & (pairs < HALF)
        a = tl.load(row_ptr + pairs, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(row_ptr + HALF + pairs, mask=mask, other=0.0).to(tl.float32)
    else:  # neighbours: loaded side by side, which is as wide as loads get
        dims = tl.arange(0, 2 * HALF_DIM)[None, :]
        mask = (heads < num_heads) & (dims < 2 * HALF)
        x = tl.load(row_ptr + dims, mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [HEADS, HALF_DIM, 2]))
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def store_rotated(
    x_ptr, stride_head, num_heads, a, b, scale,
    HALF: tl.constexpr, HALF_DIM: tl.constexpr, HEADS: tl.constexpr, IS_NEOX: tl.constexpr,
):  # fmt: skip
    """Store pairs of `load_rotated` as the tensor of `x_ptr` holds numbers."""
    heads = tl.arange(0, HEADS)[:, None]
    row_ptr = x_ptr + heads * stride_head
    if IS_NEOX:
        pairs = tl.arange(0, HALF_DIM)[None, :]
        mask = (heads < num_heads) & (pairs < HALF)
        tl.store(row_ptr + pairs, as_cached(a, scale, x_ptr), mask=mask)
        tl.store(row_ptr + HALF + pairs, as_cached(b, scale, x_ptr), mask=mask)
    else:
        dims = tl.arange(0, 2 * HALF_DIM)[None, :]
        x = tl.reshape(tl.join(a, b), [HEADS, 2 * HALF_DIM])
        mask = (heads < num_heads) & (dims < 2 * HALF)
        tl.store(row_ptr + dims, as_cached(x, scale, x_ptr), mask=mask)


@triton.jit
def rotate_heads(
    x_ptr, stride_head, first_head, num_heads, cos, sin,
    HALF: tl.constexpr, HALF_DIM: tl.constexpr, HEADS: tl.constexpr, IS_NEOX: tl.constexpr,
):  # fmt: skip
    """Rotate heads [first_head, min(first_head + HEADS, num_heads)) of one token in place."""
    x_ptr += first_head.to(tl.int64) * stride_head
    num_heads -= first_head
    a, b = load_rotated(x_ptr, stride_head, num_heads, cos, sin, HALF, HALF_DIM, HEADS, IS_NEOX)
    store_rotated(x_ptr, stride_head, num_heads, a, b, None, HALF, HALF_DIM, HEADS, IS_NEOX)


@triton.jit
def _rotary_embedding_kernel(
    q_ptr, k_ptr, positions_ptr, cos_sin_ptr, num_q_heads, num_kv_heads,
    q_stride_token, q_stride_head, k_stride_token, k_stride_head, cos_sin_stride_position,
    HALF: tl.constexpr, HALF_DIM: tl.constexpr, HEADS: tl.constexpr, IS_NEOX: tl.constexpr,
):  # fmt: skip
    """Grid (num_tokens, cdiv(num_q_heads, HEADS) + cdiv(num_kv_heads, HEADS))."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts = tl.cdiv(num_q_heads, HEADS)
    cos, sin = load_cos_sin(
        cos_sin_ptr, cos_sin_stride_position, positions_ptr, token, HALF, HALF_DIM
    )
    if part < q_parts:
        rotate_heads(
            q_ptr + token * q_stride_token, q_stride_head, part * HEADS, num_q_heads, cos, sin,
            HALF, HALF_DIM, HEADS, IS_NEOX,
        )  # fmt: skip
    else:
        rotate_heads(
            k_ptr + token * k_stride_token, k_stride_head, (part - q_parts) * HEADS, num_kv_heads, cos, sin,
            HALF, HALF_DIM, HEADS, IS_NEOX,
        )  # fmt: skip


@dataclass(frozen=True)
class RotaryPlan:
    """Launch choices of one rotary embedding."""

    heads: int  # of one program, a power of two
    num_warps: int


def plan_rotary_embedding(*, num_q_heads: int, rotary_size: int) -> RotaryPlan:
    """A warp and up to 1024 elements a program: in either half of a head a lane then has 16 bytes, also of 64 lanes."""
    width = triton.next_power_of_2(rotary_size)
    heads = min(triton.next_power_of_2(max(1, num_q_heads)), max(1, 1024 // width))
    return RotaryPlan(heads, num_warps=max(1, heads * width // 1024))


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
    num_parts = triton.cdiv(num_q_heads, plan.heads) + triton.cdiv(num_kv_heads, plan.heads)
    _rotary_embedding_kernel[(num_tokens, num_parts)](
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
        HEADS=plan.heads,
        IS_NEOX=is_neox,
        num_warps=plan.num_warps,
        enable_fp_fusion=True,
    )
