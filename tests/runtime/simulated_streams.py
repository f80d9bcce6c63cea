"""Streams whose work runs late, in any order that stream order and events permit: races without a GPU, by seed.

Work is kept until `Simulation.advance` runs some of it. A mover that forgot a wait passes under a kind order and fails
under an unkind one, so the order is drawn: fair, or with one stream starved for a while.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable


class SimulatedEvent:
    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        raise AssertionError("the host waits for a stream")


class SimulatedStream:
    def __init__(self) -> None:
        self.queue: deque[SimulatedEvent | Callable[[], None] | _Wait] = deque()

    def run(self, work: Callable[[], None]) -> None:
        self.queue.append(work)

    def record(self) -> SimulatedEvent:
        event = SimulatedEvent()
        self.queue.append(event)
        return event

    def wait(self, event: SimulatedEvent) -> None:
        self.queue.append(_Wait(event))

    def is_stuck(self) -> bool:
        head = self.queue[0] if self.queue else None
        return isinstance(head, _Wait) and not head.event.passed

    def advance(self) -> None:
        """Do the next thing."""
        head = self.queue.popleft()
        if isinstance(head, SimulatedEvent):
            head.passed = True
        elif not isinstance(head, _Wait):
            head()


class _Wait:
    def __init__(self, event: SimulatedEvent) -> None:
        self.event = event


class Simulation:
    """A compute stream and a side stream."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.compute, self.side = SimulatedStream(), SimulatedStream()

    def advance(self, most: int | None = None, only: SimulatedStream | None = None) -> None:
        """Do up to `most` things, or all that can be done; `only` those of one stream if given."""
        starved = self._draw.choice([None, self.compute, self.side])
        done = 0
        while most is None or done < most:
            streams = [only] if only is not None else [self.compute, self.side]
            ready = [stream for stream in streams if stream.queue and not stream.is_stuck()]
            if not ready:
                return
            kept = [stream for stream in ready if stream is not starved]
            self._draw.choice(kept or ready).advance()
            done += 1

    @property
    def is_idle(self) -> bool:
        return not self.compute.queue and not self.side.queue
