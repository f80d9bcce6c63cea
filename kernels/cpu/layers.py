"""What a transformer needs around attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .._checks import (
    check_approximate,
    check_gate_up,
    check_key_value,
    check_norm,
    check_rotary,
)
from .cache import write_checked

Tensor = torch.Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    check_norm(x, None, weight)
    return _normed(x, weight, eps, unit_offset).contiguous()


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    check_norm(x, residual, weight)
    total = (x + residual).contiguous()
    return _normed(total, weight, eps, unit_offset), total


def _normed(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    if not unit_offset:
        return F.rms_norm(x, weight.shape, weight, eps)
    # 1 + weight in fp32: a small weight beside 1 has few bits left in 16
    return F.rms_norm(x.float(), weight.shape, 1.0 + weight.float(), eps).to(x.dtype)


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor, is_neox: bool
) -> None:
    check_rotary(positions, q, k, cos_sin)
    angles = cos_sin.index_select(0, positions)
    _rotate(q, angles, is_neox)
    _rotate(k, angles, is_neox)


def rope_and_cache(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    is_neox: bool,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    check_rotary(positions, q, k, cos_sin)
    check_key_value(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    angles = cos_sin.index_select(0, positions)
    _rotate(q, angles, is_neox)
    num_slots = slot_mapping.shape[0]
    if num_slots < k.shape[0]:
        k, v, angles = k[:num_slots], v[:num_slots], angles[:num_slots]
    first, second = _rotated(*_pairs(k, angles.shape[1], is_neox), angles)
    # in fp32, so that it is rounded once, to the cache's format
    parts = (first, second) if is_neox else (torch.stack((first, second), dim=-1).flatten(-2),)
    rotated = torch.cat((*parts, k[..., angles.shape[1] :]), dim=-1)
    write_checked(rotated, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def _rotate(x: Tensor, angles: Tensor, is_neox: bool) -> None:
    """Rotate x [T, heads, head_size] in place by angles [T, rotary_size]: cosines, then sines."""
    a, b = _pairs(x, angles.shape[1], is_neox)
    first, second = _rotated(a, b, angles)
    a.copy_(first)
    b.copy_(second)


def _pairs(x: Tensor, rotary_size: int, is_neox: bool) -> tuple[Tensor, ...]:
    """The first and second numbers of all pairs, views of x."""
    if is_neox:
        return x[..., :rotary_size].chunk(2, dim=-1)
    return x[..., :rotary_size:2], x[..., 1:rotary_size:2]


def _rotated(a: Tensor, b: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = angles[:, None].chunk(2, dim=-1)  # [T, 1, rotary_size / 2]
    # products in fp32, whatever the dtype of a and b
    return (a * cos).addcmul_(b, sin, value=-1), (b * cos).addcmul_(a, sin)


def silu_and_mul(x: Tensor) -> Tensor:
    check_gate_up(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate.float()).mul_(up).to(x.dtype).contiguous()


def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    check_gate_up(x)
    check_approximate(approximate)
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate.float(), approximate=approximate).mul_(up).to(x.dtype).contiguous()
