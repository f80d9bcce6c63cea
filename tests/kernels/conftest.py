"""Every interpreted launch of a kernel test runs exactly (bf16 too) and under the memory guard.

Where there is a GPU the same tests run the compiled kernels on it, under the marker `gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from octavo.tests.kernels.attending import attend_with

if not torch.cuda.is_available():
    from octavo.kernels import interpreter
    from octavo.tests.interpreter_guard import Guard, guard

    interpreter.install()

    @pytest.fixture(autouse=True)
    def watch() -> Iterator[Guard]:
        with guard() as watch:
            yield watch
        assert not watch.findings, "\n".join(map(str, watch.findings))


@pytest.fixture(params=["cpu", "triton"])
def attend(request, monkeypatch):
    """Attention on either implementation: see `attending.attend_with`."""
    interpreted = request.param == "triton" and not torch.cuda.is_available()
    watch = request.getfixturevalue("watch") if interpreted else None
    return attend_with(request.param, monkeypatch, watch)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        for item in items:
            if "tests/kernels" in item.path.as_posix():
                item.add_marker("gpu")
