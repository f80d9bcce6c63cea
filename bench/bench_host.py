"""pytest-benchmark over what the host does: a decode step without the model beside its numpy floor, and the block manager."""

from __future__ import annotations

import pytest

from octavo.bench.host_floor import Floor
from octavo.bench.host_step import HostStep, block_manager_calls

_ROUNDS = 100


@pytest.mark.parametrize("context", [128, 1024, 8192])
@pytest.mark.parametrize("batch", [1, 64, 256])
@pytest.mark.parametrize("who", ["engine", "floor"])
def bench_decode_step(benchmark, who, batch, context):
    """Schedule, snapshots, launch arguments, sampling rows, write-back; compared with those made one request at a time first."""
    steps = _ROUNDS + 20
    host = HostStep(batch, context, steps)
    host.verify()
    step = host.step if who == "engine" else Floor(batch, context, steps).step
    benchmark.extra_info |= {"sequences": batch, "context": context}
    benchmark.pedantic(step, rounds=_ROUNDS, warmup_rounds=10)


@pytest.mark.parametrize("name", list(block_manager_calls()))
def bench_block_manager(benchmark, name):
    benchmark(block_manager_calls()[name])
