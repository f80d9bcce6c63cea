"""A runner with no model: each slot remembers the prefix that was written to it, and every read is checked.

The KV of token i depends on tokens 0..i, so a slot is right for a row exactly when the digest of the row's own prefix
stands in it. The next token is a function of the whole prefix, so one wrong token anywhere changes all that follow. For a
beam search the runner makes up a few likely tokens and their probabilities, functions of the prefix too.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec
import numpy as np

from octavo.runtime.metadata import SamplerOutput, SequenceGroupMetadata
from octavo.runtime.params import LoRARequest, MultiModalSpan, SamplingParams

VOCAB = 997


def root_digest(encoder: list[int] | None = None, lora: LoRARequest | None = None) -> bytes:
    return blake2b(repr((encoder, lora)).encode(), digest_size=8).digest()


def prefix_digest(parent: bytes, token: int, extra: bytes = b"") -> bytes:
    data = int(token).to_bytes(8, "little") + extra
    return blake2b(data, digest_size=8, key=parent).digest()


def next_token(digest: bytes, index: int) -> int:
    return (
        int.from_bytes(blake2b(bytes([index]), digest_size=4, key=digest).digest(), "little")
        % VOCAB
    )


def candidates(digest: bytes, count: int, end_token: int | None = None) -> list[tuple[int, float]]:
    """(token, log probability) of the most likely next tokens, best first. Now and then `end_token` is among them."""
    raw = blake2b(b"candidates", digest_size=64, key=digest).digest()
    tokens = list(
        dict.fromkeys(int.from_bytes(raw[i : i + 4], "little") % VOCAB for i in range(60))
    )
    if end_token is not None and raw[63] < 80:
        tokens = [token for token in tokens if token != end_token]
        tokens.insert(raw[62] % 4, end_token)
    gaps = np.frombuffer(raw, np.uint32).astype(np.float32) / 2.0**24
    logprobs = -0.2 - np.cumsum(gaps)[: len(tokens)] / 300
    found = list(zip(tokens[:count], logprobs[:count].tolist(), strict=True))
    assert len(found) == count
    return found


class Launched:
    """A step that ran when it was launched. The host sees what it drew, or its failure, only when it asks."""

    def __init__(
        self,
        outputs: SamplerOutput | None,
        failure: Exception | None = None,
        drawn: dict[int, int] | None = None,
    ) -> None:
        self._outputs, self.failure = outputs, failure
        self.drawn = drawn or {}  # seq_id -> token

    def result(self) -> SamplerOutput:
        if self.failure is not None:
            raise self.failure
        assert self._outputs is not None
        return self._outputs


class ShadowRunner:
    """Knows of a sequence what a device knows: the token that the step in flight draws for it."""

    def __init__(self, block_size: int, window: int | None = None) -> None:
        self.block_size = block_size
        self.window = window
        self.slots: dict[int, bytes] = {}
        self.host: dict[int, bytes] = {}
        self.spans: dict[
            str, tuple[MultiModalSpan, ...]
        ] = {}  # of each request, for the tests to set
        self.num_steps = 0
        self.num_ahead = 0  # tokens fed before the host knew them
        self.num_tokens = 0
        self.num_moves = {"in": 0, "out": 0, "copy": 0}

    def launch(self, seq_group_metadata_list, *, after=None, **kwargs) -> Launched:
        if after is not None and getattr(after, "failure", None) is not None:
            return Launched(None, after.failure)
        drawn = getattr(after, "drawn", {})
        known = [self._known(metadata, drawn) for metadata in seq_group_metadata_list]
        outputs = self.execute(known, **kwargs)
        return Launched(outputs, drawn=_tokens_by_sequence(known, outputs))

    def _known(
        self, metadata: SequenceGroupMetadata, drawn: dict[int, int]
    ) -> SequenceGroupMetadata:
        """With the token that the step before drew, where that is fed."""
        seq_data = {}
        for seq_id, data, _ in metadata.rows():
            if metadata.awaits_draw(data):
                self.num_ahead += 1
                token = np.append(data.output_token_ids, np.int32(drawn[seq_id]))
                data = msgspec.structs.replace(data, output_token_ids=token)
            seq_data[seq_id] = data
        return msgspec.structs.replace(metadata, seq_data=seq_data)

    def execute(
        self,
        seq_group_metadata_list: list[SequenceGroupMetadata],
        *,
        blocks_to_swap_in,
        blocks_to_swap_out,
        blocks_to_copy,
        generation_of,
    ) -> SamplerOutput:
        self.num_steps += 1
        for metadata in seq_group_metadata_list:
            assert generation_of(metadata.request_id) == metadata.generation_id
        self._move(self.slots, self.host, blocks_to_swap_out, "out")
        self._move(self.host, self.slots, blocks_to_swap_in, "in")
        self._move(self.slots, self.slots, blocks_to_copy, "copy")
        phases = [metadata.is_prompt for metadata in seq_group_metadata_list]
        assert phases == sorted(phases), "decodes come before prefills"
        written: set[int] = set()
        for metadata in seq_group_metadata_list:
            self._write_encoder(metadata, written)
            for _, data, table in metadata.rows():
                computed = metadata.computed_block_nums
                assert np.array_equal(table[: len(computed)], computed), "of every sequence's table"
                assert len(computed) * self.block_size <= data.num_computed_tokens
                self._check_spans(metadata, data)
                self._write(metadata, data, table, written)
        tokens: list[int] = []
        logprobs: list[float] = []
        for metadata in seq_group_metadata_list:
            drawn = self._draw(metadata)
            assert len(drawn) == metadata.num_samples
            tokens += [token for token, _ in drawn]
            logprobs += [logprob for _, logprob in drawn]
        return SamplerOutput(np.array(tokens, np.int64), np.array(logprobs, np.float32))

    def _draw(self, metadata: SequenceGroupMetadata) -> list[tuple[int, float]]:
        drawn: list[tuple[int, float]] = []
        for _, data, table in metadata.rows():
            digest = self._read(metadata, data, table)
            if not metadata.do_sample:
                continue
            if metadata.sampling_params.use_beam_search:
                end = min(metadata.eos_token_ids, default=None)
                drawn += candidates(digest, metadata.num_candidates, end)
                continue
            indices = [data.index]
            if metadata.is_first_sample:
                indices = list(range(metadata.num_logits))
            drawn += [(next_token(digest, index), -0.5) for index in indices]
        return drawn

    def _move(self, src: dict, dst: dict, pairs: list[tuple[int, int]], kind: str) -> None:
        """All sources are read before any destination is written."""
        size = self.block_size
        self.num_moves[kind] += len(pairs)
        assert len({d for _, d in pairs}) == len(pairs), "each destination once"
        content = [[src.get(source * size + i) for i in range(size)] for source, _ in pairs]
        for (_, target), digests in zip(pairs, content, strict=True):
            for i, digest in enumerate(digests):
                if digest is None:
                    dst.pop(target * size + i, None)
                else:
                    dst[target * size + i] = digest

    def _slot(self, table: np.ndarray, position: int) -> int:
        block = int(table[position // self.block_size])
        assert block != 0, "the null block is nobody's"
        return block * self.block_size + position % self.block_size

    def _write_encoder(self, metadata: SequenceGroupMetadata, written: set[int]) -> None:
        encoder = metadata.encoder_seq_data
        if encoder is None:
            return
        assert metadata.cross_block_table is not None
        assert encoder.num_computed_tokens in (0, encoder.num_tokens)
        digest = b""
        for position, token in enumerate(encoder.prompt_token_ids.tolist()):
            digest = prefix_digest(digest, token, b"encoder")
            slot = self._slot(metadata.cross_block_table, position)
            if encoder.num_computed_tokens == 0:
                assert slot not in written, "two rows write one slot"
                written.add(slot)
                self.slots[slot] = digest
            else:
                assert self.slots.get(slot) == digest, "another encoder's KV"

    def _check_spans(self, metadata: SequenceGroupMetadata, data) -> None:
        """The snapshot names exactly the embeddings whose placeholders are fed in this step."""
        context, chunk = data.num_computed_tokens, metadata.token_chunk_size
        expected = {
            (span.offset + i - context, span.digest, i)
            for span in self.spans.get(metadata.request_id, ())
            for i in range(span.length)
            if context <= span.offset + i < context + chunk
        }
        got = [
            (part.offset + i, part.span.digest, part.start + i)
            for part in metadata.multi_modal_data
            for i in range(part.stop - part.start)
        ]
        assert len(set(got)) == len(got) and set(got) == expected
        for part in metadata.multi_modal_data:
            assert not part.span.is_whole or part.stop - part.start == part.span.length

    def _digests(self, metadata: SequenceGroupMetadata, data, stop: int) -> list[bytes]:
        encoder = metadata.encoder_seq_data
        source = None if encoder is None else encoder.prompt_token_ids.tolist()
        digest = root_digest(source, metadata.lora_request)
        spans = self.spans.get(metadata.request_id, ())
        known = {span.offset + i: span.digest for span in spans for i in range(span.length)}
        digests = []
        for position, token in enumerate(data.token_ids(0, stop).tolist()):
            digest = prefix_digest(digest, token, known.get(position, b""))
            digests.append(digest)
        return digests

    def _write(self, metadata: SequenceGroupMetadata, data, table, written: set[int]) -> None:
        context, chunk = data.num_computed_tokens, metadata.token_chunk_size
        for position, digest in enumerate(self._digests(metadata, data, context + chunk)):
            if position >= context:
                slot = self._slot(table, position)
                assert slot not in written, "two rows write one slot"
                written.add(slot)
                self.slots[slot] = digest
                self.num_tokens += 1

    def _read(self, metadata: SequenceGroupMetadata, data, table) -> bytes:
        context, chunk = data.num_computed_tokens, metadata.token_chunk_size
        assert len(table) == -(-(context + chunk) // self.block_size)
        first = 0 if self.window is None else max(0, context - self.window + 1)
        assert metadata.sliding_window == self.window
        digests = self._digests(metadata, data, context + chunk)
        for position in range(first, context + chunk):
            found = self.slots.get(self._slot(table, position))
            assert found == digests[position], (
                f"position {position} of {metadata.request_id}[{data.index}] holds another prefix's KV"
            )
        return digests[-1]


def _tokens_by_sequence(
    seq_group_metadata_list: list[SequenceGroupMetadata], outputs: SamplerOutput
) -> dict[int, int]:
    """seq_id -> token, of those that draw one."""
    tokens, start = {}, 0
    for metadata in seq_group_metadata_list:
        stop = start + metadata.num_samples
        if metadata.num_samples == len(metadata.seq_data):
            drawn = outputs.token_ids[start:stop].tolist()
            tokens |= dict(zip(sorted(metadata.seq_data), drawn, strict=False))
        start = stop
    return tokens


def solo(
    prompt: list[int],
    max_tokens: int,
    index: int = 0,
    encoder: list[int] | None = None,
    lora: LoRARequest | None = None,
    spans: tuple = (),
) -> list[int]:
    """Tokens of the request when nothing else runs and nothing goes wrong."""
    digest, output = _prompt_digest(prompt, encoder, lora, spans), []
    for _ in range(max_tokens):
        output.append(next_token(digest, index))
        digest = prefix_digest(digest, output[-1])
    return output


def _prompt_digest(prompt, encoder=None, lora=None, spans=()) -> bytes:
    digest = root_digest(encoder, lora)
    at = {span.offset + i: span.digest for span in spans for i in range(span.length)}
    for position, token in enumerate(prompt):
        digest = prefix_digest(digest, token, at.get(position, b""))
    return digest


def solo_beams(
    prompt: list[int],
    params: SamplingParams,
    max_tokens: int,
    eos: int | None = None,
    encoder: list[int] | None = None,
) -> list[tuple[list[int], float]]:
    """(tokens, score) of a beam search by plain lists: an oracle of its own, after the loop of transformers."""
    width, penalty = params.width, params.length_penalty
    count = max(2, 1 + (eos is not None)) * width
    running = [(0.0, [], _prompt_digest(prompt, encoder))]
    done: list[tuple[float, list[int]]] = []
    for length in range(1, max_tokens + 1):
        steps = []
        for place, (total, tokens, digest) in enumerate(running):
            for rank, (token, logprob) in enumerate(candidates(digest, count, eos)):
                new = (total + float(np.float32(logprob)), [*tokens, token], digest)
                steps.append((-new[0], place, rank, new))
        steps.sort(key=lambda step: step[:3])
        running = []
        for rank, (_, _, _, (total, tokens, digest)) in enumerate(steps[:count]):
            if tokens[-1] == eos or length == max_tokens:
                if rank < width:
                    done.append((total / length**penalty, tokens))
            else:
                running.append((total, tokens, prefix_digest(digest, tokens[-1])))
        running = running[:width]
        done.sort(key=lambda item: -item[0])
        done = done[:width]
        if not running:
            break
        if len(done) == width:
            if params.early_stopping is True:
                break
            longest = params.early_stopping == "never" and penalty > 0
            possible = running[0][0] / (max_tokens if longest else length) ** penalty
            if possible <= done[-1][0]:
                break
    return [(tokens, value) for value, tokens in done[: params.n]]
