"""Which beams go on, and when a beam search ends. Pure functions of scores; the rules are those of transformers.

    score of a completion = cumulative_logprob / num_output_tokens ** length_penalty

Each step gives every live beam its most likely continuations. Of all of them together the best are kept, enough that
`width` remain to go on when others end. Those among the best `width` that end become hypotheses, of which the `width` with
the highest scores are remembered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..runtime.params import SamplingParams
from .sequence import Sequence


@dataclass(frozen=True)
class Continuation:
    """One more token for one beam."""

    parent: int  # which of the step's beams
    place: int  # among the candidates of all beams together
    token_id: int
    logprob: float
    cumulative_logprob: float


@dataclass(frozen=True)
class Hypothesis:
    """A completion that has ended."""

    score: float
    seq: Sequence


def score(cumulative_logprob: float, num_output_tokens: int, length_penalty: float) -> float:
    return cumulative_logprob / num_output_tokens**length_penalty


def choose(
    cumulative_logprobs: list[float],
    token_ids: np.ndarray,
    logprobs: np.ndarray,
    end_token_ids: frozenset[int],
    at_limit: bool,
    width: int,
) -> tuple[list[Continuation], list[Continuation]]:
    """(continuations that go on, at most `width`; those that end), both best first, ties to the earlier beam.

    cumulative_logprobs   of the step's beams, B of them
    token_ids, logprobs   [B, C]: the C most likely next tokens of each beam, best first; log probability -inf is no token
    at_limit              beams have reached their longest: every continuation ends
    """
    totals = np.array(cumulative_logprobs)[:, None] + logprobs.astype(np.float64)
    flat = totals.ravel()
    best = np.argsort(-flat, kind="stable")[: token_ids.shape[1]]
    going, ending = [], []
    for rank, place in enumerate(best[np.isfinite(flat[best])].tolist()):
        parent, column = divmod(place, token_ids.shape[1])
        token = int(token_ids[parent, column])
        logprob = float(logprobs[parent, column])
        step = Continuation(parent, place, token, logprob, float(flat[place]))
        if not (at_limit or token in end_token_ids):
            going.append(step)
        elif rank < width:  # one that is not among the best now would not have been a beam either
            ending.append(step)
    return going[:width], ending


def is_over(
    best_running: float | None,
    hypotheses: list[Hypothesis],
    num_output_tokens: int,
    max_output_tokens: int,
    params: SamplingParams,
) -> bool:
    """Whether a search may end, its best running beam having `num_output_tokens` and this cumulative log probability.

    `early_stopping` False takes the best running score at the present length; "never" at the length that is best for it.
    """
    if best_running is None:
        return True
    if len(hypotheses) < params.width:
        return False
    if params.early_stopping is True:
        return True
    longest = params.early_stopping == "never" and params.length_penalty > 0
    length = max_output_tokens if longest else num_output_tokens
    possible = score(best_running, length, params.length_penalty)
    return possible <= min(hypothesis.score for hypothesis in hypotheses)
