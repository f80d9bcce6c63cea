"""A recording run again and compared, and the launches that it holds."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from octavo.runtime.launch_args import LaunchArgs, build_launch_args
from octavo.runtime.launch_buffers import LaunchBuffers
from octavo.runtime.metadata import (
    SamplerOutput,
)
from octavo.runtime.recording import (
    LayerShape,
    RecordingError,
    read_recording,
    replay,
)
from octavo.runtime.recording.launches import launch_args_of
from octavo.runtime.recording.timing import time_kernels, timings_table
from octavo.tests.runtime.recorded import (
    HEADER,
    Answering,
    decode_run,
    write_steps,
)
from octavo.tests.runtime.test_snapshots import SIZE, add, scheduler


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
