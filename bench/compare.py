"""Two runs side by side: what is in both, and how the time has changed."""

from __future__ import annotations

from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from .results import BenchResults, Measurement
from .tables import shorter


@dataclass(frozen=True)
class Change:
    """A measurement in two runs. `ratio` is new over old; None where one of them has no time."""

    old: Measurement | None
    new: Measurement | None

    @property
    def ratio(self) -> float | None:
        if self.old is None or self.new is None or not self.old.best_us or not self.new.best_us:
            return None
        return self.new.best_us / self.old.best_us

    def is_slower(self, tolerance: float) -> bool:
        """By more than a share; and what had a time and has none now, though its case was run again."""
        if self.ratio is None:
            return self.old is not None and self.new is not None and self.old.best_us is not None
        return self.ratio > 1 + tolerance


def changes(old: BenchResults, new: BenchResults) -> list[Change]:
    """In the order of the old run, then what is only in the new one."""
    before = {row.key: row for row in old.measurements}
    after = {row.key: row for row in new.measurements}
    return [Change(before.get(key), after.get(key)) for key in dict.fromkeys([*before, *after])]


def differences_of_machines(old: BenchResults, new: BenchResults) -> list[str]:
    """What makes the times of two runs hard to compare, but for the commit."""
    notes = []
    for name in old.machine.__struct_fields__:
        a, b = getattr(old.machine, name), getattr(new.machine, name)
        if name != "commit" and a != b:
            notes.append(f"{name}: {a} before, {b} now")
    for name in ("copy_bytes_per_s", "matmul_flops_per_s"):
        a, b = getattr(old.ceilings, name), getattr(new.ceilings, name)
        if not 0.9 <= b / a <= 1.1:
            notes.append(
                f"{name}: {a:.3g} before, {b:.3g} now: the machine itself has changed its pace"
            )
    return notes


def changes_table(listed: list[Change], tolerance: float) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for name in ("case", "implementation", "old us", "new us", "new / old", ""):
        is_figure = "us" in name or "/" in name
        table.add_column(name, justify="right" if is_figure else "left", overflow="fold", no_wrap=is_figure or not name)  # fmt: skip
    for change in listed:
        row = change.new or change.old
        assert row is not None
        name = row.implementation + (f" {row.plan}" if row.plan else "")
        cells = (
            f"{row.op} {shorter(row.batch)} {row.shape}",
            name,
            *(
                "-" if each is None or each.best_us is None else f"{each.best_us:.1f}"
                for each in (change.old, change.new)
            ),
            "" if change.ratio is None else f"{change.ratio:.2f}",
            _verdict(change, tolerance),
        )
        table.add_row(*map(Text, cells))
    return table


def _verdict(change: Change, tolerance: float) -> str:
    if change.is_slower(tolerance):
        return "slower" if change.ratio else "lost"
    if change.old is None or change.new is None:
        return "only before" if change.new is None else "new"
    return "faster" if change.ratio is not None and change.ratio < 1 - tolerance else ""
