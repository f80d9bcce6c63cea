"""Recorded runs: every executed step in a file, to be run again elsewhere or to be measured. Torch-free but for `launches`
and `timing`.

    frames, format             the file: frames with checksums, and what they say
    encoder, columns, changes  a step to a frame: what is new since the last one
    decoder                    a frame to the snapshots that were executed
    writer, reader             a file of frames
    runner, resolve            records what another runner runs, with the tokens that were drawn meanwhile
    comparison                 a recording run again, and compared
    launches, timing           the launch arguments of a recording, and the kernels timed on them
"""

from .comparison import Comparison, Difference, replay
from .decoder import RecordedStep
from .format import LayerShape, RecordingHeader
from .frames import RecordingError
from .reader import Recording, read_recording
from .runner import RecordingRunner
from .writer import RecordingWriter

__all__ = [
    "Comparison",
    "Difference",
    "LayerShape",
    "RecordedStep",
    "Recording",
    "RecordingError",
    "RecordingHeader",
    "RecordingRunner",
    "RecordingWriter",
    "read_recording",
    "replay",
]
