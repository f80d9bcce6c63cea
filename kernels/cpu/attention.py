"""Attention in vectorised torch, by torch's fused attention where that can express the scores:
- decode: rows of lengths within a factor of two gather their blocks together and attend as one batch, the query heads of a KV head as its
  queries; a group is no larger than what stays in the cache of a core (`_attend_rows`);
- prefill: the keys of one sequence are gathered once and its queries attend in chunks (`_attend_sequence`).
Scores and sums are fp32. Slots and table entries past a row's length are never read, or masked before they can matter.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from .._checks import (
    QUANTISED_DTYPES,
    check_attention,
    check_prefix,
    check_query_starts,
    check_states,
    check_tree_mask,
)

Tensor = torch.Tensor

# K and V that are gathered at once. Measured on one core with 9/3 heads of size 64 and 32/8 of 128, 4 to 64 rows of 16 to 1024
# tokens: half a MiB pays a fifth more for its calls, from 2 to 8 all are alike.
_GROUP_BYTES = 2 << 20
# Infinity minus infinity would be NaN. It is 3e38 in base 2, as the Triton kernels have it.
_LARGEST_SINK = 2e38
# Queries of one prefill chunk where scores are materialised; keys after the chunk's last query are skipped.
_CHUNK_QUERIES = 128


@dataclass(frozen=True)
class _Rules:
    """How scores are made from products of q and k, and which keys a query sees."""

    scale: float
    causal: bool
    window: int | None
    attention_chunk: int | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    ranges: np.ndarray | None  # [num_seqs, num_ranges, 2]
    tree_mask: Tensor | None
    num_trees: int  # the first so many sequences have a tree

    @property
    def is_plain(self) -> bool:
        """A decode sees its whole sequence, by nothing but its products."""
        return (
            self.window is None
            and self.attention_chunk is None
            and self.ranges is None
            and self.alibi_slopes is None
        )

    def visible(self, positions: np.ndarray, seq_lens: np.ndarray | int, ranges: np.ndarray | None):
        """Keys [first, stop) that queries at `positions` see; `ranges` [..., num_ranges, 2] are those of each query."""
        first = np.zeros_like(positions)
        stop = seq_lens + first
        if self.window is not None:
            first = np.maximum(first, positions - self.window + 1)
        if self.attention_chunk is not None:
            first = np.maximum(first, positions // self.attention_chunk * self.attention_chunk)
        if self.causal:
            stop = np.minimum(stop, positions + 1)
        if ranges is None:
            return first, stop
        for i in range(ranges.shape[-2]):
            low, high = ranges[..., i, 0], ranges[..., i, 1]
            inside = (positions >= low) & (positions < high)
            first = np.where(inside, np.minimum(first, np.maximum(low, 0)), first)
            stop = np.where(inside, np.maximum(stop, np.minimum(high, seq_lens)), stop)
        return first, stop


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
    attention_chunk: int | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    prefix_lm_ranges: Tensor | None,
    tree_mask: Tensor | None,
    num_decodes: int | None,
    max_decode_query_len: int,
    batch_invariant: bool,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """The first `num_decodes` sequences are rows [0, num_decodes) of q, unless they may have several; see `ops`."""
    check_attention(
        q, k_cache, v_cache, seq_lens, block_tables, out, lse, window, attention_chunk, softcap,
        alibi_slopes, sinks, k_scale, v_scale, prefix_lm_ranges,
    )  # fmt: skip
    num_seqs = seq_lens.shape[0]
    check_query_starts(q, seq_lens, query_start_loc)
    check_tree_mask(q, max_decode_query_len, tree_mask)
    ranges = None if prefix_lm_ranges is None else prefix_lm_ranges.numpy()
    if sinks is not None:
        sinks = sinks.float().clamp_max(_LARGEST_SINK)
    num_trees = 0 if tree_mask is None else num_seqs if num_decodes is None else num_decodes
    rules = _Rules(
        scale, causal, window, attention_chunk, softcap, alibi_slopes, sinks, k_scale, v_scale, ranges, tree_mask, num_trees
    )  # fmt: skip
    lengths = seq_lens.tolist()
    if num_decodes is None or max_decode_query_len > 1 or tree_mask is not None:
        num_decodes = 0  # by their query_start_loc, like chunks

    of_block = k_cache[:1].nbytes + v_cache[:1].nbytes
    most_blocks = 1 if batch_invariant else max(1, _GROUP_BYTES // max(1, of_block))
    scratch = _Scratch(k_cache), _Scratch(v_cache)
    is_plain = rules.is_plain and _is_fusable(k_cache, v_cache, q, out, rules, lse)
    for rows in _decode_groups(lengths[:num_decodes], k_cache.shape[1], most_blocks):
        if is_plain and len(rows) == 1 and lengths[rows[0]] > 0:
            row = rows[0]
            _attend_plain_row(q, k_cache, v_cache, row, lengths[row], block_tables[row], rules, out)
            continue
        _attend_rows(q, k_cache, v_cache, rows, lengths, block_tables, rules, out, lse, scratch)
    if num_decodes < num_seqs:
        starts = query_start_loc.tolist()
        for seq in range(num_decodes, num_seqs):
            queries = slice(starts[seq], starts[seq + 1])
            _attend_sequence(
                q, k_cache, v_cache, seq, queries, lengths[seq], block_tables[seq], rules, out, lse
            )


def cascade_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_block_ids: Tensor,
    block_tables: Tensor,
    *arguments,
) -> None:
    """The shared blocks are put in every table: on a CPU nothing is gained by reading them once."""
    check_prefix(k_cache, prefix_block_ids, block_tables)
    num_blocks = prefix_block_ids.shape[0]
    prefix = prefix_block_ids.expand(block_tables.shape[0], num_blocks)
    tables = torch.cat([prefix, block_tables[:, num_blocks:]], dim=1)
    query_start_loc, seq_lens, *rest = arguments
    paged_attention(q, k_cache, v_cache, query_start_loc, seq_lens, tables, *rest)


def _decode_groups(lengths: list[int], block_size: int, most_blocks: int) -> list[list[int]]:
    """Rows that attend together, longest first: padded to their longest row at most so many blocks, half of it padding.

    Rows of length 0 are one group of their own. With one block at most each row is alone.
    """
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        num_blocks = -(-lengths[row] // block_size)
        group = groups[-1] if groups else []
        width = -(-lengths[group[0]] // block_size) if group else 0
        if group and 2 * num_blocks >= width and (len(group) + 1) * width <= most_blocks:
            group.append(row)
        else:
            groups.append([row])
    return groups


@functools.cache
def _values(dtype: torch.dtype) -> Tensor:
    """The fp32 values of all bytes of a quantised format."""
    stored = torch.float8_e4m3fn if dtype == torch.uint8 else dtype
    return torch.arange(256).to(torch.uint8).view(stored).float()


def _gathered(cache: Tensor, ids: Tensor, scale: Tensor | None) -> Tensor:
    """Blocks `ids` of a cache; those of a quantised cache as fp32."""
    if cache.dtype not in QUANTISED_DTYPES:
        return cache.index_select(0, ids)
    bits = cache.view(torch.uint8).index_select(0, ids)
    # a table is four times as quick as the conversion
    blocks = _values(cache.dtype).index_select(0, bits.flatten().int()).view(bits.shape)
    if scale is not None:
        # of every slot and head: [blocks, block_size, Hkv, 1]
        scale = (scale.index_select(0, ids) if scale.dim() == 3 else scale.view(-1)).unsqueeze(-1)
        blocks.mul_(scale)
    return blocks


class _Scratch:
    """Memory for gathered blocks, kept from group to group: a fresh mapping of it costs as much as the copy."""

    def __init__(self, cache: Tensor) -> None:
        self._cache = cache
        self._blocks: Tensor | None = None

    def gathered(self, ids: Tensor, scale: Tensor | None) -> Tensor:
        """`_gathered`, valid until the next call."""
        if self._cache.dtype in QUANTISED_DTYPES:
            return _gathered(self._cache, ids, scale)
        if self._blocks is None or len(self._blocks) < len(ids):
            self._blocks = self._cache.new_empty(len(ids), *self._cache.shape[1:])
        return torch.index_select(self._cache, 0, ids, out=self._blocks[: len(ids)])


def _attend_plain_row(q, k_cache, v_cache, row, length, table, rules, out) -> None:
    """`_attend_rows` of one row that sees all its keys, in the fewest calls: what a single request waits for in every layer."""
    ids = table[: -(-length // k_cache.shape[1])]
    keys, values = (
        cache.index_select(0, ids).flatten(0, 1)[:length].transpose(0, 1).unsqueeze(0)
        for cache in (k_cache, v_cache)
    )
    queries = q[row].view(1, keys.shape[1], -1, q.shape[2])
    result = F.scaled_dot_product_attention(queries, keys, values, scale=rules.scale)
    out[row] = result.view(out.shape[1:])


def _attend_rows(
    q, k_cache, v_cache, rows, lengths, block_tables, rules, out, lse, scratch
) -> None:
    """Decode rows as one batch, [N, Hkv, G, D] over [N, Hkv, L, D], padded to the longest."""
    lens = np.array([lengths[row] for row in rows])
    rows = np.array(rows)
    if not lens.any():
        out[rows] = 0
        if lse is not None:
            lse[rows] = -math.inf
        return
    block_size, num_kv_heads = k_cache.shape[1:3]
    firsts, _ = rules.visible(lens - 1, lens, None if rules.ranges is None else rules.ranges[rows])
    first_blocks, last_blocks = firsts // block_size, (lens - 1) // block_size
    width = int((last_blocks - first_blocks).max()) + 1
    # past its last block a row reads that again, which is hidden
    index = np.minimum(first_blocks[:, None] + np.arange(width), last_blocks[:, None])
    ids = torch.from_numpy(block_tables.numpy()[rows[:, None], index]).flatten()
    k, v = (
        memory.gathered(ids, scale).view(len(rows), width * block_size, num_kv_heads, -1)
        for memory, scale in zip(scratch, (rules.k_scale, rules.v_scale), strict=True)
    )
    positions = first_blocks[:, None] * block_size + np.arange(width * block_size)
    hidden = None
    if len(rows) == 1:
        seen = slice(int(firsts[0] - positions[0, 0]), int(lens[0] - positions[0, 0]))
        k, v, positions = k[:, seen], v[:, seen], positions[:, seen]
        places = slice(int(rows[0]), int(rows[0]) + 1)
    else:
        places = torch.from_numpy(rows)
        outside = (positions >= lens[:, None]) | (positions < firsts[:, None])
        if outside.any():
            hidden = torch.from_numpy(outside)
            slots = torch.from_numpy(outside.ravel().nonzero()[0])
            for x in (k, v):  # neither a score of -inf nor a probability of 0 cancels a NaN
                x.view(-1, *x.shape[2:]).index_fill_(0, slots, 0)
    queries = q[places].unflatten(1, (num_kv_heads, -1))
    bias = _decode_bias(hidden, positions - (lens[:, None] - 1), rules, num_kv_heads)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if _is_fusable(k, v, q, out, rules, lse):
        bias = None if bias is None else bias.to(q.dtype)
        result = F.scaled_dot_product_attention(queries, k, v, attn_mask=bias, scale=rules.scale)
    else:
        result, total = _explicit_rows(queries, k, v, bias, rules)
        if lse is not None:
            lse[places] = total.flatten(1)
    out[places] = result.flatten(1, 2).to(out.dtype)


def _decode_bias(
    hidden: Tensor | None, distance: np.ndarray, rules: _Rules, num_kv_heads: int
) -> Tensor | None:
    """What is added to scores: -inf at keys hidden [N, L], and ALiBi by the distance [N, L] to them; [N, 1 | Hkv, 1 | G, L]."""
    bias = None
    if rules.alibi_slopes is not None:
        slopes = rules.alibi_slopes.float().view(1, num_kv_heads, -1, 1)
        bias = slopes * torch.from_numpy(distance.astype(np.float32))[:, None, None]
    if hidden is not None:
        bias = torch.zeros(hidden.shape)[:, None, None] if bias is None else bias
        bias = bias.masked_fill_(hidden[:, None, None], -math.inf)
    return bias


def _explicit_rows(q, k, v, bias, rules) -> tuple[Tensor, Tensor]:
    """(out [N, Hkv, G, Dv], lse [N, Hkv, G]), scores in memory: every feature."""
    q, k, v = q.float() * rules.scale, k.float(), v.float()
    scores = q.new_empty(*q.shape[:3], k.shape[2])
    for head in range(k.shape[1]):  # one head of all rows has one stride from row to row: no copy
        torch.bmm(q[:, head], k[:, head].transpose(1, 2), out=scores[:, head])
    if rules.softcap is not None:
        scores = scores.div_(rules.softcap).tanh_().mul_(rules.softcap)
    if bias is not None:
        scores += bias
    largest = scores.amax(dim=-1)
    if rules.sinks is not None:
        sinks = rules.sinks.float().view(q.shape[1:3])
        largest = torch.maximum(largest, sinks)
    weights = scores.sub_(largest[..., None]).exp_()
    total = weights.sum(dim=-1)
    if rules.sinks is not None:
        total += torch.exp(sinks - largest)
    result = v.new_empty(*q.shape[:3], v.shape[3])
    for head in range(v.shape[1]):
        torch.bmm(weights[:, head], v[:, head], out=result[:, head])
    return result.div_(total[..., None]), largest + total.log()


def _is_fusable(k, v, q, out, rules, lse) -> bool:
    """Whether torch's fused attention can express the scores; a tree's mask apart."""
    return (
        k.dtype == q.dtype == out.dtype
        and rules.softcap is None
        and rules.sinks is None
        and lse is None
        and k.shape[-1] == v.shape[-1]
    )


def _attend_sequence(q, k_cache, v_cache, seq, queries, seq_len, table, rules, out, lse) -> None:
    """The queries of one sequence, the last of which is at position seq_len - 1, chunk by chunk."""
    block_size = k_cache.shape[1]
    query_len = queries.stop - queries.start
    positions = np.arange(seq_len - query_len, seq_len)
    ranges = None if rules.ranges is None else rules.ranges[seq]
    firsts, stops = rules.visible(positions, seq_len, ranges)
    num_blind = int((stops <= firsts).sum())  # they come first: those before position 0, or all
    blind = slice(queries.start, queries.start + num_blind)
    out[blind] = 0
    if lse is not None:
        lse[blind] = -math.inf
    if num_blind == query_len:
        return

    origin = int(firsts[num_blind]) // block_size * block_size
    ids = table[origin // block_size : -(-seq_len // block_size)]
    k = _gathered(k_cache, ids, rules.k_scale).flatten(0, 1)  # from position `origin`
    v = _gathered(v_cache, ids, rules.v_scale).flatten(0, 1)

    fused = seq >= rules.num_trees and _is_fusable(k, v, q, out, rules, lse)
    fused = fused and query_len - num_blind > 1
    whole = fused and _is_square(firsts, stops) and rules.alibi_slopes is None
    chunk = query_len if whole else _CHUNK_QUERIES
    attend = _attend_fused if fused else _attend_explicit
    for begin in range(num_blind, query_len, chunk):
        end = min(begin + chunk, query_len)
        low, high = int(firsts[begin]), int(stops[end - 1])
        rows = slice(queries.start + begin, queries.start + end)
        tree = None
        if seq < rules.num_trees:
            tree = rules.tree_mask[rows, :query_len]
        attend(
            q[rows],
            k[low - origin : high - origin],
            v[low - origin : high - origin],
            _Sight(
                positions[begin:end] - low, firsts[begin:end] - low, stops[begin:end] - low, tree
            ),
            rules,
            out[rows],
            None if lse is None else lse[rows],
        )


@dataclass(frozen=True)
class _Sight:
    """Which of L gathered keys each of M queries sees; all numbers count from the first of those keys."""

    positions: np.ndarray  # [M], of the queries
    firsts: np.ndarray
    stops: np.ndarray
    tree: Tensor | None  # [M, N]: which of the sequence's N new tokens, its last, each query sees


def _is_square(firsts: np.ndarray, stops: np.ndarray) -> bool:
    """Whether query i sees exactly the first i + 1 keys: plain causal attention without a context."""
    return not firsts.any() and np.array_equal(stops, np.arange(1, len(stops) + 1))


def _bias(num_keys: int, sight: _Sight, rules: _Rules) -> Tensor | None:
    """What is added to scores: [M, L] or, with ALiBi, [Hq, M, L]."""
    masked = sight.firsts.any() or (sight.stops < num_keys).any() or sight.tree is not None
    if not masked and rules.alibi_slopes is None:
        return None
    keys = np.arange(num_keys)
    hidden = torch.from_numpy((keys < sight.firsts[:, None]) | (keys >= sight.stops[:, None]))
    if sight.tree is not None:
        # the last key seen by the last query is the sequence's last: the others' lines end before it
        new_tokens = hidden[:, -sight.tree.shape[1] :]
        new_tokens |= ~sight.tree[:, sight.tree.shape[1] - new_tokens.shape[1] :]
    if rules.alibi_slopes is not None:
        distance = torch.from_numpy(keys - sight.positions[:, None])
        bias = rules.alibi_slopes[:, None, None] * distance
    else:
        bias = torch.zeros(hidden.shape)
    return bias.masked_fill_(hidden, -math.inf)


def _attend_fused(q, k, v, sight, rules, out, lse) -> None:
    """Rows of one sequence by torch's fused attention: q, out [M, Hq, D] over k, v [L, Hkv, D]."""
    num_kv_heads = k.shape[1]
    # KV heads as the batch axis and their query heads as the head axis: K and V are shared by a stride of 0
    q = q.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    k = k.transpose(0, 1).unsqueeze(1).expand(-1, q.shape[1], -1, -1)
    v = v.transpose(0, 1).unsqueeze(1).expand(-1, q.shape[1], -1, -1)
    if rules.alibi_slopes is None and _is_square(sight.firsts, sight.stops):
        result = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=rules.scale)
    else:
        bias = _bias(k.shape[2], sight, rules)  # fp32, also for a 16-bit q
        if bias is not None and bias.dim() == 3:
            bias = bias.unflatten(0, (num_kv_heads, -1))
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=rules.scale)
    out.unflatten(1, (num_kv_heads, -1)).copy_(result.permute(2, 0, 1, 3))


def _attend_explicit(q, k, v, sight, rules, out, lse) -> None:
    """Rows of one sequence with the scores in memory: every feature, and the quickest way for one row."""
    num_queries, num_q_heads, head_size = q.shape
    num_keys, num_kv_heads, head_size_v = v.shape
    rows = q.float().mul(rules.scale).view(num_queries, num_kv_heads, -1, head_size)
    rows = rows.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_size)  # [Hkv, G * M, D]
    products = torch.bmm(rows, k.float().permute(1, 2, 0))
    if rules.softcap is not None:
        products = products.div_(rules.softcap).tanh_().mul_(rules.softcap)
    bias = _bias(num_keys, sight, rules)
    if bias is not None:
        products.view(num_q_heads, num_queries, num_keys).add_(bias)
    if lse is None and rules.sinks is None and rules.tree_mask is None:
        weights = products.softmax(dim=-1)
    else:
        total = products.logsumexp(dim=-1).view(num_q_heads, num_queries)
        if rules.sinks is not None:
            blind = total == -math.inf  # a sink alone is no key
            total = torch.logaddexp(total, rules.sinks.float()[:, None])
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
