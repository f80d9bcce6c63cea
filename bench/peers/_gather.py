"""Paged KV as the dense batches that attention without paging needs, shared by the peers that torch itself brings.

Sequences with the same number of new tokens make one dense batch, so that decodes are not padded to the length of a prompt.
In a batch, keys and values that no query sees (before a window) are left out, and shorter sequences are padded at the end
with a token of their own, which the mask hides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ..attention_problem import AttentionProblem

Tensor = torch.Tensor


@dataclass(frozen=True)
class DenseBatch:
    """Indices of the sequences whose query length is `query_len`, made once per step.

    rows [S, query_len]: their rows in q; blocks, offsets [S, L]: where each key lies in the cache; contexts [S]: keys before
    the first query, counted from the first key that is gathered; num_keys: of each sequence.
    """

    problem: AttentionProblem
    query_len: int
    num_keys: tuple[int, ...]
    rows: Tensor
    blocks: Tensor
    offsets: Tensor
    contexts: Tensor

    @property
    def width(self) -> int:
        return self.blocks.shape[1]

    @property
    def is_even(self) -> bool:
        """No sequence is padded."""
        return set(self.num_keys) == {self.width}

    @property
    def hides_by_window(self) -> bool:
        """A query does not see the whole of what was gathered before it."""
        window = self.problem.shape.window
        return window is not None and max(self.num_keys) > window

    @cached_property
    def mask(self) -> Tensor:
        """bool [S, 1, query_len, L]: True where a query sees a key."""
        key = torch.arange(self.width, device=self.rows.device)
        last = self.contexts[:, None] + torch.arange(self.query_len, device=self.rows.device)
        visible = key <= last[..., None]
        if self.problem.shape.window is not None:
            visible &= key > last[..., None] - self.problem.shape.window
        return visible[:, None]

    def queries(self) -> Tensor:
        """[S, Hq, query_len, D]"""
        return self.problem.q[self.rows].transpose(1, 2)

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """Two of [S, Hkv, L, D] in the dtype of q."""
        return self._gather(self.problem.k_cache), self._gather(self.problem.v_cache)

    def _gather(self, cache: Tensor) -> Tensor:
        # indexing has no kernels for every fp8 dtype; bytes have
        stored = cache.view(torch.uint8) if cache.itemsize == 1 else cache
        picked = stored[self.blocks, self.offsets].view(cache.dtype)
        return picked.to(self.problem.shape.dtype).transpose(1, 2)

    def scatter(self, result: Tensor, out: Tensor) -> None:
        """Write [S, Hq, query_len, D] to its rows of `out`."""
        out[self.rows] = result.transpose(1, 2)


def dense_batches(problem: AttentionProblem, multiple: int = 1) -> list[DenseBatch]:
    """`multiple`: of keys, to which all sequences are padded."""
    lengths = sorted(set(problem.batch.query_lens))
    return [_dense_batch(problem, length, multiple) for length in lengths]


def _dense_batch(problem: AttentionProblem, query_len: int, multiple: int) -> DenseBatch:
    shape, batch, device = problem.shape, problem.batch, problem.q.device
    seqs = [seq for seq, length in enumerate(batch.query_lens) if length == query_len]
    lengths = [batch.seq_lens[seq] for seq in seqs]
    hidden = [0 if shape.window is None else max(0, n - query_len - shape.window + 1) for n in lengths]  # fmt: skip
    num_keys = tuple(length - first for length, first in zip(lengths, hidden, strict=True))
    ids = torch.tensor(seqs, device=device)
    first, last = torch.tensor(hidden, device=device), torch.tensor(lengths, device=device) - 1
    width = -(-max(num_keys) // multiple) * multiple
    positions = first[:, None] + torch.arange(width, device=device)
    positions = positions.minimum(last[:, None])
    blocks = problem.block_tables[ids].long().gather(1, positions // shape.block_size)
    rows = problem.query_start_loc[ids].long()[:, None] + torch.arange(query_len, device=device)
    contexts = torch.tensor(num_keys, device=device) - query_len
    return DenseBatch(
        problem, query_len, num_keys, rows, blocks, positions % shape.block_size, contexts
    )
