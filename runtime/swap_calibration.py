"""Times both ways of swapping blocks on this machine, and finds from where on the kernel is the faster one.

Every way is first checked byte for byte, then timed: by events of the GPU, by the clock where there is none. The blocks are
scattered, so that a swap of b blocks is b copies.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..kernels.block_swap import SwapPlan, swap_blocks
from ..kernels.swap_costs import Crossover, SwapCosts

BLOCK_KIB = (4, 8, 16, 24, 28, 32, 48, 64, 128, 256, 1024, 4096)
NUM_PAIRS = (1, 4, 8, 16, 32, 64, 256)
MOST_BYTES = 1 << 27  # moved at once; more only takes longer
_REPEATS = 7
# what the kernel has to gain to be taken: it keeps multiprocessors from the model meanwhile, the copy engines do not
_HANDICAP = 1.1


@dataclass(frozen=True)
class Timing:
    """One swap, timed in both ways. `kernel_us` is None where there is no GPU to run it."""

    to_device: bool
    block_bytes: int
    num_pairs: int
    copies_us: float
    kernel_us: float | None

    def bandwidth(self, microseconds: float) -> float:
        """In GB/s."""
        return self.block_bytes * self.num_pairs / microseconds / 1000


def measure_swaps(
    device: torch.device,
    block_sizes: Sequence[int] = tuple(1024 * size for size in BLOCK_KIB),
    pair_counts: Sequence[int] = NUM_PAIRS,
    most_bytes: int = MOST_BYTES,
) -> Iterator[Timing]:
    """Time all sizes and counts, from the host and to it. Raises RuntimeError if a byte arrives wrong."""
    for block_bytes in block_sizes:
        counts = [count for count in pair_counts if count * block_bytes <= most_bytes]
        num_blocks = 2 * max(counts, default=0)
        shape = (num_blocks, block_bytes)
        there = torch.zeros(shape, dtype=torch.uint8, device=device)
        here = torch.zeros(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
        for to_device in (True, False):
            source, destination = (here, there) if to_device else (there, here)
            source.random_()
            for count in counts:
                pairs = _scattered(num_blocks, count)
                copies = _time(source, destination, pairs, SwapPlan(by_kernel=False), device)
                kernel = None
                if device.type == "cuda":
                    kernel = _time(source, destination, pairs, SwapPlan(by_kernel=True), device)
                yield Timing(to_device, block_bytes, count, copies, kernel)


def _scattered(num_blocks: int, count: int) -> torch.Tensor:
    """Pairs that are no neighbours, in [0, num_blocks)."""
    places = torch.arange(count) * 2
    return torch.stack((places, num_blocks - 1 - places), dim=1)


def _time(
    source: torch.Tensor,
    destination: torch.Tensor,
    pairs: torch.Tensor,
    plan: SwapPlan,
    device: torch.device,
) -> float:
    """Median time of a swap in us, which was checked before."""
    clock = _gpu_time if device.type == "cuda" else _cpu_time
    expected = torch.zeros_like(destination, device="cpu")
    expected[pairs[:, 1]] = source[pairs[:, 0].to(source.device)].to("cpu")
    destination.zero_()

    def swap() -> None:
        swap_blocks(source, destination, pairs, plan=plan)

    clock(swap)  # compiles the kernel
    if not torch.equal(destination.cpu(), expected):
        way = "the kernel" if plan.by_kernel else "copies"
        raise RuntimeError(
            f"swap of {len(pairs)} blocks of {source.shape[1]} bytes by {way}: bytes arrived wrong"
        )
    return statistics.median(clock(swap) for _ in range(_REPEATS))


def _gpu_time(work: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    end.synchronize()
    return 1000 * start.elapsed_time(end)


def _cpu_time(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return 1e6 * (time.perf_counter() - start)


def find_costs(timings: Sequence[Timing], machine: str) -> SwapCosts:
    """The thresholds under which the swaps that were timed lose least against the better way of each."""
    sides = [[t for t in timings if t.to_device is side] for side in (True, False)]
    return SwapCosts(find_crossover(sides[0]), find_crossover(sides[1]), machine)


def find_crossover(timings: Sequence[Timing]) -> Crossover:
    """Of one direction. The kernel is not taken beyond the sizes at which it was seen to win."""
    best = Crossover(kernel_below_bytes=0, kernel_from_copies=1)
    least = _regret(timings, best)
    for size in sorted({t.block_bytes for t in timings}):
        for count in sorted({t.num_pairs for t in timings}, reverse=True):
            crossover = Crossover(kernel_below_bytes=size + 1, kernel_from_copies=count)
            regret = _regret(timings, crossover)
            if regret < least - 1e-9:
                best, least = crossover, regret
    return best


def _regret(timings: Sequence[Timing], crossover: Crossover) -> float:
    """How much longer than the better way, as a share, summed over the swaps."""
    total = 0.0
    for timing in timings:
        assert timing.kernel_us is not None, "find_crossover: timings without a kernel"
        kernel_us = _HANDICAP * timing.kernel_us
        by_kernel = crossover.takes_kernel(timing.block_bytes, timing.num_pairs)
        taken = kernel_us if by_kernel else timing.copies_us
        total += taken / min(kernel_us, timing.copies_us) - 1
    return total


def timings_table(timings: Sequence[Timing], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in ("to", "block", "blocks", "copies us", "GB/s", "kernel us", "GB/s"):
        table.add_column(name, justify="left" if name == "to" else "right", no_wrap=True)
    for timing in timings:
        ways = []
        for microseconds in (timing.copies_us, timing.kernel_us):
            if microseconds is None:
                ways += ["-", "-"]
            else:
                ways += [f"{microseconds:.1f}", f"{timing.bandwidth(microseconds):.1f}"]
        side = "device" if timing.to_device else "host"
        table.add_row(side, f"{timing.block_bytes / 1024:g} KiB", str(timing.num_pairs), *ways)
    return table
