"""One call of paged attention: its tensors, what it must give, the bytes and the arithmetic it takes.

Octavo and every peer get the same problem, and none is timed before `verify` has accepted its result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch

from ..kernels import paged_attention
from .batch_specs import BatchSpec
from .block_tables import compacted_tables, num_blocks, scattered_tables
from .machine import free_bytes

Tensor = torch.Tensor

# Largest |out - exact| / |exact| of a head's output vector. A kernel rounds probabilities and its result to the dtype: a few
# units in the last place. Rows are built so that a token too many or too few moves them by a fifth or more (`_with_edges`).
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
_MOST_VERIFIED = 8  # query tokens of a sequence


class WrongResult(Exception):
    """An implementation's result is not what attention is; it is not timed."""


@dataclass(frozen=True)
class AttentionShape:
    """What does not depend on the batch. The default is Llama-3-8B's."""

    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None  # None: dtype. fp8 is stored with a scale of 1
    window: int | None = None  # tokens a query may see, itself included
    softcap: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_q_heads", "num_kv_heads", "head_size", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads: expected a multiple of num_kv_heads {self.num_kv_heads}, got {self.num_q_heads}"
            )
        if self.dtype not in TOLERANCES:
            raise ValueError(f"dtype: expected float32, float16 or bfloat16, got {self.dtype}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window: expected at least 1, got {self.window}")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap: expected a number above 0, got {self.softcap}")

    def __str__(self) -> str:
        parts = [f"{self.num_q_heads}/{self.num_kv_heads}", f"d{self.head_size}"]
        parts += [f"block{self.block_size}", str(self.dtype).removeprefix("torch.")]
        if self.cache_dtype is not None:
            parts.append(f"cache {str(self.cache_dtype).removeprefix('torch.')}")
        if self.window is not None:
            parts.append(f"window {self.window}")
        if self.softcap is not None:
            parts.append(f"softcap {self.softcap:g}")
        return " ".join(parts)

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of the cache."""
        return self.cache_dtype or self.dtype


@dataclass(frozen=True)
class AttentionProblem:
    """Tensors as a step hands them to `octavo.kernels.paged_attention`; blocks of a sequence are scattered over the cache.

    q [T, Hq, D]; k_cache, v_cache [num_blocks, block_size, Hkv, D]; query_start_loc int32 [S+1]; seq_lens int32 [S];
    block_tables int32 [S, W], unused entries 0.
    """

    batch: BatchSpec
    shape: AttentionShape
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor

    @property
    def scale(self) -> float:
        """Of the scores, 1 / sqrt(head size)."""
        return self.shape.head_size**-0.5

    @cached_property
    def num_pairs(self) -> int:
        """Visible (query, key) pairs of one head."""
        rows = zip(self.batch.query_lens, self.batch.seq_lens, strict=True)
        return sum(_visible_pairs(query, seq, self.shape.window) for query, seq in rows)

    @cached_property
    def bytes_moved(self) -> int:
        """At the least: a slot whose K and V some query sees once, though sequences share it; q read and the output written
        once; a table entry for each block that a sequence sees."""
        shape, size = self.shape, self.shape.block_size
        rows = zip(self.batch.query_lens, self.batch.seq_lens, self.block_tables.cpu(), strict=True)
        slots, num_entries = [], 0
        for query, length, table in rows:
            first = 0 if shape.window is None else max(0, length - query - shape.window + 1)
            entries = table[first // size : -(-length // size)].long()
            num_entries += len(entries)
            of_blocks = entries[:, None] * size + torch.arange(size)
            slots.append(of_blocks.flatten()[first % size :][: length - first])
        num_slots = torch.cat(slots).unique().numel()
        cached = 2 * num_slots * shape.num_kv_heads * shape.head_size * shape.stored_dtype.itemsize
        fed = 2 * self.q.numel() * shape.dtype.itemsize
        return cached + fed + 4 * num_entries

    @property
    def flops(self) -> int:
        """2 * pairs * query heads * (head size for q.k + head size for p.v)."""
        return 4 * self.num_pairs * self.shape.num_q_heads * self.shape.head_size

    def gathered(self, seq: int) -> tuple[Tensor, Tensor]:
        """(keys, values) of a sequence, [seq_len, Hkv, D] in the cache's dtype, in the order of its tokens."""
        length = self.batch.seq_lens[seq]
        blocks = self.block_tables[seq, : -(-length // self.shape.block_size)].long()
        shape = (-1, self.shape.num_kv_heads, self.shape.head_size)
        # indexing has no kernels for every fp8 dtype; bytes have
        keys, values = (
            cache.view(torch.uint8)[blocks].view(cache.dtype) if cache.itemsize == 1 else cache[blocks]
            for cache in (self.k_cache, self.v_cache)
        )  # fmt: skip
        return keys.reshape(shape)[:length], values.reshape(shape)[:length]

    def run(self, plan: Any = None) -> Tensor:
        """Octavo's result, [T, Hq, D]."""
        out = paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            block_tables=self.block_tables,
            max_query_len=max(self.batch.query_lens),
            max_seq_len=max(self.batch.seq_lens),
            scale=self.scale,
            window=self.shape.window,
            softcap=self.shape.softcap,
            num_decodes=self.batch.num_decodes,
            plan=plan,
        )
        return cast(Tensor, out)  # without return_lse

    def expected(self, seq: int, queries: list[int]) -> Tensor:
        """What attention is for some new tokens of a sequence, in fp64: [len(queries), Hq, D].

        Written apart from all that is timed: gathered keys, one matrix product, a softmax over what is visible.
        """
        shape, length = self.shape, self.batch.seq_lens[seq]
        first = int(self.query_start_loc[seq])
        positions = (
            torch.tensor(queries, device=self.q.device) + length - self.batch.query_lens[seq]
        )
        keys, values = (x.to(torch.float64) for x in self.gathered(seq))
        q = self.q[first + torch.tensor(queries, device=self.q.device)].double()
        # query heads that share a KV head are neighbours
        q = q.unflatten(1, (shape.num_kv_heads, -1))
        scores = torch.einsum("thgd,khd->hgtk", q, keys) * self.scale
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        key = torch.arange(length, device=self.q.device)
        hidden = key > positions[:, None]
        if shape.window is not None:
            hidden |= key <= positions[:, None] - shape.window
        weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
        return torch.einsum("hgtk,khd->thgd", weights, values).flatten(1, 2)

    @cached_property
    def _exact(self) -> list[tuple[list[int], Tensor]]:
        """For each sequence the new tokens that are looked at, and `expected` of them: one computation for all that are verified."""
        exact = []
        for seq, query_len in enumerate(self.batch.query_lens):
            count = min(query_len, _MOST_VERIFIED)
            queries = sorted({(query_len - 1) * i // max(1, count - 1) for i in range(count)})
            exact.append((queries, self.expected(seq, queries)))
        return exact

    def verify(self, out: Tensor) -> float:
        """The largest relative error of a result [T, Hq, D], over all sequences and up to eight new tokens of each.

        Raises WrongResult when it is more than `TOLERANCES` allows, or a number is not finite.
        """
        if out.shape != self.q.shape:
            raise WrongResult(f"out: expected shape {tuple(self.q.shape)}, got {tuple(out.shape)}")
        if not out.isfinite().all():  # unwritten memory is NaN: KernelCase.verify
            raise WrongResult("out: expected finite numbers, got others")
        worst, first = 0.0, 0
        for query_len, (queries, exact) in zip(self.batch.query_lens, self._exact, strict=True):
            got = out[first + torch.tensor(queries, device=out.device)].double()
            first += query_len
            error = (got - exact).norm(dim=-1) / exact.norm(dim=-1)
            worst = max(worst, float(error.nan_to_num(nan=math.inf).max()))
        if not worst <= TOLERANCES[self.shape.dtype]:
            raise WrongResult(
                f"relative error {worst:.2g}, expected at most {TOLERANCES[self.shape.dtype]:g} for {self.shape.dtype}"
            )
        return worst


def make_problem(
    batch: BatchSpec,
    shape: AttentionShape,
    device: torch.device | str = "cpu",
    *,
    tables: Tensor | None = None,
    edges: Sequence[int] = (),
    seed: int = 0,
) -> AttentionProblem:
    """A problem of random numbers. `tables` int32 [S, W] are a recorded step's, sequences may share blocks in them; by default
    blocks lie in random order. `edges`: positions at which a token lost must be seen, besides the usual ones.

    Raises ValueError for a batch that is too large for the memory that is free.
    """
    _check_memory(batch, shape, device)
    if tables is None:
        tables = scattered_tables(batch, shape.block_size, seed)
    else:
        tables = compacted_tables(tables.cpu(), batch, shape.block_size)
    starts = torch.tensor([0, *itertools.accumulate(batch.query_lens)], dtype=torch.int32)
    on_device = torch.Generator(device).manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float32, device=device, generator=on_device)

    cache_shape = (int(tables.max()) + 1, shape.block_size, shape.num_kv_heads, shape.head_size)
    keys, values = random(*cache_shape), random(*cache_shape)
    _with_edges(values, batch, tables, shape, edges)
    queries = random(batch.num_tokens, shape.num_q_heads, shape.head_size)
    if shape.softcap is not None:
        # half of the heads have scores so large that the cap bends them, and a call without it is seen; the other half see
        # every token, those at the edges too, which a softmax of large scores would hide
        queries.view(-1, shape.head_size)[(batch.num_tokens * shape.num_q_heads > 1) :: 2] *= max(
            1.0, shape.softcap / 8
        )
    return AttentionProblem(
        batch,
        shape,
        queries.to(shape.dtype),
        keys.to(shape.stored_dtype),
        values.to(shape.stored_dtype),
        starts.to(device),
        torch.tensor(batch.seq_lens, dtype=torch.int32, device=device),
        tables.to(device),
    )


def _check_memory(batch: BatchSpec, shape: AttentionShape, device: torch.device | str) -> None:
    """Of the cache and the queries, as they are made: in fp32, then in their dtype."""
    counts = num_blocks(batch, shape.block_size)
    cached = sum(counts) * shape.block_size * shape.num_kv_heads * shape.head_size
    fed = batch.num_tokens * shape.num_q_heads * shape.head_size
    needed = 2 * cached * (4 + shape.stored_dtype.itemsize) + fed * (4 + shape.dtype.itemsize)
    needed += 4 * len(counts) * max(counts)
    if needed > (free := free_bytes(torch.device(device))):
        raise ValueError(
            f"batch: expected one that fits into {free / 2**30:.1f} GiB of free memory, got {needed / 2**30:.1f} GiB for {batch}"
        )


def _with_edges(
    values: Tensor, batch: BatchSpec, tables: Tensor, shape: AttentionShape, more: Sequence[int]
) -> None:
    """Make the tokens at the edges of what each query sees count: a mean over n values has length 1 / sqrt(n) of theirs, so a
    token of the usual size would be lost in a result's rounding."""
    factors: dict[tuple[int, int], float] = {}  # by slot: sequences may share blocks
    for seq, (query_len, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        positions = length - query_len, length - 1
        edges = {0, *positions, *more}
        if shape.window is not None:
            edges |= {max(0, p - shape.window + side) for p in positions for side in (0, 1)}
        for edge in edges:
            slot = int(tables[seq, edge // shape.block_size]), edge % shape.block_size
            factors[slot] = max(1.0, math.sqrt(length) / 4)
    for (block, offset), factor in factors.items():
        values[block, offset] *= factor


def _visible_pairs(query_len: int, seq_len: int, window: int | None) -> int:
    context = seq_len - query_len
    if window is None:
        return query_len * context + query_len * (query_len + 1) // 2
    whole = max(0, query_len - max(0, window - context))  # queries that see a full window
    rest = query_len - whole
    return whole * window + rest * context + rest * (rest + 1) // 2
