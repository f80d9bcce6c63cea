"""Attention of a few new tokens per sequence over its paged K and V, with the KV split over programs.

    out[t, h] = sum_j softmax_j(score(q[t, h], k[j])) * v[j],   j over the tokens visible to t
    score     = softcap(scale * q.k) + slope_h * (j - position of t)

Program (s, g, p) owns split p of sequence s for KV head g, all its new tokens (one in plain decoding, up to 16 when
drafts are verified) and all query heads that share the KV head: they are the rows of one matrix product, so K and V are
read once per KV head. A tile holds TILE_KV tokens gathered from as many blocks as it takes; only tiles at the window's
start and among the new tokens at the sequence's end are masked. With one split the program writes the result itself,
else it writes a normalised partial result and its lse, and `_merge_splits_kernel` joins them.

Bytes read:  sum_s min(seq_len_s, window) * num_kv_heads * (head_size + head_size_v) * element_size   (K and V, once)
Bytes moved by the merge: 2 * num_tokens * num_q_heads * num_splits * (head_size_v + 1) * 4
FLOPs:       2 * sum_s query_len_s * min(seq_len_s, window) * num_q_heads * (head_size + head_size_v)
Reference:   `reference.paged_attention`
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._checks import check_attention, check_queries, multiprocessors
from ._online_softmax import LN_2, LOG2_E, attend_tiles, finish, padded, paged_operands


@triton.jit
def _paged_decode_kernel(
    out_ptr, lse_ptr,
    q_ptr, k_ptr, v_ptr, alibi_slopes_ptr, sinks_ptr, tree_mask_ptr,
    block_tables_ptr, seq_lens_ptr, query_start_loc_ptr,
    scale, softcap, window,
    out_stride_token, out_stride_head, out_stride_split, lse_stride_token, lse_stride_head,
    q_stride_token, q_stride_head,
    k_stride_block, k_stride_slot, k_stride_head, v_stride_block, v_stride_slot, v_stride_head,
    table_stride_seq, tree_stride_token,
    HEAD_SIZE: tl.constexpr, HEAD_SIZE_V: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE_KV: tl.constexpr,
    CAUSAL: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Grid (num_seqs, num_kv_heads, num_splits). PARTIAL: write lse2 per split instead of the final lse.

    Without `query_start_loc_ptr` each sequence has one new token.
    """
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + seq)

    # row r holds new token r // GROUP for head kv_head * GROUP + r % GROUP
    rows = tl.arange(0, ROWS)
    heads = kv_head * GROUP + rows % GROUP
    if query_start_loc_ptr is not None:
        query_start = tl.load(query_start_loc_ptr + seq)
        query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start
        tokens = query_start.to(tl.int64) + rows // GROUP
        row_mask = rows < query_len * GROUP
        row_positions = seq_len - query_len + rows // GROUP
    else:
        query_len = 1
        tokens = seq + tl.zeros([ROWS], tl.int64)
        row_mask = rows < GROUP
        row_positions = seq_len - 1 + tl.zeros([ROWS], tl.int32)
    context_len = seq_len - query_len

    # KV range of this split: [start, stop), whole tiles counted from the tile of the first token that any row sees
    if window is not None:
        origin = tl.maximum(context_len - window + 1, 0) // TILE_KV * TILE_KV
    else:
        origin = 0
    tiles = tl.cdiv(seq_len - origin, TILE_KV)
    split_len = tl.cdiv(tiles, tl.num_programs(2)) * TILE_KV
    start = origin + split * split_len
    stop = tl.minimum(start + split_len, seq_len)

    dims = tl.arange(0, DIM)
    dims_v = tl.arange(0, DIM_V)
    q_offsets = tokens[:, None] * q_stride_token + heads[:, None] * q_stride_head + dims[None, :]
    q_mask = row_mask[:, None] & (dims[None, :] < HEAD_SIZE)
    q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)  # [ROWS, DIM]
    slopes = None
    if alibi_slopes_ptr is not None:
        slopes = tl.load(alibi_slopes_ptr + heads, mask=row_mask, other=0.0)[:, None]
    tree_rows = None
    if tree_mask_ptr is not None:
        # rows of no token look at the first token's line
        tree_rows = (
            tree_mask_ptr + tl.where(row_mask, tokens, query_start.to(tl.int64)) * tree_stride_token
        )

    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    acc = tl.zeros([ROWS, DIM_V], tl.float32)
    if sinks_ptr is not None:
        # the sink is one more key with no value; it enters once, in the first split, for rows that have keys
        has_keys = (split == 0) & (seq_len > 0) & (row_positions >= 0)
        sink = tl.load(sinks_ptr + heads, mask=row_mask, other=0.0).to(tl.float32) * LOG2_E
        m = tl.where(has_keys, sink, float("-inf"))
        l = tl.where(has_keys, 1.0, 0.0)  # noqa: E741

    # tiles [bulk_start, bulk_stop) are whole and seen by every row
    k_ptr += kv_head * k_stride_head
    v_ptr += kv_head * v_stride_head
    table_ptr = block_tables_ptr + seq * table_stride_seq
    bulk_start = start
    if window is not None:
        seen_from = tl.maximum(seq_len - window, 0)  # by the last row
        bulk_start = tl.maximum(start, tl.cdiv(seen_from, TILE_KV) * TILE_KV)
        acc, m, l = attend_tiles(  # noqa: E741
            acc, m, l, q, row_positions, start, tl.minimum(bulk_start, stop), seq_len, context_len,
            k_ptr, v_ptr, table_ptr, k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
            scale, softcap, slopes, window, tree_rows,
            HEAD_SIZE, HEAD_SIZE_V, DIM, DIM_V, BLOCK_SIZE, TILE_KV, CAUSAL, MASKED=True,
        )  # fmt: skip
    seen_by_all = stop
    if tree_mask_ptr is not None:
        seen_by_all = tl.minimum(stop, tl.maximum(context_len, 0))
    elif CAUSAL:
        seen_by_all = tl.minimum(stop, tl.maximum(context_len + 1, 0))  # by the first row
    bulk_stop = tl.maximum(bulk_start, seen_by_all // TILE_KV * TILE_KV)
    acc, m, l = attend_tiles(  # noqa: E741
        acc, m, l, q, row_positions, bulk_start, bulk_stop, seq_len, context_len,
        k_ptr, v_ptr, table_ptr, k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
        scale, softcap, slopes, window, tree_rows,
        HEAD_SIZE, HEAD_SIZE_V, DIM, DIM_V, BLOCK_SIZE, TILE_KV, CAUSAL, MASKED=False,
    )  # fmt: skip
    acc, m, l = attend_tiles(  # noqa: E741
        acc, m, l, q, row_positions, bulk_stop, stop, seq_len, context_len,
        k_ptr, v_ptr, table_ptr, k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
        scale, softcap, slopes, window, tree_rows,
        HEAD_SIZE, HEAD_SIZE_V, DIM, DIM_V, BLOCK_SIZE, TILE_KV, CAUSAL, MASKED=True,
    )  # fmt: skip

    out, lse2 = finish(acc, m, l)
    out_offsets = tokens * out_stride_token + heads * out_stride_head + split * out_stride_split
    out_mask = row_mask[:, None] & (dims_v[None, :] < HEAD_SIZE_V)
    out_rows = out_ptr + out_offsets[:, None] + dims_v[None, :]
    tl.store(out_rows, out.to(out_ptr.dtype.element_ty), mask=out_mask)
    lse_offsets = tokens * lse_stride_token + heads * lse_stride_head
    if PARTIAL:
        tl.store(lse_ptr + lse_offsets + split, lse2, mask=row_mask)
    elif lse_ptr is not None:
        tl.store(lse_ptr + lse_offsets, lse2 * LN_2, mask=row_mask)


@triton.jit
def _merge_splits_kernel(
    out_ptr, lse_ptr, partial_ptr, partial_lse2_ptr, query_start_loc_ptr, num_seqs, num_splits,
    out_stride_token, out_stride_head, lse_stride_token, lse_stride_head,
    HEAD_SIZE_V: tl.constexpr, DIM_V: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """out = sum_p w_p out_p, w_p = exp2(lse2_p - lse2), lse2 = log2 sum_p exp2(lse2_p). Grid (num_tokens, num_q_heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    if query_start_loc_ptr is not None:
        first_token = tl.load(query_start_loc_ptr)
        if (token < first_token) | (token >= tl.load(query_start_loc_ptr + num_seqs)):
            return  # nobody's token: no split wrote it
    first_split = (token * tl.num_programs(1) + head) * num_splits
    splits = tl.arange(0, SPLITS)
    dims_v = tl.arange(0, DIM_V)
    lse2_ptr = partial_lse2_ptr + first_split
    lse2 = tl.load(lse2_ptr + splits, mask=splits < num_splits, other=float("-inf"))
    largest = tl.max(lse2, axis=0)
    pivot = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(lse2 - pivot)
    total = tl.sum(weights, axis=0)
    # a split that saw no token has weight 0 and is not read
    mask = (lse2 != float("-inf"))[:, None] & (dims_v[None, :] < HEAD_SIZE_V)
    partial_offsets = (first_split + splits)[:, None] * HEAD_SIZE_V + dims_v[None, :]
    partial = tl.load(partial_ptr + partial_offsets, mask=mask, other=0.0)
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    out = tl.sum(partial * weights[:, None], axis=0) / divisor
    out_offsets = token * out_stride_token + head * out_stride_head + dims_v
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=dims_v < HEAD_SIZE_V)
    if lse_ptr is not None:
        lse = tl.where(empty, float("-inf"), (pivot + tl.log2(divisor)) * LN_2)
        tl.store(lse_ptr + token * lse_stride_token + head * lse_stride_head, lse)


@dataclass(frozen=True)
class DecodePlan:
    """Launch choices of one decode call."""

    tile_kv: int  # tokens a program loads at once
    num_splits: int  # programs that share one sequence's KV
    num_warps: int
    num_stages: int  # depth of the load pipeline


def plan_paged_decode(
    *,
    num_seqs: int,
    num_kv_heads: int,
    group: int,
    head_size: int,
    max_seq_len: int,
    num_sms: int,
    num_queries: int = 1,
) -> DecodePlan:
    """Launch choices from shapes and the longest possible sequence, never from actual lengths.

    One warp per program keeps a whole row of scores in one warp: compiled for sm_90 it needs 2 barriers per tile
    against 6 to 9 with four warps, where the row's maximum and sum cross warps. Rows above 16 or heads above 128
    would spill a single warp's registers, so they take four.
    """
    one_warp = num_queries * group <= 16 and head_size <= 128
    tile_kv = 64 if head_size <= 64 and one_warp else 32
    # enough programs to cover the memory latency (8 small programs fit on an SM), but at least 4 tiles a split,
    # below which the merge costs more than the parallelism brings
    wanted = -(-8 * num_sms // max(1, num_seqs * num_kv_heads))
    num_splits = max(1, min(wanted, max_seq_len // (4 * tile_kv), 128))
    num_stages = 3 if head_size <= 64 else 2
    return DecodePlan(tile_kv, num_splits, num_warps=1 if one_warp else 4, num_stages=num_stages)


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
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    plan: DecodePlan | None = None,
) -> torch.Tensor:
    """Attend a few new tokens per sequence over its paged K and V (whose slots include the new tokens').

    q                [num_tokens, num_q_heads, head_size]              fp32 | fp16 | bf16, last axis contiguous
    k_cache          [num_blocks, block_size, num_kv_heads, head_size]    dtype of q, any strides, last axis contiguous
    v_cache          [num_blocks, block_size, num_kv_heads, head_size_v]
    seq_lens         [num_seqs] int32         tokens, the new ones included; 0 gives out 0 and lse -inf
    block_tables     [num_seqs, width] int32  entries past ceil(seq_len / block_size) are never read
    max_seq_len      upper bound of seq_lens; only the plan depends on it
    query_start_loc  [num_seqs + 1] int32     first new token of each sequence in q; None: one each, in order
    max_query_len    upper bound of the query lengths, at most 16
    causal           a new token sees those up to itself; False: all of its sequence
    scale            multiplies q.k; window counts visible tokens including the query itself; softcap in units of scores
    alibi_slopes     [num_q_heads] fp32; sinks [num_q_heads]: one more logit per head in the denominator
    tree_mask        [num_tokens, max_query_len] bool  whether a new token sees the j-th new token of its sequence, on top
                     of the other rules; all see the context
    out              [num_tokens, num_q_heads, head_size_v], allocated when None; lse [num_tokens, num_q_heads] fp32,
                     natural log. Tokens of no sequence are not written
    Raises ValueError naming the argument, what was expected and what came.
    """
    num_tokens, num_q_heads, head_size = q.shape
    _, _, num_kv_heads, head_size_v = v_cache.shape
    num_seqs = seq_lens.shape[0]
    if out is None:
        out = q.new_empty(num_tokens, num_q_heads, head_size_v)
    check_attention(
        q, k_cache, v_cache, seq_lens, block_tables, alibi_slopes, sinks, out, lse, window, softcap
    )
    check_queries(q, seq_lens, query_start_loc, max_query_len, tree_mask)
    if num_seqs == 0 or num_tokens == 0:
        return out
    group = num_q_heads // num_kv_heads
    if plan is None:
        plan = plan_paged_decode(
            num_seqs=num_seqs,
            num_kv_heads=num_kv_heads,
            group=group,
            head_size=max(head_size, head_size_v),
            max_seq_len=max_seq_len,
            num_sms=multiprocessors(q.device),
            num_queries=max_query_len,
        )
    splits = plan.num_splits
    if splits > 1:
        shape = (num_tokens, num_q_heads, splits)
        partial = torch.empty(*shape, head_size_v, dtype=torch.float32, device=q.device)
        partial_lse2 = torch.empty(shape, dtype=torch.float32, device=q.device)
    else:
        partial, partial_lse2 = out.unsqueeze(2), lse
    _paged_decode_kernel[(num_seqs, num_kv_heads, splits)](
        out_ptr=partial,
        lse_ptr=partial_lse2,
        **paged_operands(q, k_cache, v_cache, block_tables),
        alibi_slopes_ptr=alibi_slopes,
        sinks_ptr=sinks,
        tree_mask_ptr=None if tree_mask is None else tree_mask.view(torch.uint8),
        seq_lens_ptr=seq_lens,
        query_start_loc_ptr=query_start_loc,
        scale=scale,
        softcap=softcap,
        window=window,
        out_stride_token=partial.stride(0),
        out_stride_head=partial.stride(1),
        out_stride_split=partial.stride(2),
        lse_stride_token=0 if partial_lse2 is None else partial_lse2.stride(0),
        lse_stride_head=0 if partial_lse2 is None else partial_lse2.stride(1),
        tree_stride_token=0 if tree_mask is None else tree_mask.stride(0),
        ROWS=padded(max_query_len * group),
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
            SPLITS=triton.next_power_of_2(splits),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out
