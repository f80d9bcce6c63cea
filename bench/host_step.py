"""Host cost of a decode step, part by part, against the numpy floor of the same run.

    python bench/host_step.py [--batch 1 16 64 256 1024] [--context 128 1024 8192] [--steps 200] [--nano-vllm CHECKOUT]

All sequences decode, greedily, with the prefix cache on; the forward pass is left out. Floor and engine take turns, step by
step, and the lower fifth of each is compared, so that what else the machine does weighs little. Before anything is timed the
launch arguments of a step are compared with those made one request at a time. Columns in microseconds:

    schedule      choosing, blocks, prefix cache and the snapshots
    launch args   what the kernels take, on the device
    sampling      the sampling parameters as columns
    write-back    tokens to their sequences, and who ends

With a checkout of nano-vllm its host step takes its turn too, at our block size and at its own 256, as multiples of the same
floor (see peers/nano_vllm.py for what of it is measured).

Then the block manager beside a plain list of free blocks: giving and taking back a sequence of 1024 tokens, and forking one
and writing to the shared block.
"""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Callable
from time import perf_counter_ns
from types import SimpleNamespace

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from octavo.bench.host_floor import BLOCK_SIZE, Floor
from octavo.bench.peers import nano_vllm
from octavo.bench.peers.nano_vllm import NanoHostStep
from octavo.runtime.launch_args import build_launch_args
from octavo.runtime.launch_buffers import LaunchBuffers
from octavo.runtime.metadata import SamplerOutput
from octavo.runtime.params import SamplingParams
from octavo.runtime.sampling_rows import sampling_rows
from octavo.scheduler import BlockManager, Scheduler, SchedulerConfig, SequenceGroup
from octavo.scheduler.sequence import Sequence

PEER_BLOCK_SIZES = (BLOCK_SIZE, 256)
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
        # lengths differ, so that a sixteenth of the rows needs a block in each step
        lengths = [context - 1 + row % BLOCK_SIZE for row in range(batch)]
        self.prompts = [generator.integers(0, 30000, length) for length in lengths]
        for row, prompt in enumerate(self.prompts):
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

    def verify(self) -> np.ndarray:
        """Both ways to the launch arguments, columns and single snapshots, come to the same. Returns the positions."""
        snapshots = self.scheduler.schedule().seq_group_metadata_list
        assert len(snapshots) == self.batch
        fast = build_launch_args(snapshots, BLOCK_SIZE, self.num_blocks, self.buffers)
        slow = build_launch_args(list(snapshots), BLOCK_SIZE, self.num_blocks, LaunchBuffers())
        for name in fast.__slots__:
            a, b = getattr(fast, name), getattr(slow, name)
            if name == "block_tables":
                used = torch.arange(a.shape[1]) * BLOCK_SIZE < fast.seq_lens[:, None]
                a, b = a[used], b[used]
            same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            assert same, name
        self.scheduler.update(self.outputs)
        return fast.positions.numpy().copy()


def measure(
    batch: int, context: int, steps: int, nano: SimpleNamespace | None
) -> tuple[float, list[float], float, list[float]]:
    """(floor, each part, all parts, each peer) in microseconds."""
    host, floor = HostStep(batch, context, steps + 40), Floor(batch, context, steps + 40)
    positions = host.verify()
    peers = []
    if nano is not None:
        prompts = [prompt.tolist() for prompt in host.prompts]
        peers = [NanoHostStep(nano, prompts, steps + 40, size) for size in PEER_BLOCK_SIZES]
        for peer in peers:
            peer.verify(positions)
    gc.collect()
    gc.freeze()
    samples = []
    for _ in range(steps + 20):
        ours = floor.step(), *host.step()
        samples.append((*ours, sum(ours[1:]), *(peer.step() for peer in peers)))
    gc.unfreeze()
    columns = zip(*samples[20:], strict=True)
    low = [float(np.quantile(column, 0.2)) / 1e3 for column in columns]
    return low[0], low[1:5], low[5], low[6:]


def best_us(function, repeats: int = 300) -> float:
    times = []
    for _ in range(repeats):
        started = perf_counter_ns()
        function()
        times.append(perf_counter_ns() - started)
    return float(np.quantile(times, 0.2)) / 1e3


def block_manager_calls(context: int = 1024) -> dict[str, Callable[[], None]]:
    """What is timed of the block manager, each call leaving it as it was."""
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

    return {
        f"allocate and free {context} tokens": allocate_and_free,
        f"the same from a plain list ({context // BLOCK_SIZE} blocks)": plain_list,
        f"fork {context - 3} tokens, copy on write, free": fork_and_write,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Host cost of a decode step against its floor.")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--context", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--nano-vllm", metavar="CHECKOUT")
    asked = parser.parse_args()
    nano = None if asked.nano_vllm is None else nano_vllm.load(asked.nano_vllm)
    peers = [] if nano is None else [f"nano-vllm {size}" for size in PEER_BLOCK_SIZES]
    table = Table(box=SIMPLE_HEAD)
    for name in ("sequences", "context", "floor", *PARTS, "all", "per sequence", "x floor", *peers):
        table.add_column(name, justify="right")
    cases = [(batch, 1024) for batch in asked.batch]
    cases += [(256, context) for context in asked.context if context != 1024]
    for batch, context in cases:
        floor, parts, total, of_peers = measure(batch, context, asked.steps, nano)
        numbers = (floor, *parts, total)
        table.add_row(
            str(batch),
            str(context),
            *(f"{number:.1f}" for number in numbers),
            f"{total / batch:.2f}",
            f"{total / floor:.2f}",
            *(f"{peer / floor:.2f}" for peer in of_peers),
        )
    console = Console(width=140)
    console.print(table)
    for name, call in block_manager_calls().items():
        console.print(f"{name:45} {best_us(call):7.1f} us")


if __name__ == "__main__":
    main()
