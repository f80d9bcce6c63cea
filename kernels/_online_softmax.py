"""The running softmax over paged KV tiles, shared by paged decode and paged prefill.

A program keeps, for each of its query rows, the largest score seen `m`, the sum `l = sum(exp2(score - m))` and the
unnormalised output `acc = sum(exp2(score - m) * v)`. All scores are in base-2 units (natural score * log2(e)), because
`exp2` is one instruction on a GPU; `lse2 = m + log2(l)` is in the same units, and leaves the kernels as natural log.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def gather_slots(table_ptr, positions, in_range, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Block ids (int64) and offsets inside the block of token `positions`; entries out of range are not read."""
    block_index = positions // BLOCK_SIZE
    if MASKED:
        block_ids = tl.load(table_ptr + block_index, mask=in_range, other=0)
    else:
        block_ids = tl.load(table_ptr + block_index)
    return block_ids.to(tl.int64), positions - block_index * BLOCK_SIZE


@triton.jit
def base2_scores(q, k, scale, softcap, slopes, distance):
    """Scores of one tile, [ROWS, TILE_KV], in base-2 units: scale, then soft cap, then ALiBi.

    `slopes` [ROWS, 1] and `softcap` may be None; `distance` is key position minus query position.
    """
    dots = tl.dot(q, k, input_precision="ieee")
    if softcap is not None:
        # tanh(x) = 1 - 2 / (exp(2x) + 1): right at both ends, where exp overflows to inf or underflows to 0
        doubled = dots * (scale / softcap) * (2.0 * LOG2_E)
        scores = (1.0 - 2.0 / (tl.exp2(doubled) + 1.0)) * (softcap * LOG2_E)
    else:
        scores = dots * (scale * LOG2_E)
    if slopes is not None:
        scores += slopes * distance.to(tl.float32) * LOG2_E
    return scores


@triton.jit
def accumulate(acc, m, l, scores, v, MASKED: tl.constexpr):  # noqa: E741 (l is the field's name for the sum)
    """One step of the running softmax. With MASKED, rows may be -inf throughout; they keep m = -inf and l = 0."""
    m_new = tl.maximum(m, tl.max(scores, axis=1))
    if MASKED:
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf would be NaN
    else:
        pivot = m_new
    p = tl.exp2(scores - pivot[:, None])
    decay = tl.exp2(m - pivot)
    l = l * decay + tl.sum(p, axis=1)  # noqa: E741
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, m_new, l


@triton.jit
def finish(acc, m, l):  # noqa: E741
    """Normalised output (0 for rows that saw nothing) and lse2 (-inf for them)."""
    empty = l == 0.0  # not `l > 0`: a NaN in K must stay visible in the output
    divisor = tl.where(empty, 1.0, l)
    out = acc / divisor[:, None]
    lse2 = tl.where(empty, float("-inf"), m + tl.log2(divisor))
    return out, lse2


@triton.jit
def attend_tiles(
    acc, m, l, q, row_positions, start, stop, seq_len, context_len,  # noqa: E741
    k_ptr, v_ptr, table_ptr, k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
    scale, softcap, slopes, window, tree_rows,
    HEAD_SIZE: tl.constexpr, HEAD_SIZE_V: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_KV: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Rows of one sequence over KV tiles [start, stop). Unmasked tiles are whole and visible to every row.

    `row_positions` [ROWS] is each row's place in the sequence, `context_len` that of the first new token. `tree_rows`
    [ROWS] points at each row's line of the tree mask, or is None.
    """
    dims = tl.arange(0, DIM)
    dims_v = tl.arange(0, DIM_V)
    for tile_start in range(start, stop, TILE_KV):
        positions = tile_start + tl.arange(0, TILE_KV)
        in_range = positions < seq_len
        block_ids, offsets = gather_slots(table_ptr, positions, in_range, BLOCK_SIZE, MASKED)
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
        distance = positions[None, :] - row_positions[:, None]  # [ROWS, TILE_KV]
        scores = base2_scores(q, k, scale, softcap, slopes, distance)
        if MASKED:
            visible = in_range[None, :]
            if CAUSAL:
                visible = visible & (distance <= 0)
            if window is not None:
                visible = visible & (distance > -window)
            if tree_rows is not None:
                column = positions - context_len
                is_new = (column >= 0) & in_range
                tree = tl.load(tree_rows[:, None] + column[None, :], mask=is_new[None, :], other=1)
                visible = visible & (tree != 0)
            scores = tl.where(visible, scores, float("-inf"))
        acc, m, l = accumulate(acc, m, l, scores, v, MASKED)  # noqa: E741
    return acc, m, l


def padded(size: int) -> int:
    """Width of a tile that holds `size` elements: a power of two, as Triton wants, and a matrix product's least."""
    return max(16, triton.next_power_of_2(size))


def paged_operands(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor
) -> dict[str, Any]:
    """The launch arguments that both kernels take of their checked operands."""
    _, block_size, num_kv_heads, head_size_v = v_cache.shape
    return {
        "q_ptr": q,
        "k_ptr": k_cache,
        "v_ptr": v_cache,
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
        "GROUP": q.shape[1] // num_kv_heads,
    }
