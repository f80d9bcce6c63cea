"""What every slot of the KV pool should hold, and a check of each step against it (`OCTAVO_CHECK=1`).

The keys and values of token i depend on tokens 0..i, so a slot is right for a row exactly when it was written for the
row's own prefix. A shadow of the pool remembers for each slot the digest of the prefix it was written for; before a
step is launched the shadow makes the step's moves and writes, and asks whether each row will then read its own tokens.
The content of the real pool is never looked at: it costs hashing the new tokens and one comparison of integers per
token in sight.
"""

from __future__ import annotations

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
        seq_group_metadata_list: list[SequenceGroupMetadata],
        blocks_to_swap_out: list[tuple[int, int]] | tuple[()] = (),
        blocks_to_swap_in: list[tuple[int, int]] | tuple[()] = (),
        blocks_to_copy: list[tuple[int, int]] | tuple[()] = (),
    ) -> None:
        """Make the moves of a step, in the order of `BlockMover`, and its writes.

        Raises MetadataError and leaves the shadow as it was when a row would not read its own tokens.

        Found are: two rows writing one slot, and a row in whose sight a slot holds another prefix, or nothing, once all
        rows have written.
        """
        device, host = self._device.copy(), self._host.copy()
        _move(device, host, blocks_to_swap_out)
        _move(host, device, blocks_to_swap_in)
        _move(device, device, blocks_to_copy)
        slots = device.reshape(-1)
        rows = [
            _Row(self, metadata, *row)
            for metadata in seq_group_metadata_list
            for row in metadata.rows()
        ]
        writers: dict[int, _Row] = {}
        for row in rows:
            for slot in row.written.tolist():
                if slot in writers:
                    other = writers[slot].request_id
                    row.fail(
                        f"expected a slot of its own, got slot {slot}, which {other} writes too"
                    )
                writers[slot] = row
            slots[row.written] = row.digests[row.context_len :]
        for row in rows:
            found, expected = slots[row.seen], row.digests[row.first_seen :]
            wrong = np.flatnonzero(found != expected)
            if len(wrong):
                position, slot = row.first_seen + int(wrong[0]), int(row.seen[wrong[0]])
                holds = "nothing" if found[wrong[0]] == _UNWRITTEN else "another prefix"
                row.fail(
                    f"expected its own token {position} in block {slot // self.block_size}, offset "
                    f"{slot % self.block_size}, got {holds} ({len(wrong)} of {len(found)} tokens in sight are wrong)"
                )
        self._device, self._host = device, host

    def prefix_digests(self, metadata: SequenceGroupMetadata, data: SequenceData) -> np.ndarray:
        """Digest of each prefix of a sequence's tokens up to the end of this step, int64."""
        key = (metadata.request_id, data.index)
        known = self._known.pop(key, None) or _Digests(repr(metadata.lora_request))
        self._known[key] = known  # the last in line
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        tokens = data.token_ids(0, data.num_computed_tokens + metadata.token_chunk_size)
        return known.upto(tokens)


class _Digests:
    """Prefix digests of a growing sequence; tokens that changed are hashed again, with all that follow."""

    def __init__(self, namespace: str) -> None:
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


class _Row:
    """One sequence of a step: which slots it writes, and which it will look at."""

    def __init__(
        self,
        shadow: ShadowCache,
        metadata: SequenceGroupMetadata,
        seq_id: int,
        data: SequenceData,
        table: np.ndarray,
    ) -> None:
        self.request_id, self.seq_id = metadata.request_id, seq_id
        self.context_len = data.num_computed_tokens
        seq_len = self.context_len + metadata.token_chunk_size
        self.digests = shadow.prefix_digests(metadata, data)
        window = metadata.sliding_window
        self.first_seen = 0 if window is None else max(0, self.context_len - window + 1)
        positions = np.arange(self.first_seen, seq_len)
        blocks = np.asarray(table)[positions // shadow.block_size].astype(np.int64)
        if (blocks == 0).any():
            position = self.first_seen + int(np.flatnonzero(blocks == 0)[0])
            self.fail(f"expected a block for token {position}, got the null block")
        self.seen = blocks * shadow.block_size + positions % shadow.block_size
        self.written = self.seen[self.context_len - self.first_seen :]

    def fail(self, message: str) -> None:
        raise MetadataError(self.request_id, "block_tables", f"sequence {self.seq_id}: {message}")


def _move(source: np.ndarray, destination: np.ndarray, pairs) -> None:
    """All sources are read before any destination is written, as the ops promise."""
    if len(pairs):
        sources, destinations = np.array(pairs).T
        destination[destinations] = source[sources].copy()
