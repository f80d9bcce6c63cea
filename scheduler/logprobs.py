"""Log probabilities of tokens: from a step's arrays to their sequences, and from there to what a caller reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ..runtime.metadata import PromptLogprobs, SamplerOutput, TokenLogprobs
    from .step import Step


@dataclass(slots=True)
class Logprob:
    """What a token is worth at its place.

    logprob        natural log probability under the raw logits
    rank           1 + number of tokens whose logits are greater
    decoded_token  its text in the middle of a line, special tokens included; None without a tokenizer
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


class TokenDetail(NamedTuple):
    """One row of `TokenLogprobs`: the token itself, then the most likely ones."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray


def _rows(tokens: TokenLogprobs) -> Iterable[TokenDetail]:
    return map(TokenDetail, tokens.token_ids, tokens.logprobs, tokens.ranks)


def by_place(outputs: SamplerOutput) -> dict[int, TokenDetail]:
    """Details of the samples whose requests ask for them."""
    found: dict[int, TokenDetail] = {}
    for detail in outputs.details:
        found.update(zip(detail.places.tolist(), _rows(detail.tokens), strict=True))
    return found


def record_decodes(step: Step, details: dict[int, TokenDetail]) -> None:
    """Give the rows of the batch of plain decodes theirs, before their tokens are appended."""
    decodes, left = step.decodes, step.decodes_left
    if decodes is None:
        return
    for place, detail in details.items():
        if place < step.num_decodes:
            seq = decodes.seqs[place if left is None else int(left[place])]
            if not seq.is_finished:
                seq.set_detail(detail)


def record_prompt(step: Step, prompt: PromptLogprobs) -> None:
    """Give a request those of its prompt that the step has computed. Nothing if it has lost its place meanwhile: it computes
    them again."""
    for row in step.rows:
        if row.group.request_id != prompt.request_id:
            continue
        if row.group in step.voided or row.group.is_finished:
            return
        known = row.group.prompt_logprobs
        if prompt.start > len(known):
            raise RuntimeError(
                f"request {prompt.request_id!r}: log probabilities of prompt positions {len(known)} to {prompt.start} "
                "are missing"
            )
        known[prompt.start :] = _rows(prompt.tokens)
        return


def as_dict(detail: TokenDetail, text_of: Callable[[int], str | None]) -> dict[int, Logprob]:
    """By token id, the token itself first."""
    columns = (detail.token_ids.tolist(), detail.logprobs.tolist(), detail.ranks.tolist())
    found: dict[int, Logprob] = {}
    for token, logprob, rank in zip(*columns, strict=True):
        if token not in found:
            found[token] = Logprob(logprob, rank, text_of(token))
    return found


class TokenTexts:
    """The text of single tokens as it is in the middle of a line; remembered, for the same few tokens come up all the time."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __call__(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._decode(self._tokenizer, token_id)
        return text

    @staticmethod
    def _decode(tokenizer: Tokenizer, token_id: int) -> str:
        """Some decoders drop a space at the beginning of a line, so the token is decoded behind itself."""
        once = tokenizer.decode([token_id], skip_special_tokens=False)
        twice = tokenizer.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(once) :] if twice.startswith(once) else once
