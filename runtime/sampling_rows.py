"""What sampling needs to know of a step's rows, from the snapshots: columns, and for a few rows more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .drawn_tokens import sample_places
from .metadata import SamplerOutput, SequenceGroupMetadata
from .snapshots import DecodeRows, Snapshots
from .token_counts import RowExtras


class SamplingRows(NamedTuple):
    """Sampling parameters as columns, one entry per row of logits."""

    temperature: np.ndarray  # float64
    top_k: np.ndarray  # int64, -1 off
    top_p: np.ndarray  # float64, 1 off
    min_p: np.ndarray  # float64, 0 off
    seed: np.ndarray  # uint64, sample index included
    step: np.ndarray  # uint64, tokens drawn before this one
    num_candidates: np.ndarray  # int64, tokens asked for: 1, or more for a beam search
    extras: tuple[RowExtras, ...] = ()  # rows that want more than that, by ascending row

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        return self[:7]


def sampling_rows(seq_group_metadata_list: Sequence[SequenceGroupMetadata]) -> SamplingRows:
    """Columns for the rows that `build_launch_args` asks logits for, in the same order."""
    snapshots = Snapshots.of(seq_group_metadata_list)
    if snapshots.decodes is None:
        return _rows_of(snapshots.others, 0)
    decodes = _rows_of_decodes(snapshots.decodes)
    if not snapshots.others:
        return decodes
    others = _rows_of(snapshots.others, len(snapshots.decodes))
    columns = map(np.concatenate, zip(decodes.columns, others.columns, strict=True))
    return SamplingRows(*columns, extras=decodes.extras + others.extras)


def _rows_of_decodes(rows: DecodeRows) -> SamplingRows:
    # counting is a fifth of what `all` costs
    all_plain = np.count_nonzero(rows.is_plain) == len(rows)
    return SamplingRows(
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seed,
        (rows.num_tokens - rows.num_prompt_tokens).astype(np.uint64),
        np.ones(len(rows), np.int64),
        () if all_plain else tuple(_extras_of_decodes(rows)),
    )


def _extras_of_decodes(rows: DecodeRows) -> Iterator[RowExtras]:
    for row in np.flatnonzero(~rows.is_plain).tolist():
        prompt_len = int(rows.num_prompt_tokens[row])
        tokens = rows.tokens[row]
        yield RowExtras(
            row,
            rows.sampling_params[row],
            rows.seq_ids[row],
            tokens[:prompt_len],
            tokens[prompt_len : int(rows.num_tokens[row]) - rows.awaits_draw],
            rows.eos_token_ids[row],
            rows.awaits_draw,
        )


def _rows_of(
    seq_group_metadata_list: Sequence[SequenceGroupMetadata], first_row: int
) -> SamplingRows:
    rows: list[tuple] = []
    extras: list[RowExtras] = []
    for metadata in seq_group_metadata_list:
        if not metadata.do_sample:
            continue
        params = metadata.sampling_params
        samples = [(seq_id, data, data.index) for seq_id, data, _ in metadata.rows()]
        if metadata.is_first_sample:
            seq_id, data, _ = samples[0]
            samples = [(seq_id, data, index) for index in range(metadata.num_logits)]
        num_candidates = metadata.num_candidates
        for seq_id, data, index in samples:
            output = data.output_token_ids
            num_drawn = 0 if metadata.is_first_sample else metadata.num_drawn(data)
            if not params.is_plain:
                row, prompt = first_row + len(rows), data.prompt_token_ids
                ends, awaits = metadata.eos_token_ids, metadata.awaits_draw(data)
                extras.append(RowExtras(row, params, seq_id, prompt, output, ends, awaits))
            rows.append((*params.draw(index), num_drawn, num_candidates))
    columns = list(zip(*rows, strict=True)) if rows else [()] * 7
    dtypes = (np.float64, np.int64, np.float64, np.float64, np.uint64, np.uint64, np.int64)
    return SamplingRows(
        *(np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True)),
        extras=tuple(extras),
    )


def with_newest_tokens(rows: SamplingRows, before: Snapshots, drawn: SamplerOutput) -> SamplingRows:
    """`rows` of a step that was put together while the step `before` ran, which drew the newest tokens of some."""
    if not any(extras.awaits_draw for extras in rows.extras):
        return rows
    places = sample_places(before)
    return rows._replace(
        extras=tuple(
            extras._replace(newest_token=int(drawn.token_ids[places[extras.seq_id]]))
            if extras.awaits_draw
            else extras
            for extras in rows.extras
        )
    )


def uniform(seed: np.ndarray, step: np.ndarray) -> np.ndarray:
    """float64 in (0, 1), a function of (seed, step) alone: two rounds of the SplitMix64 finaliser."""
    x = _mix(_mix(seed + np.uint64(0x9E3779B97F4A7C15)) ^ (step * np.uint64(0xD1342543DE82EF95)))
    return ((x >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
