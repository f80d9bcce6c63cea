"""Block tables of a problem: scattered over the cache as a used pool has them, or those of a recorded step.

A table is int32 [num_seqs, most blocks of a sequence]; unused entries are 0, the null block, which is never allocated.
"""

from __future__ import annotations

import itertools

import torch

from .batch_specs import BatchSpec

Tensor = torch.Tensor


def num_blocks(batch: BatchSpec, block_size: int) -> list[int]:
    """Of each sequence."""
    return [-(-length // block_size) for length in batch.seq_lens]


def scattered_tables(batch: BatchSpec, block_size: int, seed: int = 0) -> Tensor:
    """Block ids from 1 on in random order; block 0 is never allocated."""
    counts = num_blocks(batch, block_size)
    generator = torch.Generator().manual_seed(seed)
    ids = 1 + torch.randperm(sum(counts), generator=generator, dtype=torch.int32)
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, (count, end) in enumerate(zip(counts, itertools.accumulate(counts), strict=True)):
        tables[row, :count] = ids[end - count : end]
    return tables


def compacted_tables(tables: Tensor, batch: BatchSpec, block_size: int) -> Tensor:
    """The same order and the same sharing of blocks, without ids that nobody names: a cache as large as the recorded one is not
    needed. What is past a sequence's blocks may be anything in a launch; here it is 0, the null block."""
    counts = num_blocks(batch, block_size)
    tables = tables[:, : max(counts)].clone()
    tables[torch.arange(max(counts)) >= torch.tensor(counts)[:, None]] = 0
    _, ranks = torch.cat([tables.new_zeros(1), tables.flatten()]).unique(return_inverse=True)
    return ranks[1:].view_as(tables).to(torch.int32)
