"""`pytest bench` collects and runs every benchmark, verified, each once and without timing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_benchmark_runs():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-q",
         "-p", "no:cacheprovider", "-p", "no:xdist", "--benchmark-disable", "-rs", str(ROOT / "bench")],
        cwd=ROOT.parent,  # in the root, `kernels` and `bench` would be top-level packages
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    # what is skipped has a reason: plain torch has no such op
    assert done.stdout.count("SKIPPED") == done.stdout.count("plain torch has no")
