"""Whatever a step says that the reader does not expect is recorded, in columns and in snapshots."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest

from octavo.runtime.metadata import (
    SamplerOutput,
    SequenceData,
    SequenceGroupMetadata,
    SpanChunk,
)
from octavo.runtime.params import LoRARequest, SamplingParams
from octavo.runtime.recording import (
    RecordingError,
    RecordingWriter,
    read_recording,
)
from octavo.runtime.recording.resolve import _with_values, resolved
from octavo.runtime.snapshots import DecodeRows, Snapshots
from octavo.tests.runtime.recorded import (
    HEADER,
    SPANS,
    canonical,
    decode_run,
)


def test_columns_are_recorded_as_the_snapshots_they_stand_for(tmp_path) -> None:
    _, made = decode_run(40)
    assert sum(snapshots.decodes is not None for snapshots, _, _ in made) > 30
    sizes = set()
    for kind in ("columns", "objects"):
        writer = RecordingWriter(tmp_path / kind, HEADER)
        for snapshots, _, output in made:
            writer.write(list(snapshots) if kind == "objects" else snapshots, output)
        writer.close()
        recording = read_recording(tmp_path / kind)
        for step, (_, expected, output) in zip(recording, made, strict=True):
            assert [canonical(metadata) for metadata in step.snapshots] == expected
            assert np.array_equal(step.output.token_ids, output.token_ids)
        sizes.add(recording.num_bytes)
    assert len(sizes) == 1, "both ways come to the same file"


def column_pair() -> tuple[Snapshots, SamplerOutput, DecodeRows]:
    """A step of three plain decodes, what it drew, and the next step's columns in arrays of their own."""
    _, made = decode_run(8, "abc")
    (before, _, drawn), (after, _, _) = made[6], made[7]
    rows = after.decodes
    assert before.decodes is not None and rows is not None and len(rows) == 3
    assert before.decodes.request_ids is rows.request_ids
    copied = {}
    for field in dataclasses.fields(rows):
        value = getattr(rows, field.name)
        if field.name != "request_ids" and isinstance(value, (list, np.ndarray)):
            copied[field.name] = value.copy()
    for name in ("tokens", "logprobs", "tables"):
        copied[name] = [array.copy() for array in copied[name]]
    return before, drawn, dataclasses.replace(rows, **copied)


def set_entry(values, row: int, place: int, value) -> None:
    values[row][place] = value


OTHER_COLUMNS = {
    "nothing": lambda rows: None,
    "num_tokens": lambda rows: rows.num_tokens.__setitem__(1, rows.num_tokens[1] + 1),
    "not run": lambda rows: rows.num_tokens.__setitem__(1, rows.num_tokens[1] - 1),
    "prompt": lambda rows: rows.num_prompt_tokens.__setitem__(1, 3),
    "last": lambda rows: (
        set_entry(rows.tokens, 1, rows.num_tokens[1] - 1, 9),
        rows.last_token_ids.__setitem__(1, 9),
    ),
    "earlier": lambda rows: set_entry(rows.tokens, 1, 2, 9),
    "logprob": lambda rows: set_entry(
        rows.logprobs, 1, rows.num_tokens[1] - rows.num_prompt_tokens[1] - 1, -9.0
    ),
    "earlier logprob": lambda rows: set_entry(rows.logprobs, 1, 0, -9.0),
    "total": lambda rows: rows.cumulative_logprobs.__setitem__(1, -9.0),
    "table": lambda rows: set_entry(rows.tables, 1, 0, 50),
    "generation": lambda rows: rows.generation_ids.__setitem__(1, 10**6),
    "sequence": lambda rows: rows.seq_ids.__setitem__(1, 77),
    "parameters": lambda rows: rows.sampling_params.__setitem__(1, SamplingParams(seed=4)),
    "adapter": lambda rows: rows.lora_requests.__setitem__(1, LoRARequest("x", 9)),
    "end": lambda rows: rows.eos_token_ids.__setitem__(1, (4,)),
}


@pytest.mark.parametrize("kind", OTHER_COLUMNS)
def test_whatever_else_a_column_says_is_recorded(kind, tmp_path) -> None:
    """Also what the scheduler would never say of a request's next step."""
    before, drawn, rows = column_pair()
    OTHER_COLUMNS[kind](rows)
    read = write_and_read(tmp_path / "run.oct", before, drawn, Snapshots(rows))
    assert read == [canonical(metadata) for metadata in Snapshots(rows)]


@pytest.mark.parametrize("changes", [{"sliding_window": 9}, {"block_size": 8}])
def test_other_sizes_are_recorded(changes, tmp_path) -> None:
    before, drawn, rows = column_pair()
    rows = dataclasses.replace(rows, **changes)
    read = write_and_read(tmp_path / "run.oct", before, drawn, Snapshots(rows))
    assert read == [canonical(metadata) for metadata in Snapshots(rows)]


def write_and_read(path: Path, before, drawn: SamplerOutput, after) -> list[bytes]:
    """What is read of the step `after`."""
    writer = RecordingWriter(path, HEADER)
    writer.write(before, drawn)
    count = sum(metadata.num_samples for metadata in after)
    writer.write(after, SamplerOutput(np.zeros(count, np.int64), np.zeros(count, np.float32)))
    _, step = read_recording(path)
    return [canonical(metadata) for metadata in step.snapshots]


def known_sequence(tokens: int, computed: int, index: int = 0) -> SequenceData:
    logprobs = np.full(tokens - 6, -0.5, np.float32)
    ids_ = np.arange(100, 100 + tokens, dtype=np.int32)
    return SequenceData(ids_[:6], ids_[6:], computed, -0.5 * (tokens - 6), logprobs, index)


SAMPLES = {1: SamplingParams(seed=1), 2: SamplingParams(n=2, seed=1)}


def going_on(number: int, num_seqs: int = 1, encoder: bool = False) -> SequenceGroupMetadata:
    """A group that decodes its eighth (0) or ninth (1) token."""
    tokens = 8 + number
    source = known_sequence(9, 9) if encoder else None
    return SequenceGroupMetadata(
        request_id="g",
        is_prompt=False,
        seq_data={i: known_sequence(tokens, tokens - 1, i) for i in range(num_seqs)},
        block_tables={i: np.array([3, 4, 5 + i][: 2 + number], np.int32) for i in range(num_seqs)},
        sampling_params=SAMPLES[num_seqs],
        token_chunk_size=1,
        computed_block_nums=np.array([3, 4][: 1 + number], np.int32),
        do_sample=True,
        generation_id=2,
        encoder_seq_data=source,
        cross_block_table=np.array([8, 9], np.int32) if encoder else None,
    )


def with_data(**changes):
    def change(metadata: SequenceGroupMetadata) -> SequenceGroupMetadata:
        data = {i: msgspec.structs.replace(d, **changes) for i, d in metadata.seq_data.items()}
        return msgspec.structs.replace(metadata, seq_data=data)

    return change


def with_fields(**changes):
    return lambda metadata: msgspec.structs.replace(metadata, **changes)


OTHER_GROUPS = {
    "nothing": with_fields(),
    "prompt": with_fields(is_prompt=True),
    "chunk": with_fields(token_chunk_size=2),
    "no sample": with_fields(do_sample=False),
    "generation": with_fields(generation_id=3),
    "image": with_fields(multi_modal_data=(SpanChunk(SPANS[0], 0, 1, 0),)),
    "window": with_fields(sliding_window=7),
    "end": with_fields(eos_token_ids=(3,)),
    "adapter": with_fields(lora_request=LoRARequest("x", 9)),
    "prompt adapter": with_fields(prompt_adapter_request=(1, 2)),
    "computed blocks": with_fields(computed_block_nums=np.array([3], np.int32)),
    "other blocks": with_fields(computed_block_nums=np.array([3, 9], np.int32)),
    "computed": with_data(num_computed_tokens=6),
    "total": with_data(cumulative_logprob=-0.0),
    "index": with_data(index=3),
    "tokens": with_data(output_token_ids=np.array([106, 107, 1], np.int32)),
    "logprobs": with_data(output_logprobs=np.array([-0.5, -0.5, -0.25], np.float32)),
    "prompt tokens": with_data(prompt_token_ids=np.array([1] * 6, np.int32)),
    "encoder": lambda metadata: msgspec.structs.replace(
        metadata, encoder_seq_data=known_sequence(9, 0), cross_block_table=np.ones(1, np.int32)
    ),
    "cross table": with_fields(cross_block_table=np.array([8, 1], np.int32)),
    "encoder computed": with_fields(encoder_seq_data=known_sequence(9, 0)),
    "other encoder": with_fields(encoder_seq_data=known_sequence(8, 8)),
}


@pytest.mark.parametrize("num_seqs", [1, 2])
@pytest.mark.parametrize("encoder", [False, True])
@pytest.mark.parametrize("kind", OTHER_GROUPS)
def test_whatever_else_a_snapshot_says_is_recorded(kind, encoder, num_seqs, tmp_path) -> None:
    before, after = (going_on(number, num_seqs, encoder) for number in range(2))
    changed = OTHER_GROUPS[kind](after)
    drawn = SamplerOutput(np.full(num_seqs, 108), np.full(num_seqs, -0.5, np.float32))
    if changed.cross_block_table is not None and changed.encoder_seq_data is None:
        with pytest.raises(RecordingError, match="request 'g': encoder_seq_data: expected one"):
            write_and_read(tmp_path / "run.oct", [before], drawn, [changed])
        return
    read = write_and_read(tmp_path / "run.oct", [before], drawn, [changed])
    assert read == [canonical(changed)]
    if kind == "nothing" and num_seqs == 1:
        sizes = read_recording(tmp_path / "run.oct").step_bytes
        assert sizes[1] < 45, "nothing but the token, its log probability and the new block"


def test_a_buffer_that_is_too_short_is_not_taken_for_one_that_has_the_token() -> None:
    (completed,) = _with_values([np.array([7, 5], np.int32)], [2], np.array([5], np.int32))
    assert completed.tolist() == [7, 5, 5]


@pytest.mark.parametrize("not_finite", [False, True])
def test_columns_that_await_their_tokens_are_recorded_with_them(not_finite) -> None:
    """Whether their buffers have them by now, have something else, or are too short."""
    _, made = decode_run(8, "abcd")
    (before, _, drawn), (after, expected, _) = made[6], made[7]
    rows = after.decodes
    assert before.decodes is not None and rows is not None and len(rows) == 4
    waiting = dataclasses.replace(
        rows,
        last_token_ids=np.zeros(4, np.int64),
        cumulative_logprobs=before.decodes.cumulative_logprobs,
        tokens=[
            *rows.tokens[:2],
            rows.tokens[2][: int(rows.num_tokens[2]) - 1],
            np.full(80, 7, np.int32),
        ],
        awaits_draw=True,
    )
    prompt = rows.tokens[3][: int(rows.num_tokens[3]) - 1]
    waiting.tokens[3][: len(prompt)] = prompt
    if not_finite:
        drawn = SamplerOutput(np.full(4, -1), drawn.logprobs)
    got = resolved(Snapshots(waiting), before, drawn)
    assert got.decodes is not None and not got.decodes.awaits_draw
    if not_finite:
        assert [data.output_token_ids[-1] for m in got for _, data, _ in m.rows()] == [0] * 4
    else:
        assert [canonical(metadata) for metadata in got] == expected
