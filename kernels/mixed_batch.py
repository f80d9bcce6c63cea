"""Attention of a batch of decodes and prefills, each by its own kernel: a kernel that branches between them is slower."""

from __future__ import annotations

from typing import Any

import torch

from .paged_decode import paged_decode
from .paged_prefill import paged_prefill


def attend_mixed(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_query_len: int,
    num_decodes: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    prefix_lm_ranges: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    batch_invariant: bool = False,
    **rules: Any,
) -> None:
    """Sequences [0, num_decodes) to paged decode, the others to paged prefill, whose common arguments are `rules`."""
    num_seqs = seq_lens.shape[0]
    if num_decodes > 0:
        several = num_decodes == num_seqs and max_query_len > 1
        rows = slice(None) if several else slice(num_decodes)
        paged_decode(
            q[rows],
            k_cache,
            v_cache,
            seq_lens=seq_lens[:num_decodes],
            block_tables=block_tables[:num_decodes],
            query_start_loc=query_start_loc if several else None,
            max_query_len=max_query_len if several else 1,
            prefix_lm_ranges=None if prefix_lm_ranges is None else prefix_lm_ranges[:num_decodes],
            tree_mask=tree_mask,
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
