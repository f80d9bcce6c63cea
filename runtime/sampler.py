"""Choosing the next token of each row from its logits. No row's draw depends on its neighbours.

A draw is the inverse of the cumulative distribution at one uniform number, and that number is a hash of (seed + sample
index, place in the output): no generator state exists that batching, chunking or preemption could disturb.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from .metadata import SamplerOutput, SequenceGroupMetadata
from .snapshots import DecodeRows, Snapshots


class SamplingRows(NamedTuple):
    """Sampling parameters as columns, one entry per row of logits."""

    temperature: np.ndarray  # float64
    top_k: np.ndarray  # int64, -1 off
    top_p: np.ndarray  # float64, 1 off
    min_p: np.ndarray  # float64, 0 off
    seed: np.ndarray  # uint64, sample index included
    step: np.ndarray  # uint64, tokens drawn before this one
    num_candidates: np.ndarray  # int64, tokens asked for: 1, or more for a beam search


def sampling_rows(seq_group_metadata_list: Sequence[SequenceGroupMetadata]) -> SamplingRows:
    """Columns for the rows that `build_launch_args` asks logits for, in the same order."""
    snapshots = Snapshots.of(seq_group_metadata_list)
    if snapshots.decodes is None:
        return _rows_of(snapshots.others)
    decodes = _rows_of_decodes(snapshots.decodes)
    if not snapshots.others:
        return decodes
    return SamplingRows(*map(np.concatenate, zip(decodes, _rows_of(snapshots.others), strict=True)))


def _rows_of_decodes(rows: DecodeRows) -> SamplingRows:
    return SamplingRows(
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seed,
        (rows.num_tokens - rows.num_prompt_tokens).astype(np.uint64),
        np.ones(len(rows), np.int64),
    )


def _rows_of(seq_group_metadata_list: Sequence[SequenceGroupMetadata]) -> SamplingRows:
    rows = []
    for metadata in seq_group_metadata_list:
        if not metadata.do_sample:
            continue
        params = metadata.sampling_params
        if metadata.is_first_sample:
            draws = [(index, 0) for index in range(metadata.num_logits)]
        else:
            draws = [(data.index, metadata.num_drawn(data)) for _, data, _ in metadata.rows()]
        num_candidates = metadata.num_candidates
        for index, step in draws:
            rows.append((*params.draw(index), step, num_candidates))
    columns = list(zip(*rows, strict=True)) if rows else [()] * 7
    dtypes = (np.float64, np.int64, np.float64, np.float64, np.uint64, np.uint64, np.int64)
    return SamplingRows(
        *(np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True))
    )


def uniform(seed: np.ndarray, step: np.ndarray) -> np.ndarray:
    """float64 in (0, 1), a function of (seed, step) alone: two rounds of the SplitMix64 finaliser."""
    x = _mix(_mix(seed + np.uint64(0x9E3779B97F4A7C15)) ^ (step * np.uint64(0xD1342543DE82EF95)))
    return ((x >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(logits: torch.Tensor, rows: SamplingRows) -> SamplerOutput:
    """Draw one token per row of `logits` [R, vocab], or the most likely ones where a beam search asks for several.

    Order: temperature, top-k, top-p (on what top-k left), min-p, draw. Temperature 0 takes the most likely token. A row
    whose logits are not finite gets token -1; the others are not touched by it.
    """
    logits = logits.float()
    normaliser = logits.logsumexp(dim=-1)
    # not finite: a NaN, an infinite logit, or nothing but -inf
    is_finite = normaliser.isfinite()
    searching = np.flatnonzero(rows.num_candidates > 1)
    token_ids = _sample_rows(logits, rows)
    logprobs = logits.gather(1, token_ids[:, None])[:, 0] - normaliser
    token_ids.masked_fill_(~is_finite, -1)
    if len(searching) == 0:
        return SamplerOutput(token_ids.cpu().numpy(), logprobs.cpu().numpy())
    stops = np.cumsum(rows.num_candidates)
    out_ids, out_logprobs = np.zeros(stops[-1], np.int64), np.full(stops[-1], -np.inf, np.float32)
    single = rows.num_candidates == 1
    out_ids[stops[single] - 1] = token_ids.cpu().numpy()[single]
    out_logprobs[stops[single] - 1] = logprobs.cpu().numpy()[single]
    for count in np.unique(rows.num_candidates[searching]).tolist():
        chosen = np.flatnonzero(rows.num_candidates == count)
        index = torch.from_numpy(chosen).to(logits.device)
        ids, values = _most_likely(logits[index], min(count, logits.shape[1]))
        values = values - normaliser[index, None]
        ids.masked_fill_(~is_finite[index, None], -1)
        places = (stops[chosen] - count)[:, None] + np.arange(ids.shape[1])
        out_ids[places], out_logprobs[places] = ids.cpu().numpy(), values.cpu().numpy()
    return SamplerOutput(out_ids, out_logprobs)


def _sample_rows(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """One token per row, int64 [R]; of no meaning where the logits are not finite."""
    token_ids = logits.argmax(dim=-1)
    random = np.flatnonzero(rows.temperature > 0)
    if len(random):
        filtered = (rows.top_k[random] > 0) | (rows.top_p[random] < 1) | (rows.min_p[random] > 0)
        draws = torch.from_numpy(uniform(rows.seed, rows.step)).to(logits.device)
        for chosen, draw in ((random[~filtered], _draw), (random[filtered], _draw_filtered)):
            if len(chosen):
                index = torch.from_numpy(chosen).to(logits.device)
                picked = SamplingRows(*(column[chosen] for column in rows))
                token_ids[index] = draw(_scaled(logits[index], picked), draws[index], picked)
    return token_ids


def _most_likely(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, logits) of the `count` largest logits of each row, ties to the lower id, [R, count] each."""
    values, token_ids = logits.topk(count, dim=-1)
    # topk leaves the order of equal values open: order what it found, then mend what lies beyond the cut
    token_ids, order = token_ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    token_ids = token_ids.gather(1, order)
    for row in ((logits >= values[:, -1:]).sum(-1) > count).nonzero()[:, 0].tolist():
        exact = logits[row].sort(descending=True, stable=True)
        values[row], token_ids[row] = exact.values[:count], exact.indices[:count]
    return token_ids, values


def _scaled(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """float64 logits over temperature, shifted so that the largest is 0: a tiny temperature cannot overflow."""
    logits = logits.double()
    temperature = torch.from_numpy(rows.temperature).to(logits.device)
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]


def _invert_cdf(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """First index whose cumulative weight exceeds draw * total; weights float64 [R, N] >= 0."""
    cdf = weights.cumsum(dim=-1)
    index = torch.searchsorted(cdf, (draws * cdf[:, -1])[:, None], right=True)[:, 0]
    return index.clamp_(max=weights.shape[1] - 1)


def _draw(scaled: torch.Tensor, draws: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    return _invert_cdf(scaled.exp(), draws)


def _draw_filtered(scaled: torch.Tensor, draws: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    ordered, token_ids = scaled.sort(dim=-1, descending=True, stable=True)
    weights = ordered.exp()  # 1 for the most likely token
    vocab = weights.shape[1]
    top_k = torch.from_numpy(np.where(rows.top_k > 0, rows.top_k, vocab)).to(weights.device)
    weights[torch.arange(vocab, device=weights.device) >= top_k[:, None]] = 0.0
    top_p = torch.from_numpy(rows.top_p).to(weights.device)
    before = weights.cumsum(dim=-1) - weights  # weight of all more likely tokens
    weights[before >= top_p[:, None] * weights.sum(dim=-1, keepdim=True)] = 0.0
    weights[:, 0] = 1.0  # top_p below the most likely token's probability keeps that token
    min_p = torch.from_numpy(rows.min_p).to(weights.device)
    weights[weights < min_p[:, None]] = 0.0
    return token_ids.gather(1, _invert_cdf(weights, draws)[:, None])[:, 0]
