"""Draws on a CPU: one token per row, by inverting the row's cumulative distribution at one number. Nothing is sorted whole.

    no filter   in order of token ids. Weights are summed in chunks of 64, so a draw is a search among the sums and one in a
                chunk; where the temperature is 1 they are the weights that the log probabilities need anyway
    filters     in order of probability, ties to the lower id. Only the values of the most likely tokens are put in order:
                512 first, then 8192, then all, until what the filters leave is among them. The id of the drawn value is
                looked up afterwards

How far a row has to go changes none of its numbers: the weights are those of the same values, added in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

_CHUNK = 64
_RUNGS = (512, 8192)
# As the kernels take them: below, logits that differ are far apart all the same, and the fp32 value might be 0; above, all
# logits are equal, and it might be infinite, by which -inf cannot be divided.
_TEMPERATURES = 1e-30, 1e30


class Draws(NamedTuple):
    """What draws depend on beside the logits, one entry per row; see `sampling_rows.SamplingRows`."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    uniform: np.ndarray  # float64 in (0, 1)

    def take(self, rows: np.ndarray) -> Draws:
        return Draws(*(column[rows] for column in self))


class Weights(NamedTuple):
    """exp((logit - largest) / temperature) of some rows, in chunks; the last chunk is filled up with zeros."""

    chunks: np.ndarray  # float32 [R, C, 64]
    sums: np.ndarray  # float64 [R, C]
    total: np.ndarray  # float64 [R]


def most_likely(logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(lowest id of the largest logit, that logit) of each row, float32 [R, vocab]. The logit is not finite where there is a
    NaN, an infinite logit, or nothing but -inf."""
    values = logits.numpy()
    best = values.argmax(axis=1)  # of a NaN if there is one
    return best, values[np.arange(len(values)), best]


def weigh(logits: torch.Tensor, peak: np.ndarray, temperature: np.ndarray | None = None) -> Weights:
    num_rows, vocab = logits.shape
    num_chunks = -(-vocab // _CHUNK)
    # numpy's memory, as that of the partitions below: torch's is aligned, and between the two the heap would grow
    weights = torch.from_numpy(np.empty((num_rows, num_chunks * _CHUNK), np.float32))
    weights[:, vocab:] = 0
    inner = weights[:, :vocab]
    torch.sub(logits, torch.from_numpy(peak)[:, None], out=inner)
    if temperature is not None:
        inner /= _divisor(temperature)
    inner.exp_()
    chunks = weights.view(num_rows, num_chunks, _CHUNK)
    sums = chunks.sum(dim=-1).numpy().astype(np.float64)
    # cumulative, because that adds up one row as it does many
    return Weights(chunks.numpy(), sums, sums.cumsum(axis=1)[:, -1])


def _divisor(temperature: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(temperature.clip(*_TEMPERATURES).astype(np.float32))[:, None]


def draw(
    logits: torch.Tensor,
    best: np.ndarray,
    peak: np.ndarray,
    draws: Draws,
    weights: Weights | None = None,
) -> np.ndarray:
    """One token per row, int64 [R]; of no meaning where the largest logit is not finite.

    logits      float32 [R, vocab]
    best, peak  as `most_likely` has them
    weights     those of temperature 1, if they are known
    """
    token_ids = best.astype(np.int64)
    vocab = logits.shape[1]
    random = (draws.temperature > 0) & np.isfinite(peak)
    if not random.any():
        return token_ids
    by_k = (draws.top_k > 0) & (draws.top_k < vocab)
    filtered = by_k | (draws.top_p < 1) | (draws.min_p > 0)
    # top-p needs to know what all tokens weigh, unless top-k leaves a few
    weighed = random & (~filtered | ((draws.top_p < 1) & ~by_k))
    known = weighed & (draws.temperature == 1) if weights is not None else np.zeros_like(weighed)
    total = np.zeros(len(token_ids))
    if weights is not None:
        rows = np.flatnonzero(known & ~filtered)
        token_ids[rows] = _invert(weights, rows, draws.uniform[rows])
        total[known] = weights.total[known]
    rows = np.flatnonzero(weighed & ~known)
    if len(rows):
        own = weigh(_rows(logits, rows), peak[rows], draws.temperature[rows])
        total[rows] = own.total
        plain = np.flatnonzero(~filtered[rows])
        token_ids[rows[plain]] = _invert(own, plain, draws.uniform[rows[plain]])
    rows = np.flatnonzero(random & filtered)
    if len(rows):
        values = _rows(logits, rows).numpy()
        token_ids[rows] = _draw_filtered(values, peak[rows], draws.take(rows), total[rows])
    return token_ids


def _rows(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    return logits if len(rows) == len(logits) else logits[torch.from_numpy(rows)]


def _invert(weights: Weights, rows: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """First token whose cumulative weight exceeds uniform * total, of the given rows of `weights`."""
    sums, at = weights.sums[rows], np.arange(len(rows))
    cdf = sums.cumsum(axis=1)
    target = uniform * cdf[:, -1]
    chunk = _first_above(cdf, target, sums)
    inner = weights.chunks[rows, chunk].astype(np.float64)
    inside = _first_above(inner.cumsum(axis=1), target - (cdf[at, chunk] - sums[at, chunk]), inner)
    return chunk * _CHUNK + inside


def _first_above(cdf: np.ndarray, target: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """First place whose cumulative weight exceeds the target, or the last one that weighs anything."""
    place = (cdf <= target[:, None]).sum(axis=1)
    last = weights.shape[1] - 1 - (weights[:, ::-1] > 0).argmax(axis=1)
    return np.minimum(place, last)


def _draw_filtered(
    logits: np.ndarray, peak: np.ndarray, draws: Draws, total: np.ndarray
) -> np.ndarray:
    """One token per row. `total` is what a row's tokens weigh together, where top-p needs it and top-k is off."""
    token_ids = np.zeros(len(logits), np.int64)
    left = np.arange(len(logits))
    vocab = logits.shape[1]
    for size in (*(rung for rung in _RUNGS if rung < vocab), vocab):
        found, fits = _try(
            logits[left] if len(left) < len(logits) else logits,
            size,
            peak[left],
            draws.take(left),
            total[left],
        )
        token_ids[left[fits]] = found[fits]
        left = left[~fits]
        if len(left) == 0:
            break
    return token_ids


def _try(
    logits: np.ndarray, size: int, peak: np.ndarray, draws: Draws, total: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(token of each row, whether what its filters leave is among its `size` most likely tokens and so the token is right)."""
    vocab, at = logits.shape[1], np.arange(len(logits))
    if size < vocab:
        largest = np.partition(logits, vocab - size, axis=1)[:, vocab - size :]
    else:
        largest = logits.copy()
    largest.sort(axis=1)
    ordered = largest[:, ::-1]
    heat = draws.temperature.clip(*_TEMPERATURES)[:, None]
    weights = np.exp((ordered.astype(np.float64) - peak[:, None]) / heat)
    top_k = np.where(draws.top_k > 0, np.minimum(draws.top_k, vocab), vocab)
    keep = np.arange(size) < top_k[:, None]
    cdf = (weights * keep).cumsum(axis=1)
    by_k = top_k < vocab
    whole = np.where(by_k, cdf[:, -1], total)  # of what top-k leaves
    keep &= (cdf - weights < draws.top_p[:, None] * whole[:, None]) | (draws.top_p[:, None] >= 1)
    keep[:, 0] = True
    keep &= (weights >= draws.min_p[:, None]) & (weights > 0)
    num_kept = keep.sum(axis=1)  # a beginning of the order
    fits = (top_k <= size) | ((num_kept < size) & ((draws.top_p >= 1) | ~by_k))
    target = draws.uniform * cdf[at, num_kept - 1]
    place = np.minimum((cdf <= target[:, None]).sum(axis=1), num_kept - 1)
    value = ordered[at, place]
    tie = place - (ordered > value[:, None]).sum(axis=1)
    token_ids = np.zeros(len(logits), np.int64)
    for row in np.flatnonzero(fits).tolist():
        token_ids[row] = np.flatnonzero(logits[row] == value[row])[tie[row]]
    return token_ids, fits
