"""Writes a recording while the engine runs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..metadata import SamplerOutput, SequenceGroupMetadata
from ..snapshots import Snapshots
from .encoder import Pairs, StepEncoder
from .format import EndFrame, RecordingHeader, encode
from .frames import END, HEAD, STEP, FrameWriter, RecordingError


class RecordingWriter:
    """A recording being written. Every step is in the file when `write` returns.

    A step that cannot be written ends the recording: `write` raises RecordingError once, what is in the file stays readable,
    and later steps are not recorded, so that the run can go on.
    """

    def __init__(self, path: str | os.PathLike[str], header: RecordingHeader) -> None:
        try:
            self._frames = FrameWriter(path)
            self._frames.write(HEAD, encode(header))
        except OSError as error:
            raise RecordingError(path, None, f"cannot be written: {error.strerror}") from error
        self._encoder = StepEncoder(header.block_size)
        self._is_open = True
        self.path = self._frames.path

    @property
    def num_steps(self) -> int:
        return self._encoder.num_steps

    @property
    def num_bytes(self) -> int:
        return self._frames.num_bytes

    def write(
        self,
        seq_group_metadata_list: Sequence[SequenceGroupMetadata],
        output: SamplerOutput,
        *,
        blocks_to_swap_out: Pairs = (),
        blocks_to_swap_in: Pairs = (),
        blocks_to_copy: Pairs = (),
    ) -> None:
        """Append a step that has been executed."""
        if not self._is_open:
            return
        number = self._encoder.num_steps
        try:
            moves = blocks_to_swap_out, blocks_to_swap_in, blocks_to_copy
            frame = self._encoder.encode(Snapshots.of(seq_group_metadata_list), moves, output)
            self._frames.write(STEP, frame)
        except (ValueError, TypeError, OverflowError, OSError) as error:
            self._is_open = False
            self._frames.abandon()
            reason = f"step {number} cannot be recorded, the recording ends here: {error}"
            raise RecordingError(self.path, number + 1, reason) from error

    def close(self) -> None:
        """Say in the file that this is all of it. No effect the second time."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._frames.write(END, encode(EndFrame(self.num_steps)))
            self._frames.close()
        except OSError as error:
            raise RecordingError(
                self.path, None, f"its end cannot be written: {error.strerror}"
            ) from error
