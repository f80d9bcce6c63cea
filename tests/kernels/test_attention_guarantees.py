"""What paged attention promises beyond its values: bits that do not depend on the batch, launches that a CUDA graph can
replay, quantised numbers read exactly, and what it refuses."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from octavo import kernels
from octavo.kernels import reference
from octavo.tests.kernels.attending import DEVICE, check_batch
from octavo.tests.kernels.cases import QUANTISED, Batch, error

# ---------------------------------------------------------------- batch invariance


def alone(batch: Batch, row: int) -> dict:
    """Arguments of a batch of this one sequence."""
    start, stop = batch.query_start_loc[row : row + 2].tolist()
    arguments = {
        **batch.arguments,
        "query_start_loc": torch.tensor([0, stop - start], dtype=torch.int32),
        "seq_lens": batch.seq_lens_tensor[row : row + 1],
        "block_tables": batch.block_tables[row : row + 1],
        "max_seq_len": batch.seq_lens[row],
        "max_query_len": batch.query_lens[row],
        "num_decodes": int(row < batch.num_decodes),
    }
    if batch.num_decodes == len(batch.seq_lens) and max(batch.query_lens) > 1:
        arguments["max_query_len"] = max(batch.query_lens)
    return {"q": batch.q[start:stop], **arguments}


@pytest.mark.parametrize(
    "lengths",
    [
        {"seq_lens": [70, 1, 300, 33, 129], "query_lens": [1] * 5, "num_decodes": 5},
        {"seq_lens": [70, 5, 300, 33], "query_lens": [3, 5, 2, 4], "num_decodes": 4},
        {"seq_lens": [70, 5, 300, 64], "query_lens": [40, 5, 130, 1]},
        {"seq_lens": [70, 131, 90, 64], "query_lens": [1, 1, 33, 2], "num_decodes": 2},
    ],
    ids=["decode", "drafts", "prefill", "mixed"],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 50, "sinks": torch.ones(2)}, "token scales"],
    ids=["", "window", "token scales"],
)
def test_bits_do_not_depend_on_the_batch(attend, lengths, options) -> None:
    """B67: a row's result is the same, bit for bit, alone and among others, however long those are."""
    scaled = options == "token scales"
    quantised = {"dtype": torch.float16, "cache_dtype": torch.int8} if scaled else {}
    options = {"window": 50} if scaled else options
    batch = Batch(**lengths, **quantised, num_q_heads=2, num_kv_heads=1, options={**options})
    if scaled:
        batch.options |= {"k_scale": batch.token_scales(), "v_scale": batch.token_scales()}
    out, lse = attend(batch, batch_invariant=True)
    for row, (start, stop) in enumerate(itertools.pairwise(batch.query_start_loc.tolist())):
        arguments = {
            name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x
            for name, x in alone(batch, row).items()
        }
        one, one_lse = kernels.paged_attention(
            k_cache=batch.k_cache.to(DEVICE),
            v_cache=batch.v_cache.to(DEVICE),
            **arguments,
            batch_invariant=True,
            return_lse=True,
        )
        assert torch.equal(one.cpu(), out[start:stop]) and torch.equal(
            one_lse.cpu(), lse[start:stop]
        )


@pytest.mark.parametrize("options", [{}, {"window": 70}, {"attention_chunk": 64}], ids=str)
def test_bits_of_a_cascade_do_not_depend_on_the_batch(attend, options) -> None:
    """The prefix is cut where the prefix says, not where another request's window begins."""
    lengths = [140, 260, 131, 200]

    def batch_of(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch = Batch(lengths, [1] * 4, 2, 1, num_decodes=4, num_prefix_blocks=7, options=options)
        batch.seq_lens = [batch.seq_lens[i] for i in rows]
        batch.q = batch.q[rows]
        batch.block_tables = batch.block_tables[rows]
        batch.seq_lens_tensor = batch.seq_lens_tensor[rows]
        batch.query_start_loc = torch.arange(len(rows) + 1, dtype=torch.int32)
        batch.query_lens, batch.num_decodes = [1] * len(rows), len(rows)
        return attend(batch, batch_invariant=True)

    torch.manual_seed(0)
    out, lse = batch_of([0, 1, 2, 3])
    for rows in ([0], [0, 2], [0, 3, 1]):
        torch.manual_seed(0)
        few, few_lse = batch_of(rows)
        assert torch.equal(few[0], out[0]) and torch.equal(few_lse[0], lse[0])


def test_a_cascade_cuts_no_key_off(attend) -> None:
    """The tiles of the rest begin before the shared prefix ends: with 16 + 48 keys left there is one split of 64 more."""
    for seq_len in range(142, 147):
        batch = Batch([seq_len, 60], [1, 1], 2, 1, num_decodes=2, num_prefix_blocks=1)
        check_batch(attend, batch, batch_invariant=True)


def test_fixed_splits_cover_every_length() -> None:
    from octavo.kernels.paged_decode import INVARIANT_SPLIT, plan_paged_decode

    for max_seq_len in (1, 1023, 1024, 1025, 131072):
        plan = plan_paged_decode(
            num_seqs=3,
            num_kv_heads=2,
            group=4,
            head_size=64,
            max_seq_len=max_seq_len,
            num_sms=132,
            batch_invariant=True,
        )
        assert plan.split_len == INVARIANT_SPLIT and plan.split_len % plan.tile_kv == 0
        assert plan.num_splits * plan.split_len >= max_seq_len


# ---------------------------------------------------------------- CUDA graphs


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize("kind", ["decode", "prefill", "cascade"])
def test_launches_depend_on_maxima_only(monkeypatch, kind) -> None:
    """What a CUDA graph freezes (grids, scalars, scratch shapes) is the same whatever the lengths and tables are."""
    from triton.runtime.interpreter import GridExecutor

    launches: list = []
    call = GridExecutor.__call__

    def recorded(self, *args, **kwargs):
        frozen = {
            name: (tuple(x.shape), x.stride()) if isinstance(x, torch.Tensor) else x
            for name, x in kwargs.items()
        }
        launches.append((self.fn.__name__, self.grid, frozen))
        return call(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", recorded)
    from octavo.tests.kernels.attending import attend_with

    seen = []
    for seq_lens, query_lens in (([40, 33, 90], [3, 9, 4]), ([64, 100, 37], [8, 4, 4])):
        if kind != "prefill":
            query_lens = [1, 1, 1]
        batch = Batch(
            seq_lens,
            query_lens,
            num_decodes=0 if kind == "prefill" else 3,
            num_prefix_blocks=2 if kind == "cascade" else None,
            options={"window": 60},
        )
        batch.block_tables = torch.nn.functional.pad(
            batch.block_tables, (0, 12 - batch.block_tables.shape[1])
        )
        launches.clear()
        monkeypatch.undo()
        monkeypatch.setattr(GridExecutor, "__call__", recorded)
        attend = attend_with("triton", monkeypatch)  # the same splits in both rounds
        # the cache is of one size in a captured graph; a bound above all lengths stands for max_model_len
        out, _ = attend(batch, max_seq_len=128, max_query_len=16 if kind == "prefill" else 1)
        exact, _ = getattr(reference, batch.op)(
            batch.q, batch.k_cache, batch.v_cache, **batch.index, **batch.options
        )
        assert error(out, exact) < 3e-6
        for _, _, arguments in launches:
            arguments.pop("k_ptr", None), arguments.pop("v_ptr", None)
        seen.append(list(launches))
    assert len(seen[0]) >= 1 and seen[0] == seen[1]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["decode", "prefill", "cascade"])
def test_a_captured_graph_follows_new_lengths(kind) -> None:
    """Captured with short sequences, replayed with long ones and others' tables: equal to an eager call."""
    prefill = kind == "prefill"
    query_lens = [8, 4, 4] if prefill else [1, 1, 1]
    captured = Batch(
        [9, 9, 9] if kind != "cascade" else [40, 41, 42],
        query_lens,
        head_size=64,
        dtype=torch.bfloat16,
        num_decodes=0 if prefill else 3,
        num_prefix_blocks=2 if kind == "cascade" else None,
    )
    caches = [torch.randn(200, 16, 2, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    index = {
        "query_start_loc": captured.query_start_loc.to(DEVICE),
        "seq_lens": captured.seq_lens_tensor.to(DEVICE),
        "block_tables": torch.randint(1, 200, (3, 64), dtype=torch.int32, device=DEVICE),
    }
    if kind == "cascade":
        index["prefix_block_ids"] = torch.tensor([5, 9], dtype=torch.int32, device=DEVICE)
    q = captured.q.to(DEVICE)
    rules = {
        "max_query_len": 16 if prefill else 1,
        "max_seq_len": 1024,
        "num_decodes": captured.num_decodes,
    }
    op = getattr(kernels, captured.op)

    def run() -> torch.Tensor:
        return op(q, *caches, **index, **rules)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seq_lens in ([900, 33, 512], [8, 1000, 64]):
        lengths = [max(n, 40) for n in seq_lens] if kind == "cascade" else seq_lens
        index["seq_lens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        index["block_tables"].random_(1, 200)
        graph.replay()
        torch.testing.assert_close(out, run(), rtol=0, atol=0)


# ---------------------------------------------------------------- quantised caches


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_stored_number_is_read_exactly(attend, name, dtype) -> None:
    """One key per sequence: its value comes out as stored, for all numbers of the format but NaN and infinity."""
    codes = torch.arange(256).to(torch.uint8)
    if QUANTISED[name] == torch.int8:
        values = codes.view(torch.int8).float()
    else:
        stored = torch.float8_e4m3fn if name == "e4m3 bits" else QUANTISED[name]
        values = codes.view(stored).float()
    codes = torch.where(values.isfinite(), codes, torch.zeros_like(codes))
    batch = Batch([1] * 4, [1] * 4, num_decodes=4, head_size=64, cache_dtype=QUANTISED[name])
    batch.q = batch.q.to(dtype)
    batch.dtype = dtype
    for row in range(4):
        block = batch.block_tables[row, 0]
        batch.v_cache.view(torch.uint8)[block, 0] = codes[64 * row : 64 * row + 64]
    out, _ = attend(batch)
    expected = torch.where(values.isfinite(), values, 0.0).view(4, 1, 64).expand(4, 6, 64)
    rounding = (
        3e-7 if dtype == torch.float32 else 0.0
    )  # of the weight, which is 1 but for a few units in the last place
    torch.testing.assert_close(out.float(), expected.to(dtype).float(), rtol=rounding, atol=0)


def test_scales_multiply_what_is_stored(attend) -> None:
    """Twice the scale and half the numbers give the same, per tensor and per head."""
    common = {"seq_lens": [40, 17], "query_lens": [1, 1], "num_decodes": 2}
    batch = Batch(**common, cache_dtype=torch.float8_e5m2)
    scales = {"k_scale": torch.tensor([0.5, 0.25]), "v_scale": torch.tensor(0.125)}
    plain, _ = attend(batch)
    for cache, scale in zip((batch.k_cache, batch.v_cache), scales.values(), strict=True):
        scaled = cache.float() / scale.view(-1, 1)  # powers of two: exact in e5m2
        cache.view(torch.uint8).copy_(scaled.to(torch.float8_e5m2).view(torch.uint8))
    batch.options = scales
    out, _ = attend(batch)
    torch.testing.assert_close(out, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1.0, 1e4, 1e30])
def test_queries_of_any_magnitude_meet_a_quantised_cache(attend, magnitude) -> None:
    """bf16 outranges the fp16 of the product: rows are brought into range and back."""
    batch = Batch(
        [33, 7],
        [1, 1],
        num_decodes=2,
        dtype=torch.bfloat16,
        cache_dtype=torch.float8_e4m3fn,
        options={"scale": 0.2 / magnitude},
    )
    batch.q.mul_(magnitude)
    check_batch(attend, batch)


def test_many_small_weights_outweigh_a_large_one_in_fp16(attend) -> None:
    """4000 keys at exp(-16.5) of the largest weigh 0.03 % together, each less than fp16 holds without help."""
    batch = Batch([4001], [1], 1, 1, head_size=16, dtype=torch.float16, num_decodes=1)
    batch.q.fill_(1.0)
    batch.k_cache.fill_(0.0)
    batch.v_cache.fill_(1000.0)
    first = batch.block_tables[0, 0]
    batch.k_cache[first, 0] = 16.5 / 4
    batch.v_cache[first, 0] = 0.0
    out, _ = attend(batch)
    share = 4000 * math.exp(-16.5)
    assert abs(out.float().mean().item() / (1000 * share / (1 + share)) - 1) < 0.01


# ---------------------------------------------------------------- which kernel, which rows


@pytest.mark.parametrize("query_lens", [[1, 1], [1] * 6, [40, 3]], ids=str)
def test_infinite_sinks_take_all_weight_or_none(attend, query_lens) -> None:
    batch = Batch([70, 50, 40, 30, 20, 10][: len(query_lens)], query_lens, num_q_heads=2)
    batch.num_decodes = 0 if 40 in query_lens else len(query_lens)
    plain, plain_lse = attend(batch)
    for dtype in (torch.float32, torch.bfloat16):
        batch.options["sinks"] = torch.tensor([math.inf, -math.inf], dtype=dtype)
        out, lse = attend(batch)
        assert not out[:, 0].any() and (lse[:, 0] > 1e38).all()
        torch.testing.assert_close(out[:, 1], plain[:, 1])
        torch.testing.assert_close(lse[:, 1], plain_lse[:, 1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("query_len", [1, 40])
@pytest.mark.parametrize("size", [2.0**-60, 1.0, 2.0**60])
def test_scales_of_tokens_of_any_magnitude(attend, dtype, query_len, size) -> None:
    """Values of one size, some a millionth of the others, and one far above them that no query looks at."""
    batch = Batch([90], [query_len], dtype=dtype, cache_dtype=torch.int8, num_q_heads=2)
    batch.num_decodes = int(query_len == 1)
    k_scale, v_scale = batch.token_scales(), batch.token_scales()
    v_scale *= torch.where(torch.rand(v_scale.shape) < 0.5, size, size * 2.0**-20)
    block, offset = int(batch.block_tables[0, 0]), 3
    batch.q[..., 0] = 8.0
    batch.k_cache[block, offset] = 0
    batch.k_cache[block, offset, :, 0] = -127
    k_scale[block, offset], v_scale[block, offset] = 1.0, size * 2.0**50  # a score of -180
    batch.options |= {"k_scale": k_scale, "v_scale": v_scale}
    out = torch.empty(*batch.q.shape, dtype=torch.float32, device=DEVICE)
    result, _ = attend(batch, out=out)
    exact, _ = reference.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, **batch.index, **batch.options
    )
    assert error(result, exact) <= 2e-3 * exact.abs().max().item()


def test_rows_are_found_by_query_start_loc(attend) -> None:
    """Without num_decodes: sequences with no query, rows before the first and after the last sequence's."""
    batch = Batch([5, 9, 7], [1, 0, 1], num_decodes=None, nobodys=(2, 1))
    check_batch(attend, batch)
    batch = Batch([5, 9], [0, 0], num_decodes=None)
    assert attend(batch)[0].shape[0] == 0


def test_a_sequence_without_queries_is_not_read(attend) -> None:
    batch = Batch([9, 20, 5], [0, 3, 2], num_decodes=3)
    assert (batch.block_tables[0] == 2**31 - 1).all()  # garbage, for no key of it is seen
    check_batch(attend, batch)


@pytest.mark.parametrize("query_len", [1, 3, 16])
def test_more_rows_than_a_program_holds(attend, query_len) -> None:
    """71 query heads a KV head, as Falcon has, with drafts: several programs share a sequence's rows."""
    for num_decodes in (None, 2):
        batch = Batch([40, 21], [query_len] * 2, 71, 1, head_size=16, num_decodes=num_decodes)
        check_batch(attend, batch)


def test_one_new_token_with_a_tree_mask(attend) -> None:
    batch = Batch([5, 9, 30, 1, 17], [1] * 5, num_decodes=5)
    batch.options["tree_mask"] = torch.tensor([[True], [False], [True], [False], [True]])
    check_batch(attend, batch)


def test_a_strided_or_odd_query_start_loc_is_refused_before_anything_is_written(attend) -> None:
    batch = Batch([50, 40], [1, 3], num_decodes=1)
    for bad in (
        torch.tensor([0, 7, 1, 9, 4], dtype=torch.int32)[::2],
        torch.tensor([0, 1, 4]),
        torch.tensor([0, 1, 4, 4], dtype=torch.int32),
    ):
        out = torch.full((4, 6, 32), 7.0, device=DEVICE)
        with pytest.raises(ValueError, match="query_start_loc: expected"):
            attend(batch, query_start_loc=bad, out=out)
        assert (out == 7).all()


# ---------------------------------------------------------------- what is refused

PLAIN = {"seq_lens": [5, 9], "query_lens": [1, 1], "num_decodes": 2}
BAD = {
    "k_scale: expected None with a cache that is not quantised": {"k_scale": torch.ones(())},
    r"prefix_lm_ranges: expected int32 \[2, \*, 2\]": {
        "prefix_lm_ranges": torch.zeros(2, 2, dtype=torch.int32)
    },
    "attention_chunk: expected a positive": {"attention_chunk": 0},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_refused(attend, message) -> None:
    with pytest.raises(ValueError, match=message):
        attend(Batch(**PLAIN), **BAD[message])


def test_bad_scales_are_refused(attend) -> None:
    batch = Batch(**PLAIN, cache_dtype=torch.int8)
    with pytest.raises(ValueError, match=r"v_scale: expected float32 \[2\], got float32 \[3\]"):
        attend(batch, v_scale=torch.ones(3))
    with pytest.raises(ValueError, match=r"k_scale: expected float32 \[\], got float64 \[\]"):
        attend(batch, k_scale=torch.ones((), dtype=torch.float64))


def test_a_cascade_refuses_what_it_cannot_tell(attend) -> None:
    batch = Batch([40, 33], [1, 1], num_decodes=2, num_prefix_blocks=2)
    with pytest.raises(ValueError, match="prefix_block_ids: expected at most the 5 blocks"):
        attend(batch, prefix_block_ids=torch.ones(9, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"prefix_block_ids: expected int32 \[\*\], got int64"):
        attend(batch, prefix_block_ids=torch.ones(2, dtype=torch.int64))
