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

Bytes read:  per program 2 * visible tokens * head_size * element_size; all programs of a chunk re-read its context
FLOPs:       2 * (visible query-key pairs) * num_q_heads * (head_size + head_size_v)
Reference:   `reference.paged_attention`
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._checks import check_attention, check_query_starts, has_warpgroup_mma
from ._online_softmax import LN_2, LOG2_E, attend_tiles, finish, paged_operands


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


@triton.jit
def _paged_prefill_kernel(
    out_ptr, lse_ptr,
    q_ptr, k_ptr, v_ptr, alibi_slopes_ptr, sinks_ptr,
    block_tables_ptr, seq_lens_ptr, query_start_loc_ptr, num_seqs,
    scale, softcap, window,
    out_stride_token, out_stride_head, lse_stride_token, lse_stride_head, q_stride_token, q_stride_head,
    k_stride_block, k_stride_slot, k_stride_head, v_stride_block, v_stride_slot, v_stride_head, table_stride_seq,
    HEAD_SIZE: tl.constexpr, HEAD_SIZE_V: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE_Q: tl.constexpr, TILE_KV: tl.constexpr,
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
    slopes = None
    if alibi_slopes_ptr is not None:
        slopes = tl.load(alibi_slopes_ptr + heads, mask=row_mask, other=0.0)[:, None]

    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    acc = tl.zeros([ROWS, DIM_V], tl.float32)
    if sinks_ptr is not None:
        # one more key with no value, for rows that see at least one key
        has_keys = row_positions >= 0 if CAUSAL else tl.zeros_like(row_positions) < seq_len
        sink = tl.load(sinks_ptr + heads, mask=row_mask, other=0.0).to(tl.float32) * LOG2_E
        m = tl.where(has_keys, sink, float("-inf"))
        l = tl.where(has_keys, 1.0, 0.0)  # noqa: E741

    # KV tiles [start, stop) are seen by some row, [bulk_start, bulk_stop) by every row and whole
    first_position = context_len + first_query
    last_position = tl.minimum(first_position + TILE_Q, seq_len) - 1
    start = 0
    bulk_start = 0
    stop = seq_len
    seen_by_all = seq_len
    if CAUSAL:
        stop = last_position + 1
        seen_by_all = tl.maximum(first_position + 1, 0)
    if window is not None:
        start = tl.maximum(first_position - window + 1, 0) // TILE_KV * TILE_KV
        bulk_start = tl.cdiv(tl.maximum(last_position - window + 1, 0), TILE_KV) * TILE_KV
    bulk_stop = tl.maximum(bulk_start, seen_by_all // TILE_KV * TILE_KV)

    k_ptr += kv_head * k_stride_head
    v_ptr += kv_head * v_stride_head
    table_ptr = block_tables_ptr + tl.cast(seq, tl.int64) * table_stride_seq
    if window is not None:
        acc, m, l = attend_tiles(  # noqa: E741
            acc, m, l, q, row_positions, start, tl.minimum(bulk_start, stop), seq_len, context_len,
            k_ptr, v_ptr, table_ptr, k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
            scale, softcap, slopes, window, None, HEAD_SIZE, HEAD_SIZE_V, DIM, DIM_V, BLOCK_SIZE, TILE_KV, CAUSAL, MASKED=True,
        )  # fmt: skip
    acc, m, l = attend_tiles(  # noqa: E741
        acc, m, l, q, row_positions, bulk_start, bulk_stop, seq_len, context_len,
        k_ptr, v_ptr, table_ptr, k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
        scale, softcap, slopes, window, None, HEAD_SIZE, HEAD_SIZE_V, DIM, DIM_V, BLOCK_SIZE, TILE_KV, CAUSAL, MASKED=False,
    )  # fmt: skip
    acc, m, l = attend_tiles(  # noqa: E741
        acc, m, l, q, row_positions, bulk_stop, stop, seq_len, context_len,
        k_ptr, v_ptr, table_ptr, k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
        scale, softcap, slopes, window, None, HEAD_SIZE, HEAD_SIZE_V, DIM, DIM_V, BLOCK_SIZE, TILE_KV, CAUSAL, MASKED=True,
    )  # fmt: skip

    out, lse2 = finish(acc, m, l)
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
    *, group: int, head_size: int, element_size: int, warpgroup_mma: bool
) -> PrefillPlan:
    """Launch choices from shapes and the kind of matrix product alone: the largest tiles that spill nothing.

    Warpgroup products (sm_90) read K and V from shared memory and need 64 rows a warpgroup; others hold them in
    registers, which 64 tokens at a time overflow. Compiled for sm_80, sm_90 and gfx942 with all options on or off, head
    sizes 64, 128 and 256: zero spills (64 tokens spilled 48 bytes on sm_80 at 128, 6 registers on gfx942 at 64).
    """
    rows = max(128 if head_size <= 128 or warpgroup_mma else 64, triton.next_power_of_2(group))
    tile_kv = 64 if warpgroup_mma and head_size <= 128 and element_size <= 2 else 32
    return PrefillPlan(rows, tile_kv, num_warps=8, num_stages=2)


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
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    plan: PrefillPlan | None = None,
) -> torch.Tensor:
    """Attend chunks of new tokens over their paged K and V (whose slots include the new tokens').

    q                [num_tokens, num_q_heads, head_size]                  fp32 | fp16 | bf16, last axis contiguous
    k_cache          [num_blocks, block_size, num_kv_heads, head_size]     dtype of q, any strides, last axis contiguous
    v_cache          [num_blocks, block_size, num_kv_heads, head_size_v]
    query_start_loc  [num_seqs + 1] int32     first token of each sequence in q; query lengths may be 0. Tokens before
                     query_start_loc[0] and past query_start_loc[-1] belong to nobody: they are not read or written
    seq_lens         [num_seqs] int32         context length + query length
    block_tables     [num_seqs, width] int32  entries past ceil(seq_len / block_size) are never read
    max_query_len, max_seq_len   upper bounds
    scale            multiplies q.k; window counts visible tokens including the query itself
    alibi_slopes     [num_q_heads] fp32; sinks [num_q_heads]: one more logit per head in the denominator
    out              [num_tokens, num_q_heads, head_size_v], allocated when None; lse [num_tokens, num_q_heads] fp32
    Rows that see no key get out 0 and lse -inf.
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
        )
    tile_q = plan.rows // group
    _paged_prefill_kernel[(num_tokens // tile_q + num_seqs, num_kv_heads)](
        out_ptr=out,
        lse_ptr=lse,
        **paged_operands(q, k_cache, v_cache, block_tables),
        alibi_slopes_ptr=alibi_slopes,
        sinks_ptr=sinks,
        seq_lens_ptr=seq_lens,
        query_start_loc_ptr=query_start_loc,
        num_seqs=num_seqs,
        scale=scale,
        softcap=softcap,
        window=window,
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
