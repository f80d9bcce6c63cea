"""Attention of sequences that begin with the same blocks: the shared keys are read for many queries at once.

    prefix = attention of all queries over keys [0, prefix_len), in the shared blocks
    suffix = attention of each sequence's queries over its keys [prefix_len, seq_len)
    result = merge_attention_states(prefix, suffix)

The prefix part is paged decode over made-up sequences of up to 16 tokens each, taken from `q` in order, that all have
the shared blocks for a table: the tokens of several requests are the rows of one matrix product, and the keys are still
split over programs. Which keys a token sees depends on its place in its own sequence, which a small kernel looks up.

Bytes read:  (ceil(num_tokens / queries) * prefix_len + sum_s (seq_len_s - prefix_len)) * num_kv_heads
             * (head_size + head_size_v) * cache_element_size,   against sum_s seq_len_s * ... without the cascade
FLOPs:       those of paged attention
Reference:   `reference.cascade_attention`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ._checks import MAX_QUERIES, check_prefix, check_query_starts, check_tensor
from ._online_softmax import visible_interval
from .merge_states import merge_attention_states
from .mixed_batch import attend_mixed
from .paged_decode import paged_decode


@triton.jit(
    do_not_specialize=["num_seqs", "num_tokens", "num_ranges"],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "seq_lens_ptr", "ranges_ptr"],
)
def _query_positions_kernel(
    positions_ptr, firsts_ptr, query_start_loc_ptr, seq_lens_ptr, ranges_ptr, num_seqs, num_tokens,
    window, attention_chunk, num_ranges,
    CAUSAL: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Where each token is in its sequence, -1 if it sees nothing, and the first key it sees. Grid (cdiv(num_tokens, TOKENS),).

    Without causal a token before position 0 sees keys as well; it counts as being at position 0.
    """
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    in_range = tokens < num_tokens
    low = tl.zeros([TOKENS], tl.int32)
    high = low + num_seqs
    width = num_seqs
    # the last sequence that starts at or before the token, where empty ones start too
    while width > 1:
        middle = (low + high) // 2
        starts = tl.load(query_start_loc_ptr + middle, mask=middle < high, other=0)
        later = (starts > tokens) | (middle >= high)
        low = tl.where(later, low, middle)
        high = tl.where(later, middle, high)
        width = (width + 1) // 2
    start = tl.load(query_start_loc_ptr + low, mask=in_range, other=0)
    stop = tl.load(query_start_loc_ptr + low + 1, mask=in_range, other=0)
    seq_len = tl.load(seq_lens_ptr + low, mask=in_range, other=0)
    position = seq_len - stop + tokens
    if not CAUSAL:
        position = tl.maximum(position, 0)
    somebodys = (tokens >= start) & (tokens < stop) & (seq_len > 0)
    tl.store(positions_ptr + tokens, tl.where(somebodys, position, -1), mask=in_range)
    if firsts_ptr is not None:
        if ranges_ptr is not None:
            ranges_ptr += low.to(tl.int64) * num_ranges * 2
        first, _ = visible_interval(
            position, seq_len, window, attention_chunk, None, ranges_ptr, num_ranges, CAUSAL
        )
        tl.store(firsts_ptr + tokens, first, mask=in_range)


@dataclass(frozen=True)
class CascadePlan:
    """Launch choices of one cascade."""

    queries: int  # tokens of one made-up sequence


def plan_cascade_attention(*, group: int) -> CascadePlan:
    """As many tokens as make 64 rows of a matrix product with their query heads: more would spill its registers."""
    return CascadePlan(queries=max(1, min(MAX_QUERIES, 64 // triton.next_power_of_2(group))))


def cascade_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    prefix_block_ids: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    num_decodes: int | None,
    max_decode_query_len: int,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    attention_chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    prefix_lm_ranges: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    batch_invariant: bool = False,
    plan: CascadePlan | None = None,
    **rules: Any,
) -> torch.Tensor:
    """Attend as `octavo.kernels.cascade_attention` says; `rules` are the other common arguments of the two kernels.

    Returns out. Raises ValueError naming the argument, what was expected and what came.
    """
    check_prefix(k_cache, prefix_block_ids, block_tables)
    check_query_starts(q, seq_lens, query_start_loc)
    num_tokens, num_q_heads, _ = q.shape
    _, block_size, num_kv_heads, head_size_v = v_cache.shape
    num_seqs = seq_lens.shape[0]
    prefix_len = prefix_block_ids.shape[0] * block_size
    shape = (num_tokens, num_q_heads, head_size_v)
    check_tensor("out", out, shape=shape, dtype=(q.dtype, torch.float32), device=q.device)
    if num_tokens == 0 or num_seqs == 0:
        return out
    if plan is None:
        plan = plan_cascade_attention(group=num_q_heads // num_kv_heads)

    positions = torch.empty(num_tokens, dtype=torch.int32, device=q.device)
    is_local = window is not None or attention_chunk is not None
    firsts = torch.empty_like(positions) if is_local else None
    tile = 128
    _query_positions_kernel[(triton.cdiv(num_tokens, tile),)](
        positions_ptr=positions,
        firsts_ptr=firsts,
        query_start_loc_ptr=query_start_loc,
        seq_lens_ptr=seq_lens,
        num_seqs=num_seqs,
        num_tokens=num_tokens,
        ranges_ptr=prefix_lm_ranges,
        num_ranges=0 if prefix_lm_ranges is None else prefix_lm_ranges.shape[1],
        window=window,
        attention_chunk=attention_chunk,
        CAUSAL=causal,
        TOKENS=tile,
        num_warps=4,
        enable_fp_fusion=True,
    )
    parts = torch.empty(2, num_tokens, num_q_heads, head_size_v, device=q.device)
    # the parts of tokens that are nobody's are not written; -inf keeps the merge from reading them
    part_lses = torch.full((2, num_tokens, num_q_heads), -torch.inf, device=q.device)
    num_rows = triton.cdiv(num_tokens, plan.queries)
    starts = torch.arange(num_rows + 1, dtype=torch.int32, device=q.device)
    paged_decode(
        q,
        k_cache,
        v_cache,
        query_start_loc=starts.mul_(plan.queries).clamp_(max=num_tokens),
        query_positions=positions,
        query_firsts=firsts,
        max_query_len=plan.queries,
        seq_lens=torch.full((num_rows,), prefix_len, dtype=torch.int32, device=q.device),
        block_tables=prefix_block_ids.expand(num_rows, -1),
        max_seq_len=prefix_len,
        causal=causal,
        batch_invariant=batch_invariant,
        out=parts[0],
        lse=part_lses[0],
        **rules,
    )
    attend_mixed(
        q,
        k_cache,
        v_cache,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_tables=block_tables,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        num_decodes=num_decodes,
        max_decode_query_len=max_decode_query_len,
        causal=causal,
        window=window,
        attention_chunk=attention_chunk,
        sinks=sinks,
        prefix_lm_ranges=prefix_lm_ranges,
        tree_mask=tree_mask,
        kv_start=prefix_len,
        batch_invariant=batch_invariant,
        out=parts[1],
        lse=part_lses[1],
        **rules,
    )
    merge_attention_states(parts[0], part_lses[0], parts[1], part_lses[1], out=out, lse=lse)
    return out
