"""Numbers as a cache holds them: rounded to nearest even, saturating, after division by their scale.

A scale is given by the caller (one number, or one per KV head), or kept for every token and head in a scale cache beside
the cache, where whoever writes a row puts

    scale = max(largest magnitude of the row, 2^-100) / largest number of the format      448, 57344 or 127

so that a row of zeros stays one and no scale is 0 or subnormal. A row with a NaN or an infinity gets a NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ._checks import converts_e4m3

# Adding and taking away 1.5 * 2^23 leaves a fp32 number below 2^22 rounded to the nearest integer, ties to even.
_ROUND = tl.constexpr(12582912.0)
_LEAST_BITS = tl.constexpr(27 << 23)  # 2^-100


@triton.jit
def _e4m3_bits(x):
    """The bits of fp32 numbers within +-448 as e4m3, for GPUs without the type. NaN keeps its code.

    Normal numbers keep 3 of 23 bits of mantissa, and the exponent's bias goes from 127 to 7; below 2^-6 the code is the
    number in units of 2^-9.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.where(x == x, bits & 0x7FFFFFFF, 0)
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    units = tl.minimum(magnitude, 0x3C800000).to(tl.float32, bitcast=True) * 512.0  # up to 2^-6
    small = ((units + _ROUND) - _ROUND).to(tl.int32)
    code = tl.where(magnitude < 0x3C800000, small, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def as_cached(x, scale, cache_ptr):
    """`x` as the cache of `cache_ptr` holds it; `scale` is None, or broadcasts to x. NaN becomes 0 in int8."""
    dtype = cache_ptr.dtype.element_ty
    if dtype.primitive_bitwidth > 8:
        return x.to(dtype)
    x = x.to(tl.float32)
    if scale is not None:
        x = tl.div_rn(x, scale + tl.zeros_like(x))
    if dtype == tl.int8:
        x = tl.where(x == x, tl.minimum(tl.maximum(x, -127.0), 127.0), 0.0)
        return ((x + _ROUND) - _ROUND).to(tl.int8)
    largest = 57344.0 if dtype == tl.float8e5 else 448.0
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -largest), largest), x)
    if dtype == tl.uint8:
        return _e4m3_bits(x)
    return x.to(dtype)


@triton.jit
def largest_bits(x):
    """The bits of each row's largest magnitude as a fp32 number, [rows]: ordered as the numbers are, NaN above all."""
    return tl.max(x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@triton.jit
def scale_of(bits, cache_ptr):
    """The scales of rows whose `largest_bits` these are."""
    dtype = cache_ptr.dtype.element_ty
    largest = 127.0 if dtype == tl.int8 else 57344.0 if dtype == tl.float8e5 else 448.0
    magnitude = tl.maximum(bits, _LEAST_BITS).to(tl.float32, bitcast=True)
    scale = tl.div_rn(magnitude, tl.zeros_like(magnitude) + largest)
    return tl.where(bits < 0x7F800000, scale, float("nan"))


def addressable(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The caches as the kernels take them: e4m3 by its bits where the device does not convert it."""
    if k_cache.dtype == torch.float8_e4m3fn and not converts_e4m3(k_cache.device):
        return k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    return k_cache, v_cache


def scale_operands(k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> dict[str, Any]:
    """The launch arguments of checked scales. Strides over blocks and slots are None but for scale caches."""
    operands: dict[str, Any] = {}
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        block, slot, head = None, None, 0  # 0: one number serves all heads
        if scale is not None and scale.dim() == 3:
            block, slot, head = scale.stride()
        elif scale is not None and scale.numel() > 1:
            head = scale.stride(0)
        operands |= {
            f"{name}_ptr": scale,
            f"{name}_stride_block": block,
            f"{name}_stride_slot": slot,
            f"{name}_stride_head": head,
        }
    return operands
