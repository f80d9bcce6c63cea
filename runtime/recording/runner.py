"""A runner that records what another one executes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..metadata import SamplerOutput, SequenceGroupMetadata
from .writer import RecordingWriter

Pairs = list[tuple[int, int]] | tuple[()]


class Runner(Protocol):
    """What executes a step: `ModelRunner`, or one that wraps it."""

    def execute(
        self,
        seq_group_metadata_list: Sequence[SequenceGroupMetadata],
        *,
        blocks_to_swap_out: Pairs = (),
        blocks_to_swap_in: Pairs = (),
        blocks_to_copy: Pairs = (),
        generation_of: Callable[[str], int | None],
    ) -> SamplerOutput: ...


class RecordingRunner:
    """Executes steps as `runner` does, and writes those that were executed. A step that raises is not in the recording; one
    that was issued again is there as it was run."""

    def __init__(self, runner: Runner, writer: RecordingWriter) -> None:
        self.runner = runner
        self.writer = writer

    def execute(
        self,
        seq_group_metadata_list: Sequence[SequenceGroupMetadata],
        *,
        blocks_to_swap_out: Pairs = (),
        blocks_to_swap_in: Pairs = (),
        blocks_to_copy: Pairs = (),
        generation_of: Callable[[str], int | None],
    ) -> SamplerOutput:
        output = self.runner.execute(
            seq_group_metadata_list,
            blocks_to_swap_out=blocks_to_swap_out,
            blocks_to_swap_in=blocks_to_swap_in,
            blocks_to_copy=blocks_to_copy,
            generation_of=generation_of,
        )
        self.writer.write(
            seq_group_metadata_list,
            output,
            blocks_to_swap_out=blocks_to_swap_out,
            blocks_to_swap_in=blocks_to_swap_in,
            blocks_to_copy=blocks_to_copy,
        )
        return output
