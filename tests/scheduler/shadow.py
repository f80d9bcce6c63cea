"""A runner with no model: each slot remembers the prefix that was written to it, and every read is checked.

The KV of token i depends on tokens 0..i, so a slot is right for a row exactly when the digest of the row's own prefix
stands in it. The next token is a function of the whole prefix, so one wrong token anywhere changes all that follow.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from octavo.runtime.metadata import SamplerOutput

VOCAB = 997


def prefix_digest(parent: bytes, token: int) -> bytes:
    return blake2b(int(token).to_bytes(8, "little"), digest_size=8, key=parent).digest()


def next_token(digest: bytes, index: int) -> int:
    return (
        int.from_bytes(blake2b(bytes([index]), digest_size=4, key=digest).digest(), "little")
        % VOCAB
    )


class ShadowRunner:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, bytes] = {}
        self.num_steps = 0
        self.num_tokens = 0

    def execute(
        self,
        seq_group_metadata_list,
        *,
        blocks_to_swap_in,
        blocks_to_swap_out,
        blocks_to_copy,
        generation_of,
    ) -> SamplerOutput:
        assert not blocks_to_swap_in and not blocks_to_swap_out
        self.num_steps += 1
        size = self.block_size
        sources = {
            src: [self.slots.get(src * size + i) for i in range(size)] for src, _ in blocks_to_copy
        }
        for src, dst in blocks_to_copy:
            for i, digest in enumerate(sources[src]):
                if digest is None:
                    self.slots.pop(dst * size + i, None)
                else:
                    self.slots[dst * size + i] = digest
        phases = [metadata.is_prompt for metadata in seq_group_metadata_list]
        assert phases == sorted(phases), "decodes come before prefills"
        written: set[int] = set()
        for metadata in seq_group_metadata_list:
            assert generation_of(metadata.request_id) == metadata.generation_id
            for _, data, table in metadata.rows():
                computed = metadata.computed_block_nums
                assert np.array_equal(table[: len(computed)], computed), "of every sequence's table"
                assert len(computed) * size <= data.num_computed_tokens
                self._write(data, table, metadata.token_chunk_size, written)
        tokens = []
        for metadata in seq_group_metadata_list:
            for _, data, table in metadata.rows():
                digest = self._read(data, table, metadata.token_chunk_size)
                if metadata.is_first_sample:
                    tokens += [
                        next_token(digest, index) for index in range(metadata.sampling_params.n)
                    ]
                elif metadata.do_sample:
                    tokens.append(next_token(digest, data.index))
        return SamplerOutput(np.array(tokens, np.int64), np.zeros(len(tokens), np.float32))

    def _slot(self, table: np.ndarray, position: int) -> int:
        block = int(table[position // self.block_size])
        assert block != 0, "the null block is nobody's"
        return block * self.block_size + position % self.block_size

    def _write(self, data, table, chunk: int, written: set[int]) -> None:
        context = data.num_computed_tokens
        digest = self.slots[self._slot(table, context - 1)] if context else b""
        for position, token in enumerate(
            data.token_ids(context, context + chunk).tolist(), context
        ):
            digest = prefix_digest(digest, token)
            slot = self._slot(table, position)
            assert slot not in written, "two rows write one slot"
            written.add(slot)
            self.slots[slot] = digest
            self.num_tokens += 1

    def _read(self, data, table, chunk: int) -> bytes:
        digest = b""
        seq_len = data.num_computed_tokens + chunk
        assert len(table) == -(-seq_len // self.block_size)
        for position, token in enumerate(data.token_ids(0, seq_len).tolist()):
            digest = prefix_digest(digest, token)
            found = self.slots.get(self._slot(table, position))
            assert found == digest, f"position {position} of {data.index} holds another prefix's KV"
        return digest


def solo(prompt: list[int], max_tokens: int, index: int = 0) -> list[int]:
    """Tokens of the request when nothing else runs and nothing goes wrong."""
    digest, output = b"", []
    for token in prompt:
        digest = prefix_digest(digest, token)
    for _ in range(max_tokens):
        output.append(next_token(digest, index))
        digest = prefix_digest(digest, output[-1])
    return output
