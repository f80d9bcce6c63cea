"""The contract between scheduler and runtime: what one step may know of a request. Torch-free.

A `SequenceGroup` is the living request; a `SequenceGroupMetadata` is its snapshot for one step. Snapshots are

* frozen: nothing the scheduler does later changes one. Tokens are append-only, so a read-only view of the sequence's
  token buffer is a frozen copy at no cost; a block table is copied only before one of its entries is re-pointed;
* ordered: rows are groups in list order, then sequences by ascending seq_id, never in dict order (`rows()`);
* versioned: `generation_id` is raised by every event that makes an issued block table wrong.

Lengths of one row (a sequence in one step):

    |<------------ context_len ------------>|<--- query_len --->|
    | KV is in the cache before the step    | fed in this step  | tokens of later chunks
    |<------------------------ seq_len ------------------------>|

The last token that is fed may be one that the step before is still drawing for the sequence: a step can be made while
another runs. Then seq_len is one more than the tokens that the snapshot knows, and whoever runs both steps knows the rest.

They hold raw facts; what can be derived from them (positions, slots, lengths) is derived by the consumer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from .params import LoRARequest, MultiModalSpan, SamplingParams

# never allocated, hashed, evicted or counted; stands for "no block" in tables and padding
NULL_BLOCK = 0
PAD_SLOT = -1  # slot of a token whose K and V are not written


class MetadataError(ValueError):
    """A snapshot contradicts itself or the pool. Names the request and the field."""

    def __init__(self, request_id: str, field: str, message: str) -> None:
        super().__init__(f"request {request_id!r}: {field}: {message}")
        self.request_id = request_id
        self.field = field


class StaleMetadataError(RuntimeError):
    """A snapshot was overtaken by an event (preemption, swap, copy-on-write, finish, abort) before its launch."""

    def __init__(self, request_id: str, issued: int, current: int | None) -> None:
        now = "gone" if current is None else f"at generation {current}"
        super().__init__(
            f"request {request_id!r}: snapshot of generation {issued} is stale, the request is {now}"
        )
        self.request_id = request_id
        self.issued = issued
        self.current = current


class SequenceData(msgspec.Struct, frozen=True):
    """The tokens of one sequence at the start of a step. The arrays are read-only.

    prompt_token_ids     int32 [prompt_len]
    output_token_ids     int32 [output_len]
    num_computed_tokens  tokens whose KV is in the cache: the context length of this step
    cumulative_logprob   sum of `output_logprobs`
    output_logprobs      float32 [output_len], natural log probability of each output token under the raw logits
    index                which of the request's samples this is, 0 <= index < n
    """

    prompt_token_ids: np.ndarray
    output_token_ids: np.ndarray
    num_computed_tokens: int
    cumulative_logprob: float
    output_logprobs: np.ndarray
    index: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_ids(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of prompt and output taken together, int32."""
        prompt_len = len(self.prompt_token_ids)
        if stop <= prompt_len:
            return self.prompt_token_ids[start:stop]
        if start >= prompt_len:
            return self.output_token_ids[start - prompt_len : stop - prompt_len]
        return np.concatenate(
            (self.prompt_token_ids[start:], self.output_token_ids[: stop - prompt_len])
        )


class SpanChunk(msgspec.Struct, frozen=True):
    """The part of an image or the like that a step feeds: its embeddings [start, stop) stand at the step's tokens
    [offset, offset + stop - start) of the sequence."""

    span: MultiModalSpan
    start: int
    stop: int
    offset: int


class SequenceGroupMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of one request for one step.

    is_prompt            the step feeds prompt tokens, or re-feeds tokens lost to a preemption
    seq_data             seq_id -> SequenceData
    block_tables         seq_id -> int32 array, block index -> block id; blocks of later chunks may be missing, those that
                         lie before the sliding window of all that is still to be fed are the null block
    token_chunk_size     tokens fed per sequence in this step
    computed_block_nums  ids of the leading full blocks, common to all sequences, whose KV exists at the start of the
                         step. They need not be computed again; they never limit what is attended, which is always the
                         whole sequence
    do_sample            False before the last chunk
    generation_id        placement version of the group
    multi_modal_data     the parts of images and the like among the tokens of this step
    eos_token_ids        end-of-sequence tokens, none when the request ignores them
    encoder_seq_data     the encoder's tokens, of an encoder-decoder model; `num_computed_tokens` is 0 in the step that
                         has to run the encoder, and all of them afterwards
    cross_block_table    int32 array, ids of the blocks that hold what the decoder attends across to; shared by all
                         sequences of the group
    num_prompt_logprobs  of a request that asks for `prompt_logprobs`, prompt tokens whose log probabilities are known: those
                         at positions 1 to this many
    """

    request_id: str
    is_prompt: bool
    seq_data: Mapping[int, SequenceData]
    block_tables: Mapping[int, np.ndarray]
    sampling_params: SamplingParams
    token_chunk_size: int
    computed_block_nums: np.ndarray
    do_sample: bool
    generation_id: int
    sliding_window: int | None = None
    multi_modal_data: tuple[SpanChunk, ...] = ()
    lora_request: LoRARequest | None = None
    prompt_adapter_request: Any = None
    eos_token_ids: tuple[int, ...] = ()
    encoder_seq_data: SequenceData | None = None
    cross_block_table: np.ndarray | None = None
    num_prompt_logprobs: int = 0

    def rows(self) -> Iterator[tuple[int, SequenceData, np.ndarray]]:
        """(seq_id, data, block table) by ascending seq_id: the order of rows everywhere."""
        for seq_id in sorted(self.seq_data):
            yield seq_id, self.seq_data[seq_id], self.block_tables[seq_id]

    @property
    def is_first_sample(self) -> bool:
        """This step draws the first token of the request: all samples come from the one prompt row."""
        if not self.do_sample or len(self.seq_data) > 1:
            return False
        return all(self.num_drawn(data) == 0 for data in self.seq_data.values())

    def seq_len(self, data: SequenceData) -> int:
        """Tokens of the sequence that are in the cache or fed in this step."""
        return data.num_computed_tokens + self.token_chunk_size

    def num_drawn(self, data: SequenceData) -> int:
        """Output tokens of the sequence that the step feeds, or has in the cache: the place of the token it draws."""
        return self.seq_len(data) - len(data.prompt_token_ids)

    def awaits_draw(self, data: SequenceData) -> bool:
        """The last token that is fed is the one that the step before draws: the only one fed, and not known yet."""
        return self.token_chunk_size == 1 and data.num_computed_tokens == data.num_tokens

    @property
    def num_logits(self) -> int:
        """Rows of logits that the step needs for this group."""
        if not self.do_sample:
            return 0
        params = self.sampling_params
        if self.is_first_sample and not params.use_beam_search:
            return params.width
        return len(self.seq_data)

    @property
    def num_candidates(self) -> int:
        """Tokens that come from each row of logits: 1 where one is drawn. A beam search needs as many as leave it `width`
        to go on with when the most likely ones all end their beams."""
        params = self.sampling_params
        if not params.use_beam_search:
            return 1
        ends = len({*self.eos_token_ids, *params.stop_token_ids})
        return max(2, 1 + ends) * params.width

    @property
    def num_samples(self) -> int:
        """Tokens that come back for this group from this step."""
        return self.num_logits * self.num_candidates

    @property
    def prompt_logprobs_range(self) -> tuple[int, int]:
        """Positions [first, stop) whose logits say the log probability of the prompt token after them, and are to do so in
        this step."""
        if self.sampling_params.prompt_logprobs is None or not self.is_prompt:
            return 0, 0
        _, data, _ = next(self.rows())
        context_len = data.num_computed_tokens
        stop = min(context_len + self.token_chunk_size, len(data.prompt_token_ids) - 1)
        first = max(context_len, self.num_prompt_logprobs)
        return first, max(first, stop)

    def to_bytes(self) -> bytes:
        """msgpack, no pickle. ValueError for a request with logits processors: functions are not data."""
        processors = self.sampling_params.logits_processors
        if processors:
            raise ValueError(
                f"request {self.request_id!r}: logits_processors: expected none in a snapshot that is written, got "
                f"{processors!r}"
            )
        return _encoder.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> SequenceGroupMetadata:
        """The snapshot that `to_bytes` wrote. Raises ValueError when the bytes are not one."""
        try:
            md = _decoder.decode(data)
        except msgspec.DecodeError as error:
            raise ValueError(
                f"data: expected the bytes of a SequenceGroupMetadata, got {error}"
            ) from error
        return msgspec.structs.replace(
            md,
            seq_data=MappingProxyType(md.seq_data),
            block_tables=MappingProxyType(md.block_tables),
        )

    def describe(self) -> str:
        """The one line that finds most faults: who, which phase, how much, and the size of each table."""
        lens = [len(table) for _, _, table in self.rows()]
        return (
            f"request_id={self.request_id!r} is_prompt={self.is_prompt} token_chunk_size={self.token_chunk_size} "
            f"block_table_lens={lens} generation_id={self.generation_id}"
        )


class TokenLogprobs(msgspec.Struct, frozen=True):
    """What L tokens, and the k most likely tokens at the place of each, are worth under the raw logits.

    token_ids  int64 [L, 1 + k]    the token itself, then the k most likely ones, best first, ties to the lower id
    logprobs   float32 [L, 1 + k]  natural log probabilities
    ranks      int64 [L, 1 + k]    1 + number of tokens whose logits are greater
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray

    def __len__(self) -> int:
        return len(self.token_ids)


class SampleLogprobs(msgspec.Struct, frozen=True):
    """Those of the samples at `places`, int64 [L], whose requests ask for equally many."""

    places: np.ndarray
    tokens: TokenLogprobs


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Those of the prompt tokens at positions [start, start + L) of one request."""

    request_id: str
    start: int
    tokens: TokenLogprobs


class SamplerOutput(msgspec.Struct, frozen=True):
    """Drawn tokens in row order: groups in list order, `num_samples` entries each.

    For a beam search these are the candidates of each row, most likely first; where the vocabulary has fewer, the rest has
    log probability -inf.
    token_ids  int64 [num_samples]; -1 where there is none, for the reason in `errors`, by default that the model's logits
               were not finite
    logprobs   float32 [num_samples], natural log probability of each token under the raw logits
    details    for the requests that ask for `logprobs`
    prompts    for the requests that ask for `prompt_logprobs`
    errors     place of a sample -> why it has no token
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    details: tuple[SampleLogprobs, ...] = ()
    prompts: tuple[PromptLogprobs, ...] = ()
    errors: dict[int, str] = {}


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tobytes())
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be written to msgpack")


def _decode(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, data = value
        return np.frombuffer(data, dtype=dtype)  # read-only, as the original
    raise NotImplementedError(f"{kind.__name__} cannot be read from msgpack")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode)
_decoder = msgspec.msgpack.Decoder(SequenceGroupMetadata, dec_hook=_decode)
