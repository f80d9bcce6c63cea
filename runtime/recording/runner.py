"""A runner that records what another one runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..metadata import SamplerOutput, SequenceGroupMetadata
from ..snapshots import Snapshots
from .resolve import resolved
from .writer import RecordingWriter

Pairs = list[tuple[int, int]] | tuple[()]


class Launch(Protocol):
    """A step that runs, or has run."""

    def result(self) -> SamplerOutput: ...


class Runner(Protocol):
    """What runs steps: `ModelRunner`, or one that wraps it."""

    def launch(
        self,
        seq_group_metadata_list: Sequence[SequenceGroupMetadata],
        *,
        blocks_to_swap_out: Pairs = (),
        blocks_to_swap_in: Pairs = (),
        blocks_to_copy: Pairs = (),
        generation_of: Callable[[str], int | None],
        after: Any = None,
    ) -> Launch: ...


class RecordingRunner:
    """Runs steps as `runner` does, and writes those that were run, in the order in which they ran, when their tokens are asked
    for. A step that fails is not in the recording; one that was issued again is there as it was launched; one that was launched
    while the step before it drew its tokens is there with these tokens, as if the two had been run one after the other."""

    def __init__(self, runner: Runner, writer: RecordingWriter) -> None:
        self.runner = runner
        self.writer = writer

    def launch(
        self,
        seq_group_metadata_list: Sequence[SequenceGroupMetadata],
        *,
        generation_of: Callable[[str], int | None],
        after: Any = None,
        **moves: Any,
    ) -> RecordedLaunch:
        before = after if isinstance(after, RecordedLaunch) else None
        launched = self.runner.launch(
            seq_group_metadata_list,
            generation_of=generation_of,
            after=after if before is None else before.launched,
            **moves,
        )
        snapshots = Snapshots.of(seq_group_metadata_list)
        return RecordedLaunch(launched, before, snapshots, moves, self.writer)

    def execute(
        self, seq_group_metadata_list: Sequence[SequenceGroupMetadata], **kwargs: Any
    ) -> SamplerOutput:
        """`launch`, and wait for the result."""
        return self.launch(seq_group_metadata_list, **kwargs).result()


class RecordedLaunch:
    """A step that is written when its result is there."""

    def __init__(
        self,
        launched: Launch,
        before: RecordedLaunch | None,
        snapshots: Snapshots,
        moves: dict[str, Any],
        writer: RecordingWriter,
    ) -> None:
        self.launched = launched
        self.snapshots = snapshots
        self._before = before  # until this one is written
        self._moves = moves
        self._writer = writer
        self._output: SamplerOutput | None = None

    def result(self) -> SamplerOutput:
        """Its tokens. Raises what the step raised, or once RecordingError if it cannot be written."""
        if self._output is None:
            before, self._before = self._before, None
            drawn = None if before is None else before.result()
            self._output = self.launched.result()
            snapshots = self.snapshots
            if before is not None and drawn is not None:
                snapshots = resolved(snapshots, before.snapshots, drawn)
            self._writer.write(snapshots, self._output, **self._moves)
        return self._output
