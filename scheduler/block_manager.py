"""Who owns which KV block: allocation, sharing, copy-on-write and the prefix cache. Knows ids and tokens, no tensors.

Each block of the pool but the null block is in exactly one of three classes:

    free        nobody's, content worthless                          -> taken first
    cached      nobody's, but holds a full block of a known prefix   -> evicted when `free` is empty, oldest first
    referenced  named by ref_count[b] >= 1 block tables

A full block is known by its digest, a chain over all tokens up to its end, so equal digests mean equal prefixes. Block
tables are append-only: a running sequence is never re-pointed to another block with the same content. The one exception
is copy-on-write, which re-points one entry and leaves tables already issued as they are.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from ..runtime.metadata import NULL_BLOCK
from .sequence import Sequence

_DIGEST_BYTES = 16


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class BlockTable:
    """Block ids of one sequence in a growing int32 array; `view()` is read-only and never changes afterwards."""

    __slots__ = ("_ids", "_length", "_view")

    def __init__(self) -> None:
        self._ids = np.zeros(8, np.int32)
        self._length = 0
        self._view: np.ndarray | None = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return int(self._ids[: self._length][index])

    def extend(self, block_ids: list[int]) -> None:
        stop = self._length + len(block_ids)
        if stop > len(self._ids):
            self._ids = np.resize(self._ids, max(stop, 2 * len(self._ids)))
        self._ids[self._length : stop] = block_ids
        self._length, self._view = stop, None

    def replace(self, index: int, block_id: int) -> None:
        """Re-point one entry. Views already given out keep the old array."""
        self._ids = self._ids.copy()
        self._ids[index] = block_id
        self._view = None

    def view(self) -> np.ndarray:
        if self._view is None:
            self._view = self._ids[: self._length]
            self._view.flags.writeable = False
        return self._view

    def fork(self) -> BlockTable:
        child = BlockTable()
        child.extend(self.view().tolist())
        return child


class BlockManager:
    """Blocks 1..num_blocks of a pool, given to sequences block table by block table.

    Every method either does all of what it says or changes nothing; `grow` relies on its caller for that.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        cache_key: bytes = b"octavo",
    ) -> None:
        self.num_blocks = num_blocks  # usable ones, the null block is not among them
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_count = [0] * (num_blocks + 1)
        self._cache_key = cache_key  # the same key gives the same digests in every process
        self._free = list(range(num_blocks, NULL_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # in order of eviction
        self._block_of: dict[bytes, int] = {}  # digest -> block
        self._digest_of: dict[int, bytes] = {}  # and back
        self._tables: dict[int, BlockTable] = {}

    # -- reading

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be had now: free and evictable ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some table names."""
        return self.num_blocks - self.num_free_blocks

    def has_table(self, seq_id: int) -> bool:
        return seq_id in self._tables

    def table(self, seq_id: int) -> np.ndarray:
        """int32 [blocks], read-only and never changed afterwards."""
        return self._tables[seq_id].view()

    def num_blocks_needed(self, seqs: Iterable[Sequence], num_new_tokens: int) -> int:
        """Blocks to be had before each sequence can be fed `num_new_tokens` more, copies of shared blocks included."""
        needed = 0
        # shared blocks, once for each sharer that will have taken a copy by then
        leaving: list[int] = []
        for seq in seqs:
            table = self._tables[seq.seq_id]
            needed += cdiv(seq.num_computed_tokens + num_new_tokens, self.block_size) - len(table)
            tail = self._partial_tail(seq, table)
            if tail is not None and self.ref_count[tail] - leaving.count(tail) > 1:
                leaving.append(tail)
                needed += 1
        return needed

    def _partial_tail(self, seq: Sequence, table: BlockTable) -> int | None:
        """The block that holds the sequence's last computed tokens and has room for its next one, if any.

        Tables cover exactly the computed tokens, so it is the only block in use that the next tokens are written to.
        """
        return table[-1] if seq.num_computed_tokens % self.block_size else None

    # -- giving and taking

    def allocate(self, seq: Sequence, cached_blocks: list[int]) -> None:
        """Begin a table with blocks found by `match`; the sequence then has their tokens computed."""
        if seq.seq_id in self._tables:
            raise RuntimeError(f"sequence {seq.seq_id} has a block table already")
        for block in cached_blocks:
            if self.ref_count[block] == 0:
                del self._cached[block]
            self.ref_count[block] += 1
        table = self._tables[seq.seq_id] = BlockTable()
        table.extend(cached_blocks)
        seq.num_computed_tokens = len(cached_blocks) * self.block_size

    def grow(self, seqs: Iterable[Sequence], num_new_tokens: int) -> list[tuple[int, int]]:
        """Make room for `num_new_tokens` more tokens of each sequence, all of them writable by it alone.

        Returns the (source, destination) pairs to copy before the tokens are written. The caller has made sure of
        `num_blocks_needed(...) <= num_free_blocks`.
        """
        copies = []
        for seq in seqs:
            table = self._tables[seq.seq_id]
            tail = self._partial_tail(seq, table)
            if tail is not None and self.ref_count[tail] > 1:
                own = self._take()
                self.ref_count[tail] -= 1
                table.replace(len(table) - 1, own)
                copies.append((tail, own))
            missing = cdiv(seq.num_computed_tokens + num_new_tokens, self.block_size) - len(table)
            if missing:
                table.extend([self._take() for _ in range(missing)])
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give `child` the blocks of `parent`; whoever writes a shared block first gets a copy."""
        if child.seq_id in self._tables:
            raise RuntimeError(f"sequence {child.seq_id} has a block table already")
        table = self._tables[child.seq_id] = self._tables[parent.seq_id].fork()
        for block in table.view().tolist():
            self.ref_count[block] += 1

    def free(self, seq: Sequence) -> None:
        """Let go of the sequence's blocks, last block first, so that the ends of prefixes are evicted before their
        beginnings. A sequence without a table is left alone."""
        table = self._tables.pop(seq.seq_id, None)
        if table is None:
            return
        for block in reversed(table.view().tolist()):
            self.ref_count[block] -= 1
            if self.ref_count[block] == 0:
                if block in self._digest_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        elif not self._cached:
            raise RuntimeError("no block is free: expected num_blocks_needed to be asked first")
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self.ref_count[block] = 1
        return block

    # -- prefix cache

    def match(self, seq: Sequence, namespace: str, max_tokens: int) -> list[int]:
        """Blocks of the longest known prefix of the sequence's first `max_tokens` tokens; nothing is taken yet.

        One token at least is left to compute: a step needs its logits.
        """
        if not self.enable_prefix_caching:
            return []
        blocks = []
        for digest in self._digests(seq, namespace, (max_tokens - 1) // self.block_size):
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_evictable(self, blocks: list[int]) -> int:
        """How many of `blocks` count as free now and would not once taken."""
        return sum(self.ref_count[block] == 0 for block in blocks)

    def publish(self, seq: Sequence, namespace: str, start: int) -> list[int]:
        """Make the full blocks of tokens [start, num_computed_tokens) findable; returns the newly known blocks.

        A block whose content is known already under another id stays private to its owner.
        """
        if not self.enable_prefix_caching:
            return []
        first, stop = start // self.block_size, seq.num_computed_tokens // self.block_size
        if first == stop:
            return []
        table, digests, known = self._tables[seq.seq_id], self._digests(seq, namespace, stop), []
        for index in range(first, stop):
            block, digest = table[index], digests[index]
            if digest not in self._block_of and block not in self._digest_of:
                self._block_of[digest], self._digest_of[block] = block, digest
                known.append(block)
        return known

    def unpublish(self, blocks: Iterable[int]) -> None:
        """Forget what `publish` made known of these blocks, because the step that fills them will not run."""
        for block in blocks:
            if self._forget(block) and self.ref_count[block] == 0:
                del self._cached[block]
                self._free.append(block)

    def reset_prefix_cache(self) -> None:
        """Forget every published block, for example after the weights have changed."""
        self.unpublish(list(self._digest_of))

    def _forget(self, block: int) -> bool:
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
        return digest is not None

    def _digests(self, seq: Sequence, namespace: str, num_blocks: int) -> list[bytes]:
        """Chain digests of the first `num_blocks` full blocks: d[i] = H(key = d[i-1], tokens of block i)."""
        digests = seq.block_digests
        if len(digests) < num_blocks:
            parent = digests[-1] if digests else self._root(namespace)
            tokens = seq.token_ids
            for index in range(len(digests), num_blocks):
                block_tokens = tokens[
                    index * self.block_size : (index + 1) * self.block_size
                ].tobytes()
                parent = blake2b(block_tokens, digest_size=_DIGEST_BYTES, key=parent).digest()
                digests.append(parent)
        return digests[:num_blocks]

    def _root(self, namespace: str) -> bytes:
        return blake2b(namespace.encode(), digest_size=_DIGEST_BYTES, key=self._cache_key).digest()

    # -- checking

    def dump(self) -> str:
        """Every block table with the reference count of each block, for reading when something reads the wrong KV."""
        lines = []
        for seq_id, table in sorted(self._tables.items()):
            blocks = " ".join(
                f"{block}(x{self.ref_count[block]})" for block in table.view().tolist()
            )
            lines.append(f"seq_id={seq_id} blocks: {blocks}")
        return "\n".join([*lines, f"free={len(self._free)} cached={len(self._cached)}"])

    def check_integrity(self) -> None:
        """Raise RuntimeError unless each block is in exactly one class and every count and map agrees with the tables."""
        named = Counter(block for table in self._tables.values() for block in table.view().tolist())
        free, cached = set(self._free), set(self._cached)
        referenced = {block for block in range(1, self.num_blocks + 1) if self.ref_count[block] > 0}
        _agree(
            "null block",
            NULL_BLOCK in free | cached | set(named) or self.ref_count[NULL_BLOCK],
            False,
        )
        _agree("free list without repeats", len(free), len(self._free))
        _agree(
            "classes overlap",
            bool(free & cached or free & referenced or cached & referenced),
            False,
        )
        _agree("blocks in all classes", len(free | cached | referenced), self.num_blocks)
        _agree("reference counts", {b: self.ref_count[b] for b in referenced}, dict(named))
        _agree("digest maps", {d: b for b, d in self._digest_of.items()}, self._block_of)
        _agree("cached blocks without digest", cached - set(self._digest_of), set())
        _agree("free blocks with digest", free & set(self._digest_of), set())


def _agree(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise RuntimeError(f"block manager: {what}: expected {expected!r}, got {got!r}")
