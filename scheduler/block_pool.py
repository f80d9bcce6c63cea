"""Which blocks of one device are free, cached or referenced. Knows ids, reference counts and digests; no sequences.

Each block but the null block is in exactly one of three classes, and each move below costs O(1):

    free  ──take──>  referenced  ──release──>  free        its content is worthless
      ^                  │   ^
      │               release acquire
      │                  v   │
      └────evict─────  cached                              it holds a full block of a known prefix

`take` prefers free blocks, then evicts the cached block that was released first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from ..runtime.metadata import NULL_BLOCK


class BlockPool:
    """Blocks 1..num_blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks  # usable ones, the null block is not among them
        self.ref_count = [0] * (num_blocks + 1)
        self._free = list(range(num_blocks, NULL_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # in order of eviction
        self._block_of: dict[bytes, int] = {}  # digest -> block
        self._digest_of: dict[int, bytes] = {}  # and back

    @property
    def num_free(self) -> int:
        """Blocks that can be had now: free and evictable ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that some table names."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks nobody names that a known prefix can be found in."""
        return len(self._cached)

    def take(self) -> int:
        """A block of one's own, its former content forgotten."""
        if self._free:
            block = self._free.pop()
        elif not self._cached:
            raise RuntimeError("no block is free: expected the number to be asked first")
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self.ref_count[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """One more table names the block."""
        if self.ref_count[block] == 0:
            del self._cached[block]
        self.ref_count[block] += 1

    def release(self, block: int) -> None:
        """One table less names the block."""
        self.ref_count[block] -= 1
        if self.ref_count[block] == 0:
            if block in self._digest_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    # -- known content

    def find(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def publish(self, block: int, digest: bytes) -> bool:
        """Make the block findable. False, and nothing happens, if its content or the block itself is known already."""
        if digest in self._block_of or block in self._digest_of:
            return False
        self._block_of[digest], self._digest_of[block] = block, digest
        return True

    def unpublish(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._forget(block) and self.ref_count[block] == 0:
                del self._cached[block]
                self._free.append(block)

    def unpublish_all(self) -> None:
        self.unpublish(list(self._digest_of))

    def _forget(self, block: int) -> bool:
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
        return digest is not None

    # -- checking

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """RuntimeError unless each block is in exactly one class and counts and maps agree with the tables given."""
        named = Counter(block for table in tables for block in table if block != NULL_BLOCK)
        free, cached = set(self._free), set(self._cached)
        referenced = {block for block in range(1, self.num_blocks + 1) if self.ref_count[block] > 0}
        _agree("null block", NULL_BLOCK in free | cached or bool(self.ref_count[NULL_BLOCK]), False)
        _agree("free list without repeats", len(free), len(self._free))
        overlap = free & cached or free & referenced or cached & referenced
        _agree("classes overlap", bool(overlap), False)
        _agree("blocks in all classes", len(free | cached | referenced), self.num_blocks)
        _agree("reference counts", {b: self.ref_count[b] for b in referenced}, dict(named))
        _agree("digest maps", {d: b for b, d in self._digest_of.items()}, self._block_of)
        _agree("cached blocks without digest", cached - set(self._digest_of), set())
        _agree("free blocks with digest", free & set(self._digest_of), set())


def _agree(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise RuntimeError(f"block pool: {what}: expected {expected!r}, got {got!r}")
