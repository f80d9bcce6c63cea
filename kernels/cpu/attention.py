"""Attention in vectorised torch. The cache is read in three ways, chosen by what they cost:
- a few decode rows: each gathers its own blocks, about six torch calls a row;
- many decode rows: one gather and one batched product over the blocks of all rows, one block per (block, KV head) matrix,
  so that rows of mixed lengths cost no padding; the softmax runs over the blocks of a row (`_attend_blocks`);
- prefill: the keys of one sequence are gathered once and its queries attend in chunks, by torch's fused attention where
  that can express the scores.
Scores and sums are fp32. Slots and table entries past a row's length are never read, or masked before they can matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from .._checks import (
    check_attention,
    check_query_starts,
    check_states,
    check_tree_mask,
)

Tensor = torch.Tensor

# Measured with 9 query and 3 KV heads of size 64 in blocks of 16, two cores: up to this many rows the calls of separate
# rows cost less than the fixed cost of the joint product (about four short rows).
_SEPARATE_ROWS = 3
# Blocks of one joint product: K and V of 512 blocks are 12 MiB in that model, which stay in the last-level cache.
_JOINT_BLOCKS = 512
# Queries of one prefill chunk where scores are materialised; keys after the chunk's last query are skipped.
_CHUNK_QUERIES = 128


@dataclass(frozen=True)
class _Scores:
    """How scores are made from products of q and k."""

    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    tree: Tensor | None = None  # [M, M]: which of a sequence's new tokens each of them sees


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    num_decodes: int,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """The first `num_decodes` sequences are rows [0, num_decodes) of q, unless all are and have several; see `ops`."""
    check_attention(
        q, k_cache, v_cache, seq_lens, block_tables, alibi_slopes, sinks, out, lse, window, softcap
    )
    num_seqs = seq_lens.shape[0]
    check_query_starts(q, seq_lens, query_start_loc)
    check_tree_mask(q, max_query_len, tree_mask)
    scores = _Scores(scale, causal, window, softcap, alibi_slopes, sinks)
    lengths = seq_lens.tolist()
    if num_decodes == num_seqs and max_query_len > 1:
        num_decodes = 0  # several queries each attend like a chunk

    def attend_one(seq: int, queries: slice) -> None:
        table, length, rules = block_tables[seq], lengths[seq], scores
        if tree_mask is not None:
            rules = replace(scores, tree=tree_mask[queries, : queries.stop - queries.start])
        _attend_sequence(q, k_cache, v_cache, queries, length, table, rules, out, lse)

    for rows in _plan_decodes(lengths[:num_decodes], k_cache.shape[1]):
        if len(rows) > 1:
            _attend_blocks(q, k_cache, v_cache, rows, lengths, block_tables, scores, out, lse)
        else:
            attend_one(rows[0], slice(rows[0], rows[0] + 1))
    if num_decodes < num_seqs:
        starts = query_start_loc.tolist()
        for seq in range(num_decodes, num_seqs):
            attend_one(seq, slice(starts[seq], starts[seq + 1]))


def _plan_decodes(lengths: list[int], block_size: int) -> list[list[int]]:
    """Groups of rows that attend together: single rows where few, else up to `_JOINT_BLOCKS` blocks a group."""
    occupied = [row for row, length in enumerate(lengths) if length > 0]
    groups = [[row] for row, length in enumerate(lengths) if length == 0]
    if len(occupied) <= _SEPARATE_ROWS:
        return groups + [[row] for row in occupied]
    group, num_blocks = [], 0
    for row in occupied:
        row_blocks = -(-lengths[row] // block_size)
        if group and num_blocks + row_blocks > _JOINT_BLOCKS:
            groups.append(group)
            group, num_blocks = [], 0
        group.append(row)
        num_blocks += row_blocks
    return [*groups, group]


def _attend_blocks(q, k_cache, v_cache, rows, lengths, block_tables, scores, out, lse) -> None:
    """Decode rows together: a product per block, then a softmax over the blocks of each row."""
    _, block_size, num_kv_heads, head_size_v = v_cache.shape
    num_q_heads, head_size = q.shape[1:]
    group = num_q_heads // num_kv_heads
    rows = np.array(rows)
    lens = np.array(lengths)[rows]
    first = np.zeros_like(lens) if scores.window is None else np.maximum(lens - scores.window, 0)

    # blocks of all rows, one after the other: which row each serves, and the token positions it holds
    counts = -(-lens // block_size) - first // block_size
    starts = counts.cumsum() - counts
    owner = np.repeat(np.arange(len(rows)), counts)
    index = np.arange(len(owner)) + np.repeat(first // block_size - starts, counts)
    ids = torch.from_numpy(block_tables.numpy()[rows[owner], index])
    positions = index[:, None] * block_size + np.arange(block_size)
    hidden = (positions >= lens[owner, None]) | (positions < first[owner, None])

    k = k_cache.transpose(1, 2).index_select(0, ids).float()  # [blocks, Hkv, block_size, D]
    v = v_cache.transpose(1, 2).index_select(0, ids).float()
    hidden_blocks, hidden_offsets = (torch.from_numpy(axis) for axis in hidden.nonzero())
    v[hidden_blocks, :, hidden_offsets] = 0  # a probability of 0 does not cancel a NaN
    row_of_block = torch.from_numpy(rows)[torch.from_numpy(owner)]
    queries = q.index_select(0, row_of_block).float().mul_(scores.scale)
    products = torch.bmm(
        queries.view(-1, group, head_size), k.view(-1, block_size, head_size).transpose(1, 2)
    ).view(-1, num_q_heads, block_size)
    if scores.softcap is not None:
        products = products.div_(scores.softcap).tanh_().mul_(scores.softcap)
    if scores.alibi_slopes is not None:
        distance = torch.from_numpy((positions - (lens[owner, None] - 1)).astype(np.float32))
        products += scores.alibi_slopes[:, None] * distance[:, None]
    products.transpose(1, 2)[hidden_blocks, hidden_offsets] = -math.inf

    owner = torch.from_numpy(owner)
    largest = torch.from_numpy(np.maximum.reduceat(products.amax(dim=-1).numpy(), starts))
    if scores.sinks is not None:
        largest = torch.maximum(largest, scores.sinks.float())
    weights = products.sub_(largest.index_select(0, owner)[:, :, None]).exp_()
    total = torch.zeros_like(largest).index_add_(0, owner, weights.sum(dim=-1))
    if scores.sinks is not None:
        total += torch.exp(scores.sinks.float() - largest)
    partial = torch.bmm(weights.view(-1, group, block_size), v.view(-1, block_size, head_size_v))
    result = torch.zeros(len(rows), num_q_heads, head_size_v)
    result.index_add_(0, owner, partial.view(-1, num_q_heads, head_size_v)).div_(total[:, :, None])
    rows = torch.from_numpy(rows)
    out.index_copy_(0, rows, result.to(out.dtype))
    if lse is not None:
        lse.index_copy_(0, rows, largest + total.log())


def _attend_sequence(q, k_cache, v_cache, queries, seq_len, table, scores, out, lse) -> None:
    """The queries of one sequence, the last of which is at position seq_len - 1, chunk by chunk."""
    block_size = k_cache.shape[1]
    query_len = queries.stop - queries.start
    context_len = seq_len - query_len
    if seq_len == 0 or (scores.causal and context_len < 0):
        # queries before position 0 see nothing
        unseeing = slice(
            queries.start, queries.stop if seq_len == 0 else queries.start - context_len
        )
        out[unseeing] = 0
        if lse is not None:
            lse[unseeing] = -math.inf
        if scores.tree is not None:
            unseen = unseeing.stop - unseeing.start
            scores = replace(scores, tree=scores.tree[unseen:, unseen:])
        queries, context_len = slice(unseeing.stop, queries.stop), 0
    query_len = queries.stop - queries.start
    if query_len == 0:
        return

    first = 0 if scores.window is None else max(context_len - scores.window + 1, 0)
    first_block = first // block_size
    ids = table[first_block : -(-seq_len // block_size)]
    origin = first_block * block_size
    k = k_cache.index_select(0, ids).flatten(0, 1)[first - origin : seq_len - origin]
    v = v_cache.index_select(0, ids).flatten(0, 1)[first - origin : seq_len - origin]

    fused = (
        query_len > 1
        and scores.softcap is None
        and scores.sinks is None
        and scores.tree is None
        and lse is None
        and k.shape[2] == v.shape[2]
    )
    whole = fused and context_len == 0 and scores.window is None and scores.alibi_slopes is None
    chunk = query_len if whole else _CHUNK_QUERIES
    attend = _attend_fused if fused else _attend_explicit
    for begin in range(0, query_len, chunk):
        end = min(begin + chunk, query_len)
        position = context_len + begin
        low = first if scores.window is None else max(position - scores.window + 1, 0)
        high = context_len + end if scores.causal else seq_len
        visible = slice(low - first, high - first)
        rows = slice(queries.start + begin, queries.start + end)
        attend(
            q[rows],
            k[visible],
            v[visible],
            position - low,
            scores,
            out[rows],
            None if lse is None else lse[rows],
        )


def _bias(num_queries: int, num_keys: int, offset: int, scores: _Scores) -> Tensor | None:
    """What is added to scores: [M, L] or, with ALiBi, [Hq, M, L]; query i is at the position of key offset + i."""
    masked = num_queries > 1 and (scores.causal or scores.window is not None)
    masked |= scores.tree is not None
    if not masked and scores.alibi_slopes is None:
        return None
    distance = torch.arange(num_keys) - torch.arange(offset, offset + num_queries)[:, None]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if scores.causal:
        hidden |= distance > 0
    if scores.window is not None:
        hidden |= distance <= -scores.window
    if scores.tree is not None:
        hidden[:, num_keys - scores.tree.shape[1] :] |= ~scores.tree
    if scores.alibi_slopes is not None:
        bias = scores.alibi_slopes[:, None, None] * distance
    else:
        bias = torch.zeros(distance.shape)
    return bias.masked_fill_(hidden, -math.inf)


def _attend_fused(q, k, v, offset, scores, out, lse) -> None:
    """Rows of one sequence by torch's fused attention: q, out [M, Hq, D] over k, v [L, Hkv, D]."""
    num_kv_heads = k.shape[1]
    # KV heads as the batch axis and their query heads as the head axis: K and V are shared by a stride of 0
    q = q.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    k = k.transpose(0, 1).unsqueeze(1).expand(-1, q.shape[1], -1, -1)
    v = v.transpose(0, 1).unsqueeze(1).expand(-1, q.shape[1], -1, -1)
    square = scores.causal and offset == 0 and q.shape[2] == k.shape[2]
    if square and scores.window is None and scores.alibi_slopes is None:
        result = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scores.scale)
    else:
        bias = _bias(q.shape[2], k.shape[2], offset, scores)  # fp32, also for a 16-bit q
        if bias is not None and bias.dim() == 3:
            bias = bias.unflatten(0, (num_kv_heads, -1))
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scores.scale)
    out.unflatten(1, (num_kv_heads, -1)).copy_(result.permute(2, 0, 1, 3))


def _attend_explicit(q, k, v, offset, scores, out, lse) -> None:
    """Rows of one sequence with the scores in memory: every feature, and the quickest way for one row."""
    num_queries, num_q_heads, head_size = q.shape
    num_keys, num_kv_heads, head_size_v = v.shape
    rows = q.float().mul(scores.scale).view(num_queries, num_kv_heads, -1, head_size)
    rows = rows.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_size)  # [Hkv, G * M, D]
    products = torch.bmm(rows, k.float().permute(1, 2, 0))
    if scores.softcap is not None:
        products = products.div_(scores.softcap).tanh_().mul_(scores.softcap)
    bias = _bias(num_queries, num_keys, offset, scores)
    if bias is not None:
        products.view(num_q_heads, num_queries, num_keys).add_(bias)
    if lse is None and scores.sinks is None and scores.tree is None:
        weights = products.softmax(dim=-1)
    else:
        total = products.logsumexp(dim=-1).view(num_q_heads, num_queries)
        if scores.sinks is not None:
            blind = total == -math.inf  # a sink alone is no key
            total = torch.logaddexp(total, scores.sinks.float()[:, None])
            total.masked_fill_(blind, -math.inf)
        pivot = total.masked_fill(total == -math.inf, 0.0)  # -inf - -inf would be NaN
        weights = products.sub_(pivot.view(num_kv_heads, -1, 1)).exp_()
        if lse is not None:
            lse.copy_(total.t())
    result = torch.bmm(weights, v.float().transpose(0, 1))
    out.copy_(result.view(num_q_heads, num_queries, head_size_v).transpose(0, 1))


def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    check_states(out_a, lse_a, out_b, lse_b)
    lse = torch.logaddexp(lse_a, lse_b)
    pivot = lse.masked_fill(lse == -math.inf, 0.0)  # -inf - -inf would be NaN
    # the output of a side that saw no key may be unset, and 0 * NaN is NaN
    side_a = out_a.float().masked_fill((lse_a == -math.inf)[..., None], 0.0)
    side_b = out_b.float().masked_fill((lse_b == -math.inf)[..., None], 0.0)
    weight_a, weight_b = torch.exp(lse_a - pivot)[..., None], torch.exp(lse_b - pivot)[..., None]
    return side_a.mul_(weight_a).addcmul_(side_b, weight_b).to(out_a.dtype), lse
