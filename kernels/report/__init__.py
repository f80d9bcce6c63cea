"""What the compiler made of the kernels: registers, spills, loads, barriers, instructions per token, with no GPU at hand.

`measure` compiles cases of `cases` for a target in a fresh process and reads the machine code. The command
`octavo kernels report` prints the rows; the budgets in the tests are asserted on them. Nothing here is timed on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator

from .occupancy import MACHINES
from .table import Row


def select_cases(targets: Iterable[str], names: Iterable[str]) -> list[str]:
    """The cases with one of `names` in their name. Raises ValueError for what is not known."""
    from .cases import CASES

    for target in targets:
        if target not in MACHINES:
            raise ValueError(f"target: expected one of {', '.join(MACHINES)}, got {target!r}")
    for name in names:
        if not any(name in case for case in CASES):
            raise ValueError(f"kernel: expected part of one of {', '.join(CASES)}, got {name!r}")
    return [case for case in CASES if any(name in case for name in names)]


def measure(target: str, cases: Iterable[str]) -> Iterator[Row]:
    """The rows of the named cases, as they are done.

    A fresh process for each target, without TRITON_INTERPRET: Triton decides about the interpreter when a kernel is
    decorated, and the caller may be running kernels.
    """
    command = [sys.executable, "-m", f"{__name__}.worker", target, *cases]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryFile("w+") as errors:
        worker = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert worker.stdout is not None
        try:
            for line in worker.stdout:
                yield Row.from_json(line)
            if worker.wait():
                errors.seek(0)
                raise RuntimeError(f"{target}: the compiling process failed\n{errors.read()}")
        finally:
            worker.kill()  # nothing to a process that has ended
            worker.wait()
            worker.stdout.close()
