"""What a caller gets back. Field names follow vLLM's, which its users know."""

from __future__ import annotations

from dataclasses import dataclass, field

from .logprobs import Logprob
from .sequence import RequestMetrics


@dataclass
class CompletionOutput:
    """One completion of a request.

    text                without special tokens (by default) and without a stop string; while the request runs, also
                        without an ending that could still become part of a stop string or of a character
    token_ids           all generated ids, an end-of-sequence or stop token included
    cumulative_logprob  sum of the natural log probabilities of token_ids under the raw logits
    logprobs            where asked for: of each of token_ids, and of the most likely tokens at its place, by token id; the
                        token itself comes first
    finish_reason       None while running, else "stop", "length" or "abort"
    stop_reason         the stop string or stop token id that ended it, None for end-of-sequence
    score               of a beam search that has ended: cumulative_logprob / num_output_tokens ** length_penalty
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The state of a request after some step; the last one has `finished` True.

    prompt_logprobs  where asked for: None for the first prompt token, then as `CompletionOutput.logprobs`; while the prompt
                     is being computed, of the tokens so far
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
