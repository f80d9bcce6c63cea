"""Every interpreted launch of a kernel test runs exactly (bf16 too) and under the memory guard."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    from octavo.kernels import interpreter
    from octavo.tests.interpreter_guard import Guard, guard

    interpreter.install()

    @pytest.fixture(autouse=True)
    def watch() -> Iterator[Guard]:
        with guard() as watch:
            yield watch
        assert not watch.findings, "\n".join(map(str, watch.findings))
