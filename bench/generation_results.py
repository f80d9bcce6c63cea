"""What whole generations leave behind. Read without the engine, so that it can be shown where the engine cannot be imported."""

from __future__ import annotations

import msgspec

from .machine import Machine


class GenerationRow(msgspec.Struct, frozen=True):
    """Tokens per second count new tokens alone; the prompts are computed in the same time."""

    num_requests: int
    prompt_len: int
    output_len: int
    mode: str
    tokens_per_s: float
    behind: float | None = (
        None  # largest distance of a chosen token's logit from transformers' best, in deviations
    )


class GenerationResults(msgspec.Struct, frozen=True):
    machine: Machine
    model: str
    rows: list[GenerationRow]
