"""One group in two of its steps: whether it went on as groups do, and what to write if it did not."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from ..metadata import SequenceData, SequenceGroupMetadata
from ..params import MultiModalSpan
from .format import (
    IDS,
    LOGPROBS,
    Fixed,
    GroupChange,
    LineChange,
    SpanPart,
    checked_array,
    checked_data,
    common_length,
    computed_blocks,
    encode,
    not_default,
    storable,
)


def new_blocks(
    before: SequenceGroupMetadata,
    metadata: SequenceGroupMetadata,
    token_ids: np.ndarray,
    logprobs: np.ndarray,
    block_size: int,
) -> list[int] | None:
    """What the reader cannot tell from the last snapshot and what it drew, if that is one new block at most; else None."""
    seqs = list(metadata.rows())
    if (
        metadata.is_prompt
        or metadata.token_chunk_size != 1
        or not metadata.do_sample
        or metadata.generation_id != before.generation_id
        or metadata.multi_modal_data
        or len(token_ids) != len(before.seq_data)
        or metadata.seq_data.keys() != before.seq_data.keys()
        or not _same_encoder(before, metadata)
    ):
        return None
    opened = []
    drawn = zip(before.rows(), seqs, token_ids, logprobs, strict=True)
    for (_, data_before, table_before), (_, data, table), token_id, logprob in drawn:
        if not _has_drawn(data_before, data, token_id, logprob):
            return None
        if data.num_computed_tokens != data_before.num_computed_tokens + before.token_chunk_size:
            return None
        common = common_length(table_before, table)
        if common < len(table_before) or len(table) > common + 1:
            return None
        opened += table[common:].tolist()
    if opened and len(seqs) > 1:
        return None
    computed = computed_blocks(
        [table for _, _, table in seqs], seqs[0][1].num_computed_tokens, block_size
    )
    if not np.array_equal(computed, metadata.computed_block_nums):
        return None
    return opened


def group_change(
    place: int,
    before: SequenceGroupMetadata | None,
    metadata: SequenceGroupMetadata,
    fixed: Fixed | None,
    spans: list[MultiModalSpan],
) -> GroupChange:
    """All that is new of a group. `spans` are those that the reader has, and will have."""
    lines = {} if before is None else {seq_id: (d, t) for seq_id, d, t in before.rows()}
    if fixed is not None:
        adapter = storable(fixed.prompt_adapter_request)
        params: Any = not_default(fixed.sampling_params)
        fixed = msgspec.structs.replace(
            fixed, prompt_adapter_request=adapter, sampling_params=params
        )
        encode(fixed)  # what cannot be written is found here, where the request is known
    computed = metadata.computed_block_nums
    first = next(table for _, _, table in metadata.rows())
    is_leading = np.array_equal(computed, first[: len(computed)])
    encoder, cross = metadata.encoder_seq_data, metadata.cross_block_table
    encoder_before = {}
    if before is not None and before.encoder_seq_data is not None:
        encoder_before[0] = before.encoder_seq_data, _table_or_none(before.cross_block_table)
    return GroupChange(
        place,
        fixed,
        metadata.is_prompt,
        metadata.token_chunk_size,
        metadata.do_sample,
        metadata.generation_id,
        [_line_change(seq_id, data, table, lines) for seq_id, data, table in metadata.rows()],
        len(computed) if is_leading else computed.astype(IDS).tobytes(),
        _span_parts(metadata, spans),
        None
        if encoder is None
        else _line_change(0, encoder, _table_or_none(cross), encoder_before),
        cross is not None,
    )


def _span_parts(metadata: SequenceGroupMetadata, known: list[MultiModalSpan]) -> list[SpanPart]:
    parts = []
    for chunk in metadata.multi_modal_data:
        number = next((i for i, span in enumerate(known) if span is chunk.span), None)
        span = chunk.span
        if number is None:
            known.append(span)
            span = msgspec.structs.replace(span, data=storable(span.data))
        parts.append(
            SpanPart(span if number is None else number, chunk.start, chunk.stop, chunk.offset)
        )
    return parts


def check(metadata: SequenceGroupMetadata) -> None:
    """What the encoding relies on."""
    if metadata.seq_data.keys() != metadata.block_tables.keys() or not metadata.seq_data:
        raise ValueError("block_tables: expected one for each sequence, and one sequence or more")
    for _, data, table in metadata.rows():
        checked_data(data)
        checked_array("block_tables", table, np.int32)
    checked_array("computed_block_nums", metadata.computed_block_nums, np.int32)
    encoder, cross = metadata.encoder_seq_data, metadata.cross_block_table
    if encoder is not None:
        checked_data(encoder)
    if cross is not None:
        checked_array("cross_block_table", cross, np.int32)
        if encoder is None:
            raise ValueError("encoder_seq_data: expected one with a cross_block_table, got None")


_NO_TABLE = np.zeros(0, np.int32)


def _table_or_none(table: np.ndarray | None) -> np.ndarray:
    return _NO_TABLE if table is None else table


def is_fixed(fixed: Fixed, metadata: SequenceGroupMetadata) -> bool:
    """Adapters may be anything, whose equality means nothing: they are the same or they are not."""
    return (
        (fixed.sampling_params is metadata.sampling_params)
        and fixed.eos_token_ids == metadata.eos_token_ids
        and fixed.sliding_window == metadata.sliding_window
        and fixed.lora_request == metadata.lora_request
        and fixed.prompt_adapter_request is metadata.prompt_adapter_request
    )


def _has_drawn(before: SequenceData, data: SequenceData, token_id: Any, logprob: Any) -> bool:
    """Whether a sequence is what it was and one token more."""
    outputs, logprobs = data.output_token_ids, data.output_logprobs
    num_outputs = len(before.output_token_ids)
    total = float(before.cumulative_logprob) + float(logprob)
    return (
        len(outputs) == len(logprobs) == num_outputs + 1
        and int(outputs[-1]) == int(token_id)
        and logprobs[-1:].view(np.int32) == np.float32(logprob).view(np.int32)
        and _same_bits(data.cumulative_logprob, total)
        and data.index == before.index
        and len(data.prompt_token_ids) == len(before.prompt_token_ids)
        and np.array_equal(data.prompt_token_ids, before.prompt_token_ids)
        and common_length(outputs, before.output_token_ids) == num_outputs
        and common_length(logprobs, before.output_logprobs) == num_outputs
    )


def _same_bits(a: float, b: float) -> bool:
    return a == b and math.copysign(1, a) == math.copysign(1, b)


def _same_encoder(before: SequenceGroupMetadata, metadata: SequenceGroupMetadata) -> bool:
    """Neither has one, or it is as it was, all of its tokens computed."""
    a, b = before.encoder_seq_data, metadata.encoder_seq_data
    if a is None or b is None:
        return a is b
    table_a, table_b = before.cross_block_table, metadata.cross_block_table
    return (
        b.num_computed_tokens == b.num_tokens
        and np.array_equal(a.prompt_token_ids, b.prompt_token_ids)
        and np.array_equal(a.output_token_ids, b.output_token_ids)
        and np.array_equal(a.output_logprobs, b.output_logprobs)
        and _same_bits(a.cumulative_logprob, b.cumulative_logprob)
        and a.index == b.index
        and table_a is not None
        and table_b is not None
        and np.array_equal(table_a, table_b)
    )


def _line_change(
    seq_id: int,
    data: SequenceData,
    table: np.ndarray,
    lines: dict[int, tuple[SequenceData, np.ndarray]],
) -> LineChange:
    """A sequence as what it keeps of one that the reader knows, its own if nothing of that is lost."""
    tokens = data.token_ids(0, data.num_tokens)
    parent, kept = None, 0
    for candidate in sorted(lines, key=lambda other: other != seq_id):
        of_parent = lines[candidate][0]
        common = common_length(tokens, of_parent.token_ids(0, of_parent.num_tokens))
        if parent is None or common > kept:
            parent, kept = candidate, common
        if kept == min(len(tokens), of_parent.num_tokens) and candidate == seq_id:
            break
    kept_logprobs = kept_entries = 0
    if parent is not None:
        kept_logprobs = common_length(data.output_logprobs, lines[parent][0].output_logprobs)
        kept_entries = common_length(table, lines[parent][1])
    return LineChange(
        seq_id,
        parent,
        len(data.prompt_token_ids),
        kept,
        tokens[kept:].astype(IDS, copy=False).tobytes(),
        kept_logprobs,
        data.output_logprobs[kept_logprobs:].astype(LOGPROBS, copy=False).tobytes(),
        kept_entries,
        table[kept_entries:].astype(IDS, copy=False).tobytes(),
        data.num_computed_tokens,
        float(data.cumulative_logprob),
        data.index,
    )
