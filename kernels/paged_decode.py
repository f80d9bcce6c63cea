"""Attention of a few new tokens per sequence over its paged K and V, with the KV split over programs.

    out[t, h] = sum_j softmax_j(score(q[t, h], k[j])) * v[j],   j over the tokens visible to t
    score     = softcap(scale * k_scale * q.k) + slope_h * (j - position of t),   v[j] = v_scale * stored number

with scales of the KV head, or of token j and the KV head.

Program (s, g, p) owns split p of sequence s for KV head g, all its new tokens (one in plain decoding, up to 16 when
drafts are verified) and all query heads that share the KV head: they are the rows of one matrix product, so K and V are
read once per KV head (or once per 64 rows, where there are more). A tile holds TILE_KV tokens gathered from as many
blocks as it takes; only tiles at the window's start and among the new tokens at the sequence's end are masked. With one
split the program writes the result itself, else it writes a normalised partial result and its lse, and
`_merge_splits_kernel` joins them.

Bytes read:  sum_s min(seq_len_s, window) * num_kv_heads * (head_size + head_size_v) * cache_element_size   (K, V, once)
Bytes moved by the merge: 2 * num_tokens * num_q_heads * num_splits * (head_size_v + 1) * 4
FLOPs:       2 * sum_s query_len_s * min(seq_len_s, window) * num_q_heads * (head_size + head_size_v)
Reference:   `reference.paged_attention`
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._checks import MAX_QUERIES, check_attention, check_queries, multiprocessors
from ._online_softmax import (
    LN_2,
    attend_tiles,
    finish,
    load_scale,
    padded,
    paged_operands,
    scaled_queries,
    scales_of_head,
    start_rows,
    visible_interval,
)

MAX_TREE = tl.constexpr(MAX_QUERIES)  # columns of a tree mask
INVARIANT_SPLIT = 1024  # tokens of a split in batch-invariant mode


@triton.jit
def _sees_any(tree_rows, firsts, stops, context_len):
    """Which rows of a tree see a key: one of the context, or a new token of their line."""
    keys = context_len + tl.arange(0, MAX_TREE)[None, :]
    in_sight = (keys >= firsts[:, None]) & (keys < stops[:, None])
    line = tl.load(tree_rows[:, None] + (keys - context_len), mask=in_sight, other=0)
    return (firsts < context_len) | (tl.max(line.to(tl.int32), axis=1) != 0)


# What varies from step to step chooses no variant: a compilation in the middle of serving takes seconds.
@triton.jit(
    do_not_specialize=[
        "kv_start", "num_ranges", "lse_stride_token", "lse_stride_head", "table_stride_seq", "tree_stride_token",
    ],
    do_not_specialize_on_alignment=[
        "lse_ptr", "k_scale_ptr", "v_scale_ptr", "tree_mask_ptr", "ranges_ptr", "block_tables_ptr", "seq_lens_ptr", "query_start_loc_ptr",
        "query_positions_ptr", "query_firsts_ptr",
    ],
)  # fmt: skip
def _paged_decode_kernel(
    out_ptr, lse_ptr,
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, alibi_slopes_ptr, sinks_ptr, tree_mask_ptr, ranges_ptr,
    block_tables_ptr, seq_lens_ptr, query_start_loc_ptr, query_positions_ptr, query_firsts_ptr,
    scale, softcap, window, attention_chunk, kv_start, num_ranges, split_len,
    out_stride_token, out_stride_head, out_stride_split, lse_stride_token, lse_stride_head,
    q_stride_token, q_stride_head,
    k_stride_block, k_stride_slot, k_stride_head, v_stride_block, v_stride_slot, v_stride_head,
    k_scale_stride_block, k_scale_stride_slot, k_scale_stride_head,
    v_scale_stride_block, v_scale_stride_slot, v_scale_stride_head, table_stride_seq, tree_stride_token,
    HEAD_SIZE: tl.constexpr, HEAD_SIZE_V: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WIDE_SLOTS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, ROW_TILES: tl.constexpr, TILE_KV: tl.constexpr,
    CAUSAL: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Grid (num_seqs, num_kv_heads * ROW_TILES, num_splits), ROWS rows of a sequence a program.

    Without `query_start_loc_ptr` each sequence has one new token. `query_positions_ptr` says where the new tokens are
    in their sequences when that is not the end, negative where they see nothing; `query_firsts_ptr` which key each sees
    first. PARTIAL: write lse2 per split instead of the final lse.
    """
    seq = tl.program_id(0).to(tl.int64)
    kv_head = (tl.program_id(1) // ROW_TILES).to(tl.int64)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + seq)

    # row r holds new token r // GROUP for head kv_head * GROUP + r % GROUP
    rows = tl.program_id(1) % ROW_TILES * ROWS + tl.arange(0, ROWS)
    heads = kv_head * GROUP + rows % GROUP
    if query_start_loc_ptr is not None:
        query_start = tl.load(query_start_loc_ptr + seq)
        query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start
        if query_len <= 0:
            return
        tokens = query_start.to(tl.int64) + rows // GROUP
        row_mask = rows < query_len * GROUP
        row_positions = seq_len - query_len + rows // GROUP
    else:
        query_len = 1
        tokens = seq + tl.zeros([ROWS], tl.int64)
        row_mask = rows < GROUP
        row_positions = seq_len - 1 + tl.zeros([ROWS], tl.int32)
    context_len = seq_len - query_len
    first_position = context_len
    last_position = seq_len - 1
    if query_positions_ptr is not None:
        row_positions = tl.load(query_positions_ptr + tokens, mask=row_mask, other=-1)
        blind = row_positions < 0
        first_position = tl.min(tl.where(blind, 1 << 30, row_positions), axis=0)
        last_position = tl.max(tl.maximum(row_positions, -1), axis=0)

    # tiles from `seen_from` to `seen_to` are seen by some row, those of the bulk by every row
    if ranges_ptr is not None:
        ranges_ptr += seq * num_ranges * 2
    seen_from, seen_by_all = visible_interval(
        first_position, seq_len, window, attention_chunk, kv_start, ranges_ptr, num_ranges, CAUSAL
    )
    all_from, seen_to = visible_interval(
        last_position, seq_len, window, attention_chunk, kv_start, ranges_ptr, num_ranges, CAUSAL
    )
    if query_positions_ptr is not None:
        seen_to = tl.where(last_position != -1, seen_to, 0)
    if tree_mask_ptr is not None:
        seen_by_all = tl.minimum(seen_by_all, tl.maximum(context_len, 0))
    row_first = None
    row_stop = None
    if query_start_loc_ptr is not None:
        firsts, stops = visible_interval(
            row_positions, seq_len, window, attention_chunk, kv_start, ranges_ptr, num_ranges, CAUSAL
        )  # fmt: skip
        if (window is not None) | (attention_chunk is not None):
            row_first = firsts[:, None]
        if CAUSAL:
            row_stop = stops[:, None]

    if query_firsts_ptr is not None:
        firsts = tl.load(query_firsts_ptr + tokens, mask=row_mask, other=0)
        row_first = firsts[:, None]
        seen_from = tl.min(tl.where(blind, 1 << 30, firsts), axis=0)
        all_from = tl.max(tl.where(blind, 0, firsts), axis=0)

    # KV of this split: [start, stop), whole tiles counted from the tile of the first token that any row sees
    origin = seen_from // TILE_KV * TILE_KV
    if split_len is None:
        tiles = tl.cdiv(tl.maximum(seen_to - origin, 0), TILE_KV)
        split_len = tl.cdiv(tiles, tl.num_programs(2)) * TILE_KV
        start = origin + split * split_len
        stop = tl.minimum(start + split_len, seen_to)
    elif query_positions_ptr is not None:
        # rows of several sequences: a cut may not depend on where another's window begins
        stop = tl.minimum((split + 1) * split_len, seen_to)
        start = tl.maximum(split * split_len, origin)
    else:
        start = origin + split * split_len
        stop = tl.minimum(start + split_len, seen_to)
    bulk_start = start
    if (
        (window is not None)
        | (attention_chunk is not None)
        | (kv_start is not None)
        | (query_firsts_ptr is not None)
    ):
        bulk_start = tl.maximum(start, tl.cdiv(all_from, TILE_KV) * TILE_KV)
    bulk_stop = tl.maximum(bulk_start, tl.minimum(stop, seen_by_all) // TILE_KV * TILE_KV)

    dims = tl.arange(0, DIM)
    dims_v = tl.arange(0, DIM_V)
    q_offsets = tokens[:, None] * q_stride_token + heads[:, None] * q_stride_head + dims[None, :]
    q_mask = row_mask[:, None] & (dims[None, :] < HEAD_SIZE)
    q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)  # [ROWS, DIM]
    q, factor = scaled_queries(q, k_ptr)
    scale *= (
        load_scale(k_scale_ptr, kv_head, k_scale_stride_block, k_scale_stride_head, k_ptr) * factor
    )
    v_scale = load_scale(v_scale_ptr, kv_head, v_scale_stride_block, v_scale_stride_head, v_ptr)
    slopes = None
    if alibi_slopes_ptr is not None:
        slopes = tl.load(alibi_slopes_ptr + heads, mask=row_mask, other=0.0)[:, None]
    tree_rows = None
    if tree_mask_ptr is not None:
        # rows of no token look at the first token's line
        tree_rows = (
            tree_mask_ptr + tl.where(row_mask, tokens, query_start.to(tl.int64)) * tree_stride_token
        )

    has_keys = None
    if sinks_ptr is not None:
        # the sink enters once, in the first split, for rows that have keys (be they those before kv_start)
        lows, highs = visible_interval(
            row_positions, seq_len, window, attention_chunk, None, ranges_ptr, num_ranges, CAUSAL
        )
        has_keys = (split == 0) & (lows < highs)
        if tree_mask_ptr is not None:
            has_keys = has_keys & _sees_any(tree_rows, lows, highs, context_len)
    k_scales_ptr = scales_of_head(k_scale_ptr, kv_head, k_scale_stride_block, k_scale_stride_head)
    v_scales_ptr = scales_of_head(v_scale_ptr, kv_head, v_scale_stride_block, v_scale_stride_head)
    acc, m, l, unit = start_rows(  # noqa: E741
        q, v_scales_ptr, sinks_ptr, heads, row_mask, has_keys, ROWS, DIM_V
    )
    k_ptr += kv_head * k_stride_head
    v_ptr += kv_head * v_stride_head
    table_ptr = block_tables_ptr + seq * table_stride_seq
    if (
        (window is not None)
        | (attention_chunk is not None)
        | (kv_start is not None)
        | (query_firsts_ptr is not None)
    ):
        acc, m, l, unit = attend_tiles(  # noqa: E741
            acc, m, l, unit, q, row_first, row_stop, row_positions[:, None],
            start, tl.minimum(bulk_start, stop), seen_from, seen_to, context_len,
            k_ptr, v_ptr, table_ptr, k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
            k_scales_ptr, v_scales_ptr, k_scale_stride_block, k_scale_stride_slot, v_scale_stride_block, v_scale_stride_slot,
            scale, softcap, slopes, tree_rows,
            HEAD_SIZE, HEAD_SIZE_V, DIM, DIM_V, BLOCK_SIZE, WIDE_SLOTS, TILE_KV, MASKED=True,
        )  # fmt: skip
    acc, m, l, unit = attend_tiles(  # noqa: E741
        acc, m, l, unit, q, row_first, row_stop, row_positions[:, None],
        bulk_start, bulk_stop, seen_from, seen_to, context_len,
        k_ptr, v_ptr, table_ptr, k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
        k_scales_ptr, v_scales_ptr, k_scale_stride_block, k_scale_stride_slot, v_scale_stride_block, v_scale_stride_slot,
        scale, softcap, slopes, tree_rows,
        HEAD_SIZE, HEAD_SIZE_V, DIM, DIM_V, BLOCK_SIZE, WIDE_SLOTS, TILE_KV, MASKED=False,
    )  # fmt: skip
    acc, m, l, unit = attend_tiles(  # noqa: E741
        acc, m, l, unit, q, row_first, row_stop, row_positions[:, None],
        bulk_stop, stop, seen_from, seen_to, context_len,
        k_ptr, v_ptr, table_ptr, k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
        k_scales_ptr, v_scales_ptr, k_scale_stride_block, k_scale_stride_slot, v_scale_stride_block, v_scale_stride_slot,
        scale, softcap, slopes, tree_rows,
        HEAD_SIZE, HEAD_SIZE_V, DIM, DIM_V, BLOCK_SIZE, WIDE_SLOTS, TILE_KV, MASKED=True,
    )  # fmt: skip

    out, lse2 = finish(acc, m, l, unit, v_scale)
    if query_positions_ptr is not None:
        lse2 = tl.where(blind, float("-inf"), lse2)
        out = tl.where(blind[:, None], 0.0, out)
    out_offsets = tokens * out_stride_token + heads * out_stride_head + split * out_stride_split
    out_mask = row_mask[:, None] & (dims_v[None, :] < HEAD_SIZE_V)
    out_rows = out_ptr + out_offsets[:, None] + dims_v[None, :]
    tl.store(out_rows, out.to(out_ptr.dtype.element_ty), mask=out_mask)
    lse_offsets = tokens * lse_stride_token + heads * lse_stride_head
    if PARTIAL:
        tl.store(lse_ptr + lse_offsets + split, lse2, mask=row_mask)
    elif lse_ptr is not None:
        tl.store(lse_ptr + lse_offsets, lse2 * LN_2, mask=row_mask)


@triton.jit(
    do_not_specialize=["num_seqs", "num_splits", "lse_stride_token", "lse_stride_head"],
    do_not_specialize_on_alignment=["lse_ptr", "query_start_loc_ptr"],
)
def _merge_splits_kernel(
    out_ptr, lse_ptr, partial_ptr, partial_lse2_ptr, query_start_loc_ptr, num_seqs, num_splits,
    out_stride_token, out_stride_head, lse_stride_token, lse_stride_head,
    HEAD_SIZE_V: tl.constexpr, DIM_V: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """out = sum_p w_p out_p, w_p = exp2(lse2_p - lse2), lse2 = log2 sum_p exp2(lse2_p). Grid (num_tokens, num_q_heads).

    SPLITS at a time, so that the order of the sums depends on no other sequence: more splits that saw no token, as a
    longer sequence in the batch brings, add nothing.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    if query_start_loc_ptr is not None:
        first_token = tl.load(query_start_loc_ptr)
        if (token < first_token) | (token >= tl.load(query_start_loc_ptr + num_seqs)):
            return  # nobody's token: no split wrote it
    dims_v = tl.arange(0, DIM_V)
    first_split = (token * tl.num_programs(1) + head) * num_splits
    partial_ptr += first_split * HEAD_SIZE_V
    partial_lse2_ptr += first_split
    m = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    out = tl.zeros([DIM_V], tl.float32)
    for first in range(0, num_splits, SPLITS):
        splits = first + tl.arange(0, SPLITS)
        lse2 = tl.load(partial_lse2_ptr + splits, mask=splits < num_splits, other=float("-inf"))
        # a split that saw no token is not read: its memory may be unset
        mask = (lse2 != float("-inf"))[:, None] & (dims_v[None, :] < HEAD_SIZE_V)
        offsets = splits[:, None] * HEAD_SIZE_V + dims_v[None, :]
        partial = tl.load(partial_ptr + offsets, mask=mask, other=0.0)
        m_new = tl.maximum(m, tl.max(lse2, axis=0))
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        decay = tl.exp2(m - pivot)
        weights = tl.exp2(lse2 - pivot)
        total = total * decay + tl.sum(weights, axis=0)
        out = out * decay + tl.sum(partial * weights[:, None], axis=0)
        m = m_new
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    out_offsets = token * out_stride_token + head * out_stride_head + dims_v
    result = (out / divisor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offsets, result, mask=dims_v < HEAD_SIZE_V)
    if lse_ptr is not None:
        lse = tl.where(empty, float("-inf"), (m + tl.log2(divisor)) * LN_2)
        lse_offsets = token * lse_stride_token + head * lse_stride_head + tl.arange(0, 1)
        tl.store(lse_ptr + lse_offsets, lse)


@dataclass(frozen=True)
class DecodePlan:
    """Launch choices of one decode call."""

    tile_kv: int  # tokens a program loads at once
    num_splits: int  # programs that share one sequence's KV
    num_warps: int
    num_stages: int  # depth of the load pipeline
    split_len: int | None = None  # tokens of a split, whole tiles; None: KV is divided evenly


def rows_of_program(num_queries: int, group: int, head_size: int) -> int:
    """Rows of one program's matrix product: all queries * group of a sequence, up to what its registers hold."""
    return min(padded(num_queries * group), 64 if head_size <= 128 else 32)


def plan_paged_decode(
    *,
    num_seqs: int,
    num_kv_heads: int,
    group: int,
    head_size: int,
    max_seq_len: int,
    num_sms: int,
    num_queries: int = 1,
    quantised: bool = False,
    batch_invariant: bool = False,
) -> DecodePlan:
    """Launch choices from shapes and the longest possible sequence, never from actual lengths.

        rows of a program           head size <= 64     <= 128      > 128
        one query, <= 16            1 warp, 64 tokens   1, 32       4, 32 (16 quantised)
        else rows * size <= 4096    4, 32               4, 32       4, 32 (16 quantised)
        else                        8, 32               8, 32       8, 32 (16 quantised)

    One warp per program keeps a whole row of scores in one warp: compiled for sm_90 it needs 2 barriers per tile
    against 6 to 9 with four warps, where the row's maximum and sum cross warps. More than 16 rows, a place of its own
    for each row (several queries) or larger heads would spill a single warp's registers.

    Splits: as many as fill the GPU (8 small programs fit on a multiprocessor, and cover its memory latency), but at
    least 4 tiles each, below which the merge costs more than the parallelism brings. One split writes the result
    itself. With `batch_invariant` the length of a split is fixed instead of their number, so that where a sequence is
    cut, and with it the order of its sums, depends on nothing else in the batch.
    """
    rows = rows_of_program(num_queries, group, head_size)
    # tiles of bytes are small: a third one in flight
    num_stages = 3 if head_size <= 64 or (quantised and head_size <= 128) else 2
    if num_queries == 1 and rows == 16 and head_size <= 128:
        tile_kv, num_warps = (64 if head_size <= 64 else 32), 1
    else:
        tile_kv = 16 if quantised and head_size > 128 else 32
        num_warps = 4 if rows * head_size <= 4096 else 8
    if batch_invariant:
        num_splits = max(1, -(-max_seq_len // INVARIANT_SPLIT))
        return DecodePlan(tile_kv, num_splits, num_warps, num_stages, INVARIANT_SPLIT)
    wanted = -(-8 * num_sms // max(1, num_seqs * num_kv_heads))
    num_splits = max(1, min(wanted, max_seq_len // (4 * tile_kv), 128))
    return DecodePlan(tile_kv, num_splits, num_warps, num_stages)


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_seq_len: int,
    scale: float,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int = 1,
    query_positions: torch.Tensor | None = None,
    query_firsts: torch.Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    attention_chunk: int | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    prefix_lm_ranges: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    kv_start: int | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    plan: DecodePlan | None = None,
) -> torch.Tensor:
    """Attend a few new tokens per sequence over its paged K and V (whose slots include the new tokens').

    query_start_loc  [num_seqs + 1] int32  first new token of each sequence in q; None: one each, in order
    max_query_len    upper bound of the query lengths, at most 16
    query_positions  [num_tokens] int32    where each new token is in its sequence, negative: it sees nothing. None: they
                     are its last tokens
    query_firsts     [num_tokens] int32    the first key each new token sees, with query_positions and instead of window,
                     attention_chunk and prefix_lm_ranges, which are of one sequence
    tree_mask        [num_tokens, max_query_len] bool  whether a new token sees the j-th new token of its sequence, on top
                     of the other rules; all see the context
    max_seq_len      upper bound of seq_lens; only the plan depends on it
    kv_start         keys before this position are left out, by all sequences
    out              [num_tokens, num_q_heads, head_size_v], dtype of q or fp32, allocated when None
    lse              [num_tokens, num_q_heads] fp32, natural log, written when given
    batch_invariant  see `plan_paged_decode`

    The other arguments are those of `octavo.kernels.paged_attention`. Tokens of no sequence are not written.
    Raises ValueError naming the argument, what was expected and what came.
    """
    num_tokens, num_q_heads, head_size = q.shape
    _, _, num_kv_heads, head_size_v = v_cache.shape
    num_seqs = seq_lens.shape[0]
    if out is None:
        out = q.new_empty(num_tokens, num_q_heads, head_size_v)
    check_attention(
        q, k_cache, v_cache, seq_lens, block_tables, out, lse, window, attention_chunk, softcap,
        alibi_slopes, sinks, k_scale, v_scale, prefix_lm_ranges,
    )  # fmt: skip
    check_queries(q, seq_lens, query_start_loc, max_query_len, query_positions, tree_mask)
    if num_seqs == 0 or num_tokens == 0:
        return out
    group = num_q_heads // num_kv_heads
    rows = rows_of_program(max_query_len, group, max(head_size, head_size_v))
    row_tiles = triton.cdiv(max_query_len * group, rows)
    # tiles start at multiples of their size, which divides 64, so that the first may begin before kv_start
    longest = max(1, max_seq_len - (kv_start or 0) // 64 * 64)
    if plan is None:
        plan = plan_paged_decode(
            num_seqs=num_seqs,
            num_kv_heads=num_kv_heads * row_tiles,
            group=group,
            head_size=max(head_size, head_size_v),
            max_seq_len=longest,
            num_sms=multiprocessors(q.device),
            num_queries=max_query_len,
            quantised=k_cache.dtype != q.dtype,
            batch_invariant=batch_invariant,
        )
    splits = plan.num_splits
    if plan.split_len is not None and (
        plan.split_len % plan.tile_kv or splits * plan.split_len < longest
    ):
        raise ValueError(
            f"plan: expected splits of whole tiles of {plan.tile_kv} that cover {longest} tokens, got {splits} of "
            f"{plan.split_len}"
        )
    if splits > 1:
        shape = (num_tokens, num_q_heads, splits)
        partial = torch.empty(*shape, head_size_v, dtype=torch.float32, device=q.device)
        partial_lse2 = torch.empty(shape, dtype=torch.float32, device=q.device)
    else:
        partial, partial_lse2 = out.unsqueeze(2), lse
    _paged_decode_kernel[(num_seqs, num_kv_heads * row_tiles, splits)](
        out_ptr=partial,
        lse_ptr=partial_lse2,
        **paged_operands(q, k_cache, v_cache, block_tables, k_scale, v_scale, prefix_lm_ranges),
        alibi_slopes_ptr=alibi_slopes,
        sinks_ptr=sinks,
        tree_mask_ptr=None if tree_mask is None else tree_mask.view(torch.uint8),
        seq_lens_ptr=seq_lens,
        query_start_loc_ptr=query_start_loc,
        query_positions_ptr=query_positions,
        query_firsts_ptr=query_firsts,
        scale=scale,
        softcap=softcap,
        window=window,
        attention_chunk=attention_chunk,
        kv_start=kv_start,
        split_len=plan.split_len,
        out_stride_token=partial.stride(0),
        out_stride_head=partial.stride(1),
        out_stride_split=partial.stride(2),
        lse_stride_token=0 if partial_lse2 is None else partial_lse2.stride(0),
        lse_stride_head=0 if partial_lse2 is None else partial_lse2.stride(1),
        tree_stride_token=0 if tree_mask is None else tree_mask.stride(0),
        ROWS=rows,
        ROW_TILES=row_tiles,
        TILE_KV=plan.tile_kv,
        CAUSAL=causal and query_start_loc is not None,  # one token is the last: it sees all
        PARTIAL=splits > 1,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        enable_fp_fusion=True,
    )
    if splits > 1:
        _merge_splits_kernel[(num_tokens, num_q_heads)](
            out_ptr=out,
            lse_ptr=lse,
            partial_ptr=partial,
            partial_lse2_ptr=partial_lse2,
            query_start_loc_ptr=query_start_loc,
            num_seqs=num_seqs,
            num_splits=splits,
            out_stride_token=out.stride(0),
            out_stride_head=out.stride(1),
            lse_stride_token=0 if lse is None else lse.stride(0),
            lse_stride_head=0 if lse is None else lse.stride(1),
            HEAD_SIZE_V=head_size_v,
            DIM_V=padded(head_size_v),
            SPLITS=16,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out
