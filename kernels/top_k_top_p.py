"""Keep the tokens of each row that top-k, top-p and min-p allow, without sorting: the others become -inf, in place.

    order   by logit, largest first; equal logits by token id, lowest first
    top-k   the first k
    top-p   of those, each token before which less than p of their weight lies; weight_i = exp((logit_i - max) / temperature)
    min-p   of those, weight_i >= min_p

Program i owns row i. Fp32 numbers, their bits taken as integers (and negative ones mirrored), are ordered as the numbers
are, so a threshold is found exactly by narrowing a range of integers: each pass over the row counts (for top-k) or weighs
(for top-p) what lies above three pivots, which quarters the range, until the range holds one token, exactly what is
wanted, or one value, of which the first tokens are kept. Rows with nothing to do cost three loads.

Bytes moved: (passes + 2) * num_filtered_rows * vocab * element_size, all but the first pass from the second-level cache
             where rows fit; passes <= 16 for top-k, <= 17 for top-p, about half of that where logits differ
Reference:   `reference.apply_top_k_top_p_min_p`
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._sampling_checks import check_filters

_LOWEST = tl.constexpr(-(2**31))
_LOG2_E = tl.constexpr(1.4426950408889634)
_COUNT_BITS = tl.constexpr(10)  # per lane and pivot, three of which share an int32
_COUNT_MASK = tl.constexpr(1023)


@triton.jit
def _load(row_ptr, ids, vocab):
    return tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _key(x):
    """int32, ordered as the fp32 x is; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, peak, rate):
    """exp((x - peak) / temperature), 1 for the most likely token."""
    return tl.exp2((x - peak) * rate)


@triton.jit
def _above(row_ptr, vocab, a, b, c, peak, rate, BY_WEIGHT: tl.constexpr, TILE: tl.constexpr):
    """How many tokens have keys >= a, b and c, and (BY_WEIGHT) what they weigh together: six numbers."""
    a, b, c = a.to(tl.int32), b.to(tl.int32), c.to(tl.int32)
    counts = tl.zeros([TILE], tl.int32)
    weight_a = tl.zeros([TILE], tl.float32)
    weight_b = tl.zeros([TILE], tl.float32)
    weight_c = tl.zeros([TILE], tl.float32)
    # four tiles under way: nothing in this loop is a matrix product, so Triton pipelines it only when told to
    for start in tl.range(0, vocab, TILE, num_stages=4):  # pyright: ignore[reportGeneralTypeIssues]
        ids = start + tl.arange(0, TILE)
        x = _load(row_ptr, ids, vocab)
        key = _key(x)
        real = ids < vocab
        above_a, above_b, above_c = real & (key >= a), real & (key >= b), real & (key >= c)
        counts += above_a.to(tl.int32)
        counts += above_b.to(tl.int32) << _COUNT_BITS
        counts += above_c.to(tl.int32) << (2 * _COUNT_BITS)
        if BY_WEIGHT:
            weight = _weight(x, peak, rate)
            weight_a += tl.where(above_a, weight, 0.0)
            weight_b += tl.where(above_b, weight, 0.0)
            weight_c += tl.where(above_c, weight, 0.0)
    return (
        tl.sum(counts & _COUNT_MASK, axis=0),
        tl.sum((counts >> _COUNT_BITS) & _COUNT_MASK, axis=0),
        tl.sum(counts >> (2 * _COUNT_BITS), axis=0),
        tl.sum(weight_a, axis=0),
        tl.sum(weight_b, axis=0),
        tl.sum(weight_c, axis=0),
    )


@triton.jit
def _pick(reach_a, reach_b, reach_c, none, one, two, three):
    return tl.where(reach_c, three, tl.where(reach_b, two, tl.where(reach_a, one, none)))


@triton.jit
def _bracket(
    row_ptr, vocab, low, high, count_low, target, peak, rate,
    BY_WEIGHT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Narrow [low, high) around the key where the measure of all keys from there up crosses `target`.

    The measure is the count, or the weight. Always measure(low) >= target > measure(high). Ends with one token or one
    key in the range, or with exactly `target` tokens from `low` up. Returns low, high, both counts and weight(high).
    """
    count_high = 0
    weight_high = 0.0
    while (high - low > 1) & (count_low - count_high > 1) & (BY_WEIGHT | (count_low != target)):
        width = high - low
        a, b, c = low + width // 4, low + width // 2, low + width // 4 * 3 + width % 4 * 3 // 4
        count_a, count_b, count_c, weight_a, weight_b, weight_c = _above(
            row_ptr, vocab, a, b, c, peak, rate, BY_WEIGHT, TILE
        )
        if BY_WEIGHT:
            reach_a, reach_b, reach_c = weight_a >= target, weight_b >= target, weight_c >= target
        else:
            reach_a, reach_b, reach_c = count_a >= target, count_b >= target, count_c >= target
        # measures fall from a to c: the new range lies between the last pivot that reaches and the next
        high = _pick(reach_a, reach_b, reach_c, a, b, c, high)
        count_high = _pick(reach_a, reach_b, reach_c, count_a, count_b, count_c, count_high)
        weight_high = _pick(reach_a, reach_b, reach_c, weight_a, weight_b, weight_c, weight_high)
        low = _pick(reach_a, reach_b, reach_c, low, a, b, c)
        count_low = _pick(reach_a, reach_b, reach_c, count_low, count_a, count_b, count_c)
    return low, high, count_low, count_high, weight_high


@triton.jit
def _apply_top_k_top_p_min_p_kernel(
    logits_ptr, top_k_ptr, top_p_ptr, min_p_ptr, temperatures_ptr, vocab, logits_stride_row,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid (num_rows,). Kept are keys >= `floor` and the first `ties` tokens of key `floor` - 1, then what min-p allows."""
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    by_k, by_p = (top_k > 0) & (top_k < vocab), top_p < 1.0
    heat = tl.full([], 1.0, tl.float32)
    if temperatures_ptr is not None:
        heat = tl.load(temperatures_ptr + row)
    is_filtered = by_k | by_p | (min_p > 0.0)
    if (is_filtered == 0) | ((heat > 0.0) == 0):
        return
    row_ptr = logits_ptr + row * logits_stride_row
    best = tl.full([TILE], float("-inf"), tl.float32)
    is_nan = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab, TILE):
        x = _load(row_ptr, start + tl.arange(0, TILE), vocab)
        best = tl.maximum(best, x)
        is_nan |= (x != x).to(tl.int32)
    peak = tl.max(best, axis=0)
    if (tl.abs(peak) == float("inf")) | (tl.max(is_nan, axis=0) != 0):
        return  # nothing may hide from `sample` that the row is bad
    rate = _LOG2_E / tl.minimum(tl.maximum(heat, 1e-30), 1e30)  # finite, and not 0
    ceiling = _key(peak).to(tl.int64) + 1
    floor = tl.full([], _LOWEST, tl.int64)
    ties = tl.full([], 0, tl.int32)
    if by_k:
        low, high, count_low, count_high, _ = _bracket(
            row_ptr, vocab, floor, ceiling, vocab, top_k, peak, rate, False, TILE
        )
        floor = low
        if count_low > top_k:
            floor = high
            ties = top_k - count_high
    if by_p:
        count, _, _, weight, _, _ = _above(
            row_ptr, vocab, floor, floor, floor, peak, rate, True, TILE
        )
        tie_weight = _weight(_value(floor - 1), peak, rate)
        tied_weight = tl.where(ties > 0, tie_weight * ties.to(tl.float32), 0.0)
        target = tl.maximum(top_p, 1e-30) * (weight + tied_weight)
        if weight >= target:  # the last token kept is among those
            low, high, count_low, count_high, weight_high = _bracket(
                row_ptr, vocab, floor, ceiling, count, target, peak, rate, True, TILE
            )
            one_value = high - low == 1  # else it is one token, whose key `low` need not be
            one_weight = tl.where(one_value, _weight(_value(low), peak, rate), 1.0)
            wanted = tl.ceil((target - weight_high) / one_weight)
            kept = tl.minimum(wanted, 1.0 * (count_low - count_high)).to(tl.int32)
            kept = tl.maximum(kept, 1)
            is_whole = (one_value == 0) | (kept == count_low - count_high)
            floor = tl.where(is_whole, low, high)
            ties = tl.where(is_whole, 0, kept)
        else:
            wanted = tl.ceil((target - weight) / tie_weight)
            ties = tl.maximum(tl.minimum(wanted, 1.0 * ties).to(tl.int32), 1)
    if ties > 0:
        floor -= 1
        _drop_late_ties(row_ptr, vocab, floor, ties, TILE)
    _drop_below(row_ptr, vocab, floor, min_p, peak, rate, TILE)


@triton.jit
def _drop_below(row_ptr, vocab, floor, min_p, peak, rate, TILE: tl.constexpr):
    for start in range(0, vocab, TILE):
        ids = start + tl.arange(0, TILE)
        x = _load(row_ptr, ids, vocab)
        drop = (_key(x) < floor.to(tl.int32)) | (_weight(x, peak, rate) < min_p)
        nothing = tl.full([TILE], float("-inf"), tl.float32).to(row_ptr.dtype.element_ty)
        tl.store(row_ptr + ids, nothing, mask=(ids < vocab) & drop)


@triton.jit
def _drop_late_ties(row_ptr, vocab, tie, kept, TILE: tl.constexpr):
    """Drop all but the first `kept` tokens whose key is `tie`."""
    seen = tl.full([], 0, tl.int32)
    for start in range(0, vocab, TILE):
        ids = start + tl.arange(0, TILE)
        is_tie = (_key(_load(row_ptr, ids, vocab)) == tie.to(tl.int32)) & (ids < vocab)
        place = seen + tl.cumsum(is_tie.to(tl.int32), axis=0)
        nothing = tl.full([TILE], float("-inf"), tl.float32).to(row_ptr.dtype.element_ty)
        tl.store(row_ptr + ids, nothing, mask=is_tie & (place > kept))
        seen += tl.sum(is_tie.to(tl.int32), axis=0)


@dataclass(frozen=True)
class FilterPlan:
    """Launch choices of the filter."""

    tile: int  # tokens of one step, a power of two; at least vocab / 1023
    num_warps: int


def plan_apply_top_k_top_p_min_p(*, vocab: int) -> FilterPlan:
    """Sixteen tokens a thread: the passes wait for memory, so as many loads as registers allow are under way."""
    least = triton.next_power_of_2(triton.cdiv(vocab, 1023))  # a lane's counts have ten bits
    tile = max(least, min(4096, triton.next_power_of_2(vocab)))
    return FilterPlan(tile, num_warps=max(1, min(16, tile // 256)))


def apply_top_k_top_p_min_p(
    logits: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    temperatures: torch.Tensor | None = None,
    *,
    plan: FilterPlan | None = None,
) -> None:
    """Set what a row's top-k, top-p and min-p do not allow to -inf, in place.

    logits        [num_rows, vocab]   fp32 | fp16 | bf16, any row stride, last axis contiguous
    top_k         [num_rows] int32    <= 0, or >= vocab: off. Exactly k tokens stay: of equal logits those of lowest id
    top_p         [num_rows] fp32     >= 1: off. The most likely token always stays
    min_p         [num_rows] fp32     <= 0: off
    temperatures  [num_rows] fp32     that the row is to be drawn at; <= 0: the row is left alone. None: 1
    Weights are added in fp32: top-p may keep one token more or less where the sum is within rounding of p. A row that
    has a NaN, or whose largest logit is infinite, is left alone.
    Raises ValueError naming the argument, what was expected and what came.
    """
    check_filters(logits, top_k, top_p, min_p, temperatures)
    num_rows, vocab = logits.shape
    if logits.numel() == 0:
        return
    if plan is None:
        plan = plan_apply_top_k_top_p_min_p(vocab=vocab)
    _apply_top_k_top_p_min_p_kernel[(num_rows,)](
        logits_ptr=logits,
        top_k_ptr=top_k,
        top_p_ptr=top_p,
        min_p_ptr=min_p,
        temperatures_ptr=temperatures,
        vocab=vocab,
        logits_stride_row=logits.stride(0),
        TILE=plan.tile,
        num_warps=plan.num_warps,
        enable_fp_fusion=True,
    )
