"""A problem's figures by hand and by brute force; faults that attention kernels have are refused before anything is timed."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.bench import attention_problem
from octavo.bench.attention_problem import (
    AttentionProblem,
    AttentionShape,
    WrongResult,
    make_problem,
)
from octavo.bench.batch_specs import BatchSpec

SMALL = AttentionShape(4, 2, 16, 8, torch.float32)


def problem_of(batch: str, shape: AttentionShape = SMALL, **options) -> AttentionProblem:
    return make_problem(BatchSpec.parse(batch), shape, **options)


def attention(problem: AttentionProblem, *, drop=(), shift=0, widen=0, softcap=True, by_head=None) -> torch.Tensor:  # fmt: skip
    """Attention by loops, with faults: keys left out, an end moved, a window widened, no soft cap, another KV head."""
    shape, batch, rows = problem.shape, problem.batch, []
    group = shape.num_q_heads // shape.num_kv_heads
    for seq, (query_len, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        keys, values = (x.double() for x in problem.gathered(seq))
        for number in range(query_len):
            position = length - query_len + number
            first = 0 if shape.window is None else max(0, position + 1 - shape.window - widen)
            seen = [
                key for key in range(first, min(length, position + 1 + shift)) if key not in drop
            ]
            out = torch.zeros(shape.num_q_heads, shape.head_size, dtype=torch.float64)
            for head in range(shape.num_q_heads):
                kv = by_head(head) if by_head else head // group
                scores = keys[seen, kv] @ problem.q[len(rows), head].double() * problem.scale
                if shape.softcap is not None and softcap:
                    scores = shape.softcap * (scores / shape.softcap).tanh()
                out[head] = scores.softmax(0) @ values[seen, kv] if seen else torch.nan
            rows.append(out)
    return torch.stack(rows).to(shape.dtype)


def refused(problem: AttentionProblem, out: torch.Tensor) -> bool:
    try:
        problem.verify(out)
    except WrongResult:
        return True
    return False


# ---------------------------------------------------------------- figures


def test_bytes_and_flops_by_hand() -> None:
    """Two decodes of 20 and 9 tokens: 29 slots, 3 + 2 blocks; K and V of 2 heads of 16 floats; q and out of 4 heads."""
    problem = problem_of("q1s20_q1s9")
    assert problem.num_pairs == 29
    assert problem.flops == 2 * 29 * 4 * (16 + 16)
    assert problem.bytes_moved == 2 * 29 * 2 * 16 * 4 + 2 * 2 * 4 * 16 * 4 + 4 * (3 + 2)


def test_a_window_reads_what_it_sees() -> None:
    """Of 30 tokens, 10 seen by the last: blocks 2 and 3 of 8 slots. fp8 stores a byte."""
    shape = replace(SMALL, window=10, cache_dtype=torch.float8_e4m3fn)
    problem = problem_of("q1s30", shape)
    assert problem.num_pairs == 10
    assert problem.bytes_moved == 2 * 10 * 2 * 16 + 2 * 4 * 16 * 4 + 4 * 2


def test_shared_blocks_are_read_once() -> None:
    """Three sequences of 20 tokens that begin with the same two blocks: 16 + 3 * 4 slots, and 9 table entries."""
    tables = torch.tensor([[5, 9, 1], [5, 9, 2], [5, 9, 30]], dtype=torch.int32)
    problem = problem_of("3q1s20", tables=tables)
    assert problem.bytes_moved == 2 * 28 * 2 * 16 * 4 + 2 * 3 * 4 * 16 * 4 + 4 * 9
    assert problem.num_pairs == 60
    assert not refused(problem, attention(problem))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=4),
    st.none() | st.integers(1, 50),
    st.sampled_from([1, 3, 16, 256]),
)
def test_figures_by_brute_force(rows, window: int | None, block_size: int) -> None:
    batch = BatchSpec.of([(query, query + context) for query, context in rows])
    shape = replace(SMALL, window=window, block_size=block_size)
    problem = make_problem(batch, shape)
    pairs, slots, entries = 0, set(), 0
    for seq, (query, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        seen = set()
        for position in range(length - query, length):
            keys = [k for k in range(length) if k <= position and (window is None or position - k < window)]  # fmt: skip
            pairs += len(keys)
            seen |= {int(problem.block_tables[seq, k // block_size]) * block_size + k % block_size for k in keys}  # fmt: skip
        slots |= seen
        entries += len({slot // block_size for slot in seen})
    assert problem.num_pairs == pairs
    assert problem.flops == 4 * pairs * 4 * 16
    fed = 2 * batch.num_tokens * 4 * 16 * 4
    assert problem.bytes_moved == 2 * len(slots) * 2 * 16 * 4 + fed + 4 * entries


# ---------------------------------------------------------------- the tensors


def test_blocks_are_scattered_and_none_is_null() -> None:
    problem = problem_of("9q1s64_q5s17")
    used = [row[: -(-length // 8)].tolist() for row, length in zip(problem.block_tables, problem.batch.seq_lens, strict=True)]  # fmt: skip
    ids = [block for row in used for block in row]
    assert sorted(ids) == list(range(1, len(ids) + 1))
    assert ids != sorted(ids)
    assert int(problem.block_tables[-1, 3:].abs().sum()) == 0


def test_recorded_tables_keep_order_and_sharing_but_no_gaps() -> None:
    """Ids of a pool of millions; what is past a sequence's blocks is not a block; a block of the window's past is null."""
    tables = torch.tensor(
        [[70_000_000, 3, 99, 2**31 - 1], [70_000_000, 8, 2**31 - 1, -7], [0, 5, 3, 4]],
        dtype=torch.int32,
    )
    problem = problem_of("q1s24_q1s9_q1s20", tables=tables)
    assert problem.block_tables.tolist() == [[5, 1, 4], [5, 3, 0], [0, 2, 1]]
    assert problem.k_cache.shape[0] == 6
    assert problem.block_tables.dtype == torch.int32


def test_the_same_seed_gives_the_same_numbers() -> None:
    first, again, other = (problem_of("q3s20", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.k_cache, again.k_cache) and torch.equal(first.q, again.q)
    assert not torch.equal(first.q, other.q)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_q_heads", 0),
        ("num_kv_heads", 0),
        ("num_kv_heads", 3),
        ("head_size", 0),
        ("block_size", -1),
        ("dtype", torch.int8),
        ("window", 0),
        ("softcap", 0.0),
        ("softcap", -1.0),
        ("softcap", math.nan),
        ("softcap", math.inf),
    ],
)
def test_shapes_that_make_no_sense(field: str, value: object) -> None:
    name = "num_q_heads" if value == 3 else field
    with pytest.raises(ValueError, match=f"{name}: expected .*, got"):
        replace(SMALL, **{field: value})


def test_more_than_the_memory_is_refused_before_it_is_asked_for() -> None:
    with pytest.raises(
        ValueError, match=r"batch: expected one that fits into .* GiB for q1s2097151k"
    ):
        problem_of("q1s2097151k", AttentionShape(32, 8, 128))
    with pytest.raises(ValueError, match="batch: expected one that fits"):  # of its tables
        problem_of("99999q1_q1000000", replace(SMALL, block_size=1))


# ---------------------------------------------------------------- what is right passes

SHAPES = {
    "plain": SMALL,
    "bf16": AttentionShape(4, 1, 32, 16, torch.bfloat16),
    "fp16": AttentionShape(6, 2, 8, 7, torch.float16),
    "fp8": replace(SMALL, cache_dtype=torch.float8_e5m2),
    "window": replace(SMALL, window=13),
    "softcap 50": replace(SMALL, softcap=50.0),
    "softcap 5": replace(SMALL, softcap=5.0),
    "window and softcap": AttentionShape(4, 2, 16, 8, torch.bfloat16, None, 13, 30.0),
    "odd": AttentionShape(7, 1, 33, 1, torch.float32),
    "large blocks": replace(SMALL, block_size=256),
}
BATCHES = ("q1", "3q1s40", "q9", "q5s33_q1s50", "2q12s37_q1s1k")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_loops_and_octavo_are_right(shape: AttentionShape, batch: str) -> None:
    problem = problem_of(batch, shape)
    assert problem.verify(attention(problem)) <= attention_problem.TOLERANCES[shape.dtype]
    assert problem.verify(problem.run()) <= attention_problem.TOLERANCES[shape.dtype]


# ---------------------------------------------------------------- what is wrong does not


@pytest.mark.parametrize("batch", ["q1s40", "3q1s700", "q9s40", "q8s200_q1s50"])
@pytest.mark.parametrize("shape", [s for n, s in SHAPES.items() if n != "odd"], ids=[n for n in SHAPES if n != "odd"])  # fmt: skip
@pytest.mark.parametrize("end", ["first", "last", "own"])
def test_a_token_at_an_edge_is_ignored(batch: str, shape: AttentionShape, end: str) -> None:
    """The first that is seen, or the newest one; in a prefill also one that is every query's own."""
    problem = problem_of(batch, shape)
    if end == "first":
        wrong = attention(problem, drop={0}) if shape.window is None else attention(problem, widen=-1)  # fmt: skip
    elif end == "last":
        wrong = attention(problem, drop={max(problem.batch.seq_lens) - 1})
    else:
        wrong = attention(problem, shift=-1)
    assert refused(problem, wrong)


@pytest.mark.parametrize("batch", ["q1s40", "q9s40", "q1s2k"])
@pytest.mark.parametrize("by", [-1, 1])
def test_a_window_off_by_one(batch: str, by: int) -> None:
    for dtype, softcap in itertools.product((torch.float32, torch.bfloat16), (None, 50.0)):
        problem = problem_of(batch, replace(SMALL, window=13, dtype=dtype, softcap=softcap))
        assert refused(problem, attention(problem, widen=by))


def test_a_window_ignored() -> None:
    problem = problem_of("q1s40", replace(SMALL, window=13))
    assert refused(problem, attention(problem, widen=1000))


@pytest.mark.parametrize("batch", ["q9s40", "q30"])
def test_a_mask_that_shows_the_next_token(batch: str) -> None:
    problem = problem_of(batch)
    assert refused(problem, attention(problem, shift=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("softcap", [1.0, 5.0, 30.0, 50.0])
@pytest.mark.parametrize("batch", ["q1s40", "3q1s700", "q9s40"])
def test_a_soft_cap_ignored(batch: str, softcap: float, dtype: torch.dtype) -> None:
    problem = problem_of(batch, AttentionShape(16, 2, 16, 8, dtype, softcap=softcap))
    assert refused(problem, attention(problem, softcap=False))


def test_heads_mixed_up() -> None:
    """Interleaved instead of neighbours, or all by the first KV head."""
    problem = problem_of("2q1s40_q5s30")
    assert refused(problem, attention(problem, by_head=lambda head: head % 2))
    assert refused(problem, attention(problem, by_head=lambda head: 0))


@pytest.mark.parametrize("batch", ["q1s64", "q1s64_q1s64"])
def test_a_wrong_block(batch: str) -> None:
    problem = problem_of(batch)
    tables = problem.block_tables.clone()
    tables[0, 3] = tables[0, 4] if problem.batch.num_seqs == 1 else tables[1, 3]
    assert refused(problem, attention(replace(problem, block_tables=tables)))


def test_the_scale_forgotten() -> None:
    problem = problem_of("2q1s40")
    assert refused(problem, attention(replace(problem, q=problem.q * 4)))


def test_results_of_another_kind() -> None:
    problem = problem_of("2q1s40")
    right = attention(problem)
    problem.verify(right)
    for wrong in (right[:1], right[:, :2], right[None], right.flatten(1), right.transpose(0, 1)):
        with pytest.raises(WrongResult, match="out: expected shape"):
            problem.verify(wrong)
    for number in (math.nan, math.inf, 0.0):
        wrong = right.clone()
        wrong[1, 3, 5] = number
        assert refused(problem, wrong)
    assert refused(problem, torch.zeros_like(right))
    assert refused(problem, right.roll(1, 0))


def test_a_long_prompt_is_looked_at_from_end_to_end() -> None:
    problem = problem_of("q200", AttentionShape(1, 1, 8, 16, torch.float32))
    right = attention(problem)
    for token in (0, 199):
        wrong = right.clone()
        wrong[token] *= 1.01
        assert refused(problem, wrong)


def test_what_changes_the_cache_is_found_out_by_the_next() -> None:
    """What is right is computed once, from what was there before."""
    problem = problem_of("2q1s40")
    problem.verify(problem.run())
    problem.v_cache.mul_(2)
    assert refused(problem, problem.run())


def test_an_edge_asked_for_counts() -> None:
    """A token in the middle of thousands is seen to be missing when the case says that it matters."""
    shape = AttentionShape(4, 2, 16, 16, torch.bfloat16)
    problem = problem_of("q1s4k", shape, edges=(2047,))
    assert not refused(problem, attention(problem))
    assert refused(problem, attention(problem, drop={2047}))
