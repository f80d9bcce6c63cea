"""Paged batches for attention tests, and the measure of error that all kernel tests share."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch

# An implementation may be this much further from the fp64 oracle than torch is, computing in the same dtype.
WORST_RATIO = 2.0
# and by this much of the largest number, or of 1: a few units in the last place
TINY = {torch.float32: 2e-6, torch.float16: 2.5e-4, torch.bfloat16: 2e-3}
GARBAGE = 2**31 - 1  # what unused entries of a block table hold


QUANTISED = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "e4m3 bits": torch.uint8,
}
UNREAD_NUMBER = {torch.int8: 127, torch.uint8: 0x7F}  # where there is no NaN


@dataclass
class Batch:
    """A paged batch in which slots that no query sees are NaN, and table entries of blocks of such slots out of range."""

    seq_lens: list[int]
    query_lens: list[int]
    num_q_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 32
    head_size_v: int | None = None
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None  # None: dtype
    num_decodes: int | None = 0
    max_decode_query_len: int | None = None
    nobodys: tuple[int, int] = (0, 0)  # rows of q before the first and after the last sequence's
    num_prefix_blocks: int | None = None  # blocks that all sequences share, for a cascade
    hnd: bool = False  # heads before tokens inside a block
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        prefix = range(self.num_prefix_blocks or 0)
        counts = [-(-length // self.block_size) for length in self.seq_lens]
        num_blocks = sum(counts) + len(prefix) + 3
        ids = (1 + torch.randperm(num_blocks - 1)).tolist()
        shared = [ids.pop() for _ in prefix]
        width = max([*counts, len(prefix)]) + 2
        tables = torch.full((len(counts), width), GARBAGE, dtype=torch.int32)
        self.used = torch.zeros(num_blocks, self.block_size, dtype=torch.bool)
        for row, (count, length) in enumerate(zip(counts, self.seq_lens, strict=True)):
            first = self.first_seen(row)
            for i in range(count):
                block = shared[i] if i < len(prefix) else ids.pop()
                begin = max(first - i * self.block_size, 0)
                end = length - i * self.block_size
                if begin < min(end, self.block_size):
                    self.used[block, begin:end] = True
                    if i >= len(prefix):
                        tables[row, i] = block
        self.k_cache = self._cache(num_blocks, self.head_size)
        self.v_cache = self._cache(num_blocks, self.head_size_v or self.head_size)
        before, after = self.nobodys
        starts = [before, *(before + n for n in itertools.accumulate(self.query_lens))]
        # queries are a strided view, as they are in a fused QKV projection
        packed = torch.randn(starts[-1] + after, self.num_q_heads + 2, self.head_size).to(
            self.dtype
        )
        self.q = packed[:, : self.num_q_heads]
        self.query_start_loc = torch.tensor(starts, dtype=torch.int32)
        self.seq_lens_tensor = torch.tensor(self.seq_lens, dtype=torch.int32)
        self.block_tables = tables
        self.prefix_block_ids = torch.tensor(shared, dtype=torch.int32)

    def sight(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(distance, visible), [query_len, seq_len]: key minus query position; what a query sees but for the tree mask."""
        seq_len, query_len = self.seq_lens[row], self.query_lens[row]
        key, query = torch.arange(seq_len), torch.arange(seq_len - query_len, seq_len)[:, None]
        distance = key - query
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.options.get("causal", True):
            visible &= distance <= 0
        if (window := self.options.get("window")) is not None:
            visible &= distance > -window
        if (chunk := self.options.get("attention_chunk")) is not None:
            visible &= key >= query - query % chunk
        if (ranges := self.options.get("prefix_lm_ranges")) is not None:
            for low, high in ranges[row].tolist():
                visible |= (low <= key) & (key < high) & (low <= query) & (query < high)
        return distance, visible

    def first_seen(self, row: int) -> int:
        """The first key that some query of a sequence sees; its length if none does."""
        seen = self.sight(row)[1].any(dim=0).nonzero()
        return int(seen[0]) if len(seen) else self.seq_lens[row]

    def _cache(self, num_blocks: int, head_size: int) -> torch.Tensor:
        """One layer of a pool, in either layout."""
        inner = (self.block_size, self.num_kv_heads)
        shape = (num_blocks, 2, *(reversed(inner) if self.hnd else inner), head_size)
        cache = self.stored(torch.randn(shape))[:, 1]
        cache = cache.transpose(1, 2) if self.hnd else cache
        unread = UNREAD_NUMBER.get(cache.dtype, float("nan"))
        if cache.dtype.is_floating_point and cache.itemsize == 1:
            cache.view(torch.uint8)[~self.used] = 0x7F  # NaN in e4m3 and e5m2
        else:
            cache[~self.used] = unread
        return cache

    def stored(self, values: torch.Tensor) -> torch.Tensor:
        """Values as the cache's numbers, for scales about 1 (1/32 for int8)."""
        dtype = self.cache_dtype or self.dtype
        if dtype == torch.int8:
            return (32 * values).round().clamp(-127, 127).to(dtype)
        if dtype == torch.uint8:
            return values.to(torch.float8_e4m3fn).view(torch.uint8)
        return values.to(dtype)

    def numbers(self, cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """What a cache holds, in the batch's dtype."""
        if cache.dtype == torch.uint8:
            cache = cache.contiguous().view(torch.float8_e4m3fn)
        values = cache.float() if self.cache_dtype else cache
        if scale is not None:
            values = values * (scale if scale.dim() == 2 else scale.view(-1))[..., None]
        return values.to(self.dtype)

    def token_scales(self) -> torch.Tensor:
        """A scale for every slot and head, some a thousand times others; NaN where no query sees the slot."""
        number = 1 / 32 if self.cache_dtype == torch.int8 else 1.0
        blocks = torch.full((len(self.used), 3, self.block_size + 1, self.num_kv_heads), torch.nan)
        scales = blocks[:, 1, :-1]
        scales[self.used] = 1.0
        return scales.mul_(number * 2.0 ** (torch.rand(scales.shape) * 10 - 8))

    def table(self, row: int) -> list[int]:
        """Block ids of a sequence, those of the shared prefix included."""
        ids = self.block_tables[row].tolist()
        prefix = self.prefix_block_ids.tolist()
        return [*prefix, *ids[len(prefix) :]]

    @property
    def index(self) -> dict[str, torch.Tensor]:
        """The oracle's index arguments."""
        index = {
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens_tensor,
            "block_tables": self.block_tables,
        }
        if self.num_prefix_blocks is not None:
            index["prefix_block_ids"] = self.prefix_block_ids
        return index

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the op after q and the caches."""
        return {
            **self.index,
            "max_query_len": max(self.query_lens),
            "max_seq_len": max(self.seq_lens),
            "num_decodes": self.num_decodes,
            "max_decode_query_len": self.max_decode_query_len,
            **self.options,
        }

    @property
    def somebodys(self) -> slice:
        """Rows of q that belong to a sequence."""
        return slice(int(self.query_start_loc[0]), int(self.query_start_loc[-1]))

    @property
    def op(self) -> str:
        return "paged_attention" if self.num_prefix_blocks is None else "cascade_attention"


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest absolute difference; infinite where one is NaN or they are not infinite alike."""
    result = result.double()
    if not torch.equal(result.isinf(), exact.isinf()) or result.isnan().any():
        return float("inf")
    finite = ~exact.isinf()
    return (result - exact)[finite].abs().max().item() if finite.any() else 0.0


def assert_close(result: torch.Tensor, exact: torch.Tensor, naive: torch.Tensor) -> None:
    """`result` is not much further from `exact` (fp64) than `naive`, torch's own computation in the same dtype."""
    largest = exact[exact.isfinite()].abs().max().item() if exact.isfinite().any() else 0.0
    allowed = WORST_RATIO * error(naive, exact) + TINY[result.dtype] * max(1.0, largest)
    actual = error(result, exact)
    assert actual <= allowed, f"error {actual:.3g}, allowed {allowed:.3g}"


def naive_attention(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by torch in the batch's dtype, over keys and values made contiguous: the measure of rounding error."""
    options = batch.options
    group = batch.num_q_heads // batch.num_kv_heads
    scale = options.get("scale", batch.head_size**-0.5)
    softcap, slopes, sinks = (options.get(name) for name in ("softcap", "alibi_slopes", "sinks"))
    out = batch.q.new_zeros(*batch.q.shape[:2], batch.v_cache.shape[3])
    lse = torch.full(batch.q.shape[:2], float("-inf"))
    starts = batch.query_start_loc.tolist()
    for seq, (seq_len, query_len) in enumerate(zip(batch.seq_lens, batch.query_lens, strict=True)):
        rows = slice(starts[seq], starts[seq + 1])
        first = batch.first_seen(seq)
        if first == seq_len or query_len == 0:
            continue
        distance, visible = (x[:, first:] for x in batch.sight(seq))
        table = batch.table(seq)
        slots = [divmod(i, batch.block_size) for i in range(first, seq_len)]
        blocks = torch.tensor([table[i] for i, _ in slots])
        offsets = torch.tensor([offset for _, offset in slots])
        scales = [options.get(name) for name in ("k_scale", "v_scale")]
        scales = [x[blocks, offsets] if x is not None and x.dim() == 3 else x for x in scales]
        k = batch.numbers(batch.k_cache[blocks, offsets], scales[0])
        v = batch.numbers(batch.v_cache[blocks, offsets], scales[1])
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", batch.q[rows], k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if slopes is not None:
            scores = scores + (slopes[:, None, None] * distance).to(batch.dtype)
        hidden = ~visible
        if options.get("tree_mask") is not None and query_len <= options["tree_mask"].shape[1]:
            new_tokens = min(query_len, seq_len - first)
            line = options["tree_mask"][rows, query_len - new_tokens : query_len]
            hidden[:, seq_len - first - new_tokens :] |= ~line
        scores = scores.masked_fill(hidden, float("-inf"))
        total = scores.float().logsumexp(dim=-1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.float()[:, None])
        seen = ~hidden.all(dim=-1)
        weights = torch.exp(scores - total[..., None]).to(batch.dtype).nan_to_num(0.0)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v)
        lse[rows] = total.masked_fill(~seen, float("-inf")).t()
    return out, lse


def random_tree(batch: Batch) -> torch.Tensor:
    """A branching draft per sequence: each new token sees its ancestors and itself, but for a few that see none."""
    decodes = len(batch.seq_lens) if batch.num_decodes is None else batch.num_decodes
    width = max(batch.query_lens[:decodes])
    tree = torch.zeros(batch.q.shape[0], width, dtype=torch.bool)
    starts = batch.query_start_loc.tolist()
    for start, query_len in zip(starts, batch.query_lens[:decodes], strict=False):
        for i in range(query_len):
            if i:
                parent = int(torch.randint(i, ()))
                tree[start + i] = tree[start + parent]
            tree[start + i, i] = True
    blind = torch.rand(len(tree)) < 0.1
    tree[blind] = False
    tree[starts[decodes] :] = True  # prefills have no tree
    return tree
