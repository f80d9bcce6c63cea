"""Gated activations of a feed-forward layer.

    out = act(gate) * up,   x = (gate | up)
    silu(g) = g / (1 + exp(-g))
    gelu(g) = g / 2 * (1 + erf(g / sqrt(2))), or by tanh: g / (1 + exp(-2u)), u = sqrt(2 / pi) * (g + 0.044715 g^3)

Program (i, j) owns tile j of row i.

Bytes moved: 3 * num_rows * size * element_size
Reference:   `reference.silu_and_mul`, `reference.gelu_and_mul`
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._checks import check_approximate, check_gate_up

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_TWO_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def _gate_and_mul_kernel(
    out_ptr, x_ptr, size, x_stride_row, ACTIVATION: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Grid (num_rows, cdiv(size, TILE)). ACTIVATION: "silu", "gelu" or "gelu_tanh"."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = dims < size
    x_ptr += row * x_stride_row
    gate = tl.load(x_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + size + dims, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu":
        activated = 0.5 * gate * (1.0 + tl.erf(gate * _SQRT_HALF))
    else:
        exponent = gate
        if ACTIVATION == "gelu_tanh":
            # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)), which needs no tanh and is exact at both ends
            exponent = _TWO_SQRT_2_OVER_PI * (gate + 0.044715 * gate * gate * gate)
        activated = gate / (1.0 + tl.exp(-exponent))
    out = activated * up
    tl.store(out_ptr + row * size + dims, out.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class ActivationPlan:
    """Launch choices of one activation."""

    tile: int  # elements of one program, a power of two
    num_warps: int


def plan_gate_and_mul(*, size: int) -> ActivationPlan:
    """Tiles of up to 1024 elements, two warps: a lane loads 8 neighbours, 16 bytes of a 16-bit dtype, also of 64 lanes."""
    tile = min(1024, triton.next_power_of_2(size))
    return ActivationPlan(tile, num_warps=max(1, tile // 512))


def _launch(x: torch.Tensor, activation: str, plan: ActivationPlan | None) -> torch.Tensor:
    size = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], size)
    if out.numel() == 0:
        return out
    num_rows = out.numel() // size
    rows = x.reshape(num_rows, 2 * size)
    if plan is None:
        plan = plan_gate_and_mul(size=size)
    _gate_and_mul_kernel[(num_rows, triton.cdiv(size, plan.tile))](
        out_ptr=out,
        x_ptr=rows,
        size=size,
        x_stride_row=rows.stride(0),
        ACTIVATION=activation,
        TILE=plan.tile,
        num_warps=plan.num_warps,
        enable_fp_fusion=True,
    )
    return out


def silu_and_mul(x: torch.Tensor, *, plan: ActivationPlan | None = None) -> torch.Tensor:
    """silu(x[..., :size]) * x[..., size:], a new contiguous tensor [..., size].

    x  [..., 2 * size]   fp32 | fp16 | bf16, last axis contiguous; fp32 inside, rounded once
    Raises ValueError naming the argument, what was expected and what came.
    """
    check_gate_up(x)
    return _launch(x, "silu", plan)


def gelu_and_mul(
    x: torch.Tensor, approximate: str = "none", *, plan: ActivationPlan | None = None
) -> torch.Tensor:
    """gelu(x[..., :size]) * x[..., size:], a new contiguous tensor [..., size].

    x            [..., 2 * size]   as in `silu_and_mul`
    approximate  "none" (by erf) or "tanh"
    """
    check_gate_up(x)
    check_approximate(approximate)
    return _launch(x, "gelu_tanh" if approximate == "tanh" else "gelu", plan)
