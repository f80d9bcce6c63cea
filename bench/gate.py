"""Numbers that must not change unnoticed, against `gates.toml`.

    python bench/gate.py              measure, compare, exit 1 if a gate has tripped
    python bench/gate.py --update     write what was measured as the values to come

A gate trips in both directions: what has become better is written down too, so that it cannot be lost again. Most are counts,
which are the same on every machine; the one ratio of times has a wider band, and says so.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from octavo import kernels as ops
from octavo.bench.host_floor import Floor
from octavo.bench.host_step import HostStep
from octavo.bench.recording import RecordedHostStep
from octavo.kernels import block_swap
from octavo.kernels.report import measure as measure_kernels
from octavo.kernels.report import select_cases
from octavo.kernels.report.table import Row
from octavo.runtime.block_mover import BlockMover
from octavo.runtime.kv_pool import KVPool, LayerKV
from octavo.runtime.launch_buffers import LaunchBuffers
from octavo.runtime.recording import read_recording

GATES = Path(__file__).parent / "gates.toml"
KERNELS = ("decode-d64-whole", "decode-d128-whole", "decode-d128-fp8", "prefill-d128-plain")
ROWS = 64


@dataclass(frozen=True)
class Gate:
    """What a number should be, and how far from it (as a share) it may lie."""

    value: float
    tolerance: float


@dataclass(frozen=True)
class Verdict:
    name: str
    measured: float | None  # None: it is in the file, and was not measured
    gate: Gate | None  # None: it was measured, and is not in the file

    @property
    def has_tripped(self) -> bool:
        if self.measured is None or self.gate is None:
            return True
        off = abs(self.measured - self.gate.value)
        return not off <= self.gate.tolerance * abs(self.gate.value)  # what is not a number trips


def read_gates(path: Path = GATES) -> dict[str, Gate]:
    with path.open("rb") as file:
        return {name: Gate(**fields) for name, fields in tomllib.load(file).items()}


def judge(measured: dict[str, float], gates: dict[str, Gate]) -> list[Verdict]:
    """One verdict for each number that was measured or has a gate."""
    names = dict.fromkeys([*gates, *measured])
    return [Verdict(name, measured.get(name), gates.get(name)) for name in names]


# -- what is measured


class CountedCalls:
    """Counts calls of Python functions and of functions written in C: what the host does, whatever the machine."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> CountedCalls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, _frame, event: str, _what) -> None:
        self.count += event in ("call", "c_call")


class CountedCopies(TorchDispatchMode):
    """Counts torch's copies."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.copy_.default
        if function is torch.ops.aten._foreach_copy_.default:
            self.count += len(args[0])
        return function(*args, **(kwargs or {}))


def host_calls() -> dict[str, float]:
    """Calls of one decode step, a fixed part and one for each row: from steps of one row and of many, over two blocks' worth of
    steps."""
    counts = {}
    for rows in (1, ROWS):
        host = HostStep(rows, 1024, 64)
        steps = []
        for _ in range(40):  # a sixteenth of the rows opens a block, a sixteenth fills one
            with CountedCalls() as calls:
                host.step()
            steps.append(calls.count)
        counts[rows] = float(np.mean(steps[8:40]))
    per_row = (counts[ROWS] - counts[1]) / (ROWS - 1)
    return {"host_step.calls": counts[1], "host_step.calls_per_row": per_row}


def host_ratio() -> dict[str, float]:
    """A decode step of 256 sequences over the floor, the least of many of each, in turns."""
    host, floor = HostStep(256, 1024, 400), Floor(256, 1024, 400)
    host.verify()
    samples = [(floor.step(), sum(host.step())) for _ in range(300)][20:]
    least = [float(np.quantile(column, 0.05)) for column in zip(*samples, strict=True)]
    return {"host_step.over_floor": least[1] / least[0]}


def uploads() -> dict[str, float]:
    """Copies to the device in a step."""
    with mock.patch.object(LaunchBuffers, "upload", autospec=True, side_effect=LaunchBuffers.upload) as upload:  # fmt: skip
        host = HostStep(ROWS, 128, 16)
        upload.reset_mock()
        for _ in range(8):
            host.step()
    return {"host_step.uploads": upload.call_count / 8}


def moves() -> dict[str, float]:
    """Calls of the copy op for one step's copy-on-write, and copies for a swap, over 12 layers."""
    layers = [LayerKV(2, 8, torch.float32)] * 12
    pool, host = KVPool(24, layers, 4), KVPool(24, layers, 4)
    mover = BlockMover(pool, host)
    with mock.patch.object(ops, "copy_blocks", wraps=ops.copy_blocks) as copied:
        mover.move(copies=[(1, 9), (2, 11), (5, 7)])
    pairs = torch.tensor([(1, 2), (4, 9), (7, 5), (10, 1)])
    with CountedCopies() as swapped:
        block_swap.swap_blocks(pool.data, host.data, pairs, plan=block_swap.SwapPlan(False))
    return {
        "copy_on_write.launches": float(copied.call_count),
        "swap.copies_per_block": swapped.count / 4,
    }


def memory() -> dict[str, float]:
    """Bytes of KV a token takes in a pool of 32 layers of 8 heads of 128, half precision, and in a recording."""
    pool = KVPool(2, [LayerKV(8, 128, torch.float16)] * 32, 16)
    with tempfile.TemporaryDirectory() as directory:
        host = RecordedHostStep(ROWS, 128, 40, Path(directory) / "gate.oct")
        for _ in range(32):
            host.step()
        host.writer.close()
        sizes = read_recording(host.writer.path).step_bytes[8:32]
    return {
        "pool.bytes_per_token": pool.block_bytes / 16,
        "recording.bytes_per_row": float(np.mean(sizes)) / ROWS,
    }


def kernels(target: str = "sm_90") -> dict[str, float]:
    """Machine code of the attention kernels, compiled and not run."""
    cases = [case for case in select_cases([target], KERNELS) if case in KERNELS]
    return of_rows(list(measure_kernels(target, cases)))


def of_rows(rows: list[Row]) -> dict[str, float]:
    """Spills, and instructions for each KV token of the main loop, of the attention kernel of each case."""
    measured: dict[str, float] = {}
    for row in rows:
        if row.error is not None or row.code is None:
            raise RuntimeError(f"{row.case}: {row.error}")
        spills = f"{row.case}.spill_bytes"
        measured[spills] = measured.get(spills, 0.0) + row.code.spill_bytes
        if row.code.instructions_per_token is not None:
            measured[f"{row.case}.instructions_per_token"] = row.code.instructions_per_token
    return measured


PARTS: tuple[Callable[[], dict[str, float]], ...] = (
    host_calls, host_ratio, uploads, moves, memory, kernels,
)  # fmt: skip


def with_values(text: str, measured: dict[str, float]) -> str:
    """The file's text with the measured values in place of its own; comments and bands stay."""
    for name, value in measured.items():
        head = re.compile(rf'^(\["{re.escape(name)}"\]\nvalue = )\S+', re.MULTILINE)
        text, found = head.subn(rf"\g<1>{value:.6g}", text)
        if not found:
            text += f'\n["{name}"]\nvalue = {value:.6g}\ntolerance = 0.1\n'
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the gates and compare them.")
    parser.add_argument("--update", action="store_true", help="write what was measured")
    asked = parser.parse_args()
    measured: dict[str, float] = {}
    for part in PARTS:
        measured |= part()
    if asked.update:
        GATES.write_text(with_values(GATES.read_text() if GATES.exists() else "", measured))
    verdicts = judge(measured, read_gates())
    table = Table(box=SIMPLE_HEAD)
    for name in ("gate", "value", "measured", "off by", "band", ""):
        table.add_column(name, justify="left" if name == "gate" else "right")
    for verdict in verdicts:
        gate, got = verdict.gate, verdict.measured
        off = "" if gate is None or got is None or not gate.value else f"{got / gate.value - 1:+.1%}"  # fmt: skip
        table.add_row(
            verdict.name,
            "none" if gate is None else f"{gate.value:g}",
            "not measured" if got is None else f"{got:.6g}",
            off,
            "" if gate is None else f"{gate.tolerance:.0%}",
            "TRIPPED" if verdict.has_tripped else "",
        )
    Console(width=110).print(table)
    tripped = [verdict.name for verdict in verdicts if verdict.has_tripped]
    if tripped:
        print(f"tripped: {', '.join(tripped)}. If it is meant, python bench/gate.py --update")
    return bool(tripped)


if __name__ == "__main__":
    sys.exit(main())
