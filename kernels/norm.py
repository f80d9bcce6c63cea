"""Root-mean-square norm over the last axis, alone or after adding a residual.

    normed = x / sqrt(mean(x^2) + eps) * weight           fp32 inside, rounded once; Gemma: times 1 + weight
    fused:  residual' = x + residual (rounded to the dtype of x), normed = rms_norm(residual')

Program i owns ROWS rows, each held whole.

Bytes moved: num_rows * size * element_size * 2, fused 4
Reference:   `reference.rms_norm`, `reference.fused_add_rms_norm`
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._checks import check_norm


# Nothing about the number of rows may choose a variant: a new batch size must not compile.
@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    out_ptr, new_residual_ptr, x_ptr, residual_ptr, weight_ptr, eps, num_rows,
    x_stride_row, residual_stride_row,
    SIZE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(num_rows, ROWS),). With `residual_ptr` the sum is written to `new_residual_ptr` and normed."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    dims = tl.arange(0, DIM)[None, :]
    mask = (rows < num_rows) & (dims < SIZE)  # [ROWS, DIM]
    x = tl.load(x_ptr + rows * x_stride_row + dims, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + rows * residual_stride_row + dims, mask=mask, other=0.0)
        total = (x + residual.to(tl.float32)).to(new_residual_ptr.dtype.element_ty)
        tl.store(new_residual_ptr + rows * SIZE + dims, total, mask=mask)
        x = total.to(tl.float32)  # the norm is of what the next layer's residual holds
    weight = tl.load(weight_ptr + dims, mask=dims < SIZE, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        weight += 1.0  # in fp32: a small weight beside 1 has few bits left in 16
    inverse_rms = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)
    normed = x * inverse_rms[:, None] * weight
    tl.store(out_ptr + rows * SIZE + dims, normed.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class NormPlan:
    """Launch choices of one norm."""

    rows: int  # rows of one program, a power of two
    num_warps: int


def plan_rms_norm(*, size: int) -> NormPlan:
    """One row a program, except short rows, which share one, however many there are; a warp per 512 elements (16-byte loads, two a thread)."""
    dim = triton.next_power_of_2(size)
    rows = max(1, 1024 // dim)
    return NormPlan(rows, num_warps=max(1, min(16, rows * dim // 512)))


def _launch(x, residual, weight, eps, unit_offset, plan):
    size = x.shape[-1]
    out = x.new_empty(x.shape)
    new_residual = None if residual is None else x.new_empty(x.shape)
    num_rows = x.numel() // size if size else 0
    if num_rows == 0:
        return out, new_residual
    if plan is None:
        plan = plan_rms_norm(size=size)
    x = x.reshape(num_rows, size)
    residual = None if residual is None else residual.reshape(num_rows, size)
    _rms_norm_kernel[(triton.cdiv(num_rows, plan.rows),)](
        out_ptr=out,
        new_residual_ptr=new_residual,
        x_ptr=x,
        residual_ptr=residual,
        weight_ptr=weight,
        eps=eps,
        num_rows=num_rows,
        x_stride_row=x.stride(0),
        residual_stride_row=0 if residual is None else residual.stride(0),
        SIZE=size,
        DIM=triton.next_power_of_2(size),
        ROWS=plan.rows,
        UNIT_OFFSET=unit_offset,
        num_warps=plan.num_warps,
        enable_fp_fusion=True,
    )
    return out, new_residual


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
    *,
    plan: NormPlan | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; a new contiguous tensor.

    x            [..., size]   fp32 | fp16 | bf16, last axis contiguous
    weight       [size]        dtype of x
    unit_offset  scale by 1 + weight, added in fp32
    Raises ValueError naming the argument, what was expected and what came.
    """
    check_norm(x, None, weight)
    return _launch(x, None, weight, eps, unit_offset, plan)[0]


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
    *,
    plan: NormPlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), two new contiguous tensors; arguments as in `rms_norm`.

    residual  [..., size]   shape and dtype of x
    """
    check_norm(x, residual, weight)
    normed, new_residual = _launch(x, residual, weight, eps, unit_offset, plan)
    assert new_residual is not None
    return normed, new_residual
