"""Executed steps to frames: what is new in each, as `format` describes it.

Plain decodes come as columns (`DecodeRows`) and are compared with the columns of the step before, a few numpy operations for
all of them (`columns`); whatever else there is, or differs from what the reader expects, goes one by one (`changes`). Nothing
is taken for granted but what the contract says: a buffer is append-only, so the same array has the same beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np

from ..metadata import SamplerOutput, SequenceGroupMetadata
from ..params import MultiModalSpan
from ..snapshots import DecodeRows, Snapshots
from .changes import check, group_change, is_fixed, new_blocks
from .columns import Columns, rows_that_go_on
from .format import (
    IDS,
    LOGPROBS,
    WIDE_IDS,
    Fixed,
    GroupChange,
    StepFrame,
    checked_array,
    encode,
)

Pairs = Sequence[tuple[int, int]]

# A group that no step had for so many steps is forgotten, and written anew should it come back
_FORGET_AFTER = 256


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
        check(metadata)
        known = self._groups.get(metadata.request_id)
        if known is None:
            known = self._groups[metadata.request_id] = _Known(self._num_groups)
            self._num_groups += 1
        fixed = known.fixed
        before, blocks = known.metadata, None
        if fixed is None or before is None or not is_fixed(fixed, metadata):
            fixed = Fixed.of(metadata)
        else:
            drawn = known.token_ids, known.logprobs
            blocks = new_blocks(before, metadata, *drawn, self._block_size)
        if blocks is None:
            news = None if fixed is known.fixed else fixed
            self._changes.append(group_change(place, before, metadata, news, known.spans))
        else:
            self._opened += [(place, block) for block in blocks]
        known.fixed, known.metadata, known.seen = fixed, metadata, self.num_steps
        return known

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


def _ids(values: Sequence) -> bytes:
    """int32; raises OverflowError for what is larger."""
    return np.array(values, IDS).tobytes() if len(values) else b""


def _token_ids(values: np.ndarray) -> bytes:
    narrow = values.astype(IDS)
    return (narrow if (narrow == values).all() else values.astype(WIDE_IDS)).tobytes()
