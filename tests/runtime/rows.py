"""Rows of a step's sampling, made by hand; and what transformers makes of the same parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from octavo.runtime.params import SamplingParams
from octavo.runtime.sampling_rows import SamplingRows
from octavo.runtime.token_counts import RowExtras


@dataclass
class Ask:
    """One sequence: its parameters and the tokens so far."""

    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)
    eos: tuple[int, ...] = ()
    seq_id: int = 0
    num_candidates: int = 1


def rows_of(asks: list[Ask], steps: list[int] | None = None) -> SamplingRows:
    draws = list(zip(*(ask.params.draw(0) for ask in asks), strict=True))
    dtypes = (np.float64, np.int64, np.float64, np.float64, np.uint64)
    columns = [np.array(column, dtype) for column, dtype in zip(draws, dtypes, strict=True)]
    extras = [
        RowExtras(
            row,
            ask.params,
            ask.seq_id,
            np.array(ask.prompt, np.int32),
            np.array(ask.output, np.int32),
            ask.eos,
        )
        for row, ask in enumerate(asks)
        if not ask.params.is_plain
    ]
    return SamplingRows(
        *columns,
        np.array(steps or [len(ask.output) for ask in asks], np.uint64),
        np.array([ask.num_candidates for ask in asks], np.int64),
        tuple(extras),
    )


def processed_by_transformers(ask: Ask, logits: torch.Tensor) -> torch.Tensor:
    """Logits of one row before the temperature, float32. Frequency and presence, which it has not, by plain loops."""
    p = ask.params
    prompt, output = torch.tensor([ask.prompt]), torch.tensor([ask.output], dtype=torch.int64)
    both = torch.cat((prompt, output), dim=1)
    scores = logits[None].clone()
    if p.allowed_token_ids is not None:
        allowed = list(p.allowed_token_ids)
        scores = PrefixConstrainedLogitsProcessor(lambda *_: allowed, 1)(both, scores)
    if p.logit_bias:
        bias = {(token,): float(value) for token, value in p.logit_bias.items()}
        scores = SequenceBiasLogitsProcessor(bias)(both, scores)
    if p.bad_words_token_ids:
        words = [list(ids) for ids in p.bad_words_token_ids]
        scores = NoBadWordsLogitsProcessor(words)(output, scores)
    ends = [*ask.eos, *p.stop_token_ids]
    if p.min_tokens and ends:
        length = MinNewTokensLengthLogitsProcessor(len(ask.prompt), p.min_tokens, ends)
        scores = length(both, scores)
    scores = RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(both, scores)
    for token in range(logits.shape[0]):
        count = ask.output.count(token)
        if count:
            scores[0, token] -= p.frequency_penalty * count + p.presence_penalty
    return scores[0]


def probabilities(ask: Ask, logits: torch.Tensor) -> torch.Tensor:
    """Of the tokens that one row may draw, float64, after transformers' warpers; 0 is forbidden."""
    p = ask.params
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(p.temperature))])
    if p.top_k > 0:
        warpers.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        warpers.append(TopPLogitsWarper(float(p.top_p)))
    if p.min_p > 0:
        warpers.append(MinPLogitsWarper(float(p.min_p)))
    scores = processed_by_transformers(ask, logits)[None]
    return warpers(torch.zeros(1, 0, dtype=torch.int64), scores)[0].double().softmax(-1)
