"""What is read from a recording is what was executed, and a file that is damaged, cut off or foreign says so."""

from __future__ import annotations

import dataclasses
import random
import struct
import zlib
from collections import Counter
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.runtime.drawn_tokens import with_drawn
from octavo.runtime.launch_args import LaunchArgs, build_launch_args
from octavo.runtime.launch_buffers import LaunchBuffers
from octavo.runtime.metadata import (
    SamplerOutput,
    SequenceData,
    SequenceGroupMetadata,
    SpanChunk,
    StaleMetadataError,
)
from octavo.runtime.params import LoRARequest, MultiModalSpan, SamplingParams
from octavo.runtime.recording import (
    LayerShape,
    Recording,
    RecordingError,
    RecordingHeader,
    RecordingRunner,
    RecordingWriter,
    read_recording,
    replay,
)
from octavo.runtime.recording.frames import MAGIC, VERSION
from octavo.runtime.recording.launches import launch_args_of
from octavo.runtime.recording.resolve import _with_values, resolved
from octavo.runtime.recording.runner import RecordedLaunch
from octavo.runtime.recording.timing import time_kernels, timings_table
from octavo.runtime.snapshots import DecodeRows, Snapshots
from octavo.scheduler import Engine, Scheduler
from octavo.tests.runtime.test_snapshots import SIZE, add, scheduler
from octavo.tests.scheduler import test_any_schedule as schedules
from octavo.tests.scheduler.shadow import Launched, ShadowRunner

HEADER = RecordingHeader(octavo_version="0", block_size=SIZE, num_gpu_blocks=60)


def canonical(metadata: SequenceGroupMetadata) -> bytes:
    """All of a snapshot, bit by bit; dicts in one order, numbers in the type of their field."""
    read = SequenceGroupMetadata.from_bytes(metadata.to_bytes())
    return msgspec.structs.replace(
        read,
        seq_data=dict(sorted(read.seq_data.items())),
        block_tables=dict(sorted(read.block_tables.items())),
    ).to_bytes()


def step_bytes(snapshots, swap_out, swap_in, copy, output) -> tuple:
    parts = [canonical(metadata) for metadata in snapshots]
    tokens = output.token_ids.dtype.str, output.token_ids.tobytes()
    logprobs = output.logprobs.dtype.str, output.logprobs.tobytes()
    return parts, [*swap_out], [*swap_in], [*copy], tokens, logprobs


def read_all(recording: Recording) -> list[tuple]:
    return [step_bytes(*step) for step in recording]


class Remembering(RecordingRunner):
    """Keeps what was run, as it was then."""

    def __init__(self, runner, writer) -> None:
        super().__init__(runner, writer)
        self.kept: list[tuple] = []

    @property
    def spans(self):
        return self.runner.spans

    def launch(self, seq_group_metadata_list, *, after=None, **kwargs):
        launched = super().launch(seq_group_metadata_list, after=after, **kwargs)
        launched.result = partial(self._result, launched, after, kwargs)
        return launched

    def _result(self, launched: RecordedLaunch, after, kwargs):
        is_first = launched._output is None
        output = RecordedLaunch.result(launched)
        if is_first:
            snapshots = list(launched.snapshots)
            if isinstance(after, RecordedLaunch):
                snapshots = with_drawn(launched.snapshots, after.snapshots, after.result())
            names = ("blocks_to_swap_out", "blocks_to_swap_in", "blocks_to_copy")
            self.kept.append(step_bytes(snapshots, *(kwargs[name] for name in names), output))
        return output


def record_schedule(seed: int, path: Path) -> tuple[Remembering, Counter[str]]:
    """A random schedule of the scheduler's tests: all kinds of requests, disturbed and failing steps."""
    rng = random.Random(seed)
    config = schedules.random_config(rng)
    asks = schedules.random_asks(rng, config)
    largest = max(ask.blocks_alone(config.block_size) for ask in asks)
    config = dataclasses.replace(config, num_gpu_blocks=largest + rng.randint(0, 6))
    header = RecordingHeader(
        octavo_version="0",
        block_size=config.block_size,
        num_gpu_blocks=config.num_gpu_blocks,
        num_cpu_blocks=config.num_cpu_blocks,
    )
    ahead = seed % 2 == 1
    if ahead:  # where blocks are short no step runs ahead
        config = dataclasses.replace(config, num_gpu_blocks=config.num_gpu_blocks + 60)
    made = Scheduler(config)
    shadow = ShadowRunner(config.block_size, config.sliding_window)
    runner = Remembering(shadow, RecordingWriter(path, header))
    disturber = schedules.Disturber(runner, made, rng)
    eos = frozenset([schedules.EOS])
    engine = Engine(made, disturber, check=True, eos_token_ids=eos, async_scheduling=ahead)
    disturber.engine = engine
    schedules.drain(engine, asks.copy(), disturber)
    runner.writer.close()
    stats = made.stats()
    return runner, disturber.counts + Counter(
        beams=sum(ask.params.use_beam_search for ask in asks),
        samples=sum(ask.params.n > 1 for ask in asks),
        spans=sum(bool(ask.spans) for ask in asks),
        encoders=sum(ask.encoder is not None for ask in asks),
        adapters=sum("lora_request" in ask.kwargs for ask in asks),
        windows=config.sliding_window is not None,
        swap=stats.num_swapped_out,
        recompute=stats.num_recomputed,
        hits=stats.num_cached_tokens,
        copies=shadow.num_moves["copy"],
        ahead=shadow.num_ahead,
    )


def test_random_schedules_are_read_as_they_were_run_and_can_be_run_again(tmp_path) -> None:
    happened: Counter[str] = Counter()
    for seed in range(36):
        path = tmp_path / "run.oct"
        runner, counts = record_schedule(seed, path)
        happened += counts
        recording = read_recording(path)
        assert recording.notice is None and len(recording) == len(runner.kept)
        assert read_all(recording) == runner.kept, f"seed {seed}"
        window = runner.runner.window
        again = ShadowRunner(recording.header.block_size, window)
        again.spans = dict(runner.spans)
        result = replay(recording, again)
        assert result.is_equal and result.num_steps == len(runner.kept)
    for event in (
        *(*schedules.EVENTS, "swap", "recompute", "hits", "ahead"),
        *("copies", "beams", "samples", "spans", "encoders", "adapters", "windows"),
    ):
        assert happened[event] > 3, f"{event}: too rare to tell anything, {happened}"


# -- snapshots that no scheduler makes


ids = st.integers(0, 2**31 - 1)
floats = st.floats(width=32)


@st.composite
def arrays(draw, elements, dtype, size) -> np.ndarray:
    with np.errstate(over="ignore"):
        array = np.array(draw(st.lists(elements, min_size=size, max_size=size)), dtype)
    array.flags.writeable = False
    return array


@st.composite
def sequences(draw) -> SequenceData:
    prompt_len, output_len = draw(st.integers(0, 5)), draw(st.integers(0, 4))
    few = st.integers(0, 2)  # so that sequences have beginnings in common
    return SequenceData(
        draw(arrays(few, np.int32, prompt_len)),
        draw(arrays(few, np.int32, output_len)),
        draw(st.integers(0, prompt_len + output_len)),
        draw(st.floats()),
        draw(arrays(st.sampled_from([-0.5, 0.0, -0.0, float("nan"), -np.inf]), np.float32, output_len)),
        draw(st.integers(0, 3)),
    )  # fmt: skip


plain_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63), st.text(), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(), inner, max_size=3),
    ),
    max_leaves=5,
)
spans = st.builds(
    MultiModalSpan,
    st.integers(0, 9),
    st.integers(1, 9),
    st.binary(min_size=8, max_size=16),
    st.one_of(plain_values, arrays(floats, np.float16, 4)),
)
SPANS = [
    MultiModalSpan(1, 3, b"d" * 8, {"pixels": np.arange(6, dtype=np.uint8).reshape(2, 3)}),
    MultiModalSpan(5, 1, b"e" * 9, (1, [2.5, None])),
]
params = st.sampled_from(
    [
        SamplingParams(temperature=0),
        SamplingParams(seed=5, top_k=3, stop=["x", "y"], stop_token_ids=[1, 2]),
        SamplingParams(n=2, seed=2**62),
        SamplingParams(use_beam_search=True, best_of=2, temperature=0, early_stopping="never"),
    ]
)


@st.composite
def groups(draw, request_id: str) -> SequenceGroupMetadata:
    seq_ids = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True))
    data = {seq_id: draw(sequences()) for seq_id in seq_ids}
    tables = {i: draw(arrays(st.integers(0, 3), np.int32, draw(st.integers(0, 6)))) for i in data}
    encoder = draw(st.none() | sequences())
    chunks = draw(st.lists(st.tuples(st.sampled_from(SPANS) | spans, ids, ids, ids), max_size=2))
    has_table = encoder is not None and draw(st.booleans())
    return SequenceGroupMetadata(
        request_id=request_id,
        is_prompt=draw(st.booleans()),
        seq_data=data,
        block_tables=tables,
        sampling_params=draw(params),
        token_chunk_size=draw(st.integers(0, 9)),
        computed_block_nums=draw(arrays(st.integers(0, 3), np.int32, draw(st.integers(0, 3)))),
        do_sample=draw(st.booleans()),
        generation_id=draw(st.integers(0, 2**60)),
        sliding_window=draw(st.none() | ids),
        multi_modal_data=tuple(SpanChunk(*chunk) for chunk in chunks),
        lora_request=draw(st.none() | st.just(LoRARequest("a", 3, "b"))),
        prompt_adapter_request=draw(st.none() | plain_values),
        eos_token_ids=draw(st.sampled_from([(), (3,), (3, 4)])),
        encoder_seq_data=encoder,
        cross_block_table=draw(arrays(ids, np.int32, 2)) if has_table else None,
    )


@st.composite
def steps(draw) -> tuple:
    names = draw(st.lists(st.sampled_from("abc"), max_size=3, unique=True))
    snapshots = [draw(groups(name)) for name in names]
    count = sum(metadata.num_samples for metadata in snapshots)
    output = SamplerOutput(
        draw(arrays(st.integers(-1, 2**40), np.int64, count)), draw(arrays(floats, np.float32, count))
    )  # fmt: skip
    pairs = st.lists(st.tuples(ids, ids), max_size=3)
    return snapshots, draw(pairs), draw(pairs), draw(pairs), output


def write_steps(path: Path, made: list[tuple], header: RecordingHeader = HEADER) -> None:
    writer = RecordingWriter(path, header)
    for snapshots, swap_out, swap_in, copy, output in made:
        writer.write(
            snapshots,
            output,
            blocks_to_swap_out=swap_out,
            blocks_to_swap_in=swap_in,
            blocks_to_copy=copy,
        )
    writer.close()


@settings(max_examples=70, deadline=None)
@given(st.lists(steps(), max_size=5))
def test_any_snapshots_come_back_bit_by_bit(tmp_path_factory, made) -> None:
    path = tmp_path_factory.getbasetemp() / "any.oct"
    write_steps(path, made)
    recording = read_recording(path)
    assert recording.header == HEADER and recording.notice is None
    assert read_all(recording) == [step_bytes(*step) for step in made]
    for step, (snapshots, *_) in zip(recording, made, strict=True):
        for got, given_ in zip(step.snapshots, snapshots, strict=True):
            assert repr(got.prompt_adapter_request) == repr(given_.prompt_adapter_request)
            for a, b in zip(got.multi_modal_data, given_.multi_modal_data, strict=True):
                assert repr(a.span.data) == repr(b.span.data), "the same types, tuples too"


# -- plain decodes


def decode_run(num_steps: int, names: str = "abcdefgh") -> tuple[Scheduler, list[tuple]]:
    """Plain decodes that come, go, are preempted and reissued; (snapshots, their bytes, output) of each step."""
    s, rng = scheduler(90), random.Random(0)
    for name in names:
        add(s, name, 6, max_tokens=40)
    made = []
    for number in range(num_steps):
        if number == 9:
            s.preempt("b")
        if number == 12:
            s.abort("c")
            add(s, "new", 9, max_tokens=20)
        snapshots = s.schedule().seq_group_metadata_list
        if number == 15:  # between snapshot and launch
            s.preempt("d")
            snapshots = s.reissue().seq_group_metadata_list
        count = sum(metadata.num_samples for metadata in snapshots)
        logprobs = np.array([-rng.random() for _ in range(count)], np.float32)
        output = SamplerOutput(np.array([rng.randrange(1000) for _ in range(count)]), logprobs)
        made.append((snapshots, [canonical(metadata) for metadata in snapshots], output))
        s.update(output)
    return s, made


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
    if changed.cross_block_table is not None and changed.encoder_seq_data is None:
        pytest.skip("a table of no encoder")
    drawn = SamplerOutput(np.full(num_seqs, 108), np.full(num_seqs, -0.5, np.float32))
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


def test_a_step_is_in_the_file_when_it_is_written(tmp_path) -> None:
    """A crash leaves what can be read, and a notice: nothing is in memory only."""
    _, made = decode_run(12)
    writer = RecordingWriter(tmp_path / "run.oct", HEADER)
    for number, (snapshots, _, output) in enumerate(made, 1):
        writer.write(snapshots, output)
        recording = read_recording(tmp_path / "run.oct")
        assert len(list(recording)) == len(recording) == number
        assert recording.notice is not None and f"{number} steps can be read" in recording.notice
    writer.close()
    writer.close()
    assert read_recording(tmp_path / "run.oct").notice is None
    writer.write(made[0][0], made[0][2])
    assert len(read_recording(tmp_path / "run.oct")) == 12, "no step after the end"


def test_a_decode_step_takes_nine_bytes_a_row(tmp_path) -> None:
    """A token and its log probability; tables and tokens are told once."""
    s = scheduler(400)
    for number in range(12):
        add(s, f"r{number}", 10 + number, max_tokens=None)
    writer = RecordingWriter(tmp_path / "run.oct", HEADER)
    for _ in range(80):
        snapshots = s.schedule().seq_group_metadata_list
        count = sum(metadata.num_samples for metadata in snapshots)
        output = SamplerOutput(np.arange(count), np.full(count, -0.5, np.float32))
        writer.write(snapshots, output)
        s.update(output)
    writer.close()
    sizes = read_recording(tmp_path / "run.oct").step_bytes[40:80]
    # 8 bytes a row, 8 for each of a quarter of the rows that open a block, and the frame
    assert np.mean(sizes) < 12 * (8 + 8 / SIZE) + 25


def test_what_no_step_has_had_for_long_is_forgotten_by_both(tmp_path) -> None:
    """And told anew when it comes back: memory does not grow with the number of requests."""

    def one(name: str, length: int) -> SequenceGroupMetadata:
        data = SequenceData(
            np.arange(length, dtype=np.int32), np.zeros(0, np.int32), 0, 0.0, np.zeros(0, np.float32)
        )  # fmt: skip
        return SequenceGroupMetadata(
            request_id=name,
            is_prompt=True,
            seq_data={0: data},
            block_tables={0: np.array([1], np.int32)},
            sampling_params=SamplingParams(temperature=0),
            token_chunk_size=length,
            computed_block_nums=np.zeros(0, np.int32),
            do_sample=False,
            generation_id=0,
        )

    nothing = SamplerOutput(np.zeros(0, np.int64), np.zeros(0, np.float32))
    made = [([one(f"r{number}", 3)], [], [], [], nothing) for number in range(700)]
    made += [([one("r0", 3), one("r699", 3)], [], [], [], nothing)]
    path = tmp_path / "run.oct"
    writer = RecordingWriter(path, HEADER)
    for snapshots, *_ in made:
        writer.write(snapshots, nothing)
        assert len(writer._encoder._groups) <= 2 * 256 + 2
    writer.close()
    assert read_all(read_recording(path)) == [step_bytes(*step) for step in made]


# -- files that are not whole


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[bytes, list[tuple]]:
    """A short recording of mixed rows, and its steps."""
    path = tmp_path_factory.mktemp("small") / "run.oct"
    for seed in range(100):
        record_schedule(seed, path)
        recording = read_recording(path)
        if 5 <= len(recording) <= 25 and 700 < recording.num_bytes < 1400:
            return path.read_bytes(), read_all(recording)
    raise AssertionError("no schedule is as short as that")


def read_damaged(path: Path, data: bytes) -> tuple[list[tuple], str]:
    """(steps that can be read, what is said about the rest)."""
    path.write_bytes(data)
    found = []
    try:
        recording = read_recording(path)
        for step in recording:
            found.append(step_bytes(*step))
    except RecordingError as error:
        assert str(error).startswith(str(path))
        return found, str(error)
    return found, recording.notice or ""


def test_every_flipped_byte_is_noticed(small, tmp_path) -> None:
    """Right data up to there, then a clear error; no other exception, and no allocation by a damaged length."""
    data, expected = small
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << (place % 8)
        found, said = read_damaged(tmp_path / "run.oct", bytes(damaged))
        assert said, f"byte {place}"
        assert found == expected[: len(found)], f"byte {place}"


def test_every_cut_is_noticed(small, tmp_path) -> None:
    data, expected = small
    for length in range(len(data)):
        found, said = read_damaged(tmp_path / "run.oct", data[:length])
        assert "cut off" in said or (length < len(MAGIC) and "expected a recording" in said)
        assert found == expected[: len(found)], f"length {length}"
        if "steps can be read" in said:
            assert f"{len(found)} steps can be read" in said


def frames_of(data: bytes) -> list[tuple[bytes, bytes]]:
    found, offset = [], 16
    while offset < len(data):
        kind, length, _, _ = struct.unpack_from("<4sIII", data, offset)
        found.append((kind, data[offset + 16 : offset + 16 + length]))
        offset += 16 + length
    return found


def file_of(frames: list[tuple[bytes, bytes]], prefix: bytes) -> bytes:
    parts = [prefix]
    for kind, payload in frames:
        head = struct.pack("<4sII", kind, len(payload), zlib.crc32(payload))
        parts += [head, struct.pack("<I", zlib.crc32(head)), payload]
    return b"".join(parts)


def test_frames_with_right_checksums_and_wrong_contents_are_refused(small, tmp_path) -> None:
    """Whoever wrote them: nothing but RecordingError comes of it."""
    data, _ = small
    frames, rng, refused = frames_of(data), random.Random(0), 0
    for _ in range(700):
        number = rng.randrange(len(frames))
        kind, payload = frames[number]
        changed = bytearray(payload)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        if rng.random() < 0.2:
            del changed[rng.randrange(len(changed)) :]
        mutated = [*frames]
        mutated[number] = kind, bytes(changed)
        _, said = read_damaged(tmp_path / "run.oct", file_of(mutated, data[:16]))
        refused += bool(said)
    assert refused > 350


def test_frames_out_of_order_are_refused(small, tmp_path) -> None:
    data, expected = small
    frames, prefix = frames_of(data), data[:16]
    assert file_of(frames, prefix) == data
    header, *told, end = frames
    for order, number, said in (
        ([header, *told[:2], *told[3:], end], 2, "expected step 2, got 3"),
        ([header, told[0], *told, end], 1, "expected step 1, got 0"),
        ([header, *told[:-1], end], len(told) - 1, f"expected {len(told)} steps, got"),
        ([*told, end], 0, "damaged"),
        ([header, header, *told, end], 0, "damaged"),
        ([header, *told, end, end], len(told), "expected nothing after its end"),
    ):
        found, message = read_damaged(tmp_path / "run.oct", file_of(order, prefix))
        assert found == expected[:number] and said in message, message


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "expected a recording, got b''"),
        (b"{\"model\": 1}", "expected a recording, got"),
        (MAGIC.replace(b"\r\n", b"\n") + b"\0" * 30, "expected a recording"),
        (MAGIC + b"\1\0", "cut off in the first 16 bytes"),
        (MAGIC + struct.pack("<II", VERSION + 1, 0), "the version of its format is damaged"),
    ],
)  # fmt: skip
def test_what_is_no_recording(data, said, tmp_path) -> None:
    assert said in read_damaged(tmp_path / "run.oct", data)[1]


@pytest.mark.parametrize(("version", "age"), [(VERSION + 1, "newer"), (0, "older")])
def test_another_version_is_refused_by_name(small, version, age, tmp_path) -> None:
    start = MAGIC + struct.pack("<I", version)
    data = start + struct.pack("<I", zlib.crc32(start)) + small[0][16:]
    _, said = read_damaged(tmp_path / "run.oct", data)
    assert f"expected format version {VERSION}, got the {age} version {version}" in said


def test_files_that_cannot_be_had(tmp_path) -> None:
    with pytest.raises(RecordingError, match="cannot be read: No such file"):
        read_recording(tmp_path / "none.oct")
    with pytest.raises(RecordingError, match="cannot be written: No such file"):
        RecordingWriter(tmp_path / "none" / "run.oct", HEADER)
    with pytest.raises(ValueError, match="block_size: expected 1 or more, got 0"):
        RecordingHeader(octavo_version="0", block_size=0, num_gpu_blocks=1)


# -- recording


class Answering:
    """A runner that answers every step, but for those that fail."""

    def __init__(self) -> None:
        self.fails: Exception | None = None

    def execute(self, seq_group_metadata_list, **kwargs) -> SamplerOutput:
        return self.launch(seq_group_metadata_list).result()

    def launch(self, seq_group_metadata_list, **kwargs) -> Launched:
        error, self.fails = self.fails, None
        if isinstance(error, StaleMetadataError):
            raise error
        count = sum(metadata.num_samples for metadata in seq_group_metadata_list)
        output = SamplerOutput(np.arange(count), np.full(count, -0.25, np.float32))
        return Launched(output, error)


@pytest.mark.parametrize("error", [StaleMetadataError("a", 0, 1), OSError("the model failed")])
def test_a_step_that_was_not_executed_is_not_recorded(error, tmp_path) -> None:
    answering = Answering()
    runner = RecordingRunner(answering, RecordingWriter(tmp_path / "run.oct", HEADER))
    s = scheduler()
    add(s, "a", 6, max_tokens=60)
    for number in range(3):
        snapshots = s.schedule().seq_group_metadata_list
        if number == 1:
            before, answering.fails = runner.writer.num_bytes, error
            with pytest.raises(type(error)):
                runner.execute(snapshots, generation_of=s.generation_of)
            assert runner.writer.num_bytes == before
            assert (tmp_path / "run.oct").stat().st_size == before
        s.update(runner.execute(snapshots, generation_of=s.generation_of))
    runner.writer.close()
    assert len(list(read_recording(tmp_path / "run.oct"))) == 3


def test_what_cannot_be_recorded_is_said_once_and_the_run_goes_on(tmp_path) -> None:
    runner = RecordingRunner(Answering(), RecordingWriter(tmp_path / "run.oct", HEADER))
    s = scheduler()
    add(s, "a", 6, max_tokens=60)
    current = s.generation_of
    s.update(runner.execute(s.schedule().seq_group_metadata_list, generation_of=current))
    (metadata,) = s.schedule().seq_group_metadata_list
    odd = msgspec.structs.replace(metadata, prompt_adapter_request=torch.zeros(2))
    with pytest.raises(RecordingError, match=r"frame 2: step 1 .* request 'a': .*got Tensor"):
        runner.execute([odd], generation_of=current)
    s.update(runner.execute([metadata], generation_of=current))
    runner.writer.close()
    recording = read_recording(tmp_path / "run.oct")
    assert len(list(recording)) == 1 and "cut off" in (recording.notice or "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_tables": {}}, "block_tables: expected one for each sequence"),
        ({"computed_block_nums": np.zeros(0)}, "computed_block_nums: expected int32"),
        ({"cross_block_table": np.zeros(1, np.int32)}, "encoder_seq_data: expected one with"),
        ({"block_tables": {0: np.zeros(3)}}, "block_tables: expected int32 arrays"),
    ],
)
def test_snapshots_that_contradict_themselves_are_not_recorded(change, said, tmp_path) -> None:
    s = scheduler()
    add(s, "a", 6)
    (metadata,) = s.schedule().seq_group_metadata_list
    writer = RecordingWriter(tmp_path / "run.oct", HEADER)
    output = SamplerOutput(np.zeros(1, np.int64), np.zeros(1, np.float32))
    with pytest.raises(RecordingError, match=f"request 'a': {said}"):
        writer.write([msgspec.structs.replace(metadata, **change)], output)
    for wrong in (
        SamplerOutput(np.zeros(2, np.int64), np.zeros(2, np.float32)),
        SamplerOutput(np.zeros(1, np.int64), np.zeros(1)),
    ):
        writer = RecordingWriter(tmp_path / "run.oct", HEADER)
        with pytest.raises(RecordingError, match=r"output: expected 1 tokens|logprobs: expected"):
            writer.write([metadata], wrong)


def test_a_full_disk_leaves_whole_frames(tmp_path, monkeypatch) -> None:
    _, made = decode_run(3)
    writer = RecordingWriter(tmp_path / "run.oct", HEADER)
    writer.write(made[0][0], made[0][2])

    class Full:
        def __init__(self, file) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            if len(data) > 60:
                return self.file.write(data[:50])  # what there was room for
            raise OSError(28, "No space left on device")

        def __getattr__(self, name):
            return getattr(self.file, name)

    frames = writer._frames
    monkeypatch.setattr(frames, "_file", Full(frames._file))
    with pytest.raises(RecordingError, match=r"step 1 cannot be recorded.*No space left"):
        writer.write(made[1][0], made[1][2])
    assert (tmp_path / "run.oct").stat().st_size == frames.num_bytes
    assert len(list(read_recording(tmp_path / "run.oct"))) == 1


# -- running again


def test_a_planted_difference_is_found(tmp_path) -> None:
    _, made = decode_run(10)
    path = tmp_path / "run.oct"
    write_steps(path, [(list(s), [], [], [], output) for s, _, output in made])
    recorded = read_recording(path)

    class Replaying:
        def __init__(self, step: int, row: int, token: int = 0, logprob: float = 0.0) -> None:
            self.steps = iter(recorded)
            self.number, self.planted = 0, (step, row, token, logprob)

        def execute(self, seq_group_metadata_list, **kwargs) -> SamplerOutput:
            output = next(self.steps).output
            token_ids, logprobs = output.token_ids.copy(), output.logprobs.copy()
            step, row, token, logprob = self.planted
            if self.number == step:
                token_ids[row] += token
                logprobs[row] += logprob
            self.number += 1
            return SamplerOutput(token_ids, logprobs)

    assert replay(recorded, Replaying(4, 3)).is_equal
    result = replay(recorded, Replaying(4, 3, token=1))
    assert (result.num_token_differences, result.num_logprob_differences) == (1, 0)
    first = result.first
    assert first is not None and (first.step, first.row, first.field) == (4, 3, "token")
    assert first.request_id == list(recorded)[4].snapshots[3].request_id
    assert first.got == first.expected + 1
    assert str(first).startswith(f"step 4, row 3, request '{first.request_id}': token: recorded")
    for logprob, tolerance, equal in (
        (0.01, 0.02, True),
        (0.01, 0.001, False),
        (float("nan"), 0.1, False),
        (-np.inf, 0.1, False),
    ):
        result = replay(recorded, Replaying(2, 0, logprob=logprob), tolerance=tolerance)
        assert result.is_equal == equal and result.num_token_differences == 0
        assert result.num_logprob_differences == (not equal)
    assert replay(recorded, Replaying(4, 3, token=1), most_steps=4).num_steps == 4


def test_an_older_snapshot_after_a_newer_one_is_refused(tmp_path) -> None:
    s = scheduler()
    add(s, "a", 6)
    (metadata,) = s.schedule().seq_group_metadata_list
    output = SamplerOutput(np.zeros(1, np.int64), np.zeros(1, np.float32))
    made = [
        ([msgspec.structs.replace(metadata, generation_id=generation)], [], [], [], output)
        for generation in (3, 2)
    ]
    write_steps(tmp_path / "run.oct", made)
    with pytest.raises(RecordingError, match="frame 2: request 'a': expected generation 3 or"):
        replay(read_recording(tmp_path / "run.oct"), Answering())


# -- launches


def shapes(num_layers: int = 2, **changes) -> tuple[LayerShape, ...]:
    values = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "head_size_v": 16}
    return (LayerShape(**{**values, "dtype": "float32", **changes}),) * num_layers


def record_decodes(path: Path, **header) -> list[tuple]:
    _, made = decode_run(25)
    known = msgspec.structs.replace(HEADER, num_gpu_blocks=90, **header)
    write_steps(path, [(list(s), [], [], [], output) for s, _, output in made], known)
    return made


def test_launch_arguments_are_those_of_the_run(tmp_path) -> None:
    path = tmp_path / "run.oct"
    made = record_decodes(path)
    again = list(launch_args_of(read_recording(path)))  # kept, so none may be in another's memory
    assert len(again) == len(made)
    for got, (snapshots, _, _) in zip(again, made, strict=True):
        args = build_launch_args(list(snapshots), SIZE, 91, LaunchBuffers())
        for field in dataclasses.fields(LaunchArgs):
            a, b = getattr(got, field.name), getattr(args, field.name)
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, field.name


def test_steps_that_cannot_be_launched_are_named(tmp_path) -> None:
    _, made = decode_run(4)
    write_steps(
        tmp_path / "run.oct",
        [(list(s), [], [], [], output) for s, _, output in made],
        msgspec.structs.replace(HEADER, num_gpu_blocks=3),
    )
    with pytest.raises(RecordingError, match=r"frame 1: cannot be run: request .*block_tables"):
        list(launch_args_of(read_recording(tmp_path / "run.oct")))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "float8_e4m3fn", "window": 5},
        {"dtype": "int8", "scale_per_token_head": True, "softcap": 3.0, "head_size_v": 32},
    ],
)
def test_kernels_are_timed_by_class_without_weights(changes, tmp_path) -> None:
    path = tmp_path / "run.oct"
    layers = (*shapes(**changes), msgspec.structs.replace(shapes(**changes)[0], reads=1))
    made = record_decodes(path, layers=layers, kv_layout="HND")
    recording = read_recording(path)
    timings = list(time_kernels(recording, repeats=1, most_per_class=2, most_steps=14))
    assert 2 < len(timings) < 14 < len(made)
    first = timings[0]
    assert (first.num_decodes, first.num_prefills) == (0, 4)  # 24 tokens are 4 prompts of 6
    assert (first.num_prefill_tokens, first.num_context_tokens, first.longest) == (24, 0, 6)
    assert all(timing.attention_us > 0 and timing.cache_write_us > 0 for timing in timings)
    assert max(Counter(timing.step_class for timing in timings).values()) == 2
    assert timings_table(timings, "").row_count == len({t.step_class for t in timings})
    assert len(list(time_kernels(recording, repeats=1, most_steps=3))) == 3


def test_timing_needs_the_shapes(tmp_path) -> None:
    record_decodes(tmp_path / "run.oct")
    with pytest.raises(ValueError, match="expected the shapes of its layers, got none"):
        next(time_kernels(read_recording(tmp_path / "run.oct")))
