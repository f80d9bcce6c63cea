"""Before any project import: without a GPU, Triton kernels are decorated for its interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
if workers > 1:  # workers that all use every core spend their time waiting for one another
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no GPU is visible")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
