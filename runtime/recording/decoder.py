"""Frames to executed steps, the inverse of `encoder`: the very snapshots that were recorded, in arrays that share their
beginnings from step to step."""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ..metadata import SamplerOutput, SequenceData, SequenceGroupMetadata, SpanChunk
from ..params import MultiModalSpan
from .format import (
    IDS,
    LOGPROBS,
    WIDE_IDS,
    Fixed,
    GroupChange,
    LineChange,
    SpanPart,
    checked_data,
    computed_blocks,
    decode_step,
)

Pairs = list[tuple[int, int]]


class RecordedStep(NamedTuple):
    """One executed step: what the runner was given, and what it returned."""

    snapshots: list[SequenceGroupMetadata]
    blocks_to_swap_out: Pairs
    blocks_to_swap_in: Pairs
    blocks_to_copy: Pairs
    output: SamplerOutput


class _Growing:
    """An array that is only appended to: what was given out stays as it is."""

    __slots__ = ("_array", "_length")

    def __init__(self, values: np.ndarray) -> None:
        self._array = values.copy()
        self._length = len(values)

    def append(self, value: float) -> None:
        if self._length == len(self._array):
            self._make_room(1)
        self._array[self._length] = value
        self._length += 1

    def extend(self, values: np.ndarray) -> None:
        if self._length + len(values) > len(self._array):
            self._make_room(len(values))
        self._array[self._length : self._length + len(values)] = values
        self._length += len(values)

    def _make_room(self, more: int) -> None:
        larger = np.zeros(self._length + max(more, self._length, 8), self._array.dtype)
        larger[: self._length] = self._array[: self._length]
        self._array = larger

    def view(self) -> np.ndarray:
        view = self._array[: self._length]
        view.flags.writeable = False
        return view


class _Line:
    """A sequence as the last frame left it."""

    __slots__ = ("computed", "cumulative", "index", "logprobs", "prompt_len", "table", "tokens")

    tokens: _Growing
    logprobs: _Growing
    table: _Growing
    prompt_len: int
    computed: int
    cumulative: float
    index: int

    def data(self) -> SequenceData:
        tokens = self.tokens.view()
        return SequenceData(
            tokens[: self.prompt_len],
            tokens[self.prompt_len :],
            self.computed,
            self.cumulative,
            self.logprobs.view(),
            self.index,
        )


class _Group:
    """A group as the last frame with it left it, and what it drew then."""

    __slots__ = ("chunk", "cross", "drawn", "encoder", "fixed", "generation_id", "lines", "spans")

    def __init__(self, fixed: Fixed) -> None:
        self.fixed = fixed
        self.lines: dict[int, _Line] = {}
        self.encoder: _Line | None = None
        self.cross = False  # the encoder's table is one
        self.spans: list[MultiModalSpan] = []
        self.generation_id = 0
        self.chunk = 1
        self.drawn: tuple[np.ndarray, np.ndarray] | None = None


class StepDecoder:
    """The payloads of frames to steps, in order."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._groups: dict[int, _Group] = {}
        self._num_groups = 0
        self._order: list[int] = []
        self._number = 0

    def decode(self, payload: bytes) -> RecordedStep:
        frame = decode_step(payload)
        _require(frame.number == self._number, f"expected step {self._number}, got {frame.number}")
        self._number += 1
        if frame.order is not None:
            self._order = _ints(frame.order, IDS).tolist()
        changes = {change.place: change for change in frame.changes}
        opened = dict(_pairs(frame.opened))
        places = range(len(self._order))
        _require(
            len(changes) == len(frame.changes)
            and all(place in places for place in (*changes, *opened))
            and not changes.keys() & opened.keys()
            and len(set(self._order)) == len(self._order),
            "expected each group once, and changes of groups of the step",
        )
        logprobs = _read_only(np.frombuffer(frame.logprobs, LOGPROBS).astype(np.float32))
        wide = len(frame.token_ids) == 2 * len(frame.logprobs)
        token_ids = _read_only(_ints(frame.token_ids, WIDE_IDS if wide else IDS).astype(np.int64))
        _require(len(token_ids) == len(logprobs), "expected a log probability for each token")
        snapshots, start = [], 0
        for place, number in enumerate(self._order):
            change = changes.get(place)
            if change is None:
                metadata = self._advance(self._groups[number], opened.get(place))
            else:
                metadata = self._change(number, change)
            stop = start + metadata.num_samples
            _require(
                stop <= len(token_ids), f"expected {stop} tokens or more, got {len(token_ids)}"
            )
            self._groups[number].drawn = token_ids[start:stop], logprobs[start:stop]
            snapshots.append(metadata)
            start = stop
        _require(start == len(token_ids), f"expected {start} tokens, got {len(token_ids)}")
        for number in _ints(frame.forgotten, IDS).tolist():
            del self._groups[number]
        return RecordedStep(
            snapshots,
            _pairs(frame.swap_out),
            _pairs(frame.swap_in),
            _pairs(frame.copy),
            SamplerOutput(token_ids, logprobs),
        )

    def _advance(self, group: _Group, opened: int | None) -> SequenceGroupMetadata:
        """The group went on as groups do."""
        lines = sorted(group.lines.items())
        _require(
            group.drawn is not None and len(group.drawn[0]) == len(lines),
            "expected a change of a group that drew no token for each of its sequences",
        )
        assert group.drawn is not None
        for (_, line), token_id, logprob in zip(lines, *group.drawn, strict=True):
            line.tokens.append(token_id)
            line.logprobs.append(logprob)
            line.cumulative += float(logprob)
            line.computed += group.chunk
        if opened is not None:
            _require(len(lines) == 1, "expected a block for a group of one sequence")
            lines[0][1].table.append(opened)
        if group.encoder is not None:
            group.encoder.computed = group.encoder.data().num_tokens
        group.chunk = 1
        return self._metadata(group, False, True, None, ())

    def _change(self, number: int, change: GroupChange) -> SequenceGroupMetadata:
        group = self._groups.get(number)
        if group is None:
            _require(
                number == self._num_groups and change.fixed is not None,
                f"expected group {self._num_groups} to be new, got group {number}",
            )
            self._num_groups += 1
            assert change.fixed is not None
            group = self._groups[number] = _Group(change.fixed)
        elif change.fixed is not None:
            group.fixed = change.fixed
        lines = {line.seq_id: _changed_line(line, group.lines) for line in change.lines}
        _require(0 < len(lines) == len(change.lines), "expected each sequence of the group once")
        before = {} if group.encoder is None else {0: group.encoder}
        group.lines = lines
        group.encoder = None if change.encoder is None else _changed_line(change.encoder, before)
        group.cross = change.has_cross_table
        group.generation_id, group.chunk = change.generation_id, change.token_chunk_size
        spans = tuple(_span_chunk(part, group) for part in change.spans)
        return self._metadata(
            group, change.is_prompt, change.do_sample, change.computed_blocks, spans
        )

    def _metadata(
        self,
        group: _Group,
        is_prompt: bool,
        do_sample: bool,
        computed: int | bytes | None,
        spans: tuple[SpanChunk, ...],
    ) -> SequenceGroupMetadata:
        seq_data = {seq_id: line.data() for seq_id, line in group.lines.items()}
        tables = {seq_id: line.table.view() for seq_id, line in group.lines.items()}
        for data in seq_data.values():
            checked_data(data)
        first = min(seq_data)
        if computed is None:
            ordered = [tables[seq_id] for seq_id in sorted(tables)]
            blocks = computed_blocks(ordered, seq_data[first].num_computed_tokens, self._block_size)
        elif isinstance(computed, int):
            _require(
                0 <= computed <= len(tables[first]),
                f"expected at most {len(tables[first])} computed blocks, got {computed}",
            )
            blocks = tables[first][:computed]
        else:
            blocks = _read_only(_ints(computed, IDS).astype(np.int32))
        encoder, fixed = group.encoder, group.fixed
        return SequenceGroupMetadata(
            request_id=fixed.request_id,
            is_prompt=is_prompt,
            seq_data=MappingProxyType(seq_data),
            block_tables=MappingProxyType(tables),
            sampling_params=fixed.sampling_params,
            token_chunk_size=group.chunk,
            computed_block_nums=blocks,
            do_sample=do_sample,
            generation_id=group.generation_id,
            sliding_window=fixed.sliding_window,
            multi_modal_data=spans,
            lora_request=fixed.lora_request,
            prompt_adapter_request=fixed.prompt_adapter_request,
            eos_token_ids=fixed.eos_token_ids,
            encoder_seq_data=None if encoder is None else encoder.data(),
            cross_block_table=encoder.table.view() if encoder is not None and group.cross else None,
        )


def _changed_line(change: LineChange, lines: dict[int, _Line]) -> _Line:
    """What is kept of the parent, and what follows. A sequence that goes on without loss keeps its buffers."""
    parent = None if change.parent is None else lines[change.parent]
    line = _Line()
    for name, kept, data, dtype in (
        ("tokens", change.kept_tokens, _ints(change.tokens, IDS), np.int32),
        ("logprobs", change.kept_logprobs, np.frombuffer(change.logprobs, LOGPROBS), np.float32),
        ("table", change.kept_entries, _ints(change.entries, IDS), np.int32),
    ):
        source = None if parent is None else getattr(parent, name)
        there = np.zeros(0, dtype) if source is None else source.view()
        _require(0 <= kept <= len(there), f"expected to keep at most {len(there)}, got {kept}")
        if source is None or kept < len(there) or change.parent != change.seq_id:
            source = _Growing(there[:kept])
        source.extend(data)
        setattr(line, name, source)
    line.prompt_len = change.prompt_len
    line.computed, line.index = change.num_computed_tokens, change.index
    line.cumulative = change.cumulative_logprob
    num_tokens = len(line.tokens.view())
    _require(
        0 <= line.prompt_len <= num_tokens,
        f"expected a prompt of at most {num_tokens} tokens, got {line.prompt_len}",
    )
    checked_data(line.data())
    return line


def _span_chunk(part: SpanPart, group: _Group) -> SpanChunk:
    span = part.span
    if isinstance(span, int):
        _require(0 <= span < len(group.spans), f"expected a span that was given, got {span}")
        span = group.spans[span]
    else:
        group.spans.append(span)
    return SpanChunk(span, part.start, part.stop, part.offset)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def _ints(data: bytes, dtype: np.dtype) -> np.ndarray:
    return np.frombuffer(data, dtype)


def _pairs(data: bytes) -> Pairs:
    pairs = _ints(data, IDS).reshape(-1, 2).tolist()
    return [(a, b) for a, b in pairs]
