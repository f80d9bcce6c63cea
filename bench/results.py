"""What a run of the benchmarks leaves behind: JSON that can be read back, compared and drawn.

Rates are derived from time, bytes and FLOPs when they are shown, so that a file cannot contradict itself.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from .machine import Ceilings, Machine


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

    def share_of(self, ceilings: Ceilings) -> float | None:
        """Of the nearer ceiling: the larger share of copy bandwidth and of a matrix product's FLOP/s."""
        if not self.best_us:
            return None
        return max(
            (self.bytes_per_s or 0) / ceilings.copy_bytes_per_s,
            (self.flops_per_s or 0) / ceilings.matmul_flops_per_s,
        )


class HostCost(msgspec.Struct, frozen=True):
    """The host's part of a decode step, and the same changes by bare numpy in the same run."""

    num_seqs: int
    context_len: int
    host_us: float
    floor_us: float


class BenchResults(msgspec.Struct, frozen=True):
    """A run. Ratios are within it; another run on another machine is another world."""

    machine: Machine
    ceilings: Ceilings
    measurements: list[Measurement]
    host_costs: list[HostCost] = []
    version: int = 1

    def write(self, path: Path) -> None:
        """Raises ValueError when the file cannot be written."""
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self)))
        except OSError as error:
            raise ValueError(f"json: {path} cannot be written: {error.strerror}") from error


def read_results(path: Path) -> BenchResults:
    """Raises ValueError for a file that is not there, or not of this kind."""
    try:
        results = msgspec.json.decode(path.read_bytes(), type=BenchResults)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: expected what `octavo bench --json` writes: {error}") from error
    if results.version != 1:
        raise ValueError(f"{path}: expected version 1, got {results.version}")
    return results
