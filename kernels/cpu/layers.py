"""What a transformer needs around attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .._checks import check_gate_up, check_norm, check_rotary

Tensor = torch.Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    check_norm(x, None, weight)
    return F.rms_norm(x, weight.shape, weight, eps).contiguous()


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    check_norm(x, residual, weight)
    total = (x + residual).contiguous()
    return F.rms_norm(total, weight.shape, weight, eps), total


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor, is_neox: bool
) -> None:
    check_rotary(positions, q, k, cos_sin)
    rotary_size = cos_sin.shape[1]
    cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(
        2, dim=-1
    )  # [T, 1, rotary_size / 2]
    for x in (q, k):
        x = x[..., :rotary_size]
        a, b = x.chunk(2, dim=-1) if is_neox else (x[..., ::2], x[..., 1::2])
        # products in fp32, whatever the dtype of x
        first = (a * cos).addcmul_(b, sin, value=-1)
        second = (b * cos).addcmul_(a, sin)
        a.copy_(first)
        b.copy_(second)


def silu_and_mul(x: Tensor) -> Tensor:
    check_gate_up(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate.float()).mul_(up).to(x.dtype).contiguous()
