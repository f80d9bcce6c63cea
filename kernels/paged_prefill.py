"""Attention of chunks of new tokens over context and chunk, both read from the paged cache.

    out[t, h] = sum_j softmax_j(score(q[t, h], k[j])) * v[j]
    score     = softcap(scale * q.k) + slope_h * (j - position of t)
    j visible to t: j < seq_len, and j <= position of t (causal), and j > position of t - window (window)

Sequences have any query length, one after the other in `q` (`query_start_loc`). Program (i, g) owns TILE_Q consecutive
tokens of one sequence for KV head g: TILE_Q * group rows of one matrix product, so any ratio of query to KV heads fills
the rows. Which sequence a program works for is found by binary search in `query_start_loc`; the grid is the upper bound
num_tokens // TILE_Q + num_seqs, so that no length has to be known on the host. KV tiles that every row of the program
sees whole run unmasked; only those on the diagonal, the window's edge or the sequence's end are masked, and tiles out
of every row's sight are not visited.

Bytes read:  per program visible tokens * (head_size + head_size_v) * cache_element_size; all programs of a chunk re-read its context
FLOPs:       2 * (visible query-key pairs) * num_q_heads * (head_size + head_size_v)
Reference:   `reference.paged_attention`
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._checks import check_attention, check_query_starts, has_warpgroup_mma, warp_size
from ._online_softmax import (
    LN_2,
    attend_tiles,
    finish,
    load_scale,
    paged_operands,
    scaled_queries,
    scales_of_head,
    start_rows,
    visible_interval,
)


@triton.jit
def _find_sequence(query_start_loc_ptr, num_seqs, tile, TILE_Q: tl.constexpr):
    """The last sequence whose first tile, query_start_loc[i] // TILE_Q + i, is at or before `tile`."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc_ptr + middle) // TILE_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


# What varies from step to step chooses no variant: a compilation in the middle of serving takes seconds.
@triton.jit(
    do_not_specialize=[
        "num_seqs", "kv_start", "num_ranges", "lse_stride_token", "lse_stride_head", "table_stride_seq",
    ],
    do_not_specialize_on_alignment=[
        "lse_ptr", "k_scale_ptr", "v_scale_ptr", "ranges_ptr", "block_tables_ptr", "seq_lens_ptr",
        "query_start_loc_ptr",
    ],
)  # fmt: skip
def _paged_prefill_kernel(
    out_ptr, lse_ptr,
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, alibi_slopes_ptr, sinks_ptr, ranges_ptr,
    block_tables_ptr, seq_lens_ptr, query_start_loc_ptr, num_seqs,
    scale, softcap, window, attention_chunk, kv_start, num_ranges,
    out_stride_token, out_stride_head, lse_stride_token, lse_stride_head, q_stride_token, q_stride_head,
    k_stride_block, k_stride_slot, k_stride_head, v_stride_block, v_stride_slot, v_stride_head,
    k_scale_stride_block, k_scale_stride_slot, k_scale_stride_head,
    v_scale_stride_block, v_scale_stride_slot, v_scale_stride_head, table_stride_seq,
    HEAD_SIZE: tl.constexpr, HEAD_SIZE_V: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WIDE_SLOTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE_Q: tl.constexpr, TILE_KV: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Grid (num_tokens // TILE_Q + num_seqs, num_kv_heads)."""
    tile = tl.load(query_start_loc_ptr) // TILE_Q + tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    seq = _find_sequence(query_start_loc_ptr, num_seqs, tile, TILE_Q)
    query_start = tl.load(query_start_loc_ptr + seq)
    query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + seq)
    first_query = (tile - (query_start // TILE_Q + seq)) * TILE_Q
    if first_query >= query_len:
        return

    # row r holds query token first_query + r // GROUP for head kv_head * GROUP + r % GROUP
    rows = tl.arange(0, ROWS)
    queries = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    row_mask = (rows < TILE_Q * GROUP) & (queries < query_len)
    context_len = seq_len - query_len
    row_positions = context_len + queries
    tokens = (query_start + queries).to(tl.int64)
    dims = tl.arange(0, DIM)
    dims_v = tl.arange(0, DIM_V)
    q_offsets = tokens[:, None] * q_stride_token + heads[:, None] * q_stride_head + dims[None, :]
    q = tl.load(
        q_ptr + q_offsets, mask=row_mask[:, None] & (dims[None, :] < HEAD_SIZE), other=0.0
    )  # [ROWS, DIM]
    q, factor = scaled_queries(q, k_ptr)
    scale *= (
        load_scale(k_scale_ptr, kv_head, k_scale_stride_block, k_scale_stride_head, k_ptr) * factor
    )
    v_scale = load_scale(v_scale_ptr, kv_head, v_scale_stride_block, v_scale_stride_head, v_ptr)
    slopes = None
    if alibi_slopes_ptr is not None:
        slopes = tl.load(alibi_slopes_ptr + heads, mask=row_mask, other=0.0)[:, None]

    # tiles from `seen_from` to `seen_to` are seen by some row, those of the bulk by every row
    if ranges_ptr is not None:
        ranges_ptr += tl.cast(seq, tl.int64) * num_ranges * 2
    first_position = context_len + first_query
    last_position = tl.minimum(first_position + TILE_Q, seq_len) - 1
    seen_from, seen_by_all = visible_interval(
        first_position, seq_len, window, attention_chunk, kv_start, ranges_ptr, num_ranges, CAUSAL
    )
    all_from, seen_to = visible_interval(
        last_position, seq_len, window, attention_chunk, kv_start, ranges_ptr, num_ranges, CAUSAL
    )
    firsts, stops = visible_interval(
        row_positions, seq_len, window, attention_chunk, kv_start, ranges_ptr, num_ranges, CAUSAL
    )
    row_first = None
    if (window is not None) | (attention_chunk is not None):
        row_first = firsts[:, None]
    row_stop = None
    if CAUSAL:
        row_stop = stops[:, None]
    start = 0
    bulk_start = 0
    if (window is not None) | (attention_chunk is not None) | (kv_start is not None):
        start = seen_from // TILE_KV * TILE_KV
        bulk_start = tl.cdiv(all_from, TILE_KV) * TILE_KV
    bulk_stop = tl.maximum(bulk_start, seen_by_all // TILE_KV * TILE_KV)

    has_keys = None
    if sinks_ptr is not None:
        lows, highs = visible_interval(
            row_positions, seq_len, window, attention_chunk, None, ranges_ptr, num_ranges, CAUSAL
        )
        has_keys = lows < highs  # be they those before kv_start
    k_scales_ptr = scales_of_head(k_scale_ptr, kv_head, k_scale_stride_block, k_scale_stride_head)
    v_scales_ptr = scales_of_head(v_scale_ptr, kv_head, v_scale_stride_block, v_scale_stride_head)
    acc, m, l, unit = start_rows(  # noqa: E741
        q, v_scales_ptr, sinks_ptr, heads, row_mask, has_keys, ROWS, DIM_V
    )
    k_ptr += kv_head * k_stride_head
    v_ptr += kv_head * v_stride_head
    table_ptr = block_tables_ptr + tl.cast(seq, tl.int64) * table_stride_seq
    if (window is not None) | (attention_chunk is not None) | (kv_start is not None):
        acc, m, l, unit = attend_tiles(  # noqa: E741
            acc, m, l, unit, q, row_first, row_stop, row_positions[:, None],
            start, tl.minimum(bulk_start, seen_to), seen_from, seen_to, context_len,
            k_ptr, v_ptr, table_ptr, k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
            k_scales_ptr, v_scales_ptr, k_scale_stride_block, k_scale_stride_slot, v_scale_stride_block, v_scale_stride_slot,
            scale, softcap, slopes, None, HEAD_SIZE, HEAD_SIZE_V, DIM, DIM_V, BLOCK_SIZE, WIDE_SLOTS, TILE_KV, MASKED=True,
        )  # fmt: skip
    acc, m, l, unit = attend_tiles(  # noqa: E741
        acc, m, l, unit, q, row_first, row_stop, row_positions[:, None],
        bulk_start, bulk_stop, seen_from, seen_to, context_len,
        k_ptr, v_ptr, table_ptr, k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
        k_scales_ptr, v_scales_ptr, k_scale_stride_block, k_scale_stride_slot, v_scale_stride_block, v_scale_stride_slot,
        scale, softcap, slopes, None, HEAD_SIZE, HEAD_SIZE_V, DIM, DIM_V, BLOCK_SIZE, WIDE_SLOTS, TILE_KV, MASKED=False,
    )  # fmt: skip
    acc, m, l, unit = attend_tiles(  # noqa: E741
        acc, m, l, unit, q, row_first, row_stop, row_positions[:, None],
        bulk_stop, seen_to, seen_from, seen_to, context_len,
        k_ptr, v_ptr, table_ptr, k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
        k_scales_ptr, v_scales_ptr, k_scale_stride_block, k_scale_stride_slot, v_scale_stride_block, v_scale_stride_slot,
        scale, softcap, slopes, None, HEAD_SIZE, HEAD_SIZE_V, DIM, DIM_V, BLOCK_SIZE, WIDE_SLOTS, TILE_KV, MASKED=True,
    )  # fmt: skip

    out, lse2 = finish(acc, m, l, unit, v_scale)
    out_offsets = (
        tokens[:, None] * out_stride_token + heads[:, None] * out_stride_head + dims_v[None, :]
    )
    out_mask = row_mask[:, None] & (dims_v[None, :] < HEAD_SIZE_V)
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=out_mask)
    if lse_ptr is not None:
        tl.store(
            lse_ptr + tokens * lse_stride_token + heads * lse_stride_head,
            lse2 * LN_2,
            mask=row_mask,
        )


@dataclass(frozen=True)
class PrefillPlan:
    """Launch choices of one prefill call."""

    rows: int  # query rows of one program (tokens times group), a power of two
    tile_kv: int  # tokens of K and V a program loads at once
    num_warps: int
    num_stages: int  # depth of the load pipeline


def plan_paged_prefill(
    *,
    group: int,
    head_size: int,
    element_size: int,
    warpgroup_mma: bool,
    quantised: bool = False,
    warp_size: int = 32,
) -> PrefillPlan:
    """Launch choices from shapes and the GPU alone: the largest tiles that spill nothing, all options on or off.

        GPU                                 rows of head size <= 128, > 128     tile_kv
        warpgroup products (sm_90)          128, 128 (64 quantised)             64, 32
        other 32-lane warps (sm_80)         128, 64                             32, 32
        64-lane wavefronts (gfx942)         128, 64                             32 to head size 64, else 16

    Warpgroup products read K and V from shared memory and need 64 rows a warpgroup; others hold them in registers,
    which 64 tokens at a time overflow. On gfx942 the load pipeline is in registers too. Tiles of bytes are small: where
    registers are short a third one in flight takes fewer than two, for block ids then wait in shared memory as well.
    """
    small = head_size <= 128
    rows = 128 if small or (warpgroup_mma and not quantised) else 64
    tile_kv = 64 if warpgroup_mma and small and element_size <= 2 else 32
    if warp_size == 64 and head_size > 64:
        tile_kv = 16
    num_stages = 2
    if quantised and not (warpgroup_mma or warp_size == 64):
        num_stages = 3 if small else 1
    return PrefillPlan(max(rows, triton.next_power_of_2(group)), tile_kv, 8, num_stages)


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    attention_chunk: int | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    prefix_lm_ranges: torch.Tensor | None = None,
    kv_start: int | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    plan: PrefillPlan | None = None,
) -> torch.Tensor:
    """Attend chunks of new tokens over their paged K and V (whose slots include the new tokens').

    query_start_loc  [num_seqs + 1] int32  first token of each sequence in q; query lengths may be 0. Tokens before
                     query_start_loc[0] and past query_start_loc[-1] belong to nobody: they are not read or written
    max_query_len, max_seq_len   upper bounds
    kv_start         keys before this position are left out, by all sequences
    out              [num_tokens, num_q_heads, head_size_v], dtype of q or fp32, allocated when None
    lse              [num_tokens, num_q_heads] fp32, natural log, written when given

    The other arguments are those of `octavo.kernels.paged_attention`. Rows that see no key get out 0 and lse -inf.
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
    check_query_starts(q, seq_lens, query_start_loc)
    if num_tokens == 0 or num_seqs == 0:
        return out
    group = num_q_heads // num_kv_heads
    if plan is None:
        plan = plan_paged_prefill(
            group=group,
            head_size=max(head_size, head_size_v),
            element_size=q.element_size(),
            warpgroup_mma=has_warpgroup_mma(q.device),
            quantised=k_cache.dtype != q.dtype,
            warp_size=warp_size(q.device),
        )
    tile_q = plan.rows // group
    _paged_prefill_kernel[(num_tokens // tile_q + num_seqs, num_kv_heads)](
        out_ptr=out,
        lse_ptr=lse,
        **paged_operands(q, k_cache, v_cache, block_tables, k_scale, v_scale, prefix_lm_ranges),
        alibi_slopes_ptr=alibi_slopes,
        sinks_ptr=sinks,
        seq_lens_ptr=seq_lens,
        query_start_loc_ptr=query_start_loc,
        num_seqs=num_seqs,
        scale=scale,
        softcap=softcap,
        window=window,
        attention_chunk=attention_chunk,
        kv_start=kv_start,
        out_stride_token=out.stride(0),
        out_stride_head=out.stride(1),
        lse_stride_token=0 if lse is None else lse.stride(0),
        lse_stride_head=0 if lse is None else lse.stride(1),
        ROWS=plan.rows,
        TILE_Q=tile_q,
        TILE_KV=plan.tile_kv,
        CAUSAL=causal,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        enable_fp_fusion=True,
    )
    return out
