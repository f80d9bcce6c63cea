"""Reads a recording: the very snapshots that were executed, step by step. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

from .decoder import RecordedStep, StepDecoder
from .format import (
    RecordingHeader,
    decode_end,
    decode_header,
)
from .frames import END, FrameReader, RecordingError

# what a frame whose contents contradict themselves, or what came before, runs into
_CONTRADICTIONS = (
    msgspec.DecodeError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)


class Recording:
    """The steps of a recorded run, in order; it can be gone through any number of times.

    header     what the recorded engine was
    notice     what is missing if the file was cut off, or is still being written; None for a whole one. Its steps up to
               there are all there
    num_bytes  of the file

    Iterating raises RecordingError where the file is damaged, after the steps before that.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self._file = FrameReader(path)
        except OSError as error:
            raise RecordingError(path, None, f"cannot be read: {error.strerror}") from error
        self.path = self._file.path
        self.notice = self._file.notice
        self.num_bytes = self._file.num_bytes
        if not self._file.frames:
            raise self._file.fault or RecordingError(
                path, 0, "cut off before the end of the header"
            )
        try:
            self.header: RecordingHeader = decode_header(self._file.payload(0))
        except msgspec.DecodeError as error:
            raise RecordingError(path, 0, f"no header of a recording: {error}") from error

    def __len__(self) -> int:
        """Steps in the file, the damaged ones among them."""
        frames = self._file.frames
        return len(frames) - 1 - (frames[-1].kind == END)

    @property
    def step_bytes(self) -> list[int]:
        """What each step takes in the file, without its frame's head."""
        return [frame.length for frame in self._file.frames[1 : len(self) + 1]]

    def __iter__(self) -> Iterator[RecordedStep]:
        decoder = StepDecoder(self.header.block_size)
        for index, frame, payload in self._file.payloads():
            if index == 0:
                continue
            try:
                if frame.kind == END:
                    expected = decode_end(payload).num_steps
                    if expected != len(self):
                        raise ValueError(f"expected {expected} steps, got {len(self)}")
                    break
                step = decoder.decode(payload)
            except _CONTRADICTIONS as error:
                reason = f"it contradicts itself: {type(error).__name__}: {error}"
                raise RecordingError(self.path, index, reason) from error
            yield step
        if self._file.fault is not None:
            raise self._file.fault


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """Open a file that `LLM(..., record=path)` or `octavo record` wrote.

    Raises RecordingError when it is no recording, one of another version, or its header cannot be read.
    """
    return Recording(path)
