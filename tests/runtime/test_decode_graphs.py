"""Replayed decode steps: whatever changes between replays, the result is that of the eager step, and padding touches nothing."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import paged_attention, reshape_and_cache
from octavo.runtime.decode_graphs import CallCapture, DecodeGraphs, default_sizes
from octavo.runtime.kv_pool import KVPool, LayerKV
from octavo.runtime.launch_args import LaunchArgs

BLOCK_SIZE, NUM_BLOCKS, MAX_SEQ_LEN, HEADS, SIZE = 4, 12, 16, 2, 8


class OneLayer:
    """Keys, values and queries are made of token and position; the logits are what attention gives."""

    def __call__(self, args: LaunchArgs, pool: KVPool) -> torch.Tensor:
        x = torch.stack((args.input_ids, args.positions), -1).float()
        made = torch.cat((x.sin(), x.cos(), (3 * x).sin(), (5 * x).cos()), -1)
        q = made[:, None].expand(-1, HEADS, -1).contiguous()
        k_cache, v_cache = pool.layer(0)
        reshape_and_cache(q * 0.5, q + 1, k_cache, v_cache, args.slot_mapping)
        return paged_attention(
            q, k_cache, v_cache,
            query_start_loc=args.query_start_loc, seq_lens=args.seq_lens, block_tables=args.block_tables,
            max_query_len=args.max_query_len, max_seq_len=args.max_seq_len, num_decodes=args.num_decodes,
        ).flatten(1)  # fmt: skip

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2


def new_pool() -> KVPool:
    pool = KVPool(NUM_BLOCKS, [LayerKV(HEADS, SIZE, torch.float32)], BLOCK_SIZE)
    k_cache, v_cache = pool.layer(0)
    generator = torch.Generator().manual_seed(0)
    for cache in (k_cache, v_cache):
        cache.copy_(torch.randn(cache.shape, generator=generator))
        cache[0] = torch.nan  # nobody reads the null block
    return pool


def decodes(rows: list[tuple[int, int, list[int]]]) -> LaunchArgs:
    """(token, position, block table) of each."""
    tokens, positions, tables = zip(*rows, strict=True)
    width = max(map(len, tables))
    slots = [t[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for _, p, t in rows]
    return LaunchArgs(
        input_ids=torch.tensor(tokens),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        query_start_loc=torch.arange(len(rows) + 1, dtype=torch.int32),
        seq_lens=torch.tensor(positions, dtype=torch.int32) + 1,
        block_tables=torch.tensor([t + [99] * (width - len(t)) for t in tables], dtype=torch.int32),
        logits_indices=torch.arange(len(rows)),
        num_decodes=len(rows),
        max_query_len=1,
        max_seq_len=max(positions) + 1,
    )


STEPS = [
    [(7, 5, [3, 4])],
    [(7, 0, [2]), (9, 13, [1, 5, 6, 7]), (11, 3, [8])],
    [(1, 8, [9, 10, 11]), (2, 1, [2])],
    [(5, 6, [3, 4]), (6, 14, [1, 5, 6, 7]), (7, 4, [8, 2]), (8, 9, [9, 10, 11])],
    [(3, 7, [3, 4])],
]


@pytest.mark.parametrize("sizes", [[4], [1, 2, 4]], ids=str)
def test_replays_equal_eager_steps_whatever_lengths_and_tables_are(sizes):
    eager, replayed, model = new_pool(), new_pool(), OneLayer()
    graphs = DecodeGraphs(model, replayed, MAX_SEQ_LEN, sizes)
    graphs.capture_all()
    assert torch.equal(replayed.data, eager.data), "capturing writes nothing"
    for rows in STEPS:
        args = decodes(rows)
        assert graphs.takes(args)
        expected = model.compute_logits(model(args, eager))
        torch.testing.assert_close(graphs.logits(args), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(replayed.data, eager.data), "padding is written nowhere"
        for graph in graphs._graphs.values():
            if graph.logits.data_ptr() == graphs.logits(args).data_ptr():
                assert not graph.args.seq_lens[len(rows) :].any(), "and attends to nothing"


def test_what_the_host_decided_at_capture_stays_decided():
    """So a model that looks at lengths on the host is found out without a GPU."""

    class Looks(OneLayer):
        def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden * float(hidden.abs().sum() > 0)

    pool = new_pool()
    graphs = DecodeGraphs(Looks(), pool, MAX_SEQ_LEN, [1])
    assert graphs.logits(decodes(STEPS[0])).abs().sum() == 0, (
        "captured with padding, which gives zeros"
    )


def test_calls_are_replayed_on_the_same_tensors():
    x, y = torch.arange(4.0), torch.zeros(4)

    def work() -> torch.Tensor:
        y.add_(x)
        return (y.view(2, 2).T + 1).flatten()

    result, replay = CallCapture()(work)
    assert result.tolist() == [1, 3, 2, 4]
    x.fill_(10)
    replay()
    assert y.tolist() == [10, 11, 12, 13] and result.tolist() == [11, 13, 12, 14]


def test_only_decodes_that_draw_are_taken():
    graphs = DecodeGraphs(OneLayer(), new_pool(), MAX_SEQ_LEN, [2])
    args = decodes(STEPS[1])
    assert not graphs.takes(args), "three rows"
    two = decodes(STEPS[2])
    assert graphs.takes(two)
    changed = {name: getattr(two, name) for name in two.__slots__}
    assert not graphs.takes(LaunchArgs(**{**changed, "num_decodes": 1}))
    assert not graphs.takes(LaunchArgs(**{**changed, "logits_indices": torch.tensor([1])}))
    assert not graphs.takes(LaunchArgs(**{**changed, "cross_seq_lens": two.seq_lens}))


def test_sizes():
    assert default_sizes(1) == [1] and default_sizes(3) == [1, 2, 4]
    assert default_sizes(16) == [1, 2, 4, 8, 16] and default_sizes(20) == [1, 2, 4, 8, 16, 24]
    for bad in ([], [0, 4]):
        with pytest.raises(ValueError, match="sizes: expected"):
            DecodeGraphs(OneLayer(), new_pool(), MAX_SEQ_LEN, bad)
    with pytest.raises(ValueError, match="max_seq_len: expected"):
        DecodeGraphs(OneLayer(), new_pool(), 0, [1])
