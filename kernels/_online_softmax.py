"""The running softmax over KV tiles, shared by paged decode and paged prefill.

A program keeps, for each of its query rows, the largest score seen `m`, the sum `l = sum(exp2(score - m))` and the
unnormalised output `acc = sum(exp2(score - m) * v)`. All scores are in base-2 units (natural score * log2(e)), because
`exp2` is one instruction on a GPU; `lse2 = m + log2(l)` is in the same units, and leaves the kernels as natural log.
"""

from __future__ import annotations

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
