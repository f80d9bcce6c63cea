"""Paged batches for attention tests, and the measure of error that all kernel tests share."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch

# An implementation may be this much further from the fp64 oracle than torch is, computing in the same dtype.
WORST_RATIO = 2.0
TINY = {torch.float32: 2e-6, torch.float16: 2.5e-4, torch.bfloat16: 2e-3}
GARBAGE = 2**31 - 1  # what unused entries of a block table hold


@dataclass
class Batch:
    """A paged batch whose unused slots are NaN and whose unused table entries are out of range."""

    seq_lens: list[int]
    query_lens: list[int]
    num_q_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 32
    head_size_v: int | None = None
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    num_decodes: int = 0
    hnd: bool = False  # heads before tokens inside a block
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        head_size_v = self.head_size_v or self.head_size
        counts = [-(-length // self.block_size) for length in self.seq_lens]
        num_blocks = sum(counts) + 3
        ids = (1 + torch.randperm(num_blocks - 1)).tolist()
        tables = torch.full((len(counts), max(counts, default=0) + 2), GARBAGE, dtype=torch.int32)
        self.used = torch.zeros(num_blocks, self.block_size, dtype=torch.bool)
        for row, (count, length) in enumerate(zip(counts, self.seq_lens, strict=True)):
            for i in range(count):
                block = ids.pop()
                tables[row, i] = block
                self.used[block, : length - i * self.block_size] = True
        self.k_cache = self._cache(num_blocks, self.head_size)
        self.v_cache = self._cache(num_blocks, head_size_v)
        starts = [0, *itertools.accumulate(self.query_lens)]
        # queries are a strided view, as they are in a fused QKV projection
        packed = torch.randn(starts[-1], self.num_q_heads + 2, self.head_size).to(self.dtype)
        self.q = packed[:, : self.num_q_heads]
        self.query_start_loc = torch.tensor(starts, dtype=torch.int32)
        self.seq_lens_tensor = torch.tensor(self.seq_lens, dtype=torch.int32)
        self.block_tables = tables

    def _cache(self, num_blocks: int, head_size: int) -> torch.Tensor:
        """One layer of a pool, in either layout."""
        inner = (self.block_size, self.num_kv_heads)
        shape = (num_blocks, 2, *(reversed(inner) if self.hnd else inner), head_size)
        cache = torch.randn(shape).to(self.dtype)[:, 1]
        cache = cache.transpose(1, 2) if self.hnd else cache
        cache[~self.used] = float("nan")
        return cache

    @property
    def index(self) -> dict[str, torch.Tensor]:
        return {
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens_tensor,
            "block_tables": self.block_tables,
        }

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `ops.paged_attention` after q and the caches."""
        return {
            **self.index,
            "max_query_len": max(self.query_lens),
            "max_seq_len": max(self.seq_lens),
            "num_decodes": self.num_decodes,
            **self.options,
        }


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest absolute difference; infinite where one is NaN or they are not infinite alike."""
    result = result.double()
    if not torch.equal(result.isinf(), exact.isinf()) or result.isnan().any():
        return float("inf")
    finite = ~exact.isinf()
    return (result - exact)[finite].abs().max().item() if finite.any() else 0.0


def assert_close(result: torch.Tensor, exact: torch.Tensor, naive: torch.Tensor) -> None:
    """`result` is not much further from `exact` (fp64) than `naive`, torch's own computation in the same dtype."""
    allowed = WORST_RATIO * error(naive, exact) + TINY[result.dtype]
    actual = error(result, exact)
    assert actual <= allowed, f"error {actual:.3g}, allowed {allowed:.3g}"


def naive_attention(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by torch in the batch's dtype, over keys and values made contiguous: the measure of rounding error."""
    options = batch.options
    group = batch.num_q_heads // batch.num_kv_heads
    scale = options.get("scale", batch.head_size**-0.5)
    window, softcap = options.get("window"), options.get("softcap")
    slopes, sinks = options.get("alibi_slopes"), options.get("sinks")
    out = batch.q.new_zeros(*batch.q.shape[:2], batch.v_cache.shape[3])
    lse = torch.full(batch.q.shape[:2], float("-inf"))
    starts = batch.query_start_loc.tolist()
    for seq, (seq_len, query_len) in enumerate(zip(batch.seq_lens, batch.query_lens, strict=True)):
        rows = slice(starts[seq], starts[seq + 1])
        if seq_len == 0 or query_len == 0:
            continue
        ids = batch.block_tables[seq, : -(-seq_len // batch.block_size)]
        k = batch.k_cache[ids].flatten(0, 1)[:seq_len].repeat_interleave(group, dim=1)
        v = batch.v_cache[ids].flatten(0, 1)[:seq_len].repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", batch.q[rows], k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(seq_len) - torch.arange(seq_len - query_len, seq_len)[:, None]
        if slopes is not None:
            scores = scores + (slopes[:, None, None] * distance).to(batch.dtype)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if options.get("causal", True):
            hidden |= distance > 0
        if window is not None:
            hidden |= distance <= -window
        if "tree_mask" in options:
            hidden[:, seq_len - query_len :] |= ~options["tree_mask"][rows, :query_len]
        scores = scores.masked_fill(hidden, float("-inf"))
        total = scores.float().logsumexp(dim=-1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.float()[:, None])
        seen = ~hidden.all(dim=-1)
        weights = torch.exp(scores - total[..., None]).to(batch.dtype).nan_to_num(0.0)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v)
        lse[rows] = total.masked_fill(~seen, float("-inf")).t()
    return out, lse
