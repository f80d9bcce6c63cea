"""Queues of work on a device, and events between them: what moving blocks beside a running model takes.

Work handed to a stream runs after all earlier work of the stream. Two streams are in no order, but for a `wait`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch


class Event(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Whether the stream has passed it. Does not wait."""
        ...

    def synchronize(self) -> None:
        """Let the host wait until the stream has passed it."""
        ...


class Stream(Protocol):
    def run(self, work: Callable[[], None]) -> None:
        """Enqueue what `work` does. It reads host memory at any time until an event recorded afterwards has passed."""
        ...

    def record(self) -> Event:
        """The place after everything enqueued so far."""
        ...

    def wait(self, event: Event) -> None:
        """What is enqueued from now on runs after `event`. The host does not wait."""
        ...


class CudaStream:
    """A stream of a GPU; without one, whichever is current when it is used."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._own = stream

    @property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if self._own is None else self._own

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def wait(self, event: Event) -> None:
        self._stream.wait_event(cast(torch.cuda.Event, event))


class HostStream:
    """Work on a CPU is done when it is enqueued, so there is nothing to wait for."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Event:
        return HostEvent()

    def wait(self, event: Event) -> None:
        pass


class HostEvent:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def compute_and_side_stream(pool: torch.Tensor) -> tuple[Stream, Stream]:
    """The stream in which the model runs, and one beside it for moving blocks of `pool`."""
    if not pool.is_cuda:
        return HostStream(), HostStream()
    side = torch.cuda.Stream(pool.device)
    pool.record_stream(
        side
    )  # its memory, once freed, is not handed out while the side stream reads
    return CudaStream(pool.device), CudaStream(pool.device, side)
