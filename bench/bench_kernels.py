"""pytest-benchmark over every op, beside plain torch: `pytest bench/bench_kernels.py --benchmark-group-by=param:op,param:batch`.

pytest-benchmark reads the host's clock, so on a GPU a round is one call and the wait for it; what the device itself needs, cold
and as a graph, is in `extra_info` with bytes, FLOPs, shares of the ceilings and the plan. `octavo bench` is the command for looking
around; this is for `--benchmark-save` and `--benchmark-compare` on one machine.
"""

from __future__ import annotations

import pytest
import torch

from octavo.bench.batch_specs import BatchSpec
from octavo.bench.conftest import bench_device
from octavo.bench.kernel_cases import OPS, make_case
from octavo.bench.plans import plan_in_use
from octavo.bench.results import Measurement
from octavo.bench.timing import time_in_turns

_GPU = {
    "paged_attention": ("q2k", "q8k", "8q1s1k", "8q1s8k", "8q1s32k", "64q1s2k", "256q1s1k"),
    "cascade_attention": ("64q1s8k",),
}
_CPU = {
    "paged_attention": ("q256", "1q1s1k", "8q1s256", "8q1s1k", "q64s512_4q1s256"),
    "cascade_attention": ("8q1s512",),
}
_OTHERS = {"cuda": ("256q1s128", "q4k"), "cpu": ("16q1s64", "q128")}


def _cases() -> list[tuple[str, str]]:
    special = _GPU if bench_device() == "cuda" else _CPU
    return [(op, batch) for op in OPS for batch in special.get(op, _OTHERS[bench_device()])]


@pytest.mark.parametrize("implementation", ["octavo", "torch"])
@pytest.mark.parametrize(("op", "batch"), _cases())
def bench_op(benchmark, op, batch, implementation, device, shape, ceilings):
    """Verified before it is timed; an op without a plain torch twin has no second row."""
    case = make_case(op, BatchSpec.parse(batch), shape, device)
    if implementation not in case.calls:
        pytest.skip(f"plain torch has no {op}")
    timed = case.calls[implementation]
    error = case.verify(timed)
    timing = time_in_turns({implementation: timed}, device, seconds=0.2 if device == "cuda" else 0)
    measured = Measurement(
        case.op, case.batch, case.shape, implementation,
        bytes_moved=case.bytes_moved, flops=case.flops, error=error, **vars(timing[implementation]),
    )  # fmt: skip
    benchmark.extra_info |= {
        "shape": case.shape,
        "bytes": case.bytes_moved,
        "flops": case.flops,
        "error": error,
        "device_us": measured.median_us,
        "graph_us": measured.graph_us,
        "GB/s": (measured.bytes_per_s or 0) / 1e9,
        "TFLOP/s": (measured.flops_per_s or 0) / 1e12,
        "share_of_ceiling": measured.share_of(ceilings),
    }
    if case.problem is not None and implementation == "octavo":
        benchmark.extra_info["plan"] = plan_in_use(case.problem)

    def once() -> None:
        timed.call()
        if device == "cuda":
            torch.cuda.synchronize()

    def reset() -> None:  # what a setup returns would be the call's arguments
        if timed.reset:
            timed.reset()

    with torch.inference_mode():
        if timed.reset:
            benchmark.pedantic(once, setup=reset, rounds=20, warmup_rounds=1)
        else:
            benchmark(once)
