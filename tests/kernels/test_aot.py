"""Every kernel compiles for the GPUs we support, without a GPU, and no kernel is forgotten."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import octavo.kernels
from octavo.tests.kernels.aot import TARGETS


def kernel_names() -> set[str]:
    """All @triton.jit functions that are launched: those named `_<op>_kernel`."""
    names = set()
    for file in Path(octavo.kernels.__file__).parent.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                names.add(node.name)
    return names


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "octavo.tests.kernels.aot", target],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    launches = [json.loads(line) for line in done.stdout.splitlines()]
    assert [launch for launch in launches if launch["error"]] == []
    assert kernel_names() - {launch["kernel"] for launch in launches} == set()
    assert {launch["case"]: launch["spills"] for launch in launches if launch["spills"]} == {}
