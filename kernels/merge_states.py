"""Join two partial attentions of the same queries over disjoint sets of keys, as if they had been one.

    lse = log(exp(lse_a) + exp(lse_b))
    out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

Program i owns ROWS (token, head) pairs. A side with lse -inf saw no key: its output is not read, so it may be unset.

Bytes moved: num_tokens * num_heads * (3 * head_size * element_size + 3 * 4)
Reference:   `reference.merge_attention_states`
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._checks import FLOAT_DTYPES, check_last_axis_contiguous, check_states, check_tensor


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["lse_ptr", "lse_a_ptr", "lse_b_ptr"],
)
def _merge_attention_states_kernel(
    out_ptr, lse_ptr, out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, num_rows, num_heads,
    out_stride_token, out_stride_head, lse_stride_token, lse_stride_head,
    out_a_stride_token, out_a_stride_head, lse_a_stride_token, lse_a_stride_head,
    out_b_stride_token, out_b_stride_head, lse_b_stride_token, lse_b_stride_head,
    HEAD_SIZE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(num_rows, ROWS),); row r is head r % num_heads of token r // num_heads."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = rows < num_rows
    token = rows // num_heads
    head = rows - token * num_heads
    dims = tl.arange(0, DIM)[None, :]

    lse_a_offsets = token * lse_a_stride_token + head * lse_a_stride_head
    lse_b_offsets = token * lse_b_stride_token + head * lse_b_stride_head
    lse_a = tl.load(lse_a_ptr + lse_a_offsets, mask=in_range, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + lse_b_offsets, mask=in_range, other=float("-inf"))
    seen_a = (lse_a != float("-inf"))[:, None] & (dims < HEAD_SIZE)  # [ROWS, DIM]
    seen_b = (lse_b != float("-inf"))[:, None] & (dims < HEAD_SIZE)
    out_a_offsets = token * out_a_stride_token + head * out_a_stride_head
    out_b_offsets = token * out_b_stride_token + head * out_b_stride_head
    out_a = tl.load(out_a_ptr + out_a_offsets[:, None] + dims, mask=seen_a, other=0.0)
    out_b = tl.load(out_b_ptr + out_b_offsets[:, None] + dims, mask=seen_b, other=0.0)

    largest = tl.maximum(lse_a, lse_b)
    pivot = tl.where(largest == float("-inf"), 0.0, largest)  # -inf - -inf would be NaN
    weight_a = tl.exp(lse_a - pivot)
    weight_b = tl.exp(lse_b - pivot)
    total = weight_a + weight_b
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    out = (
        out_a.to(tl.float32) * weight_a[:, None] + out_b.to(tl.float32) * weight_b[:, None]
    ) / divisor[:, None]
    lse = tl.where(empty, float("-inf"), pivot + tl.log(divisor))

    out_offsets = token * out_stride_token + head * out_stride_head
    out_mask = in_range[:, None] & (dims < HEAD_SIZE)
    tl.store(out_ptr + out_offsets[:, None] + dims, out.to(out_ptr.dtype.element_ty), mask=out_mask)
    tl.store(lse_ptr + token * lse_stride_token + head * lse_stride_head, lse, mask=in_range)


@dataclass(frozen=True)
class MergePlan:
    """Launch choices of one merge."""

    rows: int  # (token, head) pairs of one program, a power of two
    num_warps: int


def plan_merge_attention_states(*, head_size: int) -> MergePlan:
    """Tiles of 2048 elements: at four warps each thread loads 16 neighbouring elements of either side."""
    return MergePlan(rows=max(1, 2048 // triton.next_power_of_2(head_size)), num_warps=4)


def merge_attention_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    plan: MergePlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two attention states into `(out, lse)`, which may be the tensors of either side.

    out_a, out_b  [num_tokens, num_heads, head_size]  fp32 | fp16 | bf16, last axis contiguous
    lse_a, lse_b  [num_tokens, num_heads] fp32        natural log; -inf: no key was seen
    out           of any of these dtypes; that of out_a when allocated
    Where both are -inf: out 0, lse -inf. Raises ValueError naming the argument, what was expected and what came.
    """
    check_states(out_a, lse_a, out_b, lse_b)
    num_tokens, num_heads, head_size = out_a.shape
    if out is None:
        out = out_a.new_empty(out_a.shape)
    if lse is None:
        lse = lse_a.new_empty(lse_a.shape)
    check_tensor("out", out, shape=tuple(out_a.shape), dtype=FLOAT_DTYPES, device=out_a.device)
    check_last_axis_contiguous("out", out)
    check_tensor("lse", lse, shape=tuple(lse_a.shape), dtype=torch.float32, device=out_a.device)
    num_rows = num_tokens * num_heads
    if num_rows == 0:
        return out, lse
    if plan is None:
        plan = plan_merge_attention_states(head_size=head_size)
    _merge_attention_states_kernel[(triton.cdiv(num_rows, plan.rows),)](
        out_ptr=out,
        lse_ptr=lse,
        out_a_ptr=out_a,
        lse_a_ptr=lse_a,
        out_b_ptr=out_b,
        lse_b_ptr=lse_b,
        num_rows=num_rows,
        num_heads=num_heads,
        out_stride_token=out.stride(0),
        out_stride_head=out.stride(1),
        lse_stride_token=lse.stride(0),
        lse_stride_head=lse.stride(1),
        out_a_stride_token=out_a.stride(0),
        out_a_stride_head=out_a.stride(1),
        lse_a_stride_token=lse_a.stride(0),
        lse_a_stride_head=lse_a.stride(1),
        out_b_stride_token=out_b.stride(0),
        out_b_stride_head=out_b.stride(1),
        lse_b_stride_token=lse_b.stride(0),
        lse_b_stride_head=lse_b.stride(1),
        HEAD_SIZE=head_size,
        DIM=triton.next_power_of_2(head_size),
        ROWS=plan.rows,
        num_warps=plan.num_warps,
        enable_fp_fusion=True,
    )
    return out, lse
