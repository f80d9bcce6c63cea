"""Steps that have been scheduled and not yet written back: one that runs, and perhaps the one after it.

    schedule 1 | launch 1 | schedule 2 | launch 2 | write back 1 | schedule 3 | launch 3 | write back 2 ...
    in flight  |     1    |      1     |   1, 2   |      2       |      2     |   2, 3   |      3

The device runs them in this order. Blocks that they name stay taken until the last of them that names them is written back:
that is the fence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .sequence import Sequence, SequenceGroup
    from .step import Step


class Flight:
    """The steps in flight, oldest first."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    @property
    def oldest(self) -> Step:
        """RuntimeError if there is none."""
        self._require()
        return self.steps[0]

    @property
    def newest(self) -> Step:
        """RuntimeError if there is none."""
        self._require()
        return self.steps[-1]

    def cancel(self) -> list[Step]:
        """Nothing is in flight any more; returns what was, newest first. RuntimeError if there was none."""
        self._require()
        steps, self.steps = self.steps[::-1], []
        return steps

    def _require(self) -> None:
        if not self.steps:
            raise RuntimeError("expected a step in flight, there is none: schedule() comes first")

    def names(self, seq: Sequence) -> bool:
        """Whether a step in flight reads or writes the sequence's blocks."""
        return any(step.names(seq) for step in self.steps)

    def has(self, group: SequenceGroup) -> bool:
        return any(step.has(group) for step in self.steps)

    def make_void(self, group: SequenceGroup) -> None:
        """What the steps draw for the group is dropped, and drawn again later."""
        for step in self.steps:
            if step.has(group):
                step.voided.add(group)

    @property
    def fence(self) -> list[int] | None:
        """Where blocks go that are given up now and may be named in flight; None when nothing is in flight."""
        return self.steps[-1].fenced if self.steps else None

    @property
    def fenced(self) -> list[int]:
        """All blocks behind the fence."""
        return [block for step in self.steps for block in step.fenced]
