"""For `pytest bench`: where the benchmarks run, on what shapes, and the machine's facts in every file they write."""

from __future__ import annotations

import msgspec
import pytest
import torch

from octavo.bench.attention_problem import AttentionShape
from octavo.bench.machine import Ceilings, describe_machine, measure_ceilings


def bench_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def bench_shape() -> AttentionShape:
    """Llama-3-8B's on a GPU, SmolLM2-135M's on a CPU."""
    if bench_device() == "cuda":
        return AttentionShape()
    return AttentionShape(9, 3, 64, dtype=torch.float32)


@pytest.fixture(scope="session")
def device() -> str:
    return bench_device()


@pytest.fixture(scope="session")
def shape() -> AttentionShape:
    return bench_shape()


@pytest.fixture(scope="session")
def ceilings(device: str, shape: AttentionShape) -> Ceilings:
    return measure_ceilings(device, shape.dtype)


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict) -> None:
    machine_info["octavo"] = msgspec.to_builtins(describe_machine(bench_device()))
