"""What importing costs, in a fresh interpreter each."""

from __future__ import annotations

import subprocess
import sys

import pytest

import octavo

HEAVY = ("torch", "numpy", "triton", "transformers")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(code: str, names: tuple[str, ...] = HEAVY) -> list[str]:
    return eval(
        run(f"{code}\nimport sys; print([name for name in {names} if name in sys.modules])")
    )


def test_import_is_quick() -> None:
    code = "import time; t = time.perf_counter(); import octavo; print(time.perf_counter() - t)"
    assert min(float(run(code)) for _ in range(5)) < 0.3


def test_import_loads_nothing_heavy() -> None:
    assert loaded("import octavo") == []


@pytest.mark.parametrize(
    "code",
    [
        "import octavo.scheduler",
        "from octavo import SamplingParams, RequestOutput",
        "from octavo.runtime.recording import read_recording, RecordingRunner, replay",
    ],
)
def test_scheduler_and_recordings_are_torch_free(code: str) -> None:
    assert loaded(code, ("torch", "triton", "transformers")) == []


def test_kernels_on_a_cpu_do_without_triton() -> None:
    assert (
        loaded(
            "import os; os.environ.pop('OCTAVO_BACKEND', None); import octavo.kernels", ("triton",)
        )
        == []
    )


def test_the_report_is_no_part_of_the_kernels() -> None:
    code = "import octavo.kernels; octavo.kernels.paged_attention"
    assert loaded(code, ("octavo.kernels.ops", "octavo.kernels.report")) == ["octavo.kernels.ops"]


@pytest.mark.parametrize("name", octavo.__all__)
def test_public_names(name: str) -> None:
    assert name in dir(octavo)
    assert getattr(octavo, name) is getattr(octavo, name)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'octavo' has no attribute 'LLMM'"):
        getattr(octavo, "LLMM")  # noqa: B009 (a plain access is not a statement)
