"""A file that is damaged, cut off or foreign says so, and a step that cannot be written too."""

from __future__ import annotations

import random
import struct
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from octavo.runtime.metadata import (
    SamplerOutput,
    StaleMetadataError,
)
from octavo.runtime.recording import (
    RecordingError,
    RecordingHeader,
    RecordingRunner,
    RecordingWriter,
    read_recording,
)
from octavo.runtime.recording.frames import MAGIC, VERSION
from octavo.tests.runtime.recorded import (
    HEADER,
    Answering,
    decode_run,
    read_all,
    record_schedule,
    step_bytes,
)
from octavo.tests.runtime.test_snapshots import add, scheduler


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[bytes, list[tuple]]:
    """A short recording of mixed rows, and its steps."""
    path = tmp_path_factory.mktemp("small") / "run.oct"
    for seed in range(100):
        record_schedule(seed, path)
        recording = read_recording(path)
        if 5 <= len(recording) <= 25 and 700 < recording.num_bytes < 1400:
            return path.read_bytes(), read_all(recording)
    raise AssertionError("no schedule is as short as that")


def read_damaged(path: Path, data: bytes) -> tuple[list[tuple], str]:
    """(steps that can be read, what is said about the rest)."""
    path.write_bytes(data)
    found = []
    try:
        recording = read_recording(path)
        for step in recording:
            found.append(step_bytes(*step))
    except RecordingError as error:
        assert str(error).startswith(str(path))
        return found, str(error)
    return found, recording.notice or ""


def test_every_flipped_byte_is_noticed(small, tmp_path) -> None:
    """Right data up to there, then a clear error; no other exception, and no allocation by a damaged length."""
    data, expected = small
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << (place % 8)
        found, said = read_damaged(tmp_path / "run.oct", bytes(damaged))
        assert said, f"byte {place}"
        assert found == expected[: len(found)], f"byte {place}"


def test_every_cut_is_noticed(small, tmp_path) -> None:
    data, expected = small
    for length in range(len(data)):
        found, said = read_damaged(tmp_path / "run.oct", data[:length])
        assert "cut off" in said or (length < len(MAGIC) and "expected a recording" in said)
        assert found == expected[: len(found)], f"length {length}"
        if "steps can be read" in said:
            assert f"{len(found)} steps can be read" in said


def frames_of(data: bytes) -> list[tuple[bytes, bytes]]:
    found, offset = [], 16
    while offset < len(data):
        kind, length, _, _ = struct.unpack_from("<4sIII", data, offset)
        found.append((kind, data[offset + 16 : offset + 16 + length]))
        offset += 16 + length
    return found


def file_of(frames: list[tuple[bytes, bytes]], prefix: bytes) -> bytes:
    parts = [prefix]
    for kind, payload in frames:
        head = struct.pack("<4sII", kind, len(payload), zlib.crc32(payload))
        parts += [head, struct.pack("<I", zlib.crc32(head)), payload]
    return b"".join(parts)


def test_frames_with_right_checksums_and_wrong_contents_are_refused(small, tmp_path) -> None:
    """Whoever wrote them: nothing but RecordingError comes of it."""
    data, _ = small
    frames, rng, refused = frames_of(data), random.Random(0), 0
    for _ in range(700):
        number = rng.randrange(len(frames))
        kind, payload = frames[number]
        changed = bytearray(payload)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        if rng.random() < 0.2:
            del changed[rng.randrange(len(changed)) :]
        mutated = [*frames]
        mutated[number] = kind, bytes(changed)
        _, said = read_damaged(tmp_path / "run.oct", file_of(mutated, data[:16]))
        refused += bool(said)
    assert refused > 350


def test_frames_out_of_order_are_refused(small, tmp_path) -> None:
    data, expected = small
    frames, prefix = frames_of(data), data[:16]
    assert file_of(frames, prefix) == data
    header, *told, end = frames
    for order, number, said in (
        ([header, *told[:2], *told[3:], end], 2, "expected step 2, got 3"),
        ([header, told[0], *told, end], 1, "expected step 1, got 0"),
        ([header, *told[:-1], end], len(told) - 1, f"expected {len(told)} steps, got"),
        ([*told, end], 0, "damaged"),
        ([header, header, *told, end], 0, "damaged"),
        ([header, *told, end, end], len(told), "expected nothing after its end"),
    ):
        found, message = read_damaged(tmp_path / "run.oct", file_of(order, prefix))
        assert found == expected[:number] and said in message, message


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "expected a recording, got b''"),
        (b"{\"model\": 1}", "expected a recording, got"),
        (MAGIC.replace(b"\r\n", b"\n") + b"\0" * 30, "expected a recording"),
        (MAGIC + b"\1\0", "cut off in the first 16 bytes"),
        (MAGIC + struct.pack("<II", VERSION + 1, 0), "the version of its format is damaged"),
    ],
)  # fmt: skip
def test_what_is_no_recording(data, said, tmp_path) -> None:
    assert said in read_damaged(tmp_path / "run.oct", data)[1]


@pytest.mark.parametrize(("version", "age"), [(VERSION + 1, "newer"), (0, "older")])
def test_another_version_is_refused_by_name(small, version, age, tmp_path) -> None:
    start = MAGIC + struct.pack("<I", version)
    data = start + struct.pack("<I", zlib.crc32(start)) + small[0][16:]
    _, said = read_damaged(tmp_path / "run.oct", data)
    assert f"expected format version {VERSION}, got the {age} version {version}" in said


def test_files_that_cannot_be_had(tmp_path) -> None:
    with pytest.raises(RecordingError, match="cannot be read: No such file"):
        read_recording(tmp_path / "none.oct")
    with pytest.raises(RecordingError, match="cannot be written: No such file"):
        RecordingWriter(tmp_path / "none" / "run.oct", HEADER)
    with pytest.raises(ValueError, match="block_size: expected 1 or more, got 0"):
        RecordingHeader(octavo_version="0", block_size=0, num_gpu_blocks=1)


@pytest.mark.parametrize("error", [StaleMetadataError("a", 0, 1), OSError("the model failed")])
def test_a_step_that_was_not_executed_is_not_recorded(error, tmp_path) -> None:
    answering = Answering()
    runner = RecordingRunner(answering, RecordingWriter(tmp_path / "run.oct", HEADER))
    s = scheduler()
    add(s, "a", 6, max_tokens=60)
    for number in range(3):
        snapshots = s.schedule().seq_group_metadata_list
        if number == 1:
            before, answering.fails = runner.writer.num_bytes, error
            with pytest.raises(type(error)):
                runner.execute(snapshots, generation_of=s.generation_of)
            assert runner.writer.num_bytes == before
            assert (tmp_path / "run.oct").stat().st_size == before
        s.update(runner.execute(snapshots, generation_of=s.generation_of))
    runner.writer.close()
    assert len(list(read_recording(tmp_path / "run.oct"))) == 3


def test_what_cannot_be_recorded_is_said_once_and_the_run_goes_on(tmp_path) -> None:
    runner = RecordingRunner(Answering(), RecordingWriter(tmp_path / "run.oct", HEADER))
    s = scheduler()
    add(s, "a", 6, max_tokens=60)
    current = s.generation_of
    s.update(runner.execute(s.schedule().seq_group_metadata_list, generation_of=current))
    (metadata,) = s.schedule().seq_group_metadata_list
    odd = msgspec.structs.replace(metadata, prompt_adapter_request=torch.zeros(2))
    with pytest.raises(RecordingError, match=r"frame 2: step 1 .* request 'a': .*got Tensor"):
        runner.execute([odd], generation_of=current)
    s.update(runner.execute([metadata], generation_of=current))
    runner.writer.close()
    recording = read_recording(tmp_path / "run.oct")
    assert len(list(recording)) == 1 and "cut off" in (recording.notice or "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_tables": {}}, "block_tables: expected one for each sequence"),
        ({"computed_block_nums": np.zeros(0)}, "computed_block_nums: expected int32"),
        ({"cross_block_table": np.zeros(1, np.int32)}, "encoder_seq_data: expected one with"),
        ({"block_tables": {0: np.zeros(3)}}, "block_tables: expected int32 arrays"),
    ],
)
def test_snapshots_that_contradict_themselves_are_not_recorded(change, said, tmp_path) -> None:
    s = scheduler()
    add(s, "a", 6)
    (metadata,) = s.schedule().seq_group_metadata_list
    writer = RecordingWriter(tmp_path / "run.oct", HEADER)
    output = SamplerOutput(np.zeros(1, np.int64), np.zeros(1, np.float32))
    with pytest.raises(RecordingError, match=f"request 'a': {said}"):
        writer.write([msgspec.structs.replace(metadata, **change)], output)
    for wrong in (
        SamplerOutput(np.zeros(2, np.int64), np.zeros(2, np.float32)),
        SamplerOutput(np.zeros(1, np.int64), np.zeros(1)),
    ):
        writer = RecordingWriter(tmp_path / "run.oct", HEADER)
        with pytest.raises(RecordingError, match=r"output: expected 1 tokens|logprobs: expected"):
            writer.write([metadata], wrong)


def test_a_full_disk_leaves_whole_frames(tmp_path, monkeypatch) -> None:
    _, made = decode_run(3)
    writer = RecordingWriter(tmp_path / "run.oct", HEADER)
    writer.write(made[0][0], made[0][2])

    class Full:
        def __init__(self, file) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            if len(data) > 60:
                return self.file.write(data[:50])  # what there was room for
            raise OSError(28, "No space left on device")

        def __getattr__(self, name):
            return getattr(self.file, name)

    frames = writer._frames
    monkeypatch.setattr(frames, "_file", Full(frames._file))
    with pytest.raises(RecordingError, match=r"step 1 cannot be recorded.*No space left"):
        writer.write(made[1][0], made[1][2])
    assert (tmp_path / "run.oct").stat().st_size == frames.num_bytes
    assert len(list(read_recording(tmp_path / "run.oct"))) == 1
