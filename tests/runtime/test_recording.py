"""What is read from a recording is what was executed, bit by bit."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.runtime.metadata import (
    SamplerOutput,
    SequenceData,
    SequenceGroupMetadata,
    SpanChunk,
)
from octavo.runtime.params import LoRARequest, MultiModalSpan, SamplingParams
from octavo.runtime.recording import (
    RecordingWriter,
    read_recording,
    replay,
)
from octavo.tests.runtime.recorded import (
    HEADER,
    SPANS,
    decode_run,
    read_all,
    record_schedule,
    step_bytes,
    write_steps,
)
from octavo.tests.runtime.test_snapshots import SIZE, add, scheduler
from octavo.tests.scheduler import test_any_schedule as schedules
from octavo.tests.scheduler.shadow import ShadowRunner


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


params = st.sampled_from(
    [
        SamplingParams(temperature=0),
        SamplingParams(seed=5, top_k=3, stop=["x", "y"], stop_token_ids=[1, 2]),
        SamplingParams(n=2, seed=2**62),
        SamplingParams(
            seed=1,
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            logit_bias={4: 2.5, 7: -100.0},
            allowed_token_ids=[4, 7, 9],
            bad_words_token_ids=[[4, 5], [6]],
            min_tokens=2,
            logprobs=3,
        ),
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
