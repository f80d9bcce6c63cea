"""Host cost of a decode step, part by part, against the numpy floor of the same run.

    python bench/host_step.py [--batch 1 16 64 256 1024] [--context 128 1024 8192] [--steps 200]

All sequences decode, greedily, with the prefix cache on; the forward pass is left out. Floor and engine take turns, step by
step, and the lower fifth of each is compared, so that what else the machine does weighs little. Before anything is timed the
launch arguments of a step are compared with those made one request at a time. Columns in microseconds:

    schedule      choosing, blocks, prefix cache and the snapshots
    launch args   what the kernels take, on the device
    sampling      the sampling parameters as columns
    write-back    tokens to their sequences, and who ends

Then the block manager beside a plain list of free blocks: giving and taking back a sequence of 1024 tokens, and forking one
and writing to the shared block.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
from pathlib import Path
from time import perf_counter_ns

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from octavo.runtime.launch_args import build_launch_args
from octavo.runtime.launch_buffers import LaunchBuffers
from octavo.runtime.metadata import SamplerOutput
from octavo.runtime.params import SamplingParams
from octavo.runtime.sampler import sampling_rows
from octavo.scheduler import BlockManager, Scheduler, SchedulerConfig, SequenceGroup
from octavo.scheduler.sequence import Sequence

sys.path.insert(0, str(Path(__file__).parent))
from host_floor import BLOCK_SIZE, Floor

PARTS = ("schedule", "launch args", "sampling", "write-back")
PARAMS = SamplingParams(temperature=0, max_tokens=None)


class HostStep:
    """`step()` runs the host's part of one decode step and returns the nanoseconds of each part."""

    def __init__(self, batch: int, context: int, steps: int) -> None:
        blocks = batch * ((context + steps) // BLOCK_SIZE + 3)
        self.batch, self.num_blocks = batch, blocks + 1
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_gpu_blocks=blocks,
                block_size=BLOCK_SIZE,
                max_num_seqs=batch,
                max_num_batched_tokens=batch * (context + BLOCK_SIZE),
                max_model_len=context + steps + BLOCK_SIZE,
            )
        )
        self.buffers = LaunchBuffers()
        generator = np.random.default_rng(0)
        for row in range(batch):
            prompt = generator.integers(0, 30000, context - 1 + row % BLOCK_SIZE)
            self.scheduler.add_seq_group(SequenceGroup(f"r{row}", prompt, PARAMS, 0.0))
        self.outputs = SamplerOutput(np.arange(batch) % 30000, np.full(batch, -0.5, np.float32))
        self.scheduler.schedule()
        self.scheduler.update(self.outputs)

    def step(self) -> tuple[int, ...]:
        times = [perf_counter_ns()]
        snapshots = self.scheduler.schedule().seq_group_metadata_list
        times.append(perf_counter_ns())
        build_launch_args(snapshots, BLOCK_SIZE, self.num_blocks, self.buffers)
        times.append(perf_counter_ns())
        sampling_rows(snapshots)
        times.append(perf_counter_ns())
        self.scheduler.update(self.outputs)
        times.append(perf_counter_ns())
        return tuple(b - a for a, b in itertools.pairwise(times))

    def verify(self) -> None:
        """Both ways to the launch arguments, columns and single snapshots, come to the same."""
        snapshots = self.scheduler.schedule().seq_group_metadata_list
        assert len(snapshots) == self.batch
        fast = build_launch_args(snapshots, BLOCK_SIZE, self.num_blocks, self.buffers)
        slow = build_launch_args(list(snapshots), BLOCK_SIZE, self.num_blocks, LaunchBuffers())
        for name in fast.__slots__:
            a, b = getattr(fast, name), getattr(slow, name)
            if name == "block_tables":
                used = torch.arange(a.shape[1]) * BLOCK_SIZE < fast.seq_lens[:, None]
                a, b = a[used], b[used]
            assert a == b if isinstance(a, int) or a is None else torch.equal(a, b), name
        self.scheduler.update(self.outputs)


def measure(batch: int, context: int, steps: int) -> tuple[float, list[float], float]:
    """(floor, each part, all parts) in microseconds."""
    host, floor = HostStep(batch, context, steps + 40), Floor(batch, context, steps + 40)
    host.verify()
    gc.collect()
    gc.freeze()
    samples = [(floor.step(), *host.step()) for _ in range(steps + 20)][20:]
    gc.unfreeze()
    low = [float(np.quantile(column, 0.2)) / 1e3 for column in zip(*samples, strict=True)]
    total = float(np.quantile([sum(sample[1:]) for sample in samples], 0.2)) / 1e3
    return low[0], low[1:], total


def best_us(function, repeats: int = 300) -> float:
    times = []
    for _ in range(repeats):
        started = perf_counter_ns()
        function()
        times.append(perf_counter_ns() - started)
    return float(np.quantile(times, 0.2)) / 1e3


def block_manager_rows(context: int = 1024) -> list[tuple[str, float]]:
    blocks, free = BlockManager(4096, BLOCK_SIZE), list(range(4096))
    seq = Sequence(0, list(range(context)))
    tail, child = Sequence(1, list(range(context - 3))), Sequence(2, list(range(context - 3)))

    def allocate_and_free() -> None:
        seq.num_computed_tokens = 0
        blocks.allocate(seq, [])
        blocks.grow([seq], context)
        blocks.free(seq)

    def plain_list() -> None:
        taken = [free.pop() for _ in range(context // BLOCK_SIZE)]
        free.extend(reversed(taken))

    blocks.allocate(tail, [])
    blocks.grow([tail], context - 3)
    tail.num_computed_tokens = child.num_computed_tokens = context - 3

    def fork_and_write() -> None:
        blocks.fork(tail, child)
        assert len(blocks.grow([child], 1)) == 1
        blocks.free(child)

    return [
        (f"allocate and free {context} tokens", best_us(allocate_and_free)),
        (f"the same from a plain list ({context // BLOCK_SIZE} blocks)", best_us(plain_list)),
        (f"fork {context - 3} tokens, copy on write, free", best_us(fork_and_write)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Host cost of a decode step against its floor.")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--context", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args()
    table = Table(box=SIMPLE_HEAD)
    for name in ("sequences", "context", "floor", *PARTS, "all", "per sequence", "x floor"):
        table.add_column(name, justify="right")
    cases = [(batch, 1024) for batch in asked.batch]
    cases += [(256, context) for context in asked.context if context != 1024]
    for batch, context in cases:
        floor, parts, total = measure(batch, context, asked.steps)
        numbers = (floor, *parts, total)
        table.add_row(
            str(batch),
            str(context),
            *(f"{number:.1f}" for number in numbers),
            f"{total / batch:.2f}",
            f"{total / floor:.2f}",
        )
    console = Console(width=120)
    console.print(table)
    for name, microseconds in block_manager_rows():
        console.print(f"{name:45} {microseconds:7.1f} us")


if __name__ == "__main__":
    main()
