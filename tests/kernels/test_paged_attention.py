"""Paged attention on CPU tensors and by the Triton kernels, against the oracle."""

from __future__ import annotations

import pytest
import torch

from octavo import kernels
from octavo.kernels import reference
from octavo.tests.kernels.attending import DEVICE, check_batch
from octavo.tests.kernels.cases import Batch, error, random_tree


def check_plan(batch: Batch, plan) -> None:
    """A plan of the caller's own gives the oracle's answer."""
    out, lse = kernels.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, **batch.arguments, return_lse=True, plan=plan
    )
    exact_out, exact_lse = reference.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, **batch.index, **batch.options
    )
    assert error(out, exact_out) < 3e-6 and error(lse, exact_lse) < 3e-6


DECODE = {"seq_lens": [1, 15, 16, 17, 70], "query_lens": [1] * 5, "num_decodes": 5}
PREFILL = {"seq_lens": [1, 16, 17, 40], "query_lens": [1, 16, 5, 33]}
MIXED = {"seq_lens": [33, 5, 20, 31], "query_lens": [1, 1, 7, 31], "num_decodes": 2}
# a few queries each in the split kernel, as when drafts are verified
DRAFTS = {"seq_lens": [4, 16, 20, 70, 130], "query_lens": [4, 1, 7, 3, 16], "num_decodes": 5}
LENGTHS = pytest.mark.parametrize(
    "lengths", [DECODE, PREFILL, MIXED, DRAFTS], ids=["decode", "prefill", "mixed", "drafts"]
)


@LENGTHS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("return_lse", [True, False], ids=["lse", "plain"])
def test_dtypes(attend, lengths, dtype, return_lse) -> None:
    """Unused slots are NaN and unused table entries out of range in this and every test here."""
    check_batch(attend, Batch(**lengths, dtype=dtype), return_lse)


@LENGTHS
@pytest.mark.parametrize("heads", [(4, 4), (3, 1), (9, 3), (8, 1)], ids=str)
def test_head_groups(attend, lengths, heads) -> None:
    check_batch(attend, Batch(**lengths, num_q_heads=heads[0], num_kv_heads=heads[1]))


@LENGTHS
@pytest.mark.parametrize(
    "sizes", [(64, None), (80, None), (128, None), (48, 32), (32, 96)], ids=str
)
def test_head_sizes(attend, lengths, sizes) -> None:
    check_batch(attend, Batch(**lengths, head_size=sizes[0], head_size_v=sizes[1]))


@LENGTHS
@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_block_sizes_and_layouts(attend, lengths, block_size) -> None:
    check_batch(attend, Batch(**lengths, block_size=block_size, hnd=block_size == 5))


OPTIONS = {
    "window1": {"window": 1},
    "window16": {"window": 16},
    "softcap": {"softcap": 0.9},
    "alibi": {"alibi_slopes": torch.linspace(0.1, 0.9, 6)},
    "sinks": {"sinks": torch.linspace(-2.0, 3.0, 6)},
    "scale": {"scale": 0.4},
    "all": {
        "window": 19,
        "softcap": 1.5,
        "alibi_slopes": torch.linspace(0.1, 0.9, 6),
        "sinks": torch.linspace(-2.0, 3.0, 6),
    },
}


@LENGTHS
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(attend, lengths, options) -> None:
    """B20: windows with chunks over a context, and with decode, equal the dense result."""
    check_batch(attend, Batch(**lengths, options=options))


@pytest.mark.parametrize(
    "options", [{}, OPTIONS["window16"], OPTIONS["all"]], ids=["plain", "window", "all"]
)
def test_not_causal(attend, options) -> None:
    check_batch(attend, Batch(**PREFILL, options={"causal": False, **options}))


@pytest.mark.parametrize("edge", [63, 64, 65, 127, 128, 129, 260])
@pytest.mark.parametrize("query_len", [1, 3])
def test_tile_edges(attend, edge, query_len) -> None:
    batch = Batch(
        [edge], [query_len], num_q_heads=2, num_kv_heads=1, num_decodes=int(query_len == 1)
    )
    check_batch(attend, batch)


def test_more_queries_than_a_tile(attend) -> None:
    check_batch(attend, Batch([150, 75], [140, 75], num_q_heads=2, num_kv_heads=1, head_size=16))
    check_batch(
        attend,
        Batch([300], [290], num_q_heads=1, num_kv_heads=1, head_size=16, options={"window": 37}),
    )


@pytest.mark.parametrize("return_lse", [True, False], ids=["lse", "plain"])
def test_empty_rows(attend, return_lse) -> None:
    """B02: seq_len 0, query_len 0, and queries before the sequence's first token: out 0, lse -inf."""
    check_batch(attend, Batch([9, 0, 17, 0], [1] * 4, num_decodes=4), return_lse)
    check_batch(attend, Batch([0, 0], [1] * 2, num_decodes=2), return_lse)
    check_batch(attend, Batch([0, 20, 3, 20, 0], [2, 0, 5, 4, 0]), return_lse)
    check_batch(
        attend, Batch([4, 0, 9], [1, 3, 2], num_decodes=1, options=OPTIONS["all"]), return_lse
    )


@pytest.mark.parametrize("num_decodes", [1, 5])
@pytest.mark.parametrize("position", [0, 15, 16, 31, 32, 62, 63, 64, 66])
def test_spike_in_sight_or_just_out_of_it(attend, num_decodes, position) -> None:
    """One key that draws all attention, at block, tile and window edges: an off-by-one changes the output by O(1)."""
    window = 52
    seq_lens = [67] * num_decodes
    batch = Batch(seq_lens, [1] * num_decodes, num_decodes=num_decodes, options={"window": window})
    for row in range(num_decodes):
        block = batch.block_tables[row, position // 16]
        head = batch.q[row].unflatten(0, (2, 3)).mean(1)
        batch.k_cache[block, position % 16] = 40 * head
    visible = position >= 67 - window
    out, _ = attend(batch)
    exact, _ = reference.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, **batch.index, window=window
    )
    assert error(out, exact) < 1e-4
    without, _ = reference.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, **batch.index, window=67 - position - 1 or 1
    )
    if visible and position < 66:
        assert (exact - without).abs().max() > 0.1  # the spike matters


@pytest.mark.parametrize("query_len", [1, 4])
def test_sight_ends_exactly_at_the_query(attend, query_len) -> None:
    """B59: a chunk's queries see no later key of the same chunk: those hold a spike that would take all attention."""
    batch = Batch([34, 36], [query_len] * 2, num_decodes=0)
    for row, seq_len in enumerate(batch.seq_lens):
        last = seq_len - 1
        block = batch.block_tables[row, last // 16]
        batch.k_cache[block, last % 16] = 30.0
    check_batch(attend, batch)


def test_unused_neighbours_in_the_pool_are_not_touched() -> None:
    batch = Batch(**MIXED)
    before = batch.k_cache.clone(), batch.v_cache.clone()
    kernels.paged_attention(batch.q, batch.k_cache, batch.v_cache, **batch.arguments)
    for cache, copy in zip((batch.k_cache, batch.v_cache), before, strict=True):
        torch.testing.assert_close(cache, copy, rtol=0, atol=0, equal_nan=True)


def test_rows_of_no_sequence_are_not_written(attend) -> None:
    batch = Batch([9, 5], [4, 5])
    batch.query_start_loc -= batch.query_start_loc.new_tensor(
        [0, 1, 2]
    )  # the last two rows are nobody's
    out, lse = attend(batch)
    assert out[7:].isnan().all()
    assert out[:7].isfinite().all() and lse[:7].isfinite().all()


def test_many_rows_of_mixed_lengths() -> None:
    """More blocks than the CPU version joins in one product, and single rows longer than that."""
    lengths = [3, 40, 8, 700, 1, 0, 129, 64, 900, 2]
    batch = Batch(
        lengths, [1] * 10, num_q_heads=2, num_kv_heads=1, head_size=16, block_size=1, num_decodes=10
    )
    out, lse = kernels.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, **batch.arguments, return_lse=True
    )
    exact_out, exact_lse = reference.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, **batch.index
    )
    assert error(out, exact_out) < 3e-6 and error(lse, exact_lse) < 3e-6


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize("num_splits", [1, 2, 7])
@pytest.mark.parametrize("tile_kv", [16, 64])
@pytest.mark.parametrize("options", [{}, OPTIONS["all"]], ids=["plain", "all"])
def test_every_decode_plan_gives_the_same_answer(num_splits, tile_kv, options) -> None:
    from octavo.kernels.paged_decode import DecodePlan

    batch = Batch(**DECODE, options=options)
    plan = DecodePlan(tile_kv=tile_kv, num_splits=num_splits, num_warps=4, num_stages=2)
    check_plan(batch, plan)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_drafts_that_branch(attend, options) -> None:
    """A tree mask on top of every other rule."""
    batch = Batch(**DRAFTS, options=options)
    batch.options = {**options, "tree_mask": random_tree(batch)}
    check_batch(attend, batch)


def test_drafts_that_see_nothing(attend) -> None:
    """Rows whose tree line is empty and who have no context: out 0, lse -inf."""
    batch = Batch(seq_lens=[3, 9], query_lens=[3, 2], num_decodes=2)
    batch.options = {"tree_mask": torch.zeros(5, 3, dtype=torch.bool)}
    check_batch(attend, batch)
    out, lse = attend(batch)
    assert lse is not None
    assert (out[:3] == 0).all() and (lse[:3] == float("-inf")).all()


def test_more_queries_than_positions_in_the_split_kernel(attend) -> None:
    check_batch(attend, Batch(seq_lens=[2, 0, 40], query_lens=[5, 3, 4], num_decodes=3))


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("tile_kv", [16, 64])
@pytest.mark.parametrize(
    "options", [{}, OPTIONS["all"], {"causal": False}], ids=["plain", "all", "full"]
)
def test_every_draft_plan_gives_the_same_answer(num_splits, tile_kv, options) -> None:
    from octavo.kernels.paged_decode import DecodePlan

    batch = Batch(**DRAFTS, options=options)
    batch.options = {**options, "tree_mask": random_tree(batch)}
    plan = DecodePlan(tile_kv=tile_kv, num_splits=num_splits, num_warps=4, num_stages=2)
    check_plan(batch, plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_decodes": 0}, "tree_mask: expected decodes"),
        ({"num_decodes": 1}, r"tree_mask: expected bool \[5, 1\]"),
        ({"tree_mask": torch.zeros(5, 2, dtype=torch.bool)}, r"tree_mask: expected bool \[5, 3\]"),
        ({"tree_mask": torch.zeros(5, 3)}, r"tree_mask: expected bool \[5, 3\], got float32"),
        ({"max_query_len": 17, "tree_mask": None}, "num_decodes: expected decodes of 1 to 16"),
    ],
)
def test_bad_drafts_are_refused(changes, message) -> None:
    batch = Batch(seq_lens=[3, 9], query_lens=[3, 2], num_decodes=2)
    arguments = {
        **batch.arguments,
        "tree_mask": torch.ones(5, 3, dtype=torch.bool),
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        kernels.paged_attention(batch.q, batch.k_cache, batch.v_cache, **arguments)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("tile_kv", [16, 64])
@pytest.mark.parametrize(
    "options", [{}, OPTIONS["all"], {"causal": False}], ids=["plain", "all", "full"]
)
def test_every_prefill_plan_gives_the_same_answer(rows, tile_kv, options) -> None:
    from octavo.kernels.paged_prefill import PrefillPlan

    batch = Batch(**PREFILL, options=options)
    plan = PrefillPlan(rows=rows, tile_kv=tile_kv, num_warps=4, num_stages=2)
    check_plan(batch, plan)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize("far", ["block", "slot"])
def test_offsets_are_64_bits_wide(watch, far) -> None:
    """B76: block id times stride, or offset in the block times stride, passes 2^31 elements; a product that wrapped is
    out of bounds to the guard.

    The cache is a view over sparse memory: only the pages of the slots in use exist.
    """
    block_size, num_kv_heads, head_size = 16, 1, 32
    slot = head_size if far == "block" else 2**31 // (block_size - 1) + head_size
    block = block_size * slot if far == "block" else head_size
    num_blocks = 2**31 // block + 3 if far == "block" else 2
    storage = torch.UntypedStorage((num_blocks * block + block_size * slot) * 2)
    cache = torch.tensor([], dtype=torch.float16).set_(
        storage, 0, (num_blocks, block_size, num_kv_heads, head_size), (block, slot, head_size, 1)
    )
    cache[-1] = torch.randn(block_size, num_kv_heads, head_size).half()
    query = torch.randn(2, 2, head_size).half()
    table = torch.tensor([[num_blocks - 1]], dtype=torch.int32)
    small = {"seq_lens": torch.tensor([16], dtype=torch.int32), "max_seq_len": 16, "scale": 0.2}

    from octavo.kernels.paged_decode import paged_decode
    from octavo.kernels.paged_prefill import paged_prefill

    near = cache[-1:].contiguous()
    zero = torch.zeros_like(table)
    starts = torch.tensor([0, 2], dtype=torch.int32)
    for run in (
        lambda c, t: paged_decode(query[:1], c, c, block_tables=t, **small),
        lambda c, t: paged_prefill(
            query, c, c, block_tables=t, query_start_loc=starts, max_query_len=2, **small
        ),
    ):
        torch.testing.assert_close(run(cache, table), run(near, zero), rtol=0, atol=0)
