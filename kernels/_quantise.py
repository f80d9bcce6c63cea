"""Numbers as a cache holds them: rounded to nearest even, saturating, after division by their scale."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._checks import converts_e4m3

# Adding and taking away 1.5 * 2^23 leaves a fp32 number below 2^22 rounded to the nearest integer, ties to even.
_ROUND = tl.constexpr(12582912.0)


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


def addressable(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The caches as the kernels take them: e4m3 by its bits where the device does not convert it."""
    if k_cache.dtype == torch.float8_e4m3fn and not converts_e4m3(k_cache.device):
        return k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    return k_cache, v_cache


def scale_stride(scale: torch.Tensor | None) -> int:
    """Stride over the KV heads of a scale, 0 where one number serves all."""
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)
