"""Writes a recording while the engine runs: what is new in each executed step, as `format` describes it.

Plain decodes come as columns (`DecodeRows`) and are compared with the columns of the step before, a few numpy operations for
all of them; whatever else there is, or differs from what the reader expects, goes through `_Groups.encode` one by one. Nothing
is taken for granted but what the contract says: a buffer is append-only, so the same array has the same beginning.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import compress
from typing import Any

import msgspec
import numpy as np

from ..metadata import SamplerOutput, SequenceData, SequenceGroupMetadata
from ..params import MultiModalSpan
from ..snapshots import DecodeRows, Snapshots
from .columns import Columns, rows_that_go_on
from .format import (
    IDS,
    LOGPROBS,
    WIDE_IDS,
    EndFrame,
    Fixed,
    GroupChange,
    LineChange,
    RecordingHeader,
    SpanPart,
    StepFrame,
    checked_array,
    checked_data,
    common_length,
    computed_blocks,
    encode,
    storable,
)
from .frames import END, HEAD, STEP, FrameWriter, RecordingError

Pairs = Sequence[tuple[int, int]]

# A group that no step had for so many steps is forgotten, and written anew should it come back
_FORGET_AFTER = 256


class RecordingWriter:
    """A recording being written. Every step is in the file when `write` returns.

    A step that cannot be written ends the recording: `write` raises RecordingError once, what is in the file stays readable,
    and later steps are not recorded, so that the run can go on.
    """

    def __init__(self, path: str | os.PathLike[str], header: RecordingHeader) -> None:
        try:
            self._frames = FrameWriter(path)
            self._frames.write(HEAD, encode(header))
        except OSError as error:
            raise RecordingError(path, None, f"cannot be written: {error.strerror}") from error
        self._encoder = StepEncoder(header.block_size)
        self._is_open = True
        self.path = self._frames.path

    @property
    def num_steps(self) -> int:
        return self._encoder.num_steps

    @property
    def num_bytes(self) -> int:
        return self._frames.num_bytes

    def write(
        self,
        seq_group_metadata_list: Sequence[SequenceGroupMetadata],
        output: SamplerOutput,
        *,
        blocks_to_swap_out: Pairs = (),
        blocks_to_swap_in: Pairs = (),
        blocks_to_copy: Pairs = (),
    ) -> None:
        """Append a step that has been executed."""
        if not self._is_open:
            return
        number = self._encoder.num_steps
        try:
            moves = blocks_to_swap_out, blocks_to_swap_in, blocks_to_copy
            frame = self._encoder.encode(Snapshots.of(seq_group_metadata_list), moves, output)
            self._frames.write(STEP, frame)
        except (ValueError, TypeError, OverflowError, OSError) as error:
            self._is_open = False
            self._frames.abandon()
            reason = f"step {number} cannot be recorded, the recording ends here: {error}"
            raise RecordingError(self.path, number + 1, reason) from error

    def close(self) -> None:
        """Say in the file that this is all of it. No effect the second time."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._frames.write(END, encode(EndFrame(self.num_steps)))
            self._frames.close()
        except OSError as error:
            raise RecordingError(
                self.path, None, f"its end cannot be written: {error.strerror}"
            ) from error


class _Known:
    """What the reader knows of a group: its last snapshot, and what it drew then."""

    __slots__ = ("fixed", "logprobs", "metadata", "number", "seen", "spans", "token_ids")

    def __init__(self, number: int) -> None:
        self.number = number
        self.fixed: Fixed | None = None
        self.spans: list[MultiModalSpan] = []
        self.metadata: SequenceGroupMetadata | None = None  # out of date while columns have it
        self.token_ids = self.logprobs = np.zeros(0)
        self.seen = 0


class _Columns:
    """The plain decodes of the last step, and what they drew."""

    def __init__(self, rows: DecodeRows, groups: list[_Known]) -> None:
        self.rows = rows
        self.groups = groups
        self.numbers = np.array([group.number for group in groups], IDS).tobytes()
        self.row_of = {request_id: row for row, request_id in enumerate(rows.request_ids)}
        self.token_ids = self.logprobs = np.zeros(0)

    def release(self, row: int) -> None:
        """From here on the row's group goes the general way."""
        known = self.groups[row]
        known.metadata = self.rows.metadata(row)
        known.token_ids = self.token_ids[row : row + 1]
        known.logprobs = self.logprobs[row : row + 1]


class StepEncoder:
    """Steps to the payloads of their frames, in order."""

    def __init__(self, block_size: int) -> None:
        self.num_steps = 0
        self._block_size = block_size
        self._groups: dict[str, _Known] = {}
        self._num_groups = 0  # so far, forgotten ones included
        self._columns: _Columns | None = None
        self._order = b""
        self._changes: list[GroupChange] = []
        self._opened: list[tuple[int, int]] = []

    def encode(
        self, snapshots: Snapshots, moves: tuple[Pairs, Pairs, Pairs], output: SamplerOutput
    ) -> bytes:
        self._changes, self._opened = [], []
        token_ids = checked_array("token_ids", output.token_ids, np.int64)
        logprobs = checked_array("logprobs", output.logprobs, np.float32)
        decodes, others = snapshots.decodes, snapshots.others
        swap_out, swap_in, copy = moves
        self._columns = self._advance_columns(decodes)
        start, order = 0, b""
        if decodes is not None and self._columns is not None:
            start, order = len(decodes), self._columns.numbers
            self._columns.token_ids = token_ids[:start]
            self._columns.logprobs = logprobs[:start]
        numbers = []
        for place, metadata in enumerate(others, start):
            known = self._encode_group(place, metadata)
            stop = start + metadata.num_samples
            known.token_ids, known.logprobs = token_ids[start:stop], logprobs[start:stop]
            numbers.append(known.number)
            start = stop
        if (len(token_ids), len(logprobs)) != (start, start):
            raise ValueError(
                f"output: expected {start} tokens and log probabilities, got {len(token_ids)} and {len(logprobs)}"
            )
        order += _ids(numbers)
        frame = StepFrame(
            self.num_steps,
            None if order == self._order else order,
            self._changes,
            _ids(self._opened),
            _ids(swap_out),
            _ids(swap_in),
            _ids(copy),
            _token_ids(token_ids),
            logprobs.astype(LOGPROBS, copy=False).tobytes(),
            self._forget(),
        )
        self._order = order
        self.num_steps += 1
        return encode(frame)

    # -- plain decodes

    def _advance_columns(self, rows: DecodeRows | None) -> _Columns | None:
        """Write what is new of the step's plain decodes; returns them as what the reader knows next."""
        before = self._columns
        places: list[int] = []  # of rows that go on, and where they were
        kept: list[int] = []
        if rows is not None and before is not None and self._are_alike(before.rows, rows):
            is_same = rows.request_ids is before.rows.request_ids
            if is_same:
                places = kept = list(range(len(rows)))
                compared = Columns.of(before.rows), Columns.of(rows)
                drawn = before.token_ids, before.logprobs
            else:
                old = [before.row_of.get(request_id, -1) for request_id in rows.request_ids]
                places = [place for place, row in enumerate(old) if row >= 0]
                kept = [old[place] for place in places]
                compared = Columns.of(before.rows, kept), Columns.of(rows, places)
                drawn = before.token_ids[kept], before.logprobs[kept]
            goes_on, opened = rows_that_go_on(*compared, *drawn, self._block_size)
            self._opened += [(places[row], block) for row, block in opened]
            if is_same and goes_on.all():
                before.rows = rows
                return before
            places, kept = (list(compress(each, goes_on.tolist())) for each in (places, kept))
        if before is not None:
            for row in set(range(len(before.groups))).difference(kept):
                before.release(row)
        if rows is None:
            return None
        groups: list[_Known | None] = [None] * len(rows)
        if before is not None:
            for place, row in zip(places, kept, strict=True):
                groups[place] = before.groups[row]
        return _Columns(
            rows,
            [
                self._encode_group(place, rows.metadata(place)) if group is None else group
                for place, group in enumerate(groups)
            ],
        )

    def _are_alike(self, before: DecodeRows, rows: DecodeRows) -> bool:
        """Blocks and window are those that the reader expects."""
        sizes_fit = before.block_size == rows.block_size == self._block_size
        return sizes_fit and before.sliding_window == rows.sliding_window

    # -- everything else

    def _encode_group(self, place: int, metadata: SequenceGroupMetadata) -> _Known:
        """Write what is new of one group, or nothing if it went on as groups do."""
        try:
            return self._encode_checked(place, metadata)
        except ValueError as error:
            raise ValueError(f"request {metadata.request_id!r}: {error}") from error

    def _encode_checked(self, place: int, metadata: SequenceGroupMetadata) -> _Known:
        _check(metadata)
        known = self._groups.get(metadata.request_id)
        if known is None:
            known = self._groups[metadata.request_id] = _Known(self._num_groups)
            self._num_groups += 1
        fixed = known.fixed
        if fixed is None or not _is_fixed(fixed, metadata):
            fixed = Fixed.of(metadata)
        if fixed is not known.fixed or not self._goes_on(place, known, metadata):
            change = self._change(place, known, metadata, None if fixed is known.fixed else fixed)
            self._changes.append(change)
        known.fixed, known.metadata, known.seen = fixed, metadata, self.num_steps
        return known

    def _goes_on(self, place: int, known: _Known, metadata: SequenceGroupMetadata) -> bool:
        """Whether the reader can tell this snapshot from the last one and what it drew, but for a new block."""
        before = known.metadata
        assert before is not None
        seqs = list(metadata.rows())
        if (
            metadata.is_prompt
            or metadata.token_chunk_size != 1
            or not metadata.do_sample
            or metadata.generation_id != before.generation_id
            or metadata.multi_modal_data
            or len(known.token_ids) != len(before.seq_data)
            or metadata.seq_data.keys() != before.seq_data.keys()
            or not _same_encoder(before, metadata)
        ):
            return False
        opened = []
        drawn = zip(before.rows(), seqs, known.token_ids, known.logprobs, strict=True)
        for (_, data_before, table_before), (_, data, table), token_id, logprob in drawn:
            if not _has_drawn(data_before, data, token_id, logprob):
                return False
            if (
                data.num_computed_tokens
                != data_before.num_computed_tokens + before.token_chunk_size
            ):
                return False
            common = common_length(table_before, table)
            if common < len(table_before) or len(table) > common + 1:
                return False
            opened += [(place, int(block)) for block in table[common:]]
        if opened and len(seqs) > 1:
            return False
        computed = computed_blocks(
            [table for _, _, table in seqs], seqs[0][1].num_computed_tokens, self._block_size
        )
        if not np.array_equal(computed, metadata.computed_block_nums):
            return False
        self._opened += opened
        return True

    def _change(
        self, place: int, known: _Known, metadata: SequenceGroupMetadata, fixed: Fixed | None
    ) -> GroupChange:
        before = known.metadata
        lines = {} if before is None else {seq_id: (d, t) for seq_id, d, t in before.rows()}
        if fixed is not None:
            adapter = storable(fixed.prompt_adapter_request)
            fixed = msgspec.structs.replace(fixed, prompt_adapter_request=adapter)
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
            self._span_parts(known, metadata),
            None
            if encoder is None
            else _line_change(0, encoder, _table_or_none(cross), encoder_before),
            cross is not None,
        )

    @staticmethod
    def _span_parts(known: _Known, metadata: SequenceGroupMetadata) -> list[SpanPart]:
        parts = []
        for chunk in metadata.multi_modal_data:
            number = next((i for i, span in enumerate(known.spans) if span is chunk.span), None)
            span = chunk.span
            if number is None:
                known.spans.append(span)
                span = msgspec.structs.replace(span, data=storable(span.data))
            parts.append(
                SpanPart(span if number is None else number, chunk.start, chunk.stop, chunk.offset)
            )
        return parts

    def _forget(self) -> bytes:
        """Now and then, the groups that no step has had for long."""
        if self.num_steps % _FORGET_AFTER:
            return b""
        for known in () if self._columns is None else self._columns.groups:
            known.seen = self.num_steps
        gone = [
            (request_id, known.number)
            for request_id, known in self._groups.items()
            if known.seen <= self.num_steps - _FORGET_AFTER
        ]
        for request_id, _ in gone:
            del self._groups[request_id]
        return _ids([number for _, number in gone])


def _check(metadata: SequenceGroupMetadata) -> None:
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


def _is_fixed(fixed: Fixed, metadata: SequenceGroupMetadata) -> bool:
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


def _ids(values: Sequence) -> bytes:
    """int32; raises OverflowError for what is larger."""
    return np.array(values, IDS).tobytes() if len(values) else b""


def _token_ids(values: np.ndarray) -> bytes:
    narrow = values.astype(IDS)
    return (narrow if (narrow == values).all() else values.astype(WIDE_IDS)).tobytes()
