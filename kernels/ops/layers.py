"""What a transformer needs around attention."""

from __future__ import annotations

import torch

from .. import cpu
from ._registry import (
    SCALES,
    empty_like,
    no_result,
    register,
    static_and_caches,
    triton_op,
    with_scales,
)

Tensor = torch.Tensor

_rms_norm = register(
    "rms_norm",
    "(Tensor x, Tensor weight, float eps, bool unit_offset=False) -> Tensor",
    triton_op(".norm", "rms_norm"),
    lambda x, weight, eps, unit_offset=False: empty_like(x),
)


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, fp32 inside; a new contiguous tensor.

    x            [..., size]   fp32 | fp16 | bf16; last axis contiguous
    weight       [size]        dtype of x
    unit_offset  scale by 1 + weight instead, as Gemma's checkpoints mean it; the sum is taken in fp32
    """
    return _rms_norm(x, weight, eps, unit_offset)


_fused_add_rms_norm = register(
    "fused_add_rms_norm",
    "(Tensor x, Tensor residual, Tensor weight, float eps, bool unit_offset=False) -> (Tensor, Tensor)",
    triton_op(".norm", "fused_add_rms_norm"),
    lambda x, residual, weight, eps, unit_offset=False: (empty_like(x), empty_like(x)),
)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), two new contiguous tensors.

    x, residual  [..., size]   fp32 | fp16 | bf16; last axis contiguous. The sum is rounded to this dtype, then normed
    weight       [size]        dtype of x
    unit_offset  scale by 1 + weight instead, as in `rms_norm`
    """
    return _fused_add_rms_norm(x, residual, weight, eps, unit_offset)


_rotary_embedding = register(
    "rotary_embedding",
    "(Tensor positions, Tensor(a!) q, Tensor(b!) k, Tensor cos_sin, bool is_neox) -> ()",
    triton_op(".rotary", "rotary_embedding"),
    no_result,
)


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor, is_neox: bool = True
) -> None:
    """Rotate the heads of `q` and `k` in place, by the angles of their tokens' positions.

    positions  [num_tokens] int64                      each below max_position
    q          [num_tokens, num_q_heads, head_size]    fp32 | fp16 | bf16; any strides, last axis contiguous
    k          [num_tokens, num_kv_heads, head_size]   dtype of q
    cos_sin    [max_position, rotary_size] fp32        cosines, then sines; dims past rotary_size stay as they are
    is_neox    pairs are (i, i + rotary_size / 2); False: (2i, 2i + 1)
    """
    _rotary_embedding(positions, q, k, cos_sin, is_neox)


_rope_and_cache = register(
    "rope_and_cache",
    "(Tensor positions, Tensor(a!) q, Tensor k, Tensor v, Tensor cos_sin, Tensor(b!) k_cache,"
    " Tensor(c!) v_cache, Tensor slot_mapping, bool is_neox," + SCALES,
    with_scales(triton_op(".rotary_cache_write", "rope_and_cache"), 9),
    no_result,
    with_scales(cpu.rope_and_cache, 9),
)


def rope_and_cache(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    is_neox: bool = True,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """`rotary_embedding` and `reshape_and_cache` in one launch, but for `k`: rotated on its way to the cache only.

    Arguments as in those two. A token whose slot is negative, or that is past the end of `slot_mapping`, has its
    queries rotated and nothing written.
    """
    scales = static_and_caches(k_scale, v_scale)
    _rope_and_cache(positions, q, k, v, cos_sin, k_cache, v_cache, slot_mapping, is_neox, *scales)


_silu_and_mul = register(
    "silu_and_mul",
    "(Tensor x) -> Tensor",
    triton_op(".activation", "silu_and_mul"),
    lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2),
)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up for x = (gate | up), fp32 inside; a new contiguous tensor [..., size].

    x  [..., 2 * size]   fp32 | fp16 | bf16; last axis contiguous
    """
    return _silu_and_mul(x)


_gelu_and_mul = register(
    "gelu_and_mul",
    "(Tensor x, str approximate) -> Tensor",
    triton_op(".activation", "gelu_and_mul"),
    lambda x, approximate: x.new_empty(*x.shape[:-1], x.shape[-1] // 2),
)


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """gelu(gate) * up for x = (gate | up), fp32 inside; a new contiguous tensor [..., size].

    x            [..., 2 * size]   fp32 | fp16 | bf16; last axis contiguous
    approximate  "none" (by the error function) or "tanh"
    """
    return _gelu_and_mul(x, approximate)
