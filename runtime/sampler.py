"""Choosing the next token of each row from its logits. No row's choice depends on its neighbours.

A draw depends on the row's logits and parameters and on a hash of (seed + sample index, place in the output): no generator
state exists that batching, chunking or preemption could disturb. What a request wants done to its logits before is in
`logits_processing`, the draw on a CPU in `cpu_draw`, log probabilities in `top_logprobs`; docs/sampling.md has the order.

`sample_on_device` does not wait for the device; `DeviceSamples.fetch` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from .. import kernels
from . import cpu_draw
from .logits_processing import LogitsProcessing
from .metadata import SampleLogprobs, SamplerOutput
from .sampling_rows import SamplingRows, uniform
from .top_logprobs import DeviceLogprobs, DevicePrompt, most_likely, token_logprobs

_NOTHING_LEFT = (
    "no token is left to choose: after what was asked for, no finite logit is the largest"
)
# numbers of logits a CPU works on at a time, so that what it makes of them stays in the cache
_BLOCK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class DeviceSamples:
    """What a step has drawn, on the device; N samples in row order, as in `SamplerOutput`.

    token_ids  int64 [N], -1 where there is none
    logprobs   float32 [N]
    raw_fault  bool [N]: the model's own logits were not finite; None where nothing came between them and the draw
    details    (places of samples, what they are worth), for those that ask
    errors     what is known on the host, by place
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    raw_fault: torch.Tensor | None = None
    details: list[tuple[np.ndarray, DeviceLogprobs]] = field(default_factory=list)
    prompts: list[DevicePrompt] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)

    def fetch(self) -> SamplerOutput:
        """Wait for the device."""
        token_ids, logprobs = self.token_ids.cpu().numpy(), self.logprobs.cpu().numpy()
        errors = self.errors
        if self.raw_fault is not None:
            lost = np.flatnonzero((token_ids < 0) & ~self.raw_fault.cpu().numpy())
            errors = dict.fromkeys(lost.tolist(), _NOTHING_LEFT) | errors
        return SamplerOutput(
            token_ids,
            logprobs,
            tuple(SampleLogprobs(places, tokens.fetch()) for places, tokens in self.details),
            tuple(prompt.fetch() for prompt in self.prompts),
            errors,
        )


def sample(logits: torch.Tensor, rows: SamplingRows) -> SamplerOutput:
    """As `sample_on_device`, fetched."""
    return sample_on_device(logits, rows).fetch()


def sample_on_device(
    logits: torch.Tensor,
    rows: SamplingRows,
    processing: LogitsProcessing | None = None,
    prompts: Sequence[DevicePrompt] = (),
) -> DeviceSamples:
    """Draw one token per row of `logits` [R, vocab], or the most likely ones where a beam search asks for several.

    Temperature 0 takes the most likely token, of equally likely ones the lowest id. A row whose logits are not finite, or
    that is left without a token, gets token -1; the others are not touched by it.
    processing  what one step has found out for the next; None for nothing
    prompts     handed through
    """
    processing = LogitsProcessing() if processing is None else processing
    processing.begin_step()
    num_rows, vocab = logits.shape
    size = num_rows if logits.is_cuda else max(1, _BLOCK_ELEMENTS // max(vocab, 1))
    blocks, start = [], 0
    for first in range(0, num_rows, size):
        block = rows if size >= num_rows else _slice(rows, first, first + size)
        blocks.append(_sample_block(logits[first : first + size], block, processing, start))
        start += len(blocks[-1].token_ids)
    if len(blocks) == 1:
        one = blocks[0]
        return DeviceSamples(
            one.token_ids, one.logprobs, one.raw_fault, one.details, list(prompts), one.errors
        )
    if not blocks:
        none = torch.zeros(0, device=logits.device)
        return DeviceSamples(none.long(), none, prompts=list(prompts))
    faults = [
        torch.ones_like(b.token_ids, dtype=torch.bool) if b.raw_fault is None else b.raw_fault
        for b in blocks
    ]
    return DeviceSamples(
        torch.cat([b.token_ids for b in blocks]),
        torch.cat([b.logprobs for b in blocks]),
        torch.cat(faults) if any(b.raw_fault is not None for b in blocks) else None,
        [detail for b in blocks for detail in b.details],
        list(prompts),
        {place: error for b in blocks for place, error in b.errors.items()},
    )


def _slice(rows: SamplingRows, start: int, stop: int) -> SamplingRows:
    extras = tuple(e._replace(row=e.row - start) for e in rows.extras if start <= e.row < stop)
    return SamplingRows(*(column[start:stop] for column in rows.columns), extras=extras)


class _Chosen(NamedTuple):
    """Of a block of rows: a token of each, whether the row has any, and the logsumexp of its raw logits."""

    token_ids: torch.Tensor  # int64 [R]
    is_valid: torch.Tensor  # bool [R]
    raw_is_finite: torch.Tensor  # bool [R]
    normaliser: torch.Tensor  # float32 [R]


class _Work(NamedTuple):
    """Logits of the rows `at`, processed."""

    at: np.ndarray  # int64 [n], ascending
    logits: torch.Tensor  # float32 [n, vocab]

    def replace_in(self, logits: torch.Tensor) -> None:
        logits[torch.from_numpy(self.at).to(logits.device)] = self.logits


def _sample_block(
    logits: torch.Tensor, rows: SamplingRows, processing: LogitsProcessing, first_sample: int
) -> DeviceSamples:
    """The samples of some rows; places are counted from `first_sample`."""
    raw = logits.float()
    work, errors = None, {}
    changed = [extras for extras in rows.extras if extras.params.changes_logits]
    if changed:
        at = np.array([extras.row for extras in changed], np.int64)
        work = _Work(at, raw[torch.from_numpy(at).to(raw.device)])
        own_rows = [extras._replace(row=row) for row, extras in enumerate(changed)]
        errors = processing.apply(work.logits, own_rows)
        errors = {int(at[row]): error for row, error in errors.items()}
    chosen = (_choose_by_ops if raw.is_cuda else _choose_on_cpu)(raw, rows, work)
    if errors:
        chosen.is_valid[torch.tensor(list(errors), device=raw.device)] = False
    token_ids, logprobs = _candidates(raw, rows, work, chosen)
    stops = np.cumsum(rows.num_candidates)
    starts = stops - rows.num_candidates
    details = []
    asked: dict[tuple[int, int], list[int]] = {}
    for extras in rows.extras:
        if extras.params.logprobs is not None:
            kind = extras.params.logprobs, int(rows.num_candidates[extras.row])
            asked.setdefault(kind, []).append(extras.row)
    for (count, num_candidates), which in asked.items():
        places = (starts[which][:, None] + np.arange(num_candidates)).reshape(-1)
        index = torch.tensor(which, device=raw.device)
        ids = token_ids[torch.from_numpy(places).to(raw.device)].view(-1, num_candidates)
        count = raw.shape[1] if count < 0 else count
        own_logits = raw if len(which) == len(raw) else raw[index]
        worth = token_logprobs(own_logits, chosen.normaliser[index], ids, count)
        details.append((places + first_sample, worth))
    fault = None
    if work is not None:
        fault = (~chosen.raw_is_finite).repeat_interleave(
            torch.from_numpy(rows.num_candidates).to(raw.device), output_size=len(token_ids)
        )
    reasons = {
        first_sample + place: error
        for row, error in errors.items()
        for place in range(int(starts[row]), int(stops[row]))
    }
    return DeviceSamples(token_ids, logprobs, fault, details, [], reasons)


def _choose_on_cpu(raw: torch.Tensor, rows: SamplingRows, work: _Work | None) -> _Chosen:
    draws = cpu_draw.Draws(
        rows.temperature, rows.top_k, rows.top_p, rows.min_p, uniform(rows.seed, rows.step)
    )
    best, peak = cpu_draw.most_likely(raw)
    weights = cpu_draw.weigh(raw, peak)
    raw_is_finite = np.isfinite(peak)
    is_valid = raw_is_finite
    if work is None:
        token_ids = cpu_draw.draw(raw, best, peak, draws, weights)
    else:
        plain = draws._replace(temperature=draws.temperature.copy())
        plain.temperature[work.at] = 0  # these are drawn from their own logits
        token_ids = cpu_draw.draw(raw, best, peak, plain, weights)
        own_best, own_peak = cpu_draw.most_likely(work.logits)
        own = cpu_draw.draw(work.logits, own_best, own_peak, draws.take(work.at))
        token_ids[work.at] = own
        is_valid = raw_is_finite.copy()
        is_valid[work.at] &= np.isfinite(own_peak)
    with np.errstate(invalid="ignore"):
        normaliser = (peak + np.log(weights.total)).astype(np.float32)
    return _Chosen(*map(torch.from_numpy, (token_ids, is_valid, raw_is_finite, normaliser)))


def _choose_by_ops(raw: torch.Tensor, rows: SamplingRows, work: _Work | None) -> _Chosen:
    """On a GPU: one launch for the filters, if any row has some, and one for the draws. The ops draw from words of their own,
    see `kernels.sample`: not the tokens a CPU would draw, but with the same probabilities."""

    def column(values: np.ndarray, dtype: type) -> torch.Tensor:
        return torch.from_numpy(values.astype(dtype)).to(raw.device)

    normaliser = raw.logsumexp(dim=-1)
    raw_is_finite = normaliser.isfinite()
    scored = raw
    temperatures = column(rows.temperature.clip(max=1e30), np.float32)  # which are all the same
    filtered = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
    filtered &= rows.temperature > 0
    if work is not None or filtered.any():
        scored = raw.clone()
    if work is not None:
        work.replace_in(scored)
    if filtered.any():
        top_k = column(np.minimum(rows.top_k, 2**31 - 1), np.int32)
        top_p, min_p = column(rows.top_p, np.float32), column(rows.min_p, np.float32)
        kernels.apply_top_k_top_p_min_p(scored, top_k, top_p, min_p, temperatures)
    seeds = torch.from_numpy(rows.seed.view(np.int64)).to(raw.device)
    token_ids = kernels.sample(scored, temperatures, seeds, column(rows.step, np.int64))
    is_valid = raw_is_finite & (token_ids >= 0)
    return _Chosen(token_ids.clamp(min=0), is_valid, raw_is_finite, normaliser)


def _candidates(
    raw: torch.Tensor, rows: SamplingRows, work: _Work | None, chosen: _Chosen
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, log probabilities) of all samples: what was chosen, and the most likely tokens of rows that search."""
    token_ids = chosen.token_ids.masked_fill(~chosen.is_valid, -1)
    logprobs = raw.gather(1, chosen.token_ids[:, None])[:, 0] - chosen.normaliser
    searching = np.flatnonzero(rows.num_candidates > 1)
    if len(searching) == 0:
        return token_ids, logprobs
    scored = raw
    if work is not None and np.isin(searching, work.at).any():
        scored = raw.clone()
        work.replace_in(scored)
    device, stops = raw.device, np.cumsum(rows.num_candidates)
    all_ids = torch.zeros(int(stops[-1]), dtype=torch.int64, device=device)
    all_logprobs = torch.full((int(stops[-1]),), float("-inf"), device=device)
    single = np.flatnonzero(rows.num_candidates == 1)
    at, places = (torch.from_numpy(a).to(device) for a in (single, stops[single] - 1))
    all_ids[places], all_logprobs[places] = token_ids[at], logprobs[at]
    for count in np.unique(rows.num_candidates[searching]).tolist():
        which = np.flatnonzero(rows.num_candidates == count)
        index = torch.from_numpy(which).to(device)
        ids, values = most_likely(scored[index], min(count, raw.shape[1]))
        values = values - chosen.normaliser[index, None]
        ids = ids.masked_fill(~chosen.is_valid[index, None], -1)
        found = (stops[which] - count)[:, None] + np.arange(ids.shape[1])
        places = torch.from_numpy(found).to(device)
        all_ids[places], all_logprobs[places] = ids, values
    return all_ids, all_logprobs
