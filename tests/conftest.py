"""Before any project import: without a GPU, Triton kernels are decorated for its interpreter."""

from __future__ import annotations

import os
import random

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
if workers > 1:  # workers that all use every core spend their time waiting for one another
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--count", type=int, default=300, help="random cases of the feature matrix")
    parser.addoption(
        "--schedules", type=int, default=320, help="random schedules of the real engine"
    )
    parser.addoption(
        "--seed", type=int, help="of the random cases; by default another in every run"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(10**6)


def pytest_report_header(config: pytest.Config) -> str:
    return f"random cases: --seed {config.option.seed} --count {config.option.count}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no GPU is visible")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def run_seed(request: pytest.FixtureRequest) -> int:
    """Another in every run; the header of the report tells it."""
    return request.config.option.seed


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
