"""The runner moves blocks before it writes, and launches nothing for a stale snapshot."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from octavo.runtime.kv_pool import KVPool, LayerKV
from octavo.runtime.metadata import (
    MetadataError,
    SequenceData,
    SequenceGroupMetadata,
    StaleMetadataError,
)
from octavo.runtime.params import LoRARequest, SamplingParams
from octavo.runtime.runner import ModelRunner


class EchoModel:
    """Writes its input ids as K of layer 0 and answers each token with the next id."""

    def __call__(self, args, kv):
        k_cache, _ = kv.layer(0)
        block, offset = args.slot_mapping // kv.block_size, args.slot_mapping % kv.block_size
        k_cache[block, offset, 0, 0] = args.input_ids.float()
        return args.input_ids.float()[:, None]

    def compute_logits(self, hidden):
        return torch.nn.functional.one_hot(hidden[:, 0].long() + 1, 100).float()


def snapshot(tokens, table, generation_id=0, computed=0) -> SequenceGroupMetadata:
    return SequenceGroupMetadata(
        request_id="r",
        is_prompt=True,
        seq_data={
            0: SequenceData(
                np.array(tokens, np.int32), np.zeros(0, np.int32), computed, 0.0, np.zeros(0)
            )
        },
        block_tables={0: np.array(table, np.int32)},
        sampling_params=SamplingParams(temperature=0),
        token_chunk_size=len(tokens) - computed,
        computed_block_nums=np.zeros(0, np.int32),
        do_sample=True,
        generation_id=generation_id,
    )


@pytest.fixture
def pools():
    pool, host = (KVPool(blocks, [LayerKV(1, 4, torch.float32)], 2) for blocks in (6, 4))
    pool.data[:] = torch.arange(6, dtype=torch.uint8)[:, None]
    host.data[:] = 100 + torch.arange(4, dtype=torch.uint8)[:, None]
    return pool, host


def test_a_step_answers_in_row_order(pools):
    runner = ModelRunner(EchoModel(), pools[0])
    out = runner.execute([snapshot([7, 8, 9], [2, 3])], generation_of=lambda _: 0)
    assert out.token_ids.tolist() == [10]
    assert pools[0].layer(0)[0][2, :, 0, 0].tolist() == [7, 8]


def test_blocks_move_in_order_and_before_the_writes(pools):
    """Swap out, swap in, copy, then the step's own writes (B29)."""
    pool, host = pools
    ModelRunner(EchoModel(), pool, host).execute(
        [snapshot([50], [3])],
        blocks_to_swap_out=[(4, 1)],
        blocks_to_copy=[(3, 5)],
        generation_of=lambda _: 0,
    )
    assert host.data[1].unique().tolist() == [4]
    assert pool.data[5].unique().tolist() == [3], "copied before 50 was written to block 3"
    assert pool.layer(0)[0][3, 0, 0, 0] == 50
    ModelRunner(EchoModel(), pool, host).execute(
        [snapshot([51], [3])],
        blocks_to_swap_in=[(2, 1)],
        blocks_to_copy=[(1, 2)],
        generation_of=lambda _: 0,
    )
    assert pool.data[1].unique().tolist() == [102]
    assert pool.data[2].unique().tolist() == [102], "copies come after swaps"


def test_a_block_is_swapped_out_before_it_is_filled_again(pools):
    """In one step: by a swap-in, by a copy and by the step's own keys and values."""
    pool, host = pools
    out = ModelRunner(EchoModel(), pool, host).execute(
        [snapshot([50], [5])],
        blocks_to_swap_out=[(2, 1), (3, 3), (5, 2)],
        blocks_to_swap_in=[(0, 2)],
        blocks_to_copy=[(4, 3)],
        generation_of=lambda _: 0,
    )
    assert out.token_ids.tolist() == [51]
    assert [host.data[block].unique().tolist() for block in (1, 3, 2)] == [[2], [3], [5]]
    assert pool.data[2].unique().tolist() == [100]
    assert pool.data[3].unique().tolist() == [4]
    assert pool.layer(0)[0][5, 0, 0, 0] == 50


def test_a_host_block_is_not_filled_in_the_step_that_empties_it(pools):
    pool, host = pools
    before = pool.data.clone(), host.data.clone()
    with pytest.raises(ValueError, match=r"no host block that a swap-in .* got \[1\]"):
        ModelRunner(EchoModel(), pool, host).execute(
            [snapshot([50], [5])],
            blocks_to_swap_out=[(3, 1)],
            blocks_to_swap_in=[(1, 2)],
            generation_of=lambda _: 0,
        )
    assert torch.equal(pool.data, before[0]) and torch.equal(host.data, before[1])


def test_moves_that_are_refused_leave_no_shadow(pools):
    """The shadow would believe in moves that were never made."""
    pool, host = pools
    runner = ModelRunner(EchoModel(), pool, host, check=True)
    runner.execute([snapshot([50], [5])], generation_of=lambda _: 0)
    for copies in ([(3, 5), (4, 5)], [(3, 5), (5, 2)], [(1, 99)]):
        with pytest.raises(ValueError, match="copies: expected"):
            runner.execute([], blocks_to_copy=copies, generation_of=lambda _: 0)
    runner.execute([snapshot([50, 51], [5], computed=1)], generation_of=lambda _: 0)


def test_a_step_without_rows_only_moves(pools):
    pool, host = pools
    out = ModelRunner(EchoModel(), pool, host, check=True).execute(
        [], blocks_to_swap_out=[(3, 1)], generation_of=lambda _: 0
    )
    assert len(out.token_ids) == 0
    assert host.data[1].unique().tolist() == [3]
    with pytest.raises(ValueError, match="expected at least one snapshot"):
        ModelRunner(EchoModel(), pool, host).execute([], generation_of=lambda _: 0)


@pytest.mark.parametrize("current", [1, None])
def test_a_stale_snapshot_touches_nothing(pools, current):
    """Article 5.2: the version is checked right before the launch."""
    pool, _ = pools
    before = pool.data.clone()
    with pytest.raises(StaleMetadataError) as error:
        ModelRunner(EchoModel(), pool).execute(
            [snapshot([7], [2])], blocks_to_copy=[(3, 4)], generation_of=lambda _: current
        )
    assert (error.value.request_id, error.value.issued, error.value.current) == ("r", 0, current)
    assert torch.equal(pool.data, before)


def test_swapping_needs_a_host_pool(pools):
    with pytest.raises(ValueError, match="host pool"):
        ModelRunner(EchoModel(), pools[0]).execute(
            [snapshot([7], [2])], blocks_to_swap_in=[(1, 1)], generation_of=lambda _: 0
        )


def test_a_checked_runner_refuses_to_read_what_nobody_wrote(pools):
    """Before any memory is touched: the moves of the refused step are not made either."""
    pool, host = pools
    runner = ModelRunner(EchoModel(), pool, host, check=True)
    out = runner.execute([snapshot([7, 8, 9], [2, 3])], generation_of=lambda _: 0)
    assert out.token_ids.tolist() == [10]
    before = pool.data.clone()
    step = snapshot([7, 8, 9, 10], [2, 4])  # the second block was never written
    data = msgspec.structs.replace(step.seq_data[0], num_computed_tokens=3)
    step = msgspec.structs.replace(step, seq_data={0: data}, token_chunk_size=1)
    with pytest.raises(MetadataError, match="own token 2 in block 4, offset 0, got nothing"):
        runner.execute([step], blocks_to_copy=[(2, 5)], generation_of=lambda _: 0)
    assert torch.equal(pool.data, before)
    step = msgspec.structs.replace(step, block_tables={0: np.array([2, 3], np.int32)})
    runner.execute([step], blocks_to_copy=[(2, 5)], generation_of=lambda _: 0)
    assert torch.equal(pool.data[5], before[2])


class Places:
    """One place for adapters, and what became of it."""

    num_places = 1

    def __init__(self) -> None:
        self.places: dict[LoRARequest, int] = {}
        self.moved: list[LoRARequest] = []

    def plan(self, requests):
        wanted = dict.fromkeys(requests, 0)
        return wanted or self.places, [(r, 0) for r in wanted if r not in self.places]

    def commit(self, places) -> None:
        self.places = places

    def move_in(self, moves) -> None:
        self.moved += [request for request, _ in moves]


def test_adapters_are_where_they_are_said_to_be_after_steps_that_fail(pools):
    """A step that is refused moves nothing in; one that fails, or comes after one that failed, has moved its adapters in."""
    store, broken = Places(), [True]

    class Model(EchoModel):
        def __call__(self, args, kv):
            if broken[0]:
                raise OSError("the device is gone")
            return super().__call__(args, kv)

    runner = ModelRunner(Model(), pools[0], adapters=store)
    one, two = LoRARequest("one", 1), LoRARequest("two", 2)

    def step(adapter, table, after=None):
        row = msgspec.structs.replace(snapshot([7], table), lora_request=adapter)
        return runner.launch([row], generation_of=lambda _: 0, after=after)

    with pytest.raises(MetadataError, match="block_tables"):
        step(one, [99])
    assert store.places == {} and store.moved == []
    first = step(one, [2])
    second = step(two, [3], after=first)
    for launched in (first, second):
        with pytest.raises(OSError, match="device is gone"):
            launched.result()
    assert store.places == {two: 0} and store.moved == [one, two]
    broken[0] = False
    assert step(two, [3]).result().token_ids.tolist() == [8]
    assert store.moved == [one, two]
