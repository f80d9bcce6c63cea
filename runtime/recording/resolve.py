"""Steps that were launched while the step before drew their tokens, as if they had waited for it. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..drawn_tokens import awaited_draws, completed, fed_token_ids, known_by_place
from ..metadata import SamplerOutput
from ..snapshots import DecodeRows, Snapshots


def resolved(snapshots: Snapshots, before: Snapshots, drawn: SamplerOutput) -> Snapshots:
    """The snapshots with what the step `before` drew. Where its logits were not finite 0 was fed, and is what stands here."""
    awaited = awaited_draws(snapshots, before)
    if awaited is None:
        return snapshots
    token_ids, logprobs = fed_token_ids(drawn, awaited[1]), drawn.logprobs[awaited[1]]
    decodes, num_decodes = snapshots.decodes, 0
    if decodes is not None:
        num_decodes = len(decodes)
        if decodes.awaits_draw:
            decodes = _with_newest(decodes, token_ids[:num_decodes], logprobs[:num_decodes])
    known, others, start = known_by_place(awaited, drawn), [], num_decodes
    for metadata in snapshots.others:
        others.append(completed(metadata, start, known))
        start += metadata.token_chunk_size * len(metadata.seq_data)
    return Snapshots(decodes, others)


def _with_newest(rows: DecodeRows, token_ids: np.ndarray, logprobs: np.ndarray) -> DecodeRows:
    """Columns with their newest tokens. Most buffers have them by now, for what the step before drew is written back."""
    newest = (rows.num_tokens - 1).tolist()
    newest_output = (rows.num_tokens - rows.num_prompt_tokens - 1).tolist()
    return dataclasses.replace(
        rows,
        last_token_ids=token_ids,
        cumulative_logprobs=rows.cumulative_logprobs + logprobs,
        tokens=_with_values(rows.tokens, newest, token_ids.astype(np.int32)),
        logprobs=_with_values(rows.logprobs, newest_output, logprobs),
        awaits_draw=False,
    )


def _with_values(
    buffers: list[np.ndarray], places: Sequence[int], values: np.ndarray
) -> list[np.ndarray]:
    """The buffers, with copies of those that do not have the value in its place."""
    sizes = list(map(len, buffers))
    reached = [min(place, size - 1) for place, size in zip(places, sizes, strict=True)]
    found = np.fromiter(map(np.ndarray.item, buffers, reached), values.dtype, len(buffers))
    lacking = np.flatnonzero(found.view(np.int32) != values.view(np.int32)).tolist()
    lacking += [row for row, place in enumerate(places) if place >= sizes[row]]
    if not lacking:
        return buffers
    completed = buffers.copy()
    for row in lacking:
        completed[row] = np.append(buffers[row][: places[row]], values[row])
    return completed
