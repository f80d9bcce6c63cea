"""Paged attention and what is built on it."""

from __future__ import annotations

from typing import Any

import torch

from .._checks import MAX_QUERIES
from ._registry import empty_like, no_result, register, triton_op

Tensor = torch.Tensor


def _triton_attention(
    q, k_cache, v_cache, query_start_loc, seq_lens, block_tables, max_query_len, max_seq_len,
    scale, causal, window, attention_chunk, softcap, alibi_slopes, sinks, k_scale, v_scale, prefix_lm_ranges,
    tree_mask, num_decodes, max_decode_query_len, batch_invariant, out, lse, prefix_block_ids=None, plan=None,
) -> None:  # fmt: skip
    """The Triton kernels, with the positional arguments of the registered op."""
    arguments = {
        "query_start_loc": query_start_loc,
        "seq_lens": seq_lens,
        "block_tables": block_tables,
        "max_query_len": max_query_len,
        "max_seq_len": max_seq_len,
        "scale": scale,
        "causal": causal,
        "window": window,
        "attention_chunk": attention_chunk,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "prefix_lm_ranges": prefix_lm_ranges,
        "tree_mask": tree_mask,
        "num_decodes": num_decodes,
        "max_decode_query_len": max_decode_query_len,
        "batch_invariant": batch_invariant,
        "out": out,
        "lse": lse,
        "plan": plan,
    }
    if prefix_block_ids is not None:
        from ..cascade import cascade_attention

        cascade_attention(q, k_cache, v_cache, prefix_block_ids=prefix_block_ids, **arguments)
    else:
        from ..mixed_batch import attend_mixed

        attend_mixed(q, k_cache, v_cache, **arguments)


def _triton_cascade(
    q, k_cache, v_cache, prefix_block_ids, block_tables, query_start_loc, seq_lens, *rest
) -> None:
    _triton_attention(
        q, k_cache, v_cache, query_start_loc, seq_lens, block_tables, *rest, prefix_block_ids=prefix_block_ids
    )  # fmt: skip


_RULES = (
    " SymInt max_query_len, SymInt max_seq_len, float scale, bool causal, int? window, int? attention_chunk,"
    " float? softcap, Tensor? alibi_slopes, Tensor? sinks, Tensor? k_scale, Tensor? v_scale,"
    " Tensor? prefix_lm_ranges, Tensor? tree_mask, SymInt? num_decodes, SymInt max_decode_query_len, bool batch_invariant,"
    " Tensor(a!) out, Tensor(b!)? lse) -> ()"
)
_paged_attention = register(
    "paged_attention",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor query_start_loc, Tensor seq_lens, Tensor block_tables,"
    + _RULES,
    _triton_attention,
    no_result,
)
_cascade_attention = register(
    "cascade_attention",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor prefix_block_ids, Tensor block_tables,"
    " Tensor query_start_loc, Tensor seq_lens," + _RULES,
    _triton_cascade,
    no_result,
)


def _decode_query_len(
    num_tokens: int,
    num_seqs: int,
    max_query_len: int,
    num_decodes: int | None,
    max_decode_query_len: int | None,
    tree_mask: Tensor | None,
) -> int:
    """The bound of the decodes' query lengths, by default that of all if all are decodes, else 1; all of it checked."""
    all_are_decodes = num_decodes in (None, num_seqs)
    if max_decode_query_len is None:
        max_decode_query_len = max(1, max_query_len) if all_are_decodes else 1
    is_prefill = num_decodes is None and max_query_len > MAX_QUERIES
    if tree_mask is not None and (is_prefill or num_decodes == 0):
        raise ValueError(
            f"tree_mask: expected decodes of up to {MAX_QUERIES} queries, got max_query_len {max_query_len} and "
            f"{num_decodes} decodes of {num_seqs} sequences"
        )
    if num_decodes is None:
        return max_decode_query_len
    if num_decodes > 0 and not 1 <= max_decode_query_len <= MAX_QUERIES:
        raise ValueError(
            f"num_decodes: expected decodes of 1 to {MAX_QUERIES} queries each, got {max_decode_query_len}"
        )
    of_one_query = max_decode_query_len <= 1 and tree_mask is None
    most = min(num_seqs, num_tokens) if of_one_query else num_seqs
    if not 0 <= num_decodes <= most:
        raise ValueError(
            f"num_decodes: expected 0 to {most} (sequences, tokens), got {num_decodes}"
        )
    return max_decode_query_len


def _defaults(
    q: Tensor, v_cache: Tensor, scale: float | None, out: Tensor | None, return_lse: bool
) -> tuple[float, Tensor, Tensor | None]:
    """(scale, out, lse): what was not given, and lse if it is asked for."""
    num_tokens, num_q_heads, head_size = q.shape
    if out is None:
        out = q.new_empty(num_tokens, num_q_heads, v_cache.shape[3])
    lse = q.new_empty(num_tokens, num_q_heads, dtype=torch.float32) if return_lse else None
    return (float(head_size) ** -0.5 if scale is None else scale), out, lse


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    attention_chunk: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    prefix_lm_ranges: Tensor | None = None,
    tree_mask: Tensor | None = None,
    num_decodes: int | None = None,
    max_decode_query_len: int | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    return_lse: bool = False,
    plan: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the queries of a batch over the paged keys and values of their sequences.

    The queries of sequence i are rows [query_start_loc[i], query_start_loc[i + 1]) of q, and are its last tokens: their
    keys and values have been written to the cache before the call (`reshape_and_cache`).

    q                [num_tokens, num_q_heads, head_size]                fp32 | fp16 | bf16; last axis contiguous
    k_cache          [num_blocks, block_size, num_kv_heads, head_size]   dtype of q, or quantised: float8_e4m3fn |
                     float8_e5m2 | int8 | uint8 (e4m3 by its bits); any strides, last axis contiguous
    v_cache          [num_blocks, block_size, num_kv_heads, head_size_v]
    query_start_loc  [num_seqs + 1] int32     not decreasing; query lengths may be 0
    seq_lens         [num_seqs] int32         context length + query length, in tokens
    block_tables     [num_seqs, width] int32  block ids; entries of blocks that hold no visible key may be anything:
                     those past ceil(seq_len / block_size), and those wholly before the window
    max_query_len    upper bound of the query lengths
    max_seq_len      upper bound of seq_lens
    scale            multiplies q.k; None: head_size ** -0.5
    causal           a query sees keys up to its own position; False: all keys of its sequence
    window           tokens a query may see, itself included; None: all. Without causal only the past is limited
    attention_chunk  a query sees no key before the last multiple of this at or before its position (local chunks)
    softcap          c: scores become c * tanh(score / c), after scale
    alibi_slopes     [num_q_heads] fp32: slope * (key position - query position) is added, after softcap
    sinks            [num_q_heads]: one more logit in each row's denominator, with no value; lse includes it. Infinite:
                     out 0, lse above 1e38
    k_scale, v_scale [] | [1] | [num_kv_heads] fp32: what the numbers of a quantised cache are to be multiplied by. Or
                     both [num_blocks, block_size, num_kv_heads], any strides: one scale for every token and head, as
                     `reshape_and_cache` writes them; those of slots that no query sees are not read
    prefix_lm_ranges [num_seqs, num_ranges, 2] int32: positions [low, high) of each sequence whose tokens see one
                     another whatever the other rules say (an image in a causal prompt). Disjoint; low >= high: unused
    tree_mask        [num_tokens, max_decode_query_len] bool: whether a query of a decode sees the j-th query of its
                     sequence, on top of the other rules; all see the context. For drafts that branch
    num_decodes      the first so many sequences take the decode kernel, which splits their keys over programs, and their
                     queries are the first rows of q. A decode with seq_len 0 is padding. None: nothing but max_query_len
                     is known; all take the decode kernel if it is small, else none
    max_decode_query_len  upper bound of their query lengths, at most 16; None: max_query_len if all are decodes, else 1.
                     With 1 they are rows [0, num_decodes) of q and query_start_loc is not looked at for them
    batch_invariant  a sequence's result is the same to the last bit whatever else is in the batch, as long as its kernel
                     (decode or prefill) and, for decodes of several queries, max_query_len stay the same
    out              [num_tokens, num_q_heads, head_size_v], dtype of q or fp32; None: allocated, dtype of q
    plan             a `DecodePlan` (num_decodes is num_seqs) or `PrefillPlan` (num_decodes is 0) for tuners: calls the
                     Triton wrapper directly, past torch's dispatcher; on a CPU only under the interpreter

    Returns out, or (out, lse [num_tokens, num_q_heads] fp32, natural log). Rows that see no key: out 0, lse -inf. Rows
    of no sequence (before query_start_loc[0], past query_start_loc[-1]) are not written. A NaN or infinity in a key or
    value that some query of a sequence sees may show in any query of that sequence, and in no other's.
    """
    num_seqs = seq_lens.shape[0]
    max_decode_query_len = _decode_query_len(
        q.shape[0], num_seqs, max_query_len, num_decodes, max_decode_query_len, tree_mask
    )
    scale, out, lse = _defaults(q, v_cache, scale, out, return_lse)
    args = (
        q, k_cache, v_cache, query_start_loc, seq_lens, block_tables, max_query_len, max_seq_len,
        scale, causal, window, attention_chunk, softcap, alibi_slopes, sinks, k_scale, v_scale, prefix_lm_ranges,
        tree_mask, num_decodes, max_decode_query_len, batch_invariant, out, lse,
    )  # fmt: skip
    if plan is None:
        _paged_attention(*args)
    elif num_decodes in (0, num_seqs):
        expected = "PrefillPlan" if num_decodes == 0 else "DecodePlan"
        if type(plan).__name__ != expected:
            raise ValueError(f"plan: expected a {expected}, got {type(plan).__name__}")
        _triton_attention(*args, plan=plan)
    else:
        raise ValueError(
            f"plan: expected decodes or prefills only, got {num_decodes} decodes of {num_seqs}"
        )
    return out if lse is None else (out, lse)


def cascade_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    prefix_block_ids: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    attention_chunk: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    prefix_lm_ranges: Tensor | None = None,
    tree_mask: Tensor | None = None,
    num_decodes: int | None = None,
    max_decode_query_len: int | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`paged_attention` of sequences that all begin with the same blocks, whose keys are then read once for many queries.

    prefix_block_ids  [num_blocks] int32   the blocks of the first num_blocks * block_size tokens of every sequence, at
                      most the width of a table, whose own entries for them are not read. Sequences with seq_len 0 are
                      padding; all others are at least so long, and their queries come after those tokens

    The other arguments and the result are those of `paged_attention`, but that rows of no sequence may be written.
    """
    max_decode_query_len = _decode_query_len(
        q.shape[0], seq_lens.shape[0], max_query_len, num_decodes, max_decode_query_len, tree_mask
    )
    scale, out, lse = _defaults(q, v_cache, scale, out, return_lse)
    _cascade_attention(
        q, k_cache, v_cache, prefix_block_ids, block_tables, query_start_loc, seq_lens, max_query_len, max_seq_len,
        scale, causal, window, attention_chunk, softcap, alibi_slopes, sinks, k_scale, v_scale, prefix_lm_ranges,
        tree_mask, num_decodes, max_decode_query_len, batch_invariant, out, lse,
    )  # fmt: skip
    return out if lse is None else (out, lse)


_merge_attention_states = register(
    "merge_attention_states",
    "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    triton_op(".merge_states", "merge_attention_states"),
    lambda out_a, lse_a, out_b, lse_b: (empty_like(out_a), empty_like(lse_a)),
)


def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """(out, lse) over the union of two disjoint sets of keys, from the attention over each.

    out_a, out_b  [num_tokens, num_heads, head_size]  fp32 | fp16 | bf16; last axis contiguous
    lse_a, lse_b  [num_tokens, num_heads] fp32        natural log; -inf: no key was seen, and that side is not read
    Where both are -inf: out 0, lse -inf.
    """
    return _merge_attention_states(out_a, lse_a, out_b, lse_b)
