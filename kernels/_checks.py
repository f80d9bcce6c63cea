"""Checks of tensor arguments, shared by every wrapper: shape, dtype, strides and device, never a value on the device.

Each failure is a ValueError that names the argument, what was expected and what came, for example
`block_tables: expected int32 [4, *], got int64 [3, 9]`.
"""

from __future__ import annotations

import functools

import torch

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _describe(shape, dtype, device) -> str:
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,) if dtype is not None else ()
    parts = ["|".join(str(d).removeprefix("torch.") for d in dtypes)]
    if shape is not None:
        parts.append("[" + ", ".join("*" if size is None else str(size) for size in shape) + "]")
    if device is not None:
        parts.append(f"on {device}")
    return " ".join(part for part in parts if part)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: tuple[int | None, ...] | None = None,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
) -> None:
    """Require `tensor` to have this shape (None: any size), one of these dtypes, and to be on this device."""
    shape_ok = shape is None or (
        tensor.dim() == len(shape)
        and all(want is None or want == size for want, size in zip(shape, tensor.shape))
    )
    dtype_ok = dtype is None or (tensor.dtype in dtype if isinstance(dtype, tuple) else tensor.dtype == dtype)
    device_ok = device is None or tensor.device == device
    if not (shape_ok and dtype_ok and device_ok):
        expected = _describe(shape, dtype, device)
        got = _describe(tuple(tensor.shape), tensor.dtype, None if device_ok else tensor.device)
        raise ValueError(f"{name}: expected {expected}, got {got}")


def check_last_axis_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Require elements of the last axis to be neighbours in memory, which is what makes loads wide."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel() > 0:
        raise ValueError(f"{name}: expected a contiguous last axis, got strides {list(tensor.stride())}")


def check_positive(name: str, value: float | None) -> None:
    """Require an optional number to be above zero."""
    if value is not None and not value > 0:
        raise ValueError(f"{name}: expected a positive number or None, got {value}")


def check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor, *, device: torch.device) -> None:
    """Require [num_blocks, block_size, num_kv_heads, head_size] of one dtype; only the head sizes may differ."""
    check_tensor("k_cache", k_cache, shape=(None, None, None, None), device=device)
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    shape = (num_blocks, block_size, num_kv_heads, None)
    check_tensor("v_cache", v_cache, shape=shape, dtype=k_cache.dtype, device=device)
    check_last_axis_contiguous("k_cache", k_cache)
    check_last_axis_contiguous("v_cache", v_cache)


def check_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    window: int | None,
    softcap: float | None,
) -> None:
    """Check what paged decode and paged prefill have in common; the number of sequences is that of `seq_lens`."""
    device = q.device
    check_tensor("q", q, shape=(None, None, None), dtype=FLOAT_DTYPES)
    check_last_axis_contiguous("q", q)
    check_caches(k_cache, v_cache, device=device)
    num_tokens, num_q_heads, head_size = q.shape
    _, block_size, num_kv_heads, head_size_v = v_cache.shape
    check_tensor("k_cache", k_cache, shape=(None, block_size, num_kv_heads, head_size), dtype=q.dtype)
    if num_kv_heads == 0 or num_q_heads % num_kv_heads:
        raise ValueError(f"q: expected a multiple of {num_kv_heads} KV heads, got {num_q_heads} heads")
    check_tensor("seq_lens", seq_lens, shape=(None,), dtype=torch.int32, device=device)
    check_last_axis_contiguous("seq_lens", seq_lens)
    table_shape = (seq_lens.shape[0], None)
    check_tensor("block_tables", block_tables, shape=table_shape, dtype=torch.int32, device=device)
    check_last_axis_contiguous("block_tables", block_tables)
    if alibi_slopes is not None:
        check_tensor("alibi_slopes", alibi_slopes, shape=(num_q_heads,), dtype=torch.float32, device=device)
        check_last_axis_contiguous("alibi_slopes", alibi_slopes)
    if sinks is not None:
        check_tensor("sinks", sinks, shape=(num_q_heads,), dtype=FLOAT_DTYPES, device=device)
        check_last_axis_contiguous("sinks", sinks)
    check_tensor("out", out, shape=(num_tokens, num_q_heads, head_size_v), dtype=q.dtype, device=device)
    check_last_axis_contiguous("out", out)
    if lse is not None:
        check_tensor("lse", lse, shape=(num_tokens, num_q_heads), dtype=torch.float32, device=device)
    check_positive("window", window)
    check_positive("softcap", softcap)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors (compute units) of a GPU; 1 for the CPU, where the interpreter runs one program at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
