"""Golden tests by hand of the encoder's part of the launch arguments, block size 4. And what is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from octavo.runtime.cross_args import build_cross_arrays
from octavo.runtime.launch_args import LaunchArgs
from octavo.runtime.metadata import MetadataError, SequenceData, SequenceGroupMetadata
from octavo.runtime.params import SamplingParams
from octavo.tests.runtime.test_launch_args import NUM_BLOCKS, as_lists, build, snapshot

CROSS_FIELDS = [
    name for name in LaunchArgs.__slots__ if name.startswith(("cross", "encoder", "max_cross", "max_enc"))
]  # fmt: skip


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def encoder(ids, computed: bool) -> SequenceData:
    count = len(ids) if computed else 0
    return SequenceData(tokens(*ids), tokens(), count, 0.0, np.zeros(0, np.float32))


def crossing(request_id, ids, cross_table, computed=False, **row) -> SequenceGroupMetadata:
    return snapshot(
        request_id,
        encoder_seq_data=encoder(ids, computed),
        cross_block_table=tokens(*cross_table),
        **row,
    )


def cross_lists(args) -> dict:
    return {name: as_lists(args).get(name, getattr(args, name)) for name in CROSS_FIELDS}


NOTHING_TO_COMPUTE = dict(
    encoder_input_ids=None,
    encoder_positions=None,
    encoder_query_start_loc=None,
    encoder_seq_lens=None,
    encoder_block_tables=None,
    max_encoder_seq_len=0,
    cross_slot_mapping=None,
)


def two_beams(**changes) -> SequenceGroupMetadata:
    """Two sequences that decode their 6th token over one encoder of 6 tokens."""
    data = SequenceData(np.arange(5, dtype=np.int32), tokens(40), 5, 0.0, np.zeros(1))
    md = crossing(
        "a",
        range(60, 66),
        [5, 2],
        computed=True,
        tokens=range(6),
        prompt_len=5,
        context=5,
        chunk=1,
        table=[1, 3],
        sampling_params=SamplingParams(n=2),
    )
    return msgspec.structs.replace(
        md,
        seq_data={0: data, 1: msgspec.structs.replace(data, index=1)},
        block_tables={0: tokens(1, 3), 1: tokens(1, 4)},
        **changes,
    )


def test_decodes_a_first_chunk_and_a_row_without_encoder() -> None:
    """The example of the module: b's encoder runs in this step, a's is in the cache and shared by its sequences."""
    first = crossing("b", [70, 71, 72], [7], tokens=range(9), context=0, chunk=2, table=[8])
    plain = snapshot("c", tokens=range(9), context=0, chunk=3, table=[9])
    args = build(two_beams(), first, plain)
    assert cross_lists(args) == dict(
        cross_seq_lens=[6, 6, 3, 0],
        cross_block_tables=[[5, 2], [5, 2], [7, 0], [0, 0]],
        max_cross_seq_len=6,
        encoder_input_ids=[70, 71, 72],
        encoder_positions=[0, 1, 2],
        encoder_query_start_loc=[0, 3],
        encoder_seq_lens=[3],
        encoder_block_tables=[[0, 1, 2]],
        max_encoder_seq_len=3,
        cross_slot_mapping=[28, 29, 30],
    )
    assert args.slot_mapping.tolist() == [13, 17, 32, 33, 36, 37, 38]
    assert args.num_decodes == 2


def test_two_encoders_in_one_step() -> None:
    args = build(
        crossing("a", range(60, 66), [5, 2], context=0, chunk=2, table=[8]),
        crossing("b", [70, 71, 72], [7, 0, 99], context=0, chunk=2, table=[9]),
    )
    assert cross_lists(args) == dict(
        cross_seq_lens=[6, 3],
        cross_block_tables=[[5, 2], [7, 0]],
        max_cross_seq_len=6,
        encoder_input_ids=[60, 61, 62, 63, 64, 65, 70, 71, 72],
        encoder_positions=[0, 1, 2, 3, 4, 5, 0, 1, 2],
        encoder_query_start_loc=[0, 6, 9],
        encoder_seq_lens=[6, 3],
        encoder_block_tables=[[0, 1, 2, 3, 4, 5], [6, 7, 8, 0, 0, 0]],
        max_encoder_seq_len=6,
        cross_slot_mapping=[20, 21, 22, 23, 8, 9, 28, 29, 30],
    )


def test_an_encoder_that_is_in_the_cache_is_not_computed() -> None:
    args = build(two_beams())
    assert cross_lists(args) == NOTHING_TO_COMPUTE | dict(
        cross_seq_lens=[6, 6], cross_block_tables=[[5, 2], [5, 2]], max_cross_seq_len=6
    )


def test_one_encoder_is_written_once_for_all_sequences_of_a_group() -> None:
    """After a preemption several sequences come back with nothing computed, the encoder neither."""
    group = two_beams(encoder_seq_data=encoder(range(60, 66), computed=False))
    args = build(group)
    assert args.cross_slot_mapping is not None and args.encoder_query_start_loc is not None
    assert args.cross_slot_mapping.tolist() == [20, 21, 22, 23, 8, 9]
    assert args.encoder_query_start_loc.tolist() == [0, 6]


def test_without_encoders_there_is_nothing() -> None:
    args = build(snapshot("c", context=0, chunk=3, table=[9]))
    assert cross_lists(args) == NOTHING_TO_COMPUTE | dict(
        cross_seq_lens=None, cross_block_tables=None, max_cross_seq_len=0
    )


def test_rows_that_come_before_have_no_encoder() -> None:
    """Decodes as columns are the first rows of a mixed step."""
    alone = build_cross_arrays([two_beams()], 4, NUM_BLOCKS)
    mixed = build_cross_arrays([two_beams()], 4, NUM_BLOCKS, num_rows_before=2)
    assert alone is not None and mixed is not None
    assert mixed.arrays["cross_seq_lens"].tolist() == [0, 0, 6, 6]
    assert mixed.arrays["cross_block_tables"].tolist() == [[0, 0], [0, 0], [5, 2], [5, 2]]
    assert alone.arrays["cross_seq_lens"].tolist() == [6, 6]
    assert build_cross_arrays([], 4, NUM_BLOCKS, num_rows_before=2) is None


def test_an_encoder_survives_msgpack() -> None:
    group = crossing("b", [70, 71, 72], [7], context=0, chunk=2, table=[8])
    copy = SequenceGroupMetadata.from_bytes(group.to_bytes())
    assert as_lists(build(copy)) == as_lists(build(group))


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        (dict(cross_block_table=None), "cross_block_table", "got None"),
        (dict(encoder_seq_data=None), "encoder_seq_data", "got None"),
        (dict(cross_block_table=tokens(5)), "cross_block_table", "2 entries or more, got 1"),
        (dict(cross_block_table=np.array([5, 2])), "cross_block_table", "int32"),
        (dict(cross_block_table=[5, 2]), "cross_block_table", "int32"),
        (dict(cross_block_table=tokens(5, 0)), "cross_block_table", "got 0 at index 1"),
        (dict(cross_block_table=tokens(-1, 5)), "cross_block_table", "got -1 at index 0"),
        (dict(cross_block_table=tokens(5, NUM_BLOCKS)), "cross_block_table", "got 16 at index 1"),
        (dict(cross_block_table=tokens(5, 5)), "cross_block_table", "block 5 is written by 'bad' too"),
        (dict(cross_block_table=tokens(8, 5)), "cross_block_table", "block 8 is written by 'bad' too"),
        (dict(encoder_seq_data=encoder([], True)), "encoder_seq_data", "at least one token"),
        (
            dict(encoder_seq_data=msgspec.structs.replace(encoder(range(6), True), num_computed_tokens=4)),
            "encoder_seq_data",
            "none or all of 6 tokens computed.* got 4",
        ),
        (
            dict(encoder_seq_data=msgspec.structs.replace(encoder(range(6), True), prompt_token_ids=np.arange(6))),
            "encoder_seq_data",
            "int32",
        ),
    ],
)  # fmt: skip
def test_contradictions_are_refused_by_name(changes, field, message) -> None:
    group = crossing("bad", range(6), [5, 2], context=0, chunk=2, table=[8])
    build(group)
    with pytest.raises(MetadataError, match=message) as error:
        build(msgspec.structs.replace(group, **changes))
    assert (error.value.request_id, error.value.field) == ("bad", field)


def test_two_groups_writing_one_cross_slot_are_refused() -> None:
    with pytest.raises(MetadataError, match=r"'b': cross_block_table: .* block 2 .* 'a' too"):
        build(
            crossing("a", range(6), [5, 2], context=0, chunk=2, table=[8]),
            crossing("b", range(2), [2], context=0, chunk=2, table=[9]),
        )


def test_two_groups_may_read_one_encoder() -> None:
    """Equal encoder inputs may share their blocks, as long as only one group writes them."""
    args = build(
        crossing("a", range(6), [5, 2], context=0, chunk=2, table=[8]),
        crossing("b", range(6), [5, 2], computed=True, context=0, chunk=2, table=[9]),
    )
    assert args.cross_block_tables is not None and args.cross_slot_mapping is not None
    assert args.cross_block_tables.tolist() == [[5, 2], [5, 2]]
    assert len(args.cross_slot_mapping) == 6
