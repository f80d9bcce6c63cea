"""Results made up by hand: a run need not be measured to be compared, drawn and judged."""

from __future__ import annotations

from pathlib import Path

import msgspec

from octavo.bench.machine import Ceilings, Machine
from octavo.bench.results import BenchResults, HostCost, Measurement

MACHINE = Machine("Some CPU", 1, "3.11.7", "2.13.0", "3.9.0", "cpu", "abcdef1")
CEILINGS = Ceilings(1e12, 1e14, "bfloat16")
SHAPE = "32/8 d128 block16 bfloat16"


def row(batch: str = "8q1s1k", us: float | None = 100.0, **fields) -> Measurement:
    """Of paged attention by Octavo itself."""
    known = {"op": "paged_attention", "shape": SHAPE, "implementation": "octavo"} | fields
    if us is not None:
        times = {"median_us": us, "low_us": us * 0.9, "high_us": us * 1.2, "num_samples": 9}
        figures = {"bytes_moved": 10**8, "flops": 10**9, "error": 1e-3}
        known = times | figures | known
    return Measurement(batch=batch, **known)


def results(*rows: Measurement, **fields) -> BenchResults:
    return BenchResults(MACHINE, CEILINGS, list(rows), **fields)


def changed(of: BenchResults, **machine) -> BenchResults:
    return msgspec.structs.replace(of, machine=msgspec.structs.replace(of.machine, **machine))


def full_run() -> BenchResults:
    """Something for every table and every picture."""
    planned = [
        row(us=90.0 + 10 * split + tile, plan=f"tile_kv={tile},num_splits={split},num_warps=1,num_stages=2",
            chosen_plan="tile_kv=32,num_splits=2,num_warps=1,num_stages=2")
        for tile in (16, 32, 64) for split in (1, 2)
    ]  # fmt: skip
    return results(
        row(chosen_plan="tile_kv=32,num_splits=2,num_warps=1,num_stages=2"),
        *planned,
        row(us=130.0, implementation="sdpa", graph_us=120.0, host_us=20.0),
        row(us=None, implementation="flashinfer", note="flashinfer is not installed"),
        row("8q1s8k", 700.0),
        row("8q1s8k", 900.0, implementation="sdpa"),
        row("q2k", 1500.0, flops=10**12),
        row("256 blocks", 50.0, op="copy_blocks", flops=0, error=0.0),
        host_costs=[HostCost(256, 128, 900.0, 300.0), HostCost(256, 8192, 950.0, 310.0)],
    )


def write(folder: Path, name: str, of: BenchResults) -> Path:
    path = folder / name
    of.write(path)
    return path
