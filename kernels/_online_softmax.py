"""The running softmax over paged KV tiles, shared by paged decode and paged prefill.

A program keeps, for each of its query rows, the largest score seen `m`, the sum `l` of the weights exp2(score - m) and
the unnormalised output `acc`, their sum over the values. All scores are in base-2 units (natural score * log2(e)), because
`exp2` is one instruction on a GPU; `lse2 = m + log2(l)` is in the same units, and leaves the kernels as natural log.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ._quantise import addressable, scale_operands

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Weights are kept as 2^15 times exp2(score - largest score), so that in fp16 those down to 2^-39 of the largest still
# count: many small ones can outweigh a large one. The factor cancels in the output and is taken out of lse2.
WEIGHT_BITS = tl.constexpr(15.0)
WEIGHT_ONE = tl.constexpr(2.0**15)
LARGEST_SINK = tl.constexpr(3e38)
# With scales of every token, a row's largest weight is brought to [2^14, 2^15) in fp16, if it is above this.
LEAST_WEIGHT = tl.constexpr(2.0**-106)


@triton.jit
def visible_interval(
    position, seq_len, window, attention_chunk, kv_start, ranges_ptr, num_ranges, CAUSAL: tl.constexpr
):  # fmt: skip
    """Keys [first, stop) that a query at `position` (a scalar or a tensor) sees; empty where stop <= first.

    Every rule but the tree mask leaves one interval, and both its ends rise with the position: so the first and the
    last query of a program tell which tiles are seen by some row, and which by all.

        ranges  [low, high) around the position:            first <= low, stop >= high
        window, attention_chunk        |---- p              later of the two starts
    """
    first = position * 0
    stop = seq_len + first
    if window is not None:
        first = tl.maximum(first, position - window + 1)
    if attention_chunk is not None:
        first = tl.maximum(first, position // attention_chunk * attention_chunk)
    if CAUSAL:
        stop = tl.minimum(stop, position + 1)
    if ranges_ptr is not None:
        for i in range(num_ranges):
            low = tl.load(ranges_ptr + 2 * i)
            high = tl.load(ranges_ptr + 2 * i + 1)
            inside = (position >= low) & (position < high)
            first = tl.where(inside, tl.minimum(first, tl.maximum(low, 0)), first)
            stop = tl.where(inside, tl.maximum(stop, tl.minimum(high, seq_len)), stop)
    if kv_start is not None:
        first = tl.maximum(first, kv_start)
    return first, stop


@triton.jit
def gather_slots(
    table_ptr, positions, in_range,
    BLOCK_SIZE: tl.constexpr, WIDE_SLOTS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Block ids (int64) and offsets in the block of token `positions`; entries out of range are not read.

    WIDE_SLOTS: offsets times the slot's stride pass 2^31, so they are int64 too; it costs registers.
    """
    block_index = positions // BLOCK_SIZE
    if MASKED:
        block_ids = tl.load(table_ptr + block_index, mask=in_range, other=0)
    else:
        block_ids = tl.load(table_ptr + block_index)
    offsets = positions - block_index * BLOCK_SIZE
    if WIDE_SLOTS:
        offsets = offsets.to(tl.int64)
    return block_ids.to(tl.int64), offsets


@triton.jit
def load_scale(scale_ptr, kv_head, stride_block, stride_head, cache_ptr):
    """What all stored numbers of a head are to be multiplied by, and a constant of the decoding with it."""
    scale = 1.0
    if (scale_ptr is not None) & (
        stride_block is None
    ):  # else every token has its own: `load_scales`
        scale = tl.load(scale_ptr + kv_head * stride_head)
    if cache_ptr.dtype.element_ty == tl.uint8:
        scale *= 256.0  # see `dequantised`
    return scale


@triton.jit
def scales_of_head(scale_ptr, kv_head, stride_block, stride_head):
    """Where a head's scales of all tokens begin, or None: see `load_scale`."""
    scales_ptr = None
    if stride_block is not None:
        scales_ptr = scale_ptr + kv_head * stride_head
    return scales_ptr


@triton.jit
def load_scales(scales_ptr, block_ids, offsets, stride_block, stride_slot, in_range, MASKED: tl.constexpr):  # fmt: skip
    """The scales of one head's tokens, [TILE_KV], or None; those out of range are 0 and not read."""
    scales = None
    if scales_ptr is not None:
        scales_ptr += block_ids * stride_block + offsets * stride_slot
        if MASKED:
            scales = tl.load(scales_ptr, mask=in_range, other=0.0)
        else:
            scales = tl.load(scales_ptr)
    return scales


@triton.jit
def scaled_queries(q, cache_ptr):
    """Queries as the operand of a product with the cache, and the factor taken out of each row, [ROWS, 1].

    Against a quantised cache the product is in fp16, which holds every fp8 and int8 number exactly and into which the
    hardware converts two of them in one instruction. bf16 queries outrange fp16: each row is divided by a power of two
    that brings its largest element to [2^14, 2^15), which loses nothing within 2^-28 of it.
    """
    factor = 1.0
    if (q.dtype == tl.bfloat16) & (cache_ptr.dtype.element_ty != tl.bfloat16):
        wide = q.to(tl.float32)
        largest = tl.max(tl.abs(wide), axis=1)
        exponent = tl.cast(largest, tl.int32, bitcast=True) & 0x7F800000
        factor = tl.maximum(exponent.to(tl.float32, bitcast=True), 2.0**-100)[:, None] * 2.0**-14
        q = (wide / factor).to(tl.float16)
    return q, factor


@triton.jit
def dequantised(x, dtype: tl.constexpr):
    """Stored numbers as `dtype`, without their scale. uint8 is e4m3 by its bits, for GPUs that lack the type.

    The bits seeeemmm, moved to s0eeeemmm0000000, are an fp16 number 2^-8 times as large (the exponent's bias is 15
    instead of 7), subnormals included; `load_scale` takes the 2^8 back. The NaN code reads as 480. Extending the sign
    to 16 bits puts it at both of the upper two bits after the shift, so that one mask does the rest.
    """
    if x.dtype == tl.uint8:
        bits = (x.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -0x4001
        return bits.to(tl.float16, bitcast=True).to(dtype)
    if x.dtype == tl.int8:
        # 0x6400 with the number n + 128 in its lower bits is the fp16 number 1024 + n + 128: cheaper than a conversion
        bits = x.to(tl.uint8, bitcast=True).to(tl.uint16) ^ 0x6480
        return (bits.to(tl.float16, bitcast=True) - 1152.0).to(dtype)
    return x.to(dtype)


@triton.jit
def base2_scores(q, k, k_scales, scale, softcap, slopes, distance):
    """Scores of one tile, [ROWS, TILE_KV], in base-2 units: scale, then soft cap, then ALiBi.

    `scale` is a scalar or [ROWS, 1]; `k_scales` [TILE_KV], `slopes` [ROWS, 1] and `softcap` may be None; `distance` is
    key position minus query position.
    """
    dots = tl.dot(q, k, input_precision="ieee")
    if k_scales is not None:
        dots *= k_scales[None, :]
    if softcap is not None:
        # tanh(x) = 1 - 2 / (exp(2x) + 1): right at both ends, where exp overflows to inf or underflows to 0
        x = dots * (scale / softcap)
        tanh = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)
        if q.dtype == tl.float32:
            # near 0 the difference above keeps the digits of 1, not of x: its Taylor series, good to 3e-7 there
            y = x * x
            series = x * (1.0 - y * (1 / 3 - y * (2 / 15 - y * (17 / 315))))
            tanh = tl.where(y < 0.0625, series, tanh)
        scores = tanh * (softcap * LOG2_E)
    else:
        scores = dots * (scale * LOG2_E)
    if slopes is not None:
        scores += slopes * distance.to(tl.float32) * LOG2_E
    return scores


@triton.jit
def accumulate(acc, m, l, unit, scores, v, v_scales, MASKED: tl.constexpr):  # noqa: E741 (l is the field's name for the sum)
    """One step of the running softmax. With MASKED, rows may be -inf throughout; they keep m = -inf and l = 0.

    With scales of every token, `v_scales` [TILE_KV], the weights of the values are p * v_scale, of any magnitude. For a
    product in fp16 they are divided by a row's `unit`, a power of two that brings the largest so far below 2^15, and acc
    counts in that unit.
    """
    m_new = tl.maximum(m, tl.max(scores, axis=1))
    if MASKED:
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf would be NaN
    else:
        pivot = m_new
    p = tl.exp2(scores - (pivot - WEIGHT_BITS)[:, None])
    decay = tl.exp2(m - pivot)
    l = l * decay + tl.sum(p, axis=1)  # noqa: E741
    if v_scales is not None:
        p *= v_scales[None, :]
        if v.dtype == tl.float16:
            largest = tl.maximum(tl.max(p, axis=1), unit * decay * 2.0**14)
            bits = tl.maximum(largest, LEAST_WEIGHT).to(tl.int32, bitcast=True)
            bits = (bits & 0x7F800000) - (14 << 23)
            inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
            p *= inverse[:, None]
            decay *= unit * inverse
            unit = bits.to(tl.float32, bitcast=True)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, m_new, l, unit


@triton.jit
def start_rows(
    q, v_scales_ptr, sinks_ptr, heads, row_mask, has_keys, ROWS: tl.constexpr, DIM_V: tl.constexpr
):  # fmt: skip
    """(acc, m, l, unit) before any key. A sink is one more key with no value, for rows that have others."""
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + heads, mask=row_mask, other=0.0).to(tl.float32) * LOG2_E
        sink = tl.where(sink == float("inf"), LARGEST_SINK, sink)  # inf - inf would be NaN
        m = tl.where(has_keys, sink, m)
        l = tl.where(has_keys, WEIGHT_ONE, l)  # noqa: E741
    unit = tl.full([ROWS], 1.0, tl.float32)
    if (v_scales_ptr is not None) & (q.dtype == tl.float16):
        unit *= LEAST_WEIGHT * 2.0**-14  # `accumulate` raises it
    return tl.zeros([ROWS, DIM_V], tl.float32), m, l, unit


@triton.jit
def finish(acc, m, l, unit, v_scale):  # noqa: E741
    """Normalised output (0 for rows that saw nothing) and lse2 (-inf for them)."""
    empty = l == 0.0  # not `l > 0`: a NaN in K must stay visible in the output
    divisor = tl.where(empty, 1.0, l)
    out = acc * (unit * v_scale / divisor)[:, None]
    lse2 = tl.where(empty, float("-inf"), m + (tl.log2(divisor) - WEIGHT_BITS))
    return out, lse2


@triton.jit
def attend_tiles(
    acc, m, l, unit, q, row_first, row_stop, row_positions, start, stop, seen_from, seen_to, context_len,  # noqa: E741
    k_ptr, v_ptr, table_ptr, k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
    k_scales_ptr, v_scales_ptr, k_scale_stride_block, k_scale_stride_slot, v_scale_stride_block, v_scale_stride_slot,
    scale, softcap, slopes, tree_rows,
    HEAD_SIZE: tl.constexpr, HEAD_SIZE_V: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WIDE_SLOTS: tl.constexpr, TILE_KV: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Rows of one sequence over KV tiles [start, stop). Unmasked tiles are whole and visible to every row.

    A row sees keys [row_first, row_stop), [ROWS, 1] each, None where that end is `seen_from` or `seen_to`, between
    which all rows see and out of which nothing is read. `row_positions` [ROWS, 1] is each row's place in the sequence,
    for ALiBi. `tree_rows` [ROWS] points at each row's line of the tree mask, whose column 0 is key `context_len`.
    """
    dims = tl.arange(0, DIM)
    dims_v = tl.arange(0, DIM_V)
    for tile_start in range(start, stop, TILE_KV):
        positions = tile_start + tl.arange(0, TILE_KV)
        in_range = (positions >= seen_from) & (positions < seen_to)
        block_ids, offsets = gather_slots(
            table_ptr, positions, in_range, BLOCK_SIZE, WIDE_SLOTS, MASKED
        )
        k_slots = block_ids * k_stride_block + offsets * k_stride_slot  # [TILE_KV]
        v_slots = block_ids * v_stride_block + offsets * v_stride_slot
        k_mask = dims[:, None] < HEAD_SIZE
        v_mask = dims_v[None, :] < HEAD_SIZE_V
        if MASKED:
            k_mask = k_mask & in_range[None, :]
            v_mask = v_mask & in_range[:, None]
        k = tl.load(
            k_ptr + k_slots[None, :] + dims[:, None], mask=k_mask, other=0.0
        )  # [DIM, TILE_KV]
        v = tl.load(
            v_ptr + v_slots[:, None] + dims_v[None, :], mask=v_mask, other=0.0
        )  # [TILE_KV, DIM_V]
        k_scales = load_scales(
            k_scales_ptr, block_ids, offsets, k_scale_stride_block, k_scale_stride_slot, in_range, MASKED
        )  # fmt: skip
        v_scales = load_scales(
            v_scales_ptr, block_ids, offsets, v_scale_stride_block, v_scale_stride_slot, in_range, MASKED
        )  # fmt: skip
        distance = None
        if slopes is not None:
            distance = positions[None, :] - row_positions  # [ROWS, TILE_KV]
        scores = base2_scores(
            q, dequantised(k, q.dtype), k_scales, scale, softcap, slopes, distance
        )
        if MASKED:
            visible = in_range[None, :]
            if row_first is not None:
                visible = visible & (positions[None, :] >= row_first)
            if row_stop is not None:
                visible = visible & (positions[None, :] < row_stop)
            if tree_rows is not None:
                column = positions - context_len
                is_new = (column >= 0) & in_range
                tree = tl.load(tree_rows[:, None] + column[None, :], mask=is_new[None, :], other=1)
                visible = visible & (tree != 0)
            scores = tl.where(visible, scores, float("-inf"))
        acc, m, l, unit = accumulate(  # noqa: E741
            acc, m, l, unit, scores, dequantised(v, q.dtype), v_scales, MASKED
        )
    return acc, m, l, unit


def padded(size: int) -> int:
    """Width of a tile that holds `size` elements: a power of two, as Triton wants, and a matrix product's least."""
    return max(16, triton.next_power_of_2(size))


def paged_operands(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    prefix_lm_ranges: torch.Tensor | None,
) -> dict[str, Any]:
    """The launch arguments that both kernels take of their checked operands."""
    _, block_size, num_kv_heads, head_size_v = v_cache.shape
    k_cache, v_cache = addressable(k_cache, v_cache)
    slot_strides = [
        x.stride(1) for x in (k_cache, v_cache, k_scale, v_scale) if x is not None and x.dim() >= 3
    ]
    return {
        "q_ptr": q,
        "k_ptr": k_cache,
        "v_ptr": v_cache,
        **scale_operands(k_scale, v_scale),
        "ranges_ptr": prefix_lm_ranges,
        "num_ranges": 0 if prefix_lm_ranges is None else prefix_lm_ranges.shape[1],
        "block_tables_ptr": block_tables,
        "q_stride_token": q.stride(0),
        "q_stride_head": q.stride(1),
        "k_stride_block": k_cache.stride(0),
        "k_stride_slot": k_cache.stride(1),
        "k_stride_head": k_cache.stride(2),
        "v_stride_block": v_cache.stride(0),
        "v_stride_slot": v_cache.stride(1),
        "v_stride_head": v_cache.stride(2),
        "table_stride_seq": block_tables.stride(0),
        "HEAD_SIZE": q.shape[2],
        "HEAD_SIZE_V": head_size_v,
        "DIM": padded(q.shape[2]),
        "DIM_V": padded(head_size_v),
        "BLOCK_SIZE": block_size,
        "WIDE_SLOTS": block_size * max(slot_strides) >= 2**31,
        "GROUP": q.shape[1] // num_kv_heads,
    }
