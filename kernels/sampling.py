"""Draw one token per row by the Gumbel trick, from randomness that is a function of the row's seed, step and token ids.

    token = argmax_i (logit_i - max) / temperature + g_i,   g_i = -log(e_i),   e_i = -log(1 - v_i)
    v_i   = (word_i + 1/2) / 2^32,   word_i = word i // 1024 % 4 of Philox4x32-10(counter_i, key = seed)
    counter_i = (1024 * (i // 4096) + i % 1024, 0, low and high half of step)

Equal scores go to the lowest id, and temperature 0 takes the largest logit. Program i owns row i and passes over it
twice: for the largest logit, and, where the temperature is not 0, for the draw. One counter serves four tokens 1024
apart, so that all four loads are of neighbours. This numbering is part of the result: plans may not change it.

Bytes moved: num_rows * (2 * vocab * element_size + 28), half of it from the second-level cache
Reference:   `reference.sample`
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._sampling_checks import check_sample

_LANES = tl.constexpr(1024)  # tokens between two words of one counter
_NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def exponential(word):
    """-log(1 - v) of v = (word + 1/2) / 2^32, exact to fp32 for small v: the winner of a large vocabulary has one."""
    v = word.to(tl.float32) * (1 / 2**32) + (1 / 2**33)
    v = tl.minimum(v, 1 - 1 / 2**24)  # the largest words round to 1, whose logarithm is infinite
    # below 1/64 the subtraction loses digits and four terms of the series do not
    series = v * (1.0 + v * (0.5 + v * (0.3333333333333333 + v * 0.25)))
    return tl.where(v < 1 / 64, series, -tl.log(1.0 - v))


@triton.jit
def _best(best, best_id, score, ids):
    """Per lane, the better of two; ids only grow, so keeping the first of equals keeps the lowest id."""
    better = score > best
    return tl.where(better, score, best), tl.where(better, ids, best_id)


@triton.jit
def _lowest_of_best(best, best_id):
    top = tl.max(best, axis=0)
    return top, tl.min(tl.where(best == top, best_id, _NOWHERE), axis=0)


@triton.jit
def _sample_kernel(
    token_ids_ptr, logits_ptr, temperatures_ptr, seeds_ptr, steps_ptr, vocab, logits_stride_row,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride_row
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_id = tl.full([TILE], _NOWHERE, tl.int32)
    is_nan = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab, TILE):
        ids = start + tl.arange(0, TILE)
        logits = tl.load(logits_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        is_nan |= (logits != logits).to(tl.int32)
        best, best_id = _best(best, best_id, logits, ids)
    peak, token_id = _lowest_of_best(best, best_id)
    temperature = tl.load(temperatures_ptr + row)
    is_finite = (tl.abs(peak) < float("inf")) & (tl.max(is_nan, axis=0) == 0)
    if (temperature > 0) & is_finite:
        # 0 / 0 if it were subnormal and flushed, and of -inf / inf
        heat = tl.minimum(tl.maximum(temperature, 1e-30), 1e30)
        seed, step = tl.load(seeds_ptr + row), tl.load(steps_ptr + row)
        lanes = tl.arange(0, _LANES)
        zero = lanes * 0
        low, high = zero + step.to(tl.int32), zero + (step >> 32).to(tl.int32)
        winner = tl.full([_LANES], float("-inf"), tl.float32)
        winner_id = tl.full([_LANES], _NOWHERE, tl.int32)
        for start in range(0, vocab, 4 * _LANES):
            words = tl.philox(seed, start // 4 + lanes, zero, low, high)
            for i in tl.static_range(4):  # pyright: ignore[reportGeneralTypeIssues]
                ids = start + i * _LANES + lanes
                mask = ids < vocab
                logits = tl.load(logits_ptr + ids, mask=mask, other=float("-inf")).to(tl.float32)
                score = (logits - peak) / heat - tl.log(exponential(words[i]))
                winner, winner_id = _best(winner, winner_id, score, ids)
        _, token_id = _lowest_of_best(winner, winner_id)
    tl.store(token_ids_ptr + row, tl.where(is_finite, token_id, -1).to(tl.int64))


@dataclass(frozen=True)
class SamplePlan:
    """Launch choices of one draw."""

    tile: int  # tokens of one step of the search for the largest logit, a power of two
    num_warps: int


def plan_sample(*, vocab: int) -> SamplePlan:
    """Eight warps: four tokens of a counter's 1024 lanes a thread, and 16 bytes a load where logits are fp32."""
    return SamplePlan(tile=min(4096, triton.next_power_of_2(vocab)), num_warps=8)


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    *,
    plan: SamplePlan | None = None,
) -> torch.Tensor:
    """One token id per row, int64 [num_rows]; -1 for a row with a NaN, an infinite logit, or nothing but -inf.

    logits        [num_rows, vocab]   fp32 | fp16 | bf16, any row stride, last axis contiguous; -inf is never drawn
    temperatures  [num_rows] fp32     >= 0
    seeds, steps  [num_rows] int64    any; a draw depends on these, the temperature and the row's logits alone
    Raises ValueError naming the argument, what was expected and what came.
    """
    check_sample(logits, temperatures, seeds, steps)
    num_rows, vocab = logits.shape
    token_ids = seeds.new_empty(num_rows)
    if num_rows == 0:
        return token_ids
    if plan is None:
        plan = plan_sample(vocab=vocab)
    _sample_kernel[(num_rows,)](
        token_ids_ptr=token_ids,
        logits_ptr=logits,
        temperatures_ptr=temperatures,
        seeds_ptr=seeds,
        steps_ptr=steps,
        vocab=vocab,
        logits_stride_row=logits.stride(0),
        TILE=plan.tile,
        num_warps=plan.num_warps,
        enable_fp_fusion=True,
    )
    return token_ids
