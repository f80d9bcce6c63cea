"""Which sequence owns which KV block: block tables, sharing, copy-on-write, swap, window and prefix cache.

    block table of a sequence    [ 4  9  2  7 ]       entry i holds tokens [i * block_size, (i + 1) * block_size)
    fork                         [ 4  9  2  7 ]       names the same blocks, reference counts go up
    first to write block 7       [ 4  9  2  5 ]       takes a copy (7 -> 5), the other keeps 7
    past a sliding window        [ 0  0  2  5 ]       blocks no query can see any more become the null block

Knows ids and tokens, no tensors. Tables cover exactly the computed tokens, plus those of the step being made. They are
append-only: a running sequence is never re-pointed to another block with the same content. Copy-on-write and the window
re-point entries in a copy, so that tables already issued stay as they are. A full block is known by its digest, a chain
over all that its keys and values depend on, so equal digests mean equal content.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from ..runtime.metadata import NULL_BLOCK
from .block_pool import BlockPool
from .sequence import Sequence

_DIGEST_BYTES = 16


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class BlockTable:
    """Block ids of one sequence in a growing int32 array; `view()` is read-only and never changes afterwards."""

    __slots__ = ("_ids", "_length", "_view", "num_dropped")

    def __init__(self) -> None:
        self._ids = np.zeros(8, np.int32)
        self._length = 0
        self._view: np.ndarray | None = None
        self.num_dropped = 0  # leading entries that are the null block

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return int(self._ids[index if index >= 0 else self._length + index])

    def append(self, block_id: int) -> None:
        if self._length == len(self._ids):
            self.extend([block_id])
            return
        self._ids[self._length] = block_id
        self._length += 1
        self._view = None

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

    def drop(self, stop: int) -> list[int]:
        """Make the leading entries up to `stop` the null block; returns the blocks they named."""
        dropped = self._ids[self.num_dropped : stop].tolist()
        if dropped:
            self._ids = self._ids.copy()
            self._ids[:stop] = NULL_BLOCK
            self._view, self.num_dropped = None, stop
        return dropped

    @property
    def buffer(self) -> np.ndarray:
        return self._ids

    def view(self) -> np.ndarray:
        if self._view is None:
            self._view = self._ids[: self._length]
            self._view.flags.writeable = False
        return self._view

    def blocks(self) -> list[int]:
        """The blocks it names, the null block left out."""
        return self._ids[self.num_dropped : self._length].tolist()

    def map(self, block_of: dict[int, int]) -> BlockTable:
        """The same table with other block ids."""
        other = BlockTable()
        other.num_dropped = self.num_dropped
        other.extend([NULL_BLOCK] * self.num_dropped + [block_of[b] for b in self.blocks()])
        return other


class BlockManager:
    """Blocks of the device pool, and of a pool in host memory, given to sequences block table by block table.

    Every method either does all of what it says or changes nothing; `grow` and the swaps rely on their caller for that.
    A request's encoder tokens are one more sequence here: its table is what cross-attention reads.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        cache_key: bytes = b"octavo",
        num_cpu_blocks: int = 0,
        sliding_window: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.sliding_window = sliding_window
        self.device = BlockPool(num_blocks)
        self.host = BlockPool(num_cpu_blocks)
        self._cache_key = cache_key  # the same key gives the same digests in every process
        self._tables: dict[int, BlockTable] = {}
        self._host_tables: dict[int, BlockTable] = {}

    # -- reading

    @property
    def num_blocks(self) -> int:
        return self.device.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Device blocks that can be had now: free and evictable ones."""
        return self.device.num_free

    @property
    def num_used_blocks(self) -> int:
        """Device blocks that some table names."""
        return self.device.num_used

    @property
    def ref_count(self) -> list[int]:
        return self.device.ref_count

    def has_table(self, seq_id: int) -> bool:
        return seq_id in self._tables

    def has_host_table(self, seq_id: int) -> bool:
        return seq_id in self._host_tables

    def table(self, seq_id: int) -> np.ndarray:
        """int32 [blocks], read-only and never changed afterwards."""
        return self._tables[seq_id].view()

    def table_buffer(self, seq_id: int) -> np.ndarray:
        """The array whose beginning is the table, int32. Append-only; another one takes its place when it is full or an
        entry has to change."""
        return self._tables[seq_id].buffer

    def num_blocks_needed(self, seqs: Iterable[Sequence], num_new_tokens: int) -> int:
        """Blocks to be had before each sequence can be fed `num_new_tokens` more, copies of shared blocks included.

        For swapped sequences, once they are back.
        """
        needed = 0
        # shared blocks, once for each sharer that will have taken a copy by then
        leaving: Counter[int] = Counter()
        for seq in seqs:
            on_device = seq.seq_id in self._tables
            table = (self._tables if on_device else self._host_tables)[seq.seq_id]
            ref_count = (self.device if on_device else self.host).ref_count
            needed += cdiv(seq.num_computed_tokens + num_new_tokens, self.block_size) - len(table)
            tail = self._partial_tail(seq, table)
            if tail is not None and ref_count[tail] - leaving[tail] > 1:
                leaving[tail] += 1
                needed += 1
        return needed

    def _partial_tail(self, seq: Sequence, table: BlockTable) -> int | None:
        """The block that holds the sequence's last computed tokens and has room for its next one, if any.

        Tables cover exactly the computed tokens, so it is the only block in use that the next tokens are written to.
        """
        return table[-1] if seq.num_computed_tokens % self.block_size else None

    def held_alone(self, seqs: Iterable[Sequence]) -> set[int]:
        """Blocks that would become free if all these sequences let go of theirs."""
        named = Counter(b for seq in seqs for b in self._blocks_of(seq))
        return {b for b, count in named.items() if self.device.ref_count[b] == count}

    def _blocks_of(self, seq: Sequence) -> list[int]:
        table = self._tables.get(seq.seq_id)
        return [] if table is None else table.blocks()

    # -- giving and taking

    def allocate(self, seq: Sequence, cached_blocks: list[int]) -> None:
        """Begin a table with blocks found by `match`; the sequence then has their tokens computed."""
        if seq.seq_id in self._tables:
            raise RuntimeError(f"sequence {seq.seq_id} has a block table already")
        table = self._tables[seq.seq_id] = BlockTable()
        for block in cached_blocks:
            if block == NULL_BLOCK:
                table.num_dropped += 1
            else:
                self.device.acquire(block)
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
            if tail is not None and self.device.ref_count[tail] > 1:
                own = self.device.take()
                self.device.release(tail)
                table.replace(len(table) - 1, own)
                copies.append((tail, own))
            missing = cdiv(seq.num_computed_tokens + num_new_tokens, self.block_size) - len(table)
            if missing:
                table.extend([self.device.take() for _ in range(missing)])
        return copies

    def drop_out_of_window(self, seq: Sequence, fence: list[int] | None = None) -> None:
        """Let go of blocks that no token still to be fed can see.

        fence   takes them, for `release` later: a step in flight may still read them
        """
        if self.sliding_window is None:
            return
        first_visible = seq.num_computed_tokens - self.sliding_window + 1
        table = self._tables[seq.seq_id]
        dropped = table.drop(min(max(first_visible, 0) // self.block_size, len(table)))
        if fence is None:
            self.release(dropped)
        else:
            fence += dropped

    def grow_by_one(self, seq: Sequence) -> np.ndarray:
        """One more block for a sequence whose table is full; returns the table's array, see `table_buffer`."""
        table = self._tables[seq.seq_id]
        table.append(self.device.take())
        return table.buffer

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give `child` the blocks of `parent`; whoever writes a shared block first gets a copy."""
        if child.seq_id in self._tables:
            raise RuntimeError(f"sequence {child.seq_id} has a block table already")
        blocks = self._tables[parent.seq_id].blocks()
        self._tables[child.seq_id] = self._tables[parent.seq_id].map({b: b for b in blocks})
        for block in blocks:
            self.device.acquire(block)

    def free(self, seq: Sequence) -> None:
        """Let go of the sequence's blocks, on the device or in host memory, last block first, so that the ends of
        prefixes are evicted before their beginnings. A sequence without a table is left alone: the one way out, for
        every way in which a request can end."""
        for pool, tables in ((self.device, self._tables), (self.host, self._host_tables)):
            table = tables.pop(seq.seq_id, None)
            if table is not None:
                for block in reversed(table.blocks()):
                    pool.release(block)

    def detach(self, seq: Sequence) -> list[int]:
        """Take the sequence's device blocks from it without letting go of them: for `release` when nobody reads them."""
        table = self._tables.pop(seq.seq_id, None)
        return [] if table is None else table.blocks()[::-1]

    def release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.device.release(block)

    # -- swap: all sequences of a request move together, a block they share moves once

    def can_swap_out(self, seqs: Iterable[Sequence]) -> bool:
        return len({b for seq in seqs for b in self._blocks_of(seq)}) <= self.host.num_free

    def swap_out(self, seqs: Iterable[Sequence]) -> list[tuple[int, int]]:
        """Move the tables to host memory; returns the (device block, host block) pairs to copy."""
        return self._swap(seqs, self._tables, self.device, self._host_tables, self.host)

    def num_blocks_to_swap_in(self, seqs: Iterable[Sequence]) -> int:
        """Device blocks that `swap_in` takes."""
        tables = (self._host_tables.get(seq.seq_id) for seq in seqs)
        return len({block for table in tables if table is not None for block in table.blocks()})

    def swap_in(self, seqs: Iterable[Sequence]) -> list[tuple[int, int]]:
        """Move the tables back to the device; returns the (host block, device block) pairs to copy."""
        return self._swap(seqs, self._host_tables, self.host, self._tables, self.device)

    def _swap(
        self,
        seqs: Iterable[Sequence],
        src_tables: dict[int, BlockTable],
        src: BlockPool,
        dst_tables: dict[int, BlockTable],
        dst: BlockPool,
    ) -> list[tuple[int, int]]:
        moved: dict[int, int] = {}
        for seq in seqs:
            table = src_tables.pop(seq.seq_id, None)
            if table is None:
                continue
            for block in reversed(table.blocks()):
                if block in moved:
                    dst.acquire(moved[block])
                else:
                    moved[block] = dst.take()
                src.release(block)
            dst_tables[seq.seq_id] = table.map(moved)
        return list(moved.items())

    # -- prefix cache

    def match(self, seq: Sequence, namespace: str, max_tokens: int) -> list[int]:
        """Blocks of the longest known prefix of the sequence's first `max_tokens` tokens; nothing is taken yet.

        One token at least is left to compute: a step needs its logits. With a sliding window only the blocks that the
        next token can see have to be known, those before are the null block.
        """
        if not self.enable_prefix_caching:
            return []
        num_full = (max_tokens - 1) // self.block_size
        blocks = []
        self._extend_digests(seq, namespace, num_full)
        for digest in seq.block_digests[:num_full]:
            block = self.device.find(digest)
            if block is None and self.sliding_window is None:
                break
            blocks.append(block)
        return blocks if self.sliding_window is None else self._match_window(blocks)

    def _match_window(self, blocks: list[int | None]) -> list[int]:
        """The longest beginning of `blocks` in which all that a window at its end can see is known."""
        assert self.sliding_window is not None
        num_known = 0  # known blocks in a row, up to the one before
        runs = []
        for block in blocks:
            num_known = 0 if block is None else num_known + 1
            runs.append(num_known)
        for stop in range(len(blocks), 0, -1):
            first = max(0, stop * self.block_size - self.sliding_window + 1) // self.block_size
            if runs[stop - 1] >= stop - first:
                return [NULL_BLOCK] * first + [b for b in blocks[first:stop] if b is not None]
        return []

    def num_evictable(self, blocks: list[int]) -> int:
        """How many of `blocks` count as free now and would not once taken."""
        return sum(b != NULL_BLOCK and self.device.ref_count[b] == 0 for b in blocks)

    def publish(self, seq: Sequence, namespace: str, start: int) -> list[int]:
        """Make the full blocks of tokens [start, num_computed_tokens) findable; returns the newly known blocks.

        A block whose content is known already under another id stays private to its owner.
        """
        if not self.enable_prefix_caching:
            return []
        first, stop = start // self.block_size, seq.num_computed_tokens // self.block_size
        if first == stop:
            return []
        digests = seq.block_digests
        if len(digests) < stop:
            self._extend_digests(seq, namespace, stop)
        table, publish = self._tables[seq.seq_id], self.device.publish
        first = max(first, table.num_dropped)  # what has left the window is nobody's to publish
        return [
            block for index in range(first, stop) if publish(block := table[index], digests[index])
        ]

    def publish_last(self, seq: Sequence, namespace: str) -> list[int]:
        """`publish` of the one block that the sequence's computed tokens have just filled."""
        index = seq.num_computed_tokens // self.block_size - 1
        digests = seq.block_digests
        if len(digests) == index > 0 and not seq.spans:
            tokens = seq.token_buffer[seq.num_computed_tokens - self.block_size :]
            content = digests[-1] + tokens[: self.block_size].tobytes()
            digests.append(blake2b(content, digest_size=_DIGEST_BYTES).digest())
        else:
            self._extend_digests(seq, namespace, index + 1)
        block = self._tables[seq.seq_id][index]
        return [block] if self.device.publish(block, digests[index]) else []

    def unpublish(self, blocks: Iterable[int]) -> None:
        """Forget what `publish` made known of these blocks, because the step that fills them will not run."""
        self.device.unpublish(blocks)

    def reset_prefix_cache(self) -> None:
        """Forget every published block, for example after the weights have changed."""
        self.device.unpublish_all()

    def _extend_digests(self, seq: Sequence, namespace: str, num_blocks: int) -> None:
        """Have the chain digests of the first `num_blocks` full blocks in `seq.block_digests`.

        d[i] = H(d[i-1], tokens of block i, and the digest and place of each image or the like that lies in it)
        d[-1] is of the namespace and keyed, so that nobody can make a digest without the key.
        """
        digests = seq.block_digests
        if len(digests) >= num_blocks:
            return
        parent = digests[-1] if digests else self._root(namespace)
        tokens, size = seq.token_buffer, self.block_size
        for index in range(len(digests), num_blocks):
            start, stop = index * size, (index + 1) * size
            content = tokens[start:stop].tobytes()
            for span in seq.spans:
                if span.offset < stop and span.stop > start:
                    place = np.array([span.offset - start, span.length, len(span.digest)])
                    content += place.tobytes() + span.digest
            parent = blake2b(parent + content, digest_size=_DIGEST_BYTES).digest()
            digests.append(parent)

    def _root(self, namespace: str) -> bytes:
        return blake2b(namespace.encode(), digest_size=_DIGEST_BYTES, key=self._cache_key).digest()

    # -- checking

    def dump(self) -> str:
        """Every block table with the reference count of each block, for reading when something reads the wrong KV."""
        lines = []
        for where, pool, tables in self._sides():
            for seq_id, table in sorted(tables.items()):
                blocks = " ".join(
                    f"{block}(x{pool.ref_count[block]})" for block in table.view().tolist()
                )
                lines.append(f"seq_id={seq_id}{where} blocks: {blocks}")
        pool = self.device
        return "\n".join(
            [*lines, f"free={pool.num_free - pool.num_cached} cached={pool.num_cached}"]
        )

    def _sides(self) -> tuple[tuple[str, BlockPool, dict[int, BlockTable]], ...]:
        return ("", self.device, self._tables), (" (host)", self.host, self._host_tables)

    def check_integrity(self, detached: Iterable[int] = ()) -> None:
        """RuntimeError unless blocks, counts, digests and tables agree, and no sequence is on both sides.

        detached   device blocks that are still to be released
        """
        for _, pool, tables in self._sides():
            named = [table.view().tolist() for table in tables.values()]
            pool.check_integrity([*named, detached] if pool is self.device else named)
        both = self._tables.keys() & self._host_tables.keys()
        if both:
            raise RuntimeError(
                f"sequences {sorted(both)} have tables on the device and on the host"
            )
