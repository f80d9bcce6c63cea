"""The inside of a recording: what its frames say, in msgpack.

The reader knows of every group what the last frame with it said, so a frame only says what is new:

    nothing        the group went on as groups do: each of its sequences got the token it drew, and feeds it next. One new
                   block at the end of a table is a pair in `StepFrame.opened`
    a GroupChange  anything else, sequence by sequence, as what is kept of a sequence of the last frame and what follows

`checked_data` holds for writer and reader alike, so what one refuses the other has not written.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np

from ..metadata import SequenceData, SequenceGroupMetadata
from ..params import LoRARequest, MultiModalSpan, SamplingParams

IDS = np.dtype("<i4")
WIDE_IDS = np.dtype("<i8")
LOGPROBS = np.dtype("<f4")


class LayerShape(msgspec.Struct, frozen=True, kw_only=True):
    """What attention of one layer looks like.

    dtype, scale_per_token_head  of what is cached
    scale    of the scores; None for head_size ** -0.5
    reads    the earlier layer whose keys and values it reads; None for its own
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: str
    scale_per_token_head: bool = False
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    reads: int | None = None


class RecordingHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What the recorded engine was: enough to build it again from the model's name alone.

    model           as the user named it; None for one that was not loaded by name
    model_digest    SHA-256 of its configuration
    num_gpu_blocks, num_cpu_blocks  that can be used, the null blocks left out
    dtype           of the weights and activations
    """

    octavo_version: str
    block_size: int
    num_gpu_blocks: int
    num_cpu_blocks: int = 0
    layers: tuple[LayerShape, ...] = ()
    kv_layout: str = "NHD"
    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    model: str | None = None
    model_digest: str = ""
    architecture: str = ""
    vocab_size: int | None = None
    sliding_window: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_loras: int = 0
    max_lora_rank: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size", "num_gpu_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if self.num_cpu_blocks < 0:
            raise ValueError(f"num_cpu_blocks: expected 0 or more, got {self.num_cpu_blocks}")


class Fixed(msgspec.Struct, frozen=True, array_like=True):
    """What stays the same of a request."""

    request_id: str
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...]
    sliding_window: int | None
    lora_request: LoRARequest | None
    prompt_adapter_request: Any

    @classmethod
    def of(cls, metadata: SequenceGroupMetadata) -> Fixed:
        return cls(
            metadata.request_id,
            metadata.sampling_params,
            metadata.eos_token_ids,
            metadata.sliding_window,
            metadata.lora_request,
            metadata.prompt_adapter_request,
        )


class SpanPart(msgspec.Struct, frozen=True, array_like=True):
    """A `SpanChunk`, its span by number if the group has had it before."""

    span: int | MultiModalSpan
    start: int
    stop: int
    offset: int


class LineChange(msgspec.Struct, frozen=True, array_like=True):
    """One sequence: what it keeps of `parent`, a sequence of the group in the last frame that had it, and what follows."""

    seq_id: int
    parent: int | None
    prompt_len: int
    kept_tokens: int
    tokens: bytes  # int32
    kept_logprobs: int
    logprobs: bytes  # float32
    kept_entries: int
    entries: bytes  # int32, of the block table
    num_computed_tokens: int
    cumulative_logprob: float
    index: int


class GroupChange(msgspec.Struct, frozen=True, array_like=True):
    """A group that did not go on as groups do.

    place                 among the groups of the step
    fixed                 None: as in the last frame that had it
    num_computed_blocks   leading entries of the first table that are `computed_block_nums`, or their ids if those are others
    encoder               its table is `cross_block_table`; `has_cross_table` False if there is none
    """

    place: int
    fixed: Fixed | None
    is_prompt: bool
    token_chunk_size: int
    do_sample: bool
    generation_id: int
    lines: list[LineChange]
    computed_blocks: int | bytes
    spans: list[SpanPart] = []
    encoder: LineChange | None = None
    has_cross_table: bool = False


class StepFrame(msgspec.Struct, frozen=True, array_like=True):
    """One step.

    order      int32, the groups' numbers in row order, given in the order of their first appearance; None: as before
    opened     int32 pairs, (place, block id appended to the table of its only sequence)
    token_ids  int32, or int64 if some do not fit; as many as `logprobs`, float32
    forgotten  int32, numbers of groups that nobody will refer to any more
    """

    number: int
    order: bytes | None
    changes: list[GroupChange]
    opened: bytes
    swap_out: bytes
    swap_in: bytes
    copy: bytes
    token_ids: bytes
    logprobs: bytes
    forgotten: bytes = b""


class EndFrame(msgspec.Struct, frozen=True, array_like=True):
    num_steps: int


def checked_data(data: SequenceData) -> None:
    """Raise ValueError unless a sequence is one."""
    for name, dtype in (
        ("prompt_token_ids", np.int32),
        ("output_token_ids", np.int32),
        ("output_logprobs", np.float32),
    ):
        checked_array(name, getattr(data, name), dtype)
    if len(data.output_logprobs) != len(data.output_token_ids):
        raise ValueError(
            f"output_logprobs: expected one for each of {len(data.output_token_ids)} tokens, got {len(data.output_logprobs)}"
        )
    if not 0 <= data.num_computed_tokens <= data.num_tokens:
        raise ValueError(
            f"num_computed_tokens: expected 0 to {data.num_tokens}, got {data.num_computed_tokens}"
        )


def checked_array(name: str, array: Any, dtype: type) -> np.ndarray:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        got = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else repr(array)
        raise ValueError(f"{name}: expected {np.dtype(dtype)} arrays [*], got {got:.80}")
    return array


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Entries with which both begin, bit by bit."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n].view(np.int32) != b[:n].view(np.int32))
    return int(differs[0]) if len(differs) else n


def computed_blocks(tables: list[np.ndarray], num_tokens: int, block_size: int) -> np.ndarray:
    """The leading full blocks within `num_tokens` tokens that all tables have in common."""
    common = tables[0][: num_tokens // block_size]
    for table in tables[1:]:
        common = common[: common_length(common, table)]
    return common


_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}


def not_default(params: SamplingParams) -> dict[str, Any]:
    """What is written of sampling parameters: most of them are what they are by default, to the last bit."""
    values = {name: getattr(params, name) for name in _DEFAULTS}
    return {name: v for name, v in values.items() if repr(v) != repr(_DEFAULTS[name])}


# -- values of any type, in images and adapters: what msgpack has no word for

_ARRAY, _TUPLE = 1, 2
_PLAIN_DTYPE = re.compile(r"[<>|][biufc]\d{1,2}")


def storable(value: Any) -> Any:
    """The value with arrays and tuples as extensions, so that exactly it comes back. Raises ValueError if that cannot be."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, list):
        return [storable(item) for item in value]
    if isinstance(value, tuple):
        return msgspec.msgpack.Ext(_TUPLE, encode([storable(item) for item in value]))
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        return {key: storable(item) for key, item in value.items()}
    if isinstance(value, np.ndarray) and _PLAIN_DTYPE.fullmatch(value.dtype.str):
        parts = [value.dtype.str, list(value.shape), value.tobytes()]
        return msgspec.msgpack.Ext(_ARRAY, encode(parts))
    raise ValueError(
        f"expected numbers, text, bytes, numpy arrays, lists, tuples and dicts of these, got {type(value).__name__}"
    )


def _from_extension(code: int, data: memoryview) -> Any:
    parts = msgspec.msgpack.decode(data, ext_hook=_from_extension)
    if code == _TUPLE:
        return tuple(parts)
    if code == _ARRAY:
        dtype, shape, content = parts
        if not _PLAIN_DTYPE.fullmatch(dtype):
            raise ValueError(f"expected the dtype of plain numbers, got {dtype!r:.80}")
        return np.frombuffer(content, np.dtype(dtype)).reshape(shape)
    raise ValueError(f"expected extension {_ARRAY} or {_TUPLE}, got {code}")


def _not_storable(value: Any) -> Any:
    raise ValueError(f"{type(value).__name__} cannot be written to msgpack")


encode = msgspec.msgpack.Encoder(enc_hook=_not_storable).encode
decode_header = msgspec.msgpack.Decoder(RecordingHeader).decode
decode_step = msgspec.msgpack.Decoder(StepFrame, ext_hook=_from_extension).decode
decode_end = msgspec.msgpack.Decoder(EndFrame).decode
