"""The outside of a recording: a prefix that says what the file is, then frames that each know whether they are whole.

    | magic 8 | version u32 | crc u32 |                                        prefix, the same in every version
    | kind 4 | length u32 | crc of payload u32 | crc of these 12 u32 | payload |    a frame; numbers are little-endian

    HEAD   what the recorded engine was       once, first
    STEP   one executed step                  any number
    END.   how many steps there are           once, last: without it the file was cut off, or is still being written

A frame is written in one piece, past every buffer of the process, so a process that dies leaves a file whose frames up to there can be read. The
head of a frame has a checksum of its own: a length that was damaged is told from one that reaches past the end of the file,
and nothing is allocated for either.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterator
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO, NamedTuple

MAGIC = b"\x89OCT\r\n\x1a\n"  # not text, and spoilt by whoever converts line ends
VERSION = 1
HEAD, STEP, END = b"HEAD", b"STEP", b"END."
MOST_PAYLOAD_BYTES = 1 << 31

_PREFIX = struct.Struct("<8sII")
_FRAME = struct.Struct("<4sIII")
_CHECKED = _FRAME.size - 4  # bytes of a frame's head before its own checksum


class RecordingError(ValueError):
    """A file is no whole recording, or a step cannot be recorded. Names the file, the frame and what is wrong.

    frame  0 is the header, frame i + 1 step i; None where it is not about one frame
    """

    def __init__(self, path: str | os.PathLike[str], frame: int | None, message: str) -> None:
        where = "" if frame is None else f"frame {frame}: "
        super().__init__(f"{os.fspath(path)}: {where}{message}")
        self.path = Path(path)
        self.frame = frame


class FrameWriter:
    """Appends frames to a new file. A frame that could not be written leaves none of its bytes where that is possible."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        # unbuffered: nothing is left over to be written behind a frame that failed
        self._file: RawIOBase = self.path.open("wb", buffering=0)
        self.num_bytes = 0
        self._append(_prefix())

    def write(self, kind: bytes, payload: bytes) -> None:
        if len(payload) > MOST_PAYLOAD_BYTES:
            raise ValueError(
                f"expected at most {MOST_PAYLOAD_BYTES} bytes a frame, got {len(payload)}"
            )
        head = struct.pack("<4sII", kind, len(payload), zlib.crc32(payload))
        self._append(b"".join((head, struct.pack("<I", zlib.crc32(head)), payload)))

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self.num_bytes += len(data)

    def abandon(self) -> None:
        """Close the file as it stood after the last whole frame."""
        with contextlib.suppress(OSError):  # a half frame at the end is found out by the reader
            self._file.truncate(self.num_bytes)
        self._file.close()

    def close(self) -> None:
        self._file.close()


class Frame(NamedTuple):
    """Where a frame lies in the file."""

    kind: bytes
    start: int  # of its payload
    length: int
    crc: int

    @property
    def stop(self) -> int:
        return self.start + self.length


class FrameReader:
    """The frames of a file, found by walking over their heads when it is opened; payloads are read one at a time.

    fault   why the frames end before the file does; None if they do not
    notice  what is missing at the end of a file that was cut off; None for a whole one
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.frames: list[Frame] = []
        self.fault: RecordingError | None = None
        self.notice: str | None = None
        with self.path.open("rb") as file:
            self.num_bytes = os.fstat(file.fileno()).st_size
            self._check_prefix(file.read(_PREFIX.size))
            self._walk(file)

    def payloads(self) -> Iterator[tuple[int, Frame, bytes]]:
        """(index, frame, payload) in order. Raises RecordingError at the first damaged one."""
        with self.path.open("rb") as file:
            for index, frame in enumerate(self.frames):
                yield index, frame, self._payload(file, index, frame)

    def payload(self, index: int) -> bytes:
        with self.path.open("rb") as file:
            return self._payload(file, index, self.frames[index])

    def _payload(self, file: BinaryIO, index: int, frame: Frame) -> bytes:
        file.seek(frame.start)
        payload = file.read(frame.length)
        if len(payload) != frame.length or zlib.crc32(payload) != frame.crc:
            raise RecordingError(
                self.path,
                index,
                f"expected the {frame.length} bytes from byte {frame.start} on to match their checksum, they are damaged",
            )
        return payload

    def _check_prefix(self, prefix: bytes) -> None:
        if len(prefix) < len(MAGIC) or prefix[: len(MAGIC)] != MAGIC:
            raise RecordingError(self.path, None, f"expected a recording, got {prefix[:8]!r}")
        if len(prefix) < _PREFIX.size:
            raise RecordingError(
                self.path,
                None,
                f"cut off in the first {_PREFIX.size} bytes, nothing of it can be read",
            )
        _, version, crc = _PREFIX.unpack(prefix)
        if crc != zlib.crc32(prefix[:-4]):
            raise RecordingError(self.path, None, "the version of its format is damaged")
        if version != VERSION:
            age = "newer" if version > VERSION else "older"
            raise RecordingError(
                self.path,
                None,
                f"expected format version {VERSION}, got the {age} version {version}; read it with the Octavo that wrote it",
            )

    def _walk(self, file: BinaryIO) -> None:
        offset = _PREFIX.size
        while offset < self.num_bytes:
            index = len(self.frames)
            if self.frames and self.frames[-1].kind == END:
                extra = self.num_bytes - offset
                self.fault = RecordingError(
                    self.path, None, f"expected nothing after its end, got {extra} more bytes"
                )
                return
            file.seek(offset)
            head = file.read(_FRAME.size)
            if len(head) < _FRAME.size:
                break
            kind, length, crc, own = _FRAME.unpack(head)
            expected = (HEAD,) if index == 0 else (STEP, END)
            if own != zlib.crc32(head[:_CHECKED]) or kind not in expected:
                self.fault = RecordingError(
                    self.path, index, f"the head of the frame at byte {offset} is damaged"
                )
                return
            if offset + _FRAME.size + length > self.num_bytes:
                break
            self.frames.append(Frame(kind, offset + _FRAME.size, length, crc))
            offset = self.frames[-1].stop
        if not self.frames or self.frames[-1].kind != END:
            steps = max(0, len(self.frames) - 1)
            self.notice = (
                f"{self.path}: cut off after {offset} whole bytes of {self.num_bytes}, in frame {len(self.frames)}; "
                f"{steps} steps can be read"
            )


def _prefix() -> bytes:
    start = struct.pack("<8sI", MAGIC, VERSION)
    return start + struct.pack("<I", zlib.crc32(start))
