"""Checks of tensor arguments, shared by every wrapper: shape, dtype, strides and device, never a value on the device.

Each failure is a ValueError that names the argument, what was expected and what came, for example
`block_tables: expected int32 [4, *], got int64 [3, 9]`.
"""

from __future__ import annotations

import bisect
import functools

import torch

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# numbers of a quantised cache; uint8 is e4m3 by its bits, as other engines store it
QUANTISED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
MAX_QUERIES = 16  # new tokens of one sequence that paged decode takes


def _describe(shape, dtype, device) -> str:
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,) if dtype is not None else ()
    parts = ["|".join(str(d).removeprefix("torch.") for d in dtypes)]
    if shape is not None:
        parts.append("[" + ", ".join("*" if size is None else str(size) for size in shape) + "]")
    if device is not None:
        parts.append(f"on {device}")
    return " ".join(part for part in parts if part)


def _fits(shape: torch.Size, expected: tuple[int | None, ...]) -> bool:
    if len(shape) != len(expected):
        return False
    for size, want in zip(shape, expected, strict=True):
        if want is not None and size != want:
            return False
    return True


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: tuple[int | None, ...] | None = None,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
) -> None:
    """Require `tensor` to have this shape (None: any size), one of these dtypes, and to be on this device."""
    shape_ok = shape is None or tensor.shape == shape or _fits(tensor.shape, shape)
    dtype_ok = (
        dtype is None or tensor.dtype == dtype or (type(dtype) is tuple and tensor.dtype in dtype)
    )
    device_ok = device is None or tensor.device == device
    if not (shape_ok and dtype_ok and device_ok):
        expected = _describe(shape, dtype, None if device_ok else device)
        got = _describe(tuple(tensor.shape), tensor.dtype, None if device_ok else tensor.device)
        raise ValueError(f"{name}: expected {expected}, got {got}")


def check_last_axis_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Require elements of the last axis to be neighbours in memory, which is what makes loads wide."""
    if tensor.dim() > 0 and tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel() > 0:
        raise ValueError(
            f"{name}: expected a contiguous last axis, got strides {list(tensor.stride())}"
        )


def check_positive(name: str, value: float | None) -> None:
    """Require an optional number to be above zero."""
    if value is not None and not value > 0:
        raise ValueError(f"{name}: expected a positive number or None, got {value}")


def check_caches(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    heads: int | None,
    head_size: int,
    head_size_v: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Require [num_blocks, block_size, num_kv_heads, head_size], alike for K and V but for the head size."""
    shape = (None, None, heads, head_size)
    check_tensor("k_cache", k_cache, shape=shape, dtype=dtype, device=device)
    shape = (*k_cache.shape[:3], head_size_v)
    check_tensor("v_cache", v_cache, shape=shape, dtype=dtype, device=device)
    check_last_axis_contiguous("k_cache", k_cache)
    check_last_axis_contiguous("v_cache", v_cache)


def check_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    window: int | None,
    attention_chunk: int | None,
    softcap: float | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    prefix_lm_ranges: torch.Tensor | None,
) -> None:
    """Check what paged decode and paged prefill have in common; the number of sequences is that of `seq_lens`."""
    device = q.device
    check_tensor("q", q, shape=(None, None, None), dtype=FLOAT_DTYPES)
    check_last_axis_contiguous("q", q)
    num_tokens, num_q_heads, head_size = q.shape
    dtype = k_cache.dtype if k_cache.dtype in QUANTISED_DTYPES else q.dtype
    check_caches(
        k_cache,
        v_cache,
        heads=None,
        head_size=head_size,
        head_size_v=None,
        dtype=dtype,
        device=device,
    )
    num_kv_heads, head_size_v = v_cache.shape[2:]
    if num_kv_heads == 0 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"q: expected a multiple of {num_kv_heads} KV heads, got {num_q_heads} heads"
        )
    check_scales(k_cache, device, k_scale, v_scale)
    check_tensor("seq_lens", seq_lens, shape=(None,), dtype=torch.int32, device=device)
    check_last_axis_contiguous("seq_lens", seq_lens)
    num_seqs = seq_lens.shape[0]
    check_tensor(
        "block_tables", block_tables, shape=(num_seqs, None), dtype=torch.int32, device=device
    )
    check_last_axis_contiguous("block_tables", block_tables)
    if prefix_lm_ranges is not None:
        shape = (num_seqs, None, 2)
        check_tensor(
            "prefix_lm_ranges", prefix_lm_ranges, shape=shape, dtype=torch.int32, device=device
        )
        if not prefix_lm_ranges.is_contiguous():
            strides = list(prefix_lm_ranges.stride())
            raise ValueError(f"prefix_lm_ranges: expected contiguous, got strides {strides}")
    if alibi_slopes is not None:
        check_tensor(
            "alibi_slopes", alibi_slopes, shape=(num_q_heads,), dtype=torch.float32, device=device
        )
        check_last_axis_contiguous("alibi_slopes", alibi_slopes)
    if sinks is not None:
        check_tensor("sinks", sinks, shape=(num_q_heads,), dtype=FLOAT_DTYPES, device=device)
        check_last_axis_contiguous("sinks", sinks)
    check_tensor(
        "out",
        out,
        shape=(num_tokens, num_q_heads, head_size_v),
        dtype=(q.dtype, torch.float32),
        device=device,
    )
    check_last_axis_contiguous("out", out)
    if lse is not None:
        check_tensor(
            "lse", lse, shape=(num_tokens, num_q_heads), dtype=torch.float32, device=device
        )
    check_positive("window", window)
    check_positive("attention_chunk", attention_chunk)
    check_positive("softcap", softcap)


def check_scales(
    k_cache: torch.Tensor,
    device: torch.device,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Check the scales of a cache: only quantised ones have any, one number, or one per KV head, or for both K and V a
    scale cache with one per slot and head.
    """
    by_slot = [scale is not None and scale.dim() == 3 for scale in (k_scale, v_scale)]
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            if any(by_slot):
                shape = list(k_cache.shape[:3])
                raise ValueError(f"{name}: expected float32 {shape} like the other scale, got None")
            continue
        if k_cache.dtype not in QUANTISED_DTYPES:
            raise ValueError(f"{name}: expected None with a cache that is not quantised, got one")
        shape = () if scale.dim() == 0 else (1,) if scale.shape == (1,) else (k_cache.shape[2],)
        if any(by_slot):
            shape = tuple(k_cache.shape[:3])
        check_tensor(name, scale, shape=shape, dtype=torch.float32, device=device)


def check_prefix(
    k_cache: torch.Tensor, prefix_block_ids: torch.Tensor, block_tables: torch.Tensor
) -> None:
    """Check the blocks that all sequences of a cascade share."""
    check_tensor(
        "prefix_block_ids",
        prefix_block_ids,
        shape=(None,),
        dtype=torch.int32,
        device=k_cache.device,
    )
    check_last_axis_contiguous("prefix_block_ids", prefix_block_ids)
    check_tensor("block_tables", block_tables, shape=(None, None), dtype=torch.int32)
    if prefix_block_ids.shape[0] > block_tables.shape[1]:
        raise ValueError(
            f"prefix_block_ids: expected at most the {block_tables.shape[1]} blocks of a table, got "
            f"{prefix_block_ids.shape[0]}"
        )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors (compute units) of a GPU; 1 for the CPU, where the interpreter runs one program at a time."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )


def check_key_value(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Check new keys and values against the caches they are to be written to."""
    device = k.device
    check_tensor("k", k, shape=(None, None, None), dtype=FLOAT_DTYPES)
    check_tensor("v", v, shape=(*k.shape[:2], None), dtype=k.dtype, device=device)
    check_last_axis_contiguous("k", k)
    check_last_axis_contiguous("v", v)
    _, heads, head_size = k.shape
    for name, x in (("k", k), ("v", v)):
        if 0 in x.shape[1:]:
            raise ValueError(f"{name}: expected heads of one number or more, got {list(x.shape)}")
    dtype = k_cache.dtype if k_cache.dtype in QUANTISED_DTYPES else k.dtype
    check_caches(
        k_cache,
        v_cache,
        heads=heads,
        head_size=head_size,
        head_size_v=v.shape[2],
        dtype=dtype,
        device=device,
    )
    check_scales(k_cache, device, k_scale, v_scale)
    check_tensor("slot_mapping", slot_mapping, shape=(None,), dtype=torch.int64, device=device)
    check_last_axis_contiguous("slot_mapping", slot_mapping)
    if slot_mapping.shape[0] > k.shape[0]:
        raise ValueError(
            f"slot_mapping: expected at most {k.shape[0]} slots, got {slot_mapping.shape[0]}"
        )


def check_block_pairs(
    src_pool: torch.Tensor, dst_pool: torch.Tensor, pairs: torch.Tensor, name: str = "pairs"
) -> None:
    """Check (source, destination) block ids, which are host integers, before anything moves. `name` is that of the pairs.

    The pairs are copied in no particular order. So no two may have one destination, and no destination may be memory of
    a source: within one pool, and where two pools are views of one tensor.
    """
    check_tensor("dst_pool", dst_pool, shape=(None, *src_pool.shape[1:]), dtype=src_pool.dtype)
    check_tensor(name, pairs, shape=(None, 2), dtype=torch.int64, device=torch.device("cpu"))
    one_pool = src_pool is dst_pool
    for pool, of in ((src_pool, "src_pool"), (dst_pool, "dst_pool")):
        _check_blocks("pool" if one_pool else of, pool)
    sources, destinations = pairs[:, 0].tolist(), pairs[:, 1].tolist()
    for side, ids, pool in (("source", sources, src_pool), ("destination", destinations, dst_pool)):
        for block in ids:
            if not 0 <= block < pool.shape[0]:
                raise ValueError(
                    f"{name}: expected a {side} block in [0, {pool.shape[0]}), got {block}"
                )
    if len(set(destinations)) < len(destinations):
        twice = sorted({block for block in destinations if destinations.count(block) > 1})
        raise ValueError(f"{name}: expected each destination block once, got {twice} again")
    if both := _overwritten_sources(src_pool, dst_pool, sources, destinations):
        raise ValueError(f"{name}: expected no destination block that is also a source, got {both}")


def _check_blocks(name: str, pool: torch.Tensor) -> None:
    """Require blocks that are one run of memory each and share none."""
    if pool.shape[0] == 0:
        return
    size = pool[0].numel()
    if not pool[0].is_contiguous() or (pool.shape[0] > 1 and pool.stride(0) < size):
        raise ValueError(
            f"{name}: expected contiguous blocks that do not overlap, got strides {list(pool.stride())}"
        )


def _overwritten_sources(
    src_pool: torch.Tensor, dst_pool: torch.Tensor, sources: list[int], destinations: list[int]
) -> list[int]:
    """The destination blocks that share memory with a source block."""
    if not destinations:
        return []
    if src_pool.untyped_storage().data_ptr() != dst_pool.untyped_storage().data_ptr():
        return []
    if src_pool.data_ptr() == dst_pool.data_ptr() and src_pool.stride() == dst_pool.stride():
        return sorted(set(sources).intersection(destinations))
    size = src_pool[0].numel()
    starts = sorted(src_pool.storage_offset() + block * src_pool.stride(0) for block in sources)
    both = []
    for block in destinations:
        start = dst_pool.storage_offset() + block * dst_pool.stride(0)
        nearest = bisect.bisect_right(starts, start - size)  # of those that end behind `start`
        if nearest < len(starts) and starts[nearest] < start + size:
            both.append(block)
    return sorted(both)


def check_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor) -> None:
    """Check the arguments of the RMS norms."""
    check_tensor("x", x, dtype=FLOAT_DTYPES)
    if x.dim() == 0:
        raise ValueError("x: expected at least one axis, got []")
    check_last_axis_contiguous("x", x)
    check_tensor("weight", weight, shape=(x.shape[-1],), dtype=x.dtype, device=x.device)
    check_last_axis_contiguous("weight", weight)
    if residual is not None:
        check_tensor("residual", residual, shape=tuple(x.shape), dtype=x.dtype, device=x.device)
        check_last_axis_contiguous("residual", residual)


def check_rotary(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor
) -> None:
    """Check the arguments of the rotary embedding."""
    check_tensor("q", q, shape=(None, None, None), dtype=FLOAT_DTYPES)
    num_tokens, _, head_size = q.shape
    check_tensor("k", k, shape=(num_tokens, None, head_size), dtype=q.dtype, device=q.device)
    check_last_axis_contiguous("q", q)
    check_last_axis_contiguous("k", k)
    check_tensor("positions", positions, shape=(num_tokens,), dtype=torch.int64, device=q.device)
    check_last_axis_contiguous("positions", positions)
    check_tensor("cos_sin", cos_sin, shape=(None, None), dtype=torch.float32, device=q.device)
    check_last_axis_contiguous("cos_sin", cos_sin)
    rotary_size = cos_sin.shape[1]
    if rotary_size % 2 or rotary_size > head_size:
        raise ValueError(f"cos_sin: expected an even width up to {head_size}, got {rotary_size}")


def check_gate_up(x: torch.Tensor) -> None:
    """Check the argument of the gated activations."""
    check_tensor("x", x, dtype=FLOAT_DTYPES)
    check_last_axis_contiguous("x", x)
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"x: expected an even last axis (gate | up), got {list(x.shape)}")


def check_approximate(approximate: str) -> None:
    """Check which form of GELU is asked for."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f'approximate: expected "none" or "tanh", got {approximate!r}')


def check_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> None:
    """Check the two partial attention results of a merge."""
    check_tensor("out_a", out_a, shape=(None, None, None), dtype=FLOAT_DTYPES)
    check_tensor("out_b", out_b, shape=tuple(out_a.shape), dtype=out_a.dtype, device=out_a.device)
    check_last_axis_contiguous("out_a", out_a)
    check_last_axis_contiguous("out_b", out_b)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_tensor(
            name, lse, shape=tuple(out_a.shape[:2]), dtype=torch.float32, device=out_a.device
        )


@functools.cache
def converts_e4m3(device: torch.device) -> bool:
    """Whether the hardware converts from float8_e4m3fn. NVIDIA GPUs do from sm_89 on, and Triton has no such type before.

    For gfx942, whose own e4m3 has another bias, Triton emits five times the instructions that decoding the bits takes.
    """
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


@functools.cache
def warp_size(device: torch.device) -> int:
    """Lanes of a warp: 64 on AMD's data-centre GPUs, else 32."""
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


@functools.cache
def has_warpgroup_mma(device: torch.device) -> bool:
    """Whether four warps share one matrix product, operands in shared memory (Hopper)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def check_queries(
    q: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    max_query_len: int,
    query_positions: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
) -> None:
    """Check what says which new tokens of paged decode belong to which sequence; None: one each, in order."""
    if not 1 <= max_query_len <= MAX_QUERIES:
        raise ValueError(f"max_query_len: expected 1 to {MAX_QUERIES}, got {max_query_len}")
    if query_start_loc is None:
        if max_query_len > 1 or tree_mask is not None:
            raise ValueError("query_start_loc: expected a tensor with several new tokens, got None")
        check_tensor("seq_lens", seq_lens, shape=(q.shape[0],))
    else:
        check_query_starts(q, seq_lens, query_start_loc)
    if query_positions is not None:
        shape = (q.shape[0],)
        check_tensor(
            "query_positions", query_positions, shape=shape, dtype=torch.int32, device=q.device
        )
        check_last_axis_contiguous("query_positions", query_positions)
    check_tree_mask(q, max_query_len, tree_mask)


def check_query_starts(
    q: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor
) -> None:
    shape = (seq_lens.shape[0] + 1,)
    check_tensor(
        "query_start_loc", query_start_loc, shape=shape, dtype=torch.int32, device=q.device
    )
    check_last_axis_contiguous("query_start_loc", query_start_loc)


def check_tree_mask(q: torch.Tensor, max_query_len: int, tree_mask: torch.Tensor | None) -> None:
    if tree_mask is not None:
        shape = (q.shape[0], max_query_len)
        check_tensor("tree_mask", tree_mask, shape=shape, dtype=torch.bool, device=q.device)
        check_last_axis_contiguous("tree_mask", tree_mask)
