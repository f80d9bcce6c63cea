"""Golden tests by hand: two sequences, block size 4, what the kernels are given. And what is refused."""

from __future__ import annotations

import random
from types import MappingProxyType

import msgspec
import numpy as np
import pytest

from octavo.runtime.launch_args import LaunchBuffers, build_launch_args
from octavo.runtime.metadata import (
    MetadataError,
    SequenceData,
    SequenceGroupMetadata,
    SpanChunk,
)
from octavo.runtime.params import LoRARequest, MultiModalSpan, SamplingParams

BLOCK_SIZE = 4
NUM_BLOCKS = 16


def snapshot(
    request_id="a",
    *,
    tokens=None,
    prompt_len=None,
    context,
    chunk,
    table,
    seq_id=0,
    computed=(),
    **changes,
):
    tokens = (
        np.arange(100, 100 + context + chunk, dtype=np.int32)
        if tokens is None
        else np.array(tokens, np.int32)
    )
    prompt_len = len(tokens) if prompt_len is None else prompt_len
    fields = dict(
        request_id=request_id,
        is_prompt=len(tokens) == prompt_len,
        seq_data={
            seq_id: SequenceData(
                tokens[:prompt_len], tokens[prompt_len:], context, 0.0, np.zeros(0, np.float32)
            )
        },
        block_tables={seq_id: np.array(table, np.int32)},
        sampling_params=SamplingParams(),
        token_chunk_size=chunk,
        computed_block_nums=np.array(computed, np.int32),
        do_sample=context + chunk == len(tokens),
        generation_id=0,
    )
    return SequenceGroupMetadata(**{**fields, **changes})


def build(*metadata):
    return build_launch_args(list(metadata), BLOCK_SIZE, NUM_BLOCKS, LaunchBuffers())


def as_lists(args):
    return {
        name: getattr(args, name).tolist()
        for name in args.__slots__
        if hasattr(getattr(args, name), "tolist")
    }


def test_decode_and_prefill_chunk():
    decode = snapshot(
        "a", tokens=range(10, 16), prompt_len=5, context=5, chunk=1, table=[5, 2], seq_id=3
    )
    chunk = snapshot("b", tokens=range(20, 29), context=2, chunk=3, table=[7, 3], seq_id=1)
    args = build(decode, chunk)
    assert as_lists(args) == {
        "input_ids": [15, 22, 23, 24],
        "positions": [5, 2, 3, 4],
        "slot_mapping": [9, 30, 31, 12],
        "query_start_loc": [0, 1, 4],
        "seq_lens": [6, 5],
        "block_tables": [[5, 2], [7, 3]],
        "logits_indices": [0],
    }
    assert (args.num_decodes, args.max_query_len, args.max_seq_len) == (1, 3, 6)


def test_prefix_hit_feeds_only_what_is_not_cached_and_attends_to_all():
    """Article 5.4: computed blocks say what need not be recomputed, never what may be attended."""
    hit = snapshot(tokens=range(9), context=8, chunk=1, table=[4, 6, 9], computed=[4, 6])
    args = build(hit)
    assert args.input_ids.tolist() == [8]
    assert args.positions.tolist() == [8]
    assert args.seq_lens.tolist() == [9]
    assert args.block_tables.tolist() == [[4, 6, 9]]
    assert args.slot_mapping.tolist() == [36]


def test_key_length_of_a_chunk_ends_with_the_chunk():
    """B59: queries must not see KV that later chunks have yet to write."""
    args = build(snapshot(tokens=range(12), context=4, chunk=4, table=[1, 2, 3]))
    assert args.seq_lens.tolist() == [8]
    assert args.block_tables.tolist() == [[1, 2]]
    assert args.logits_indices.tolist() == []


def test_a_token_that_the_step_before_draws_has_a_place_and_no_id():
    """Its slot and length are known; the id is filled in on the device."""
    ahead = snapshot("a", tokens=range(10, 16), prompt_len=5, context=6, chunk=1, table=[5, 2])
    ahead = msgspec.structs.replace(ahead, do_sample=True)
    known = snapshot("b", tokens=range(20, 24), prompt_len=3, context=3, chunk=1, table=[7])
    args = build(ahead, known)
    assert args.input_ids.tolist() == [0, 23]
    assert args.positions.tolist() == [6, 3]
    assert args.slot_mapping.tolist() == [2 * 4 + 2, 7 * 4 + 3]
    assert args.seq_lens.tolist() == [7, 4]
    assert args.logits_indices.tolist() == [0, 1]


def test_resumed_sequence_feeds_prompt_and_output_across_their_border():
    resumed = snapshot(
        tokens=range(50, 57), prompt_len=4, context=2, chunk=5, table=[1, 2], is_prompt=True
    )
    args = build(resumed)
    assert args.input_ids.tolist() == [52, 53, 54, 55, 56]
    assert args.logits_indices.tolist() == [4]


def test_rows_go_by_seq_id_however_the_dicts_are_ordered():
    """B88: a dict or set order must not decide which row is whose."""

    def group(order):
        data = {
            i: SequenceData(
                np.arange(3, dtype=np.int32), np.array([40 + i], np.int32), 3, 0.0, np.zeros(1)
            )
            for i in order
        }
        tables = {i: np.array([1 + i], np.int32) for i in order}
        return snapshot(
            context=3, chunk=1, table=[1], seq_data=MappingProxyType(data), block_tables=MappingProxyType(tables),
            is_prompt=False, do_sample=True,
        )  # fmt: skip

    ids = list(range(6))
    expected = as_lists(build(group(ids)))
    assert expected["input_ids"] == [40, 41, 42, 43, 44, 45]
    for seed in range(5):
        random.Random(seed).shuffle(ids)
        assert as_lists(build(group(ids))) == expected


def test_first_token_of_n_samples_comes_from_one_row():
    args = build(
        snapshot(
            tokens=range(3), context=0, chunk=3, table=[1], sampling_params=SamplingParams(n=3)
        )
    )
    assert args.logits_indices.tolist() == [2, 2, 2]


def test_one_token_prefill_after_a_longer_one_is_not_counted_as_decode():
    args = build(
        snapshot("a", context=0, chunk=2, table=[1]),
        snapshot("b", context=0, chunk=1, table=[2]),
    )
    assert args.num_decodes == 0


def test_arguments_of_a_step_survive_the_building_of_the_next():
    buffers = LaunchBuffers()
    first = build_launch_args(
        [snapshot(context=0, chunk=2, table=[1])], BLOCK_SIZE, NUM_BLOCKS, buffers
    )
    before = as_lists(first)
    build_launch_args([snapshot(context=0, chunk=4, table=[3])], BLOCK_SIZE, NUM_BLOCKS, buffers)
    assert as_lists(first) == before


def test_buffers_grow():
    big = snapshot(context=0, chunk=60_000, table=range(1, 15_001))
    args = build_launch_args([big], BLOCK_SIZE, 20_000, LaunchBuffers())
    assert args.input_ids.tolist() == list(range(100, 60_100))
    assert args.slot_mapping.tolist() == list(range(4, 60_004))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (dict(context=0, chunk=0, table=[1]), "token_chunk_size"),
        (dict(context=0, chunk=2.0, table=[1]), "token_chunk_size"),
        (dict(context=3, chunk=2, table=[1]), "block_tables"),  # a block is missing
        # B81: what int32 would cut without a word
        (
            dict(context=0, chunk=2, table=[1], block_tables={0: np.array([2**32 + 5])}),
            "block_tables",
        ),
        (dict(context=0, chunk=2, table=[1], block_tables={0: np.array([5.7])}), "block_tables"),
        (dict(context=0, chunk=2, table=[1], block_tables={0: [5]}), "block_tables"),
        (
            dict(context=0, chunk=2, table=[1], block_tables={0: np.ones((1, 1), np.int32)}),
            "block_tables",
        ),
        (dict(context=4, chunk=1, table=[1, 2], computed=[7]), "computed_block_nums"),
        (dict(context=0, chunk=2, table=[0]), "block_tables"),  # the null block
        (dict(context=0, chunk=2, table=[NUM_BLOCKS]), "block_tables"),
        (dict(context=0, chunk=2, table=[-1]), "block_tables"),
        (dict(context=3, chunk=1, table=[1], computed=[1]), "computed_block_nums"),
        (dict(context=0, chunk=9, table=[1, 2, 3], tokens=range(4)), "token_chunk_size"),
        (dict(context=0, chunk=2, table=[1], tokens=range(4), do_sample=True), "do_sample"),
        (
            dict(context=0, chunk=2, table=[1], block_tables={9: np.array([1], np.int32)}),
            "block_tables",
        ),
    ],
)
def test_contradictions_are_refused_by_name(changes, field):
    with pytest.raises(MetadataError) as error:
        build(snapshot("bad", **changes))
    assert error.value.request_id == "bad"
    assert error.value.field == field


def test_two_rows_writing_one_slot_are_refused():
    with pytest.raises(MetadataError, match=r"'b'.*'a'"):
        build(
            snapshot("a", context=0, chunk=2, table=[3]),
            snapshot("b", context=0, chunk=2, table=[3]),
        )


def test_decode_after_prefill_is_refused():
    decode = snapshot("d", tokens=range(3), prompt_len=2, context=2, chunk=1, table=[5])
    with pytest.raises(MetadataError, match="'d'"):
        build(snapshot("p", context=0, chunk=2, table=[3]), decode)


def test_no_snapshot_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        build()


def test_snapshot_survives_msgpack():
    metadata = snapshot(context=2, chunk=3, table=[7, 3])
    copy = SequenceGroupMetadata.from_bytes(metadata.to_bytes())
    assert as_lists(build(copy)) == as_lists(build(metadata))
    assert copy.sampling_params == metadata.sampling_params
    with pytest.raises(ValueError, match="SequenceGroupMetadata"):
        SequenceGroupMetadata.from_bytes(metadata.to_bytes()[:-3])


def test_snapshot_is_frozen():
    metadata = SequenceGroupMetadata.from_bytes(
        snapshot(context=2, chunk=3, table=[7, 3]).to_bytes()
    )
    with pytest.raises(AttributeError):
        metadata.is_prompt = False  # type: ignore[misc]
    with pytest.raises(TypeError):
        metadata.seq_data[1] = None  # type: ignore[index]
    with pytest.raises(ValueError, match="read-only"):
        metadata.block_tables[0][0] = 5
    assert msgspec.structs.replace(metadata, is_prompt=False).is_prompt is False


# -- index maps, the example of `runtime.index_maps`


def test_images_and_adapters_in_one_step():
    image = MultiModalSpan(3, 3, b"an image")
    one, two = LoRARequest("one", 1), LoRARequest("two", 2)
    decode = snapshot("a", tokens=range(6), prompt_len=5, context=5, chunk=1, table=[5, 2], lora_request=one)  # fmt: skip
    chunk = snapshot(
        "b", tokens=range(20, 29), context=2, chunk=4, table=[7, 3], seq_id=1,
        multi_modal_data=(SpanChunk(image, 0, 3, 1),),
    )  # fmt: skip
    last = snapshot("c", tokens=range(2), context=0, chunk=2, table=[9], seq_id=2, lora_request=two)
    args = build_launch_args(
        [decode, chunk, last], BLOCK_SIZE, NUM_BLOCKS, LaunchBuffers(), {one: 1, two: 0}, 2
    )
    assert args.multi_modal_places.tolist() == [2, 3, 4]
    assert args.multi_modal_parts == (SpanChunk(image, 0, 3, 1),)
    assert args.lora_token_order.tolist() == [1, 2, 3, 4, 5, 6, 0]
    assert args.lora_adapter_starts.tolist() == [4, 6, 7]


def test_parts_of_images_that_a_chunk_cuts():
    """Article 5.5: a chunk carries its overlap with each span, in the order of its tokens."""
    first, second = MultiModalSpan(1, 3, b"picture1"), MultiModalSpan(5, 4, b"picture2")
    parts = (SpanChunk(first, 2, 3, 0), SpanChunk(second, 0, 2, 2))
    args = build(snapshot(tokens=range(12), context=3, chunk=4, table=[1, 2], multi_modal_data=parts))  # fmt: skip
    assert args.multi_modal_places.tolist() == [0, 2, 3] and args.multi_modal_parts == parts
    assert args.lora_token_order is None


def test_each_of_several_sequences_has_its_parts_and_its_adapter():
    image, adapter = MultiModalSpan(1, 2, b"picture1"), LoRARequest("one", 1)
    part = (SpanChunk(image, 0, 2, 1),)
    one = snapshot("a", tokens=range(8), context=0, chunk=4, table=[1], multi_modal_data=part, lora_request=adapter)  # fmt: skip
    two = msgspec.structs.replace(
        one,
        seq_data={0: one.seq_data[0], 1: one.seq_data[0]},
        block_tables={0: one.block_tables[0], 1: np.array([2], np.int32)},
    )
    last = snapshot("b", tokens=range(8), context=0, chunk=4, table=[3], seq_id=2, multi_modal_data=part)  # fmt: skip
    args = build_launch_args([two, last], BLOCK_SIZE, NUM_BLOCKS, LaunchBuffers(), {adapter: 0}, 1)
    assert args.multi_modal_places.tolist() == [1, 2, 5, 6, 9, 10]
    assert args.multi_modal_parts == (*part, *part, *part)
    assert args.lora_token_order.tolist() == [8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7]
    assert args.lora_adapter_starts.tolist() == [4, 12]


def test_nothing_is_made_where_nothing_is_asked_for():
    plain = snapshot(tokens=range(4), context=0, chunk=4, table=[1])
    args = build_launch_args([plain], BLOCK_SIZE, NUM_BLOCKS, LaunchBuffers(), {}, 2)
    assert args.multi_modal_places is None and args.lora_token_order is None


@pytest.mark.parametrize("part", [(0, 3, 2), (0, 4, 0), (1, 1, 0), (-1, 1, 0)], ids=str)
def test_a_part_that_is_not_in_the_step_is_refused(part):
    image = MultiModalSpan(1, 3, b"an image")
    bad = snapshot(tokens=range(4), context=0, chunk=4, table=[1], multi_modal_data=(SpanChunk(image, *part),))  # fmt: skip
    with pytest.raises(MetadataError, match="'a': multi_modal_data: expected a part of 3 embeddings within 4 tokens"):  # fmt: skip
        build(bad)


def test_an_adapter_that_is_not_loaded_is_refused():
    bad = snapshot(tokens=range(4), context=0, chunk=4, table=[1], lora_request=LoRARequest("x", 3))
    with pytest.raises(MetadataError, match="'a': lora_request: expected an adapter that is loaded, got 'x'"):  # fmt: skip
        build_launch_args([bad], BLOCK_SIZE, NUM_BLOCKS, LaunchBuffers(), {}, 2)
