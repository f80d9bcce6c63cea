"""What recording a run costs: time beside the host's part of a decode step, and bytes.

    python bench/recording.py [--batch 1 16 64 256 1024] [--context 1024] [--steps 200]

All sequences decode, as in `host_step.py`; the forward pass is left out. The host's part of each step is timed, then its
recording to a file, step by step in one run, and the lower fifth of each is compared. `join` is a step in which one request
has ended and another has taken its place, the columns being put together anew. Before anything is timed a run is recorded,
read back and compared snapshot by snapshot.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter_ns

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from octavo.bench.host_step import BLOCK_SIZE, PARAMS, HostStep
from octavo.runtime.metadata import SequenceGroupMetadata
from octavo.runtime.recording import RecordingHeader, RecordingWriter, read_recording
from octavo.scheduler import SequenceGroup


class RecordedHostStep(HostStep):
    """`step()` returns the nanoseconds of the host's part and of its recording."""

    def __init__(self, batch: int, context: int, steps: int, path: Path) -> None:
        super().__init__(batch, context, steps)
        header = RecordingHeader(
            octavo_version="0", block_size=BLOCK_SIZE, num_gpu_blocks=self.num_blocks - 1
        )
        self.context, self.num_added = context, batch
        self.writer = RecordingWriter(path, header)
        self.snapshots: Sequence[SequenceGroupMetadata] = ()

    def step(self) -> tuple[int, ...]:
        schedule = self.scheduler.schedule

        def watched():
            made = schedule()
            self.snapshots = made.seq_group_metadata_list
            return made

        self.scheduler.schedule = watched
        host = sum(super().step())
        del self.scheduler.schedule
        started = perf_counter_ns()
        self.writer.write(self.snapshots, self.outputs)
        return host, perf_counter_ns() - started

    def replace_one(self) -> None:
        """One request ends and another comes in, whose prompt is fed in a step that is not counted."""
        self.scheduler.abort(self.scheduler.running[0].request_id)
        prompt = np.arange(self.num_added, self.num_added + self.context) % 30000
        group = SequenceGroup(f"r{self.num_added}", prompt, PARAMS, 0.0)
        self.num_added += 1
        self.scheduler.add_seq_group(group)
        self.step()


def verify(directory: Path) -> None:
    host = RecordedHostStep(16, 100, 60, directory / "verified.oct")
    kept = []
    for step in range(50):
        if step % 7 == 3:
            host.replace_one()
            kept.append(list(host.snapshots))
        host.step()
        kept.append(list(host.snapshots))
    host.writer.close()
    read = list(read_recording(host.writer.path))
    assert len(read) == len(kept)
    for step, snapshots in zip(read, kept, strict=True):
        for got, expected in zip(step.snapshots, snapshots, strict=True):
            assert got.to_bytes() == type(got).from_bytes(expected.to_bytes()).to_bytes()


def measure(batch: int, context: int, steps: int, directory: Path) -> Iterator[tuple]:
    """(what kind of step, host us, recording us, bytes a row) of plain steps and of those after a request has joined."""
    path = directory / "timed.oct"
    host = RecordedHostStep(batch, context, 2 * steps + 40, path)
    gc.collect()
    gc.freeze()
    plain = [host.step() for _ in range(steps + 20)][20:]
    first_join = host.writer.num_steps
    joins = []
    for _ in range(steps // 4):
        host.replace_one()
        joins.append(host.step())
    gc.unfreeze()
    host.writer.close()
    sizes = read_recording(path).step_bytes
    for name, samples, each in (
        ("decode", plain, sizes[20:first_join]),
        ("join", joins, sizes[first_join + 1 :: 2]),
    ):
        times = [float(np.quantile(column, 0.2)) / 1e3 for column in zip(*samples, strict=True)]
        yield name, *times, float(np.mean(each)), sizes[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="What recording costs beside a decode step.")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args()
    table = Table(box=SIMPLE_HEAD)
    for name in ("sequences", "step", "host", "recording", "ratio", "bytes", "bytes a row"):
        table.add_column(name, justify="left" if name == "step" else "right")
    with tempfile.TemporaryDirectory() as directory:
        verify(Path(directory))
        for batch in asked.batch:
            rows = measure(batch, asked.context, asked.steps, Path(directory))
            first = 0
            for name, host, recording, size, first in rows:  # noqa: B007
                numbers = (f"{host:.1f}", f"{recording:.1f}", f"{recording / host:.2f}")
                table.add_row(str(batch), name, *numbers, f"{size:.0f}", f"{size / batch:.1f}")
            table.add_row(str(batch), "first", "", "", "", f"{first}", f"{first / batch:.1f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
