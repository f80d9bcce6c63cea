"""Tokens that one step draws and the next one feeds, while the host has not seen them. Torch-free.

step k      rows   a  b  c (prefill, draws)     samples   0:a  1:b  2:c
step k + 1  rows   a  c  b                      feeds     samples 0, 2, 1 of step k
"""

from __future__ import annotations

import msgspec
import numpy as np

from .metadata import MetadataError, SamplerOutput, SequenceGroupMetadata
from .snapshots import Snapshots


def awaited_draws(
    snapshots: Snapshots, before: Snapshots | None
) -> tuple[np.ndarray, np.ndarray] | None:
    """(places among the step's tokens, places among the samples of the step `before`) of what is fed and not known yet,
    int64 [N] each; None if all is known.

    Raises MetadataError for a token that the step before does not draw.
    """
    decodes, tokens, sources = snapshots.decodes, [], []
    start = 0 if decodes is None else len(decodes)
    if decodes is not None and decodes.awaits_draw:
        earlier = None if before is None else before.decodes
        tokens = list(range(start))
        if earlier is not None and earlier.seq_ids is decodes.seq_ids:  # nobody came or went
            sources = tokens
        else:
            waiting = list(zip(decodes.request_ids, decodes.seq_ids, strict=True))
            sources = _places_of(waiting, before)
    waiting = []
    for metadata in snapshots.others:
        for seq_id, data, _ in metadata.rows():
            if metadata.awaits_draw(data):
                tokens.append(start)
                waiting.append((metadata.request_id, seq_id))
            start += metadata.token_chunk_size
    if waiting:
        sources = [*sources, *_places_of(waiting, before)]
    return (np.array(tokens, np.int64), np.array(sources, np.int64)) if tokens else None


def _places_of(waiting: list[tuple[str, int]], before: Snapshots | None) -> list[int]:
    places = {} if before is None else sample_places(before)
    for request_id, seq_id in waiting:
        if seq_id not in places:
            raise MetadataError(
                request_id,
                "seq_data",
                f"expected a known token to feed to sequence {seq_id}, or one that the step before draws, got neither",
            )
    return [places[seq_id] for _, seq_id in waiting]


def sample_places(snapshots: Snapshots) -> dict[int, int]:
    """seq_id -> place among the step's samples, of each sequence that draws one token."""
    decodes = snapshots.decodes
    places = {} if decodes is None else {seq_id: i for i, seq_id in enumerate(decodes.seq_ids)}
    start = len(places)
    for metadata in snapshots.others:
        if metadata.num_samples == len(metadata.seq_data):
            places |= {seq_id: start + i for i, seq_id in enumerate(sorted(metadata.seq_data))}
        start += metadata.num_samples
    return places


def fed_token_ids(drawn: SamplerOutput, samples: np.ndarray) -> np.ndarray:
    """What is fed after these samples. Where the logits were not finite there is none: 0 stands for it, and what comes of it
    is dropped."""
    return np.maximum(drawn.token_ids[samples], 0)


def known_by_place(
    awaited: tuple[np.ndarray, np.ndarray], drawn: SamplerOutput
) -> dict[int, tuple[int, float]]:
    """Place among the step's tokens -> (token id, log probability) of what `awaited_draws` found."""
    places, samples = awaited
    token_ids, logprobs = fed_token_ids(drawn, samples), drawn.logprobs[samples]
    values = zip(token_ids.tolist(), logprobs.tolist(), strict=True)
    return dict(zip(places.tolist(), values, strict=True))


def completed(
    metadata: SequenceGroupMetadata, start: int, known: dict[int, tuple[int, float]]
) -> SequenceGroupMetadata:
    """A snapshot with the tokens that it awaits; its first one is token `start` of the step."""
    seq_data = {}
    for seq_id, data, _ in metadata.rows():
        if metadata.awaits_draw(data):
            token_id, logprob = known[start]
            data = msgspec.structs.replace(
                data,
                output_token_ids=np.append(data.output_token_ids, np.int32(token_id)),
                output_logprobs=np.append(data.output_logprobs, np.float32(logprob)),
                cumulative_logprob=data.cumulative_logprob + logprob,
            )
        seq_data[seq_id] = data
        start += metadata.token_chunk_size
    return msgspec.structs.replace(metadata, seq_data=seq_data)


def with_drawn(
    snapshots: Snapshots, before: Snapshots, drawn: SamplerOutput
) -> list[SequenceGroupMetadata]:
    """The snapshots as they would be had they been taken after the step before, which drew these tokens."""
    awaited = awaited_draws(snapshots, before)
    if awaited is None:
        return list(snapshots)
    known, start, whole = known_by_place(awaited, drawn), 0, []
    for metadata in snapshots:
        whole.append(completed(metadata, start, known))
        start += metadata.token_chunk_size * len(metadata.seq_data)
    return whole
