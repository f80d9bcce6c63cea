"""Attention of a batch of decodes and prefills, each by its own kernel: a kernel that branches between them is slower."""

from __future__ import annotations

from typing import Any

import torch

from ._checks import MAX_QUERIES, check_attention, check_query_starts, check_tree_mask
from .paged_decode import paged_decode, rows_of_program
from .paged_prefill import paged_prefill

_CHECKED = ("window", "attention_chunk", "softcap", "alibi_slopes", "sinks", "k_scale", "v_scale")


def attend_mixed(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_query_len: int,
    num_decodes: int | None,
    max_decode_query_len: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    prefix_lm_ranges: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    batch_invariant: bool = False,
    **rules: Any,
) -> None:
    """Sequences [0, num_decodes) to paged decode, the others to paged prefill, whose common arguments are `rules`.

    With None nothing is known of the query lengths but their bound: all to paged decode, by their query_start_loc, if
    the rows of a sequence fit one program, else all to paged prefill.
    """
    num_seqs = seq_lens.shape[0]
    check_query_starts(q, seq_lens, query_start_loc)
    check_tree_mask(q, max_decode_query_len, tree_mask)
    several = max_decode_query_len > 1 or tree_mask is not None
    if num_decodes is None:
        group, head_size = q.shape[1] // max(1, k_cache.shape[2]), max(q.shape[2], v_cache.shape[3])
        held = rows_of_program(max_decode_query_len, group, head_size)
        small = max_decode_query_len <= MAX_QUERIES and max_decode_query_len * group <= held
        several = tree_mask is not None or small
        num_decodes = num_seqs if several else 0
    if 0 < num_decodes < num_seqs:
        # one part must not run before the other is refused
        check_attention(
            q, k_cache, v_cache, seq_lens, block_tables, out, lse,
            **{name: rules.get(name) for name in _CHECKED}, prefix_lm_ranges=prefix_lm_ranges,
        )  # fmt: skip
    if num_decodes > 0:
        # several queries each are found by query_start_loc; with prefills behind them they are the first rows
        most = q.shape[0] if num_decodes == num_seqs else num_decodes * max_decode_query_len
        rows = slice(most) if several else slice(num_decodes)
        paged_decode(
            q[rows],
            k_cache,
            v_cache,
            seq_lens=seq_lens[:num_decodes],
            block_tables=block_tables[:num_decodes],
            query_start_loc=query_start_loc[: num_decodes + 1] if several else None,
            max_query_len=max_decode_query_len if several else 1,
            prefix_lm_ranges=None if prefix_lm_ranges is None else prefix_lm_ranges[:num_decodes],
            tree_mask=None if tree_mask is None else tree_mask[rows],
            batch_invariant=batch_invariant,
            out=out[rows],
            lse=None if lse is None else lse[rows],
            **rules,
        )
    if num_decodes < num_seqs:
        paged_prefill(
            q,
            k_cache,
            v_cache,
            query_start_loc=query_start_loc[num_decodes:],
            seq_lens=seq_lens[num_decodes:],
            block_tables=block_tables[num_decodes:],
            max_query_len=max_query_len,
            prefix_lm_ranges=None if prefix_lm_ranges is None else prefix_lm_ranges[num_decodes:],
            out=out,
            lse=lse,
            **rules,
        )
