"""Snapshots as columns say what the same snapshots say one by one, and stay as they are."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from octavo.runtime.launch_args import LaunchArgs, build_launch_args
from octavo.runtime.launch_buffers import LaunchBuffers
from octavo.runtime.metadata import MetadataError, SamplerOutput, StaleMetadataError
from octavo.runtime.params import SamplingParams
from octavo.runtime.sampling_rows import SamplingRows, sampling_rows
from octavo.runtime.snapshots import Snapshots
from octavo.scheduler import Scheduler, SchedulerConfig, SequenceGroup

SIZE = 4


def scheduler(num_blocks: int = 60, **config) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            num_gpu_blocks=num_blocks,
            block_size=SIZE,
            max_num_batched_tokens=24,
            max_num_seqs=12,
            max_model_len=128,
            **config,
        )
    )


def add(s: Scheduler, name: str, length: int, **params) -> None:
    prompt = [hash((name, i)) % 1000 for i in range(length)]
    s.add_seq_group(SequenceGroup(name, prompt, SamplingParams(**params), 0.0))


def finish_step(s: Scheduler, snapshots: Snapshots, rng: random.Random) -> None:
    n = sum(metadata.num_samples for metadata in snapshots)
    logprobs = np.array([-rng.random() for _ in range(n)], np.float32)
    s.update(SamplerOutput(np.array([rng.randrange(1000) for _ in range(n)], np.int64), logprobs))


def same(fast: LaunchArgs, slow: LaunchArgs) -> None:
    for field in dataclasses.fields(LaunchArgs):
        a, b = getattr(fast, field.name), getattr(slow, field.name)
        if field.name == "block_tables":
            used = torch.arange(a.shape[1]) * SIZE < fast.seq_lens[:, None]
            assert a.shape == b.shape and torch.equal(a[used], b[used])
        elif isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a, b), field.name
        else:
            assert a == b, field.name


def same_sampling(fast: SamplingRows, slow: SamplingRows) -> None:
    for a, b in zip(fast.columns, slow.columns, strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)
    assert len(fast.extras) == len(slow.extras)
    for a, b in zip(fast.extras, slow.extras, strict=True):
        assert (a.row, a.params, a.seq_id, a.eos_token_ids) == (
            b.row,
            b.params,
            b.seq_id,
            b.eos_token_ids,
        )
        assert np.array_equal(a.prompt_token_ids, b.prompt_token_ids)
        assert np.array_equal(a.output_token_ids, b.output_token_ids)
        assert a.output_token_ids.base is b.output_token_ids.base  # by which counts know it again


@pytest.mark.parametrize("window", [None, 6])
def test_columns_and_objects_come_to_the_same(window):
    """Over random schedules with prefills, samples and beams among the plain decodes, requests coming and going."""
    mixed = 0
    for seed in range(12):
        rng = random.Random(seed)
        s, buffers = scheduler(rng.choice([30, 90]), sliding_window=window), LaunchBuffers()
        for number in range(60):
            if rng.random() < 0.4:
                kinds = [{}, {}, {"seed": number, "top_k": 5, "top_p": 0.5}, {"n": 2}]
                kinds += [{"presence_penalty": 1.0}, {"logprobs": 1}, {"n": 2, "min_tokens": 1}]
                kind = rng.choice(kinds)
                add(s, f"r{number}", rng.randint(1, 20), max_tokens=rng.randint(1, 25), **kind)
            if rng.random() < 0.1 and s.running:
                s.preempt(rng.choice(s.running).request_id)
            snapshots = s.schedule().seq_group_metadata_list
            if not len(snapshots):
                continue
            mixed += snapshots.decodes is not None and len(snapshots.others) > 0
            fast = build_launch_args(snapshots, SIZE, s.blocks.num_blocks + 1, buffers)
            apart = list(snapshots)
            same(fast, build_launch_args(apart, SIZE, s.blocks.num_blocks + 1, LaunchBuffers()))
            same_sampling(sampling_rows(snapshots), sampling_rows(apart))
            finish_step(s, snapshots, rng)
            s.check_invariants()
    assert mixed > 30


def decoding(names: str = "abc", **config) -> tuple[Scheduler, random.Random]:
    s, rng = scheduler(**config), random.Random(0)
    for name in names:
        add(s, name, 6, max_tokens=60)
    finish_step(s, s.schedule().seq_group_metadata_list, rng)
    return s, rng


def test_a_snapshot_stays_as_it_is():
    """B90, article 3.3: whatever the scheduler does, also with the rows' places in its columns."""
    s, rng = decoding()
    kept = []
    for step in range(70):
        snapshots = s.schedule().seq_group_metadata_list
        if len(snapshots):
            columns = snapshots.decodes
            fresh = Snapshots(columns, snapshots.others)  # looked at later for the first time
            kept.append((fresh, [metadata.to_bytes() for metadata in snapshots]))
            finish_step(s, snapshots, rng)
        if step == 20:
            s.abort("b")
        if step == 30:
            s.preempt("a")
            add(s, "new", 9, max_tokens=20)
    assert len(kept) > 50
    for snapshots, expected in kept:
        assert [metadata.to_bytes() for metadata in snapshots] == expected


def test_a_row_cannot_be_written_to():
    s, _ = decoding()
    (metadata, *_) = s.schedule().seq_group_metadata_list
    data, table = next((data, table) for _, data, table in metadata.rows())
    for array in (data.prompt_token_ids, data.output_token_ids, data.output_logprobs, table):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(AttributeError):
        metadata.token_chunk_size = 2


def test_a_stale_row_is_told_by_name():
    s, _ = decoding()
    snapshots = s.schedule().seq_group_metadata_list
    assert snapshots.decodes is not None and len(snapshots.decodes) == 3
    snapshots.check_current(s.generation_of)
    s.preempt("b")
    with pytest.raises(StaleMetadataError, match="'b'"):
        snapshots.check_current(s.generation_of)
    s.abort("a")
    with pytest.raises(StaleMetadataError, match=r"'a'.*gone"):
        snapshots.check_current(s.generation_of)


@pytest.mark.parametrize(
    ("entry", "message"),
    [(0, r"expected ids in \[1, 61\), got 0 at index 1"), (61, "got 61"), (-4, "got -4")],
)
def test_bad_entries_of_a_decode_are_refused(entry, message):
    s, _ = decoding()
    rows = s.schedule().seq_group_metadata_list.decodes
    assert rows is not None
    tables = [table.copy() for table in rows.tables]
    tables[1][1] = entry
    bad = Snapshots(dataclasses.replace(rows, tables=tables))
    with pytest.raises(MetadataError, match=f"'b'.*{message}"):
        build_launch_args(bad, SIZE, 61, LaunchBuffers())
    tables[1] = tables[1][:1]
    with pytest.raises(MetadataError, match="expected 2 entries or more, got 1"):
        build_launch_args(bad, SIZE, 61, LaunchBuffers())


def test_two_decodes_that_write_one_slot_are_refused():
    s, _ = decoding()
    rows = s.schedule().seq_group_metadata_list.decodes
    assert rows is not None
    tables = [rows.tables[0], rows.tables[0], rows.tables[2]]
    with pytest.raises(MetadataError, match=r"'b'.*is written by 'a' too"):
        build_launch_args(
            Snapshots(dataclasses.replace(rows, tables=tables)), SIZE, 61, LaunchBuffers()
        )
