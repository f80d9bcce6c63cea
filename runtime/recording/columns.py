"""Which plain decodes of a step go on from the step before as decodes do, a few numpy operations for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq, is_, is_not, itemgetter
from typing import Any, NamedTuple

import numpy as np

from ..snapshots import DecodeRows


class Columns(NamedTuple):
    """What is compared of `DecodeRows`."""

    request_ids: Sequence[str]
    seq_ids: Sequence[int]
    generation_ids: Sequence[int]
    sampling_params: Sequence[Any]
    lora_requests: Sequence[Any]
    eos_token_ids: Sequence[tuple[int, ...]]
    tokens: Sequence[np.ndarray]
    logprobs: Sequence[np.ndarray]
    tables: Sequence[np.ndarray]
    num_tokens: np.ndarray
    num_prompt_tokens: np.ndarray
    last_token_ids: np.ndarray
    cumulative_logprobs: np.ndarray

    @classmethod
    def of(cls, rows: DecodeRows, kept: list[int] | None = None) -> Columns:
        """All of the rows, or some, in order."""
        values = [getattr(rows, name) for name in cls._fields]
        if kept is not None and kept != list(range(len(rows))):
            index = np.array(kept, np.int64)
            pick = itemgetter(*kept) if len(kept) > 1 else None
            values = [
                v[index] if isinstance(v, np.ndarray)
                else pick(v) if pick is not None
                else [v[row] for row in kept]
                for v in values
            ]  # fmt: skip
        return cls(*values)


def rows_that_go_on(
    before: Columns, rows: Columns, token_ids: np.ndarray, logprobs: np.ndarray, size: int
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Compare a step's rows with the same requests' rows of the step before, which drew these tokens. Blocks have `size` tokens.

    Returns whether each is what it was and the token it drew, with one more block at most, and who has that as (row, block).
    Buffers are append-only: those that are the same arrays are not looked at again.
    """
    goes_on = rows.num_tokens == before.num_tokens + 1
    goes_on &= rows.num_prompt_tokens == before.num_prompt_tokens
    totals = before.cumulative_logprobs + logprobs
    goes_on &= rows.cumulative_logprobs.view(np.int64) == totals.view(np.int64)
    for name, same in (
        ("request_ids", eq),
        ("seq_ids", eq),
        ("generation_ids", eq),
        ("sampling_params", is_),
        ("lora_requests", is_),
        ("eos_token_ids", is_),
    ):
        a, b = getattr(before, name), getattr(rows, name)
        if a is not b:
            goes_on &= np.fromiter(map(same, a, b), bool, len(token_ids))
    goes_on &= rows.last_token_ids == token_ids
    num_outputs = before.num_tokens - before.num_prompt_tokens
    newest = map(np.ndarray.item, rows.logprobs, num_outputs.tolist())
    drawn = np.fromiter(newest, np.float32, len(token_ids))
    goes_on &= drawn.view(np.int32) == logprobs.view(np.int32)

    entries_before = (before.num_tokens + (size - 1)) // size
    for buffers_before, buffers, lengths in (
        (before.tokens, rows.tokens, before.num_tokens),
        (before.logprobs, rows.logprobs, num_outputs),
        (before.tables, rows.tables, entries_before),
    ):
        for row in _changed(buffers_before, buffers):
            length = int(lengths[row])
            a, b = buffers_before[row][:length], buffers[row][:length]
            goes_on[row] &= np.array_equal(a.view(np.int32), b.view(np.int32))
    opened = np.flatnonzero((entries_before * size == before.num_tokens) & goes_on).tolist()
    return goes_on, [(row, int(rows.tables[row][int(entries_before[row])])) for row in opened]


def _changed(before: Sequence, after: Sequence) -> list[int]:
    """Places whose object is another one."""
    if before is after:
        return []
    return np.flatnonzero(np.fromiter(map(is_not, before, after), bool, len(after))).tolist()
