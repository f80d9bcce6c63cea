"""What a run of the benchmarks leaves behind: JSON that can be read back, compared and drawn.

Rates are derived from time, bytes and FLOPs when they are shown, so that a file cannot contradict itself.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import msgspec

from .machine import Ceilings, Machine

VERSION = 1


class Measurement(msgspec.Struct, frozen=True):
    """One implementation on one case; `note` instead of times where it was not measured."""

    op: str
    batch: str
    shape: str
    implementation: str
    plan: str | None = None  # asked for; None: the implementation's own choice
    chosen_plan: str | None = None  # which that was, where there is one plan
    bytes_moved: int = 0
    flops: int = 0
    median_us: float | None = None
    low_us: float | None = None  # 20 % of the samples were below
    high_us: float | None = None  # 80 % of the samples were below
    num_samples: int = 0
    graph_us: float | None = None
    host_us: float | None = None
    error: float | None = None  # relative to an fp64 computation, before timing
    note: str | None = None
    is_fault: bool = False  # the note tells of a wrong result or an error, not of what is missing or cannot do this

    @property
    def key(self) -> tuple[str, ...]:
        """What makes two measurements ones of the same thing."""
        return (self.op, self.batch, self.shape, self.implementation, self.plan or "")

    @property
    def best_us(self) -> float | None:
        """What an engine would see: the graph's time where there is one."""
        return self.median_us if self.graph_us is None else self.graph_us

    @property
    def bytes_per_s(self) -> float | None:
        return None if not self.best_us else self.bytes_moved / self.best_us * 1e6

    @property
    def flops_per_s(self) -> float | None:
        return None if not self.best_us else self.flops / self.best_us * 1e6

    @property
    def flops_per_byte(self) -> float | None:
        return None if not self.bytes_moved else self.flops / self.bytes_moved

    @property
    def is_own_choice(self) -> bool:
        """Octavo's kernel with the plan that it chooses by itself: what the others are compared with."""
        return self.implementation == "octavo" and self.plan is None

    def share_of(self, ceilings: Ceilings) -> float | None:
        """Of the nearer ceiling: the larger share of copy bandwidth and of a matrix product's FLOP/s."""
        if not self.best_us:
            return None
        return max(
            (self.bytes_per_s or 0) / ceilings.copy_bytes_per_s,
            (self.flops_per_s or 0) / ceilings.matmul_flops_per_s,
        )


def time_ratio(new: Measurement, old: Measurement) -> float | None:
    """Like over like: graphs where both have one, else both as they were called. None where one of them has no time."""
    if new.graph_us and old.graph_us:
        return new.graph_us / old.graph_us
    return new.median_us / old.median_us if new.median_us and old.median_us else None


class HostCost(msgspec.Struct, frozen=True):
    """The host's part of a decode step, and the same changes by bare numpy in the same run."""

    num_seqs: int
    context_len: int
    host_us: float
    floor_us: Annotated[float, msgspec.Meta(gt=0)]


class BenchResults(msgspec.Struct, frozen=True):
    """A run. Ratios are within it; another run on another machine is another world."""

    machine: Machine
    ceilings: Ceilings
    measurements: list[Measurement]
    host_costs: list[HostCost] = []
    version: int = VERSION

    def write(self, path: Path) -> None:
        """Whole or not at all, for it is written after every case. Raises ValueError when the file cannot be written."""
        write_whole(path, msgspec.json.format(msgspec.json.encode(self)))


class _Versioned(msgspec.Struct):
    version: int


def write_whole(path: Path, content: bytes) -> None:
    """Beside its place first, so that a process that is killed leaves what was there before. Raises ValueError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():  # /dev/stdout is no place to put a file
            path.write_bytes(content)
            return
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise ValueError(f"json: {path} cannot be written: {error.strerror}") from error


def read_results(path: Path) -> BenchResults:
    """Raises ValueError for a file that is not there, or not of this kind."""
    try:
        content = path.read_bytes()
        version = msgspec.json.decode(content, type=_Versioned).version
        if version != VERSION:
            raise ValueError(f"{path}: expected version {VERSION}, got {version}")
        return msgspec.json.decode(content, type=BenchResults)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: expected what `octavo bench --json` writes: {error}") from error
