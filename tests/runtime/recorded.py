"""What the tests of recordings record: random schedules, plain decodes, and how steps are compared."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from octavo.runtime.drawn_tokens import with_drawn
from octavo.runtime.metadata import (
    SamplerOutput,
    SequenceGroupMetadata,
    StaleMetadataError,
)
from octavo.runtime.params import MultiModalSpan
from octavo.runtime.recording import (
    Recording,
    RecordingHeader,
    RecordingRunner,
    RecordingWriter,
)
from octavo.runtime.recording.runner import RecordedLaunch
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


SPANS = [
    MultiModalSpan(1, 3, b"d" * 8, {"pixels": np.arange(6, dtype=np.uint8).reshape(2, 3)}),
    MultiModalSpan(5, 1, b"e" * 9, (1, [2.5, None])),
]


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
