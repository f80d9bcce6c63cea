"""What every slot of the KV pool should hold, and a check of each step against it (`OCTAVO_CHECK=1`).

The keys and values of token i depend on tokens 0..i, so a slot is right for a row exactly when it was written for the
row's own prefix. A shadow of the pool remembers for each slot the digest of the prefix it was written for; before a
step is launched the shadow makes the step's moves and writes, and asks whether each row will then read its own tokens.
An encoder's tokens see one another, so a slot of a cross block is right when it was written for the same place in the
same input; and what a decoder keeps of its own tokens depends on the encoder's too.
The content of the real pool is never looked at: it costs hashing the new tokens, one comparison of integers per
token in sight, and a copy of the shadow, 8 bytes for each slot of the pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from .metadata import MetadataError, SequenceData, SequenceGroupMetadata

_UNWRITTEN = 0
_MOST_KNOWN = 4096  # sequences whose digests are kept; those of others are made again


class ShadowCache:
    """Digests of the prefixes whose last token each slot holds, on the device and in host memory."""

    def __init__(self, block_size: int, num_blocks: int, num_host_blocks: int = 0) -> None:
        self.block_size = block_size
        self._device = np.full((num_blocks, block_size), _UNWRITTEN, np.int64)
        self._host = np.full((num_host_blocks, block_size), _UNWRITTEN, np.int64)
        self._known: dict[tuple[str, int], _Digests] = {}

    def check_step(
        self,
        seq_group_metadata_list: Sequence[SequenceGroupMetadata],
        blocks_to_swap_out: list[tuple[int, int]] | tuple[()] = (),
        blocks_to_swap_in: list[tuple[int, int]] | tuple[()] = (),
        blocks_to_copy: list[tuple[int, int]] | tuple[()] = (),
    ) -> None:
        """Make the moves of a step, in the order of `BlockMover`, and its writes.

        Raises MetadataError and leaves the shadow as it was when a row would not read its own tokens.

        Found are: negative token ids, a table that names a block twice, two rows writing one slot, and a row in whose sight a slot holds another prefix, another encoder's
        token, or nothing, once all rows have written.
        """
        device, host = self._device.copy(), self._host.copy()
        _move("blocks_to_swap_out", device, host, blocks_to_swap_out)
        _move("blocks_to_swap_in", host, device, blocks_to_swap_in)
        _move("blocks_to_copy", device, device, blocks_to_copy)
        slots = device.reshape(-1)
        reads = []
        for metadata in seq_group_metadata_list:
            reads += [self._row(metadata, *row) for row in metadata.rows()]
            data, table = metadata.encoder_seq_data, metadata.cross_block_table
            if data is not None and table is not None:
                reads.append(self._encoder(metadata, data, table))
        writers: dict[int, _Read] = {}
        for read in reads:
            for slot in read.written.tolist():
                if slot in writers:
                    other = writers[slot].request_id
                    read.fail(
                        f"expected a slot of its own, got slot {slot}, which {other} writes too"
                    )
                writers[slot] = read
            slots[read.written] = read.expected[len(read.expected) - len(read.written) :]
        for read in reads:
            found = slots[read.seen]
            wrong = np.flatnonzero(found != read.expected)
            if len(wrong):
                position, slot = read.first + int(wrong[0]), int(read.seen[wrong[0]])
                holds = (
                    "nothing"
                    if found[wrong[0]] == _UNWRITTEN
                    else "another prefix"
                    if read.field == "block_tables"
                    else "something else"
                )
                read.fail(
                    f"expected its own token {position} in block {slot // self.block_size}, offset "
                    f"{slot % self.block_size}, got {holds} ({len(wrong)} of {len(found)} tokens in sight are wrong)"
                )
        self._device, self._host = device, host

    def prefix_digests(self, metadata: SequenceGroupMetadata, data: SequenceData) -> np.ndarray:
        """Digest of each prefix of a sequence's tokens up to the end of this step, int64."""
        key = (metadata.request_id, data.index)
        namespace = repr(metadata.lora_request)
        if metadata.encoder_seq_data is not None:
            namespace += f" {_encoder_digest(metadata, metadata.encoder_seq_data)}"
        known = self._known.pop(key, None)
        if known is None or known.namespace != namespace:
            known = _Digests(namespace)
        self._known[key] = known  # the last in line
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        tokens = data.token_ids(0, data.num_computed_tokens + metadata.token_chunk_size)
        if len(tokens) and tokens.min() < 0:
            raise MetadataError(
                metadata.request_id, "seq_data", f"expected token ids >= 0, got {tokens.min()}"
            )
        return known.upto(tokens)

    def _row(
        self, metadata: SequenceGroupMetadata, seq_id: int, data: SequenceData, table: np.ndarray
    ) -> _Read:
        """A sequence over its own tokens: it writes those it feeds, and sees all or those in its window."""
        context_len, window = data.num_computed_tokens, metadata.sliding_window
        first = 0 if window is None else max(0, context_len - window + 1)
        digests = self.prefix_digests(metadata, data)
        origin = (metadata.request_id, "block_tables", f"sequence {seq_id}")
        return _Read(
            origin, table, first, digests[first:], len(digests) - context_len, *self._device.shape
        )

    def _encoder(
        self, metadata: SequenceGroupMetadata, data: SequenceData, table: np.ndarray
    ) -> _Read:
        """All sequences of a group over its encoder's tokens, which are all written in one step."""
        digests = _encoder_digest(metadata, data) + np.arange(data.num_tokens)
        digests[digests == _UNWRITTEN] = 1
        origin = (metadata.request_id, "cross_block_table", "encoder")
        num_written = data.num_tokens if data.num_computed_tokens == 0 else 0
        return _Read(origin, table, 0, digests, num_written, *self._device.shape)


def _encoder_digest(metadata: SequenceGroupMetadata, data: SequenceData) -> int:
    """Of all tokens; that of a token is its place more. 62 bits, so that the sum is one of 64."""
    namespace = blake2b(repr(metadata.lora_request).encode(), digest_size=8).digest()
    tokens = data.token_ids(0, data.num_tokens).tobytes()
    digest = blake2b(tokens, digest_size=8, key=namespace, person=b"encoder").digest()
    return int.from_bytes(digest, "little") >> 2


class _Digests:
    """Prefix digests of a growing sequence; tokens that changed are hashed again, with all that follow."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.seed = blake2b(namespace.encode(), digest_size=8).digest()
        self.tokens = np.zeros(0, np.int32)
        self.digests = np.zeros(0, np.int64)

    def upto(self, tokens: np.ndarray) -> np.ndarray:
        common = min(len(tokens), len(self.tokens))
        differ = np.flatnonzero(tokens[:common] != self.tokens[:common])
        same = int(differ[0]) if len(differ) else common
        if same < len(tokens):
            digest = self.digests[same - 1].tobytes() if same else self.seed
            fresh = []
            for token in tokens[same:].tolist():
                digest = blake2b(token.to_bytes(8, "little"), digest_size=8, key=digest).digest()
                fresh.append(int.from_bytes(digest, "little", signed=True) or 1)
                digest = np.int64(fresh[-1]).tobytes()
            self.digests = np.concatenate((self.digests[:same], np.array(fresh, np.int64)))
            self.tokens = tokens.copy()
        return self.digests[: len(tokens)]


class _Read:
    """Tokens in sight of a sequence, or of an encoder: where they are, and what should be there."""

    def __init__(
        self,
        origin: tuple[str, str, str],  # request, field of its snapshot, what of the request
        table: np.ndarray,
        first: int,  # position of the first token
        expected: np.ndarray,  # digest of each token
        num_written: int,  # the last so many are written in this step
        num_blocks: int,
        block_size: int,
    ) -> None:
        self.request_id, self.field, self.who = origin
        self.first, self.expected = first, expected
        positions = first + np.arange(len(expected))
        num_entries = -(-(first + len(expected)) // block_size)
        if len(table) < num_entries:
            self.fail(f"expected {num_entries} entries or more, got {len(table)}")
        blocks = np.asarray(table)[positions // block_size].astype(np.int64)
        if (blocks < 0).any() or (blocks >= num_blocks).any():
            self.fail(f"expected blocks in [1, {num_blocks}), got {np.unique(blocks).tolist()}")
        if (blocks == 0).any():
            position = first + int(np.flatnonzero(blocks == 0)[0])
            self.fail(f"expected a block for token {position}, got the null block")
        first_of_block = np.flatnonzero(np.diff(positions // block_size, prepend=-1))
        named, counts = np.unique(blocks[first_of_block], return_counts=True)
        if (counts > 1).any():
            block = int(named[counts.argmax()])
            self.fail(f"expected a block for each {block_size} tokens, got block {block} twice")
        self.seen = blocks * block_size + positions % block_size
        self.written = self.seen[len(expected) - num_written :]

    def fail(self, message: str) -> None:
        raise MetadataError(self.request_id, self.field, f"{self.who}: {message}")


def _move(name: str, source: np.ndarray, destination: np.ndarray, pairs) -> None:
    """All sources are read before any destination is written, as the ops promise."""
    if len(pairs):
        sources, destinations = np.array(pairs).T
        for ids, pool in ((sources, source), (destinations, destination)):
            if ids.min() < 0 or ids.max() >= len(pool):
                raise ValueError(f"{name}: expected blocks in [0, {len(pool)}), got {ids.tolist()}")
        destination[destinations] = source[sources]
