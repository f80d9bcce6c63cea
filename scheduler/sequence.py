"""The living request: `Sequence` (tokens and progress) and `SequenceGroup` (what a request's sequences share)."""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..runtime.metadata import SequenceData
from ..runtime.params import LoRARequest, MultiModalSpan, SamplingParams

if TYPE_CHECKING:
    from .beam_search import Hypothesis
    from .logprobs import TokenDetail


class SequenceStatus(enum.Enum):
    """Where a sequence stands. The value is what a caller sees as finish_reason."""

    is_finished: bool

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"

    def __init__(self, value: str) -> None:
        self.is_finished = value not in ("waiting", "running", "swapped")


class Sequence:
    """One line of tokens. The truth about it is its tokens and `num_computed_tokens`; all else is derived.

    Tokens are append-only, in an int32 buffer that doubles when full. A snapshot takes a read-only view of what is
    there and stays right for ever: appending writes past its end, growing leaves the old buffer to it.

        tokens:  [ prompt ............ | output .......... ]
                 [ num_computed ...........| to be computed ]      decode: exactly one token is to be computed
    """

    __slots__ = (
        "_logprob_view",
        "_logprobs",
        "_token_view",
        "_tokens",
        "block_digests",
        "cumulative_logprob",
        "index",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "output_details",
        "prompt_token_ids",
        "seq_id",
        "spans",
        "status",
        "stop_reason",
    )

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: Seq[int] | np.ndarray,
        index: int = 0,
        spans: tuple[MultiModalSpan, ...] = (),
        name: str = "prompt_token_ids",
    ) -> None:
        prompt = _as_token_ids(prompt_token_ids, name)
        self.spans = spans  # images and the like among the prompt's tokens
        self.seq_id = seq_id
        self.index = index  # which of the request's samples
        self.num_prompt_tokens = self.num_tokens = len(prompt)
        self._set_buffers(np.zeros(self.num_tokens + 64, np.int32), np.zeros(64, np.float32))
        self._tokens[: self.num_tokens] = prompt
        self.prompt_token_ids = self._token_view[: self.num_tokens]
        self.num_computed_tokens = 0
        self.cumulative_logprob = 0.0
        self.status = SequenceStatus.WAITING
        self.stop_reason: int | str | None = None
        # of a request that asks for `logprobs`: one for each output token, and maybe one more that the next step replaces
        self.output_details: list[TokenDetail] = []
        self.block_digests: list[
            bytes
        ] = []  # memo of the prefix cache: digest of each leading full block

    def _set_buffers(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        self._tokens, self._logprobs = tokens, logprobs
        self._token_view, self._logprob_view = _read_only(tokens), _read_only(logprobs)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [num_tokens], read-only."""
        return self._token_view[: self.num_tokens]

    @property
    def output_token_ids(self) -> np.ndarray:
        """int32 [num_output_tokens], read-only."""
        return self._token_view[self.num_prompt_tokens : self.num_tokens]

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    @property
    def token_buffer(self) -> np.ndarray:
        """Read-only, int32: `token_ids` is its beginning, and tokens yet to come go behind it while there is room."""
        return self._token_view

    @property
    def logprob_buffer(self) -> np.ndarray:
        """Read-only, float32, of the output's tokens."""
        return self._logprob_view

    @property
    def buffers(self) -> tuple[memoryview, memoryview]:
        """Tokens and log probabilities, writable: for whoever appends to many sequences at once, one number at a time, which
        a memoryview does in half the time of an array."""
        return self._tokens.data, self._logprobs.data

    @property
    def capacity(self) -> int:
        """Tokens there is room for in the present buffers."""
        return min(len(self._tokens), self.num_prompt_tokens + len(self._logprobs))

    def append(self, token_id: int, logprob: float) -> None:
        if self.num_tokens == len(self._tokens):
            self._set_buffers(_doubled(self._tokens), self._logprobs)
        if self.num_output_tokens == len(self._logprobs):
            self._set_buffers(self._tokens, _doubled(self._logprobs))
        self._tokens[self.num_tokens] = token_id
        self._logprobs[self.num_output_tokens] = logprob
        self.num_tokens += 1
        self.cumulative_logprob += logprob

    def fork(self, seq_id: int, index: int) -> Sequence:
        """A sibling with the same tokens and progress and a buffer of its own."""
        child = Sequence(seq_id, self.prompt_token_ids, index, self.spans)
        child._set_buffers(self._tokens.copy(), self._logprobs.copy())
        child.prompt_token_ids = child._token_view[: self.num_prompt_tokens]
        child.num_tokens = self.num_tokens
        child.num_computed_tokens = self.num_computed_tokens
        child.cumulative_logprob = self.cumulative_logprob
        child.status = self.status
        child.output_details = self.output_details[: self.num_output_tokens]
        child.block_digests = self.block_digests.copy()
        return child

    def set_detail(self, detail: TokenDetail) -> None:
        """That of the token to be appended next."""
        self.output_details[self.num_output_tokens :] = [detail]

    def snapshot(self) -> SequenceData:
        return SequenceData(
            self.prompt_token_ids,
            self.output_token_ids,
            self.num_computed_tokens,
            self.cumulative_logprob,
            self._logprob_view[: self.num_tokens - self.num_prompt_tokens],
            self.index,
        )


def _as_token_ids(token_ids: Seq[int] | np.ndarray, name: str) -> np.ndarray:
    """int32 [n]. Raises ValueError for anything that is not a flat run of integers of that size."""
    try:
        array = np.asarray(token_ids)
    except ValueError:  # lists of several lengths
        array = np.empty((0, 0))
    if array.ndim == 1 and array.size == 0:
        return array.astype(np.int32)
    info = np.iinfo(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{name}: expected a flat list of integers, got {token_ids!r:.80}")
    if array.min() < info.min or array.max() > info.max:
        raise ValueError(f"{name}: expected 32-bit token ids, got {array.min()} to {array.max()}")
    return array.astype(np.int32)


def _doubled(array: np.ndarray) -> np.ndarray:
    larger = np.zeros(2 * len(array), array.dtype)
    larger[: len(array)] = array
    return larger


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


@dataclass(slots=True)
class RequestMetrics:
    """Where a request's time went. Times are seconds of `time.perf_counter`, durations seconds."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    scheduler_time: float = 0.0  # in schedule and write-back of the steps this request took part in
    model_time: float = 0.0  # in the runner, in the steps this request took part in
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    num_generated_tokens: int = 0  # of all completions together

    @property
    def time_in_queue(self) -> float | None:
        return (
            None
            if self.first_scheduled_time is None
            else self.first_scheduled_time - self.arrival_time
        )

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens over the time from first being scheduled to the end."""
        if self.finished_time is None or self.first_scheduled_time is None:
            return None
        duration = self.finished_time - self.first_scheduled_time
        return self.num_generated_tokens / duration if duration > 0 else None

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


class SequenceGroup:
    """One request: sequences that share a prompt and sampling parameters. The unit of every scheduling decision.

    A request with several completions starts as one sequence, the leader, which computes the prompt; at its first token
    the others are forked from it, so the prompt's KV is stored once. After a preemption they compute their tokens again one
    after the other, each from where it parts from those before it, so that what was shared is shared again.

    seqs         the completions so far, those that ended included
    live         the ones that have not ended, by ascending seq_id; all have the same number of tokens
    encoder_seq  the encoder's tokens, for a model with cross-attention; its blocks are part of the request's
    hypotheses   of a beam search: the completions that have ended, best first. `seqs` are then the running beams, and in the
                 end the best hypotheses
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Seq[int] | np.ndarray,
        sampling_params: SamplingParams,
        arrival_time: float,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        cache_salt: str = "",
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: Any = None,
        encoder_seq: Sequence | None = None,
        multi_modal_spans: Seq[MultiModalSpan] = (),
    ) -> None:
        if not isinstance(request_id, str):
            raise ValueError(f"request_id: expected text, got {request_id!r}")
        if not isinstance(cache_salt, str) or not cache_salt.isprintable():
            raise ValueError(f"cache_salt: expected printable text, got {cache_salt!r}")
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise ValueError(f"priority: expected an integer, got {priority!r}")
        if lora_request is not None and not isinstance(lora_request, LoRARequest):
            raise ValueError(f"lora_request: expected a LoRARequest, got {lora_request!r}")
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.arrival_time = arrival_time
        self.metrics = RequestMetrics(arrival_time)
        self.eos_token_ids = () if sampling_params.ignore_eos else tuple(sorted(eos_token_ids))
        self.cache_salt = cache_salt  # requests share cached prefixes only within one salt
        self.priority = priority  # with policy "priority": lower is served first
        self.lora_request = lora_request
        self.prompt_adapter_request = prompt_adapter_request
        self.encoder_seq = encoder_seq
        # the scheduler gives the ids
        self.seqs = [Sequence(-1, prompt_token_ids, spans=tuple(multi_modal_spans))]
        self.live = self.seqs.copy()
        self.hypotheses: list[Hypothesis] = []
        # of a request that asks for `prompt_logprobs`: those of prompt tokens 1, 2, ... as far as they are known
        self.prompt_logprobs: list[TokenDetail] = []
        self.generation_id = 0
        self.arrival_order = -1  # set by the scheduler: the order of first come, first served
        self.namespace = self._namespace()

    def _namespace(self) -> str:
        """All but the tokens that keys and values depend on: prefixes are shared only within one namespace."""
        parts = [self.cache_salt]
        if self.lora_request is not None:
            parts.append(f"lora\0{self.lora_request.lora_int_id}\0{self.lora_request.lora_name}")
        if self.encoder_seq is not None:
            parts.append(f"encoder\0{self.encoder_seq.token_ids.tobytes().hex()}")
        return "\0\0".join(parts)

    @property
    def state(self) -> SequenceStatus:
        """The group's status: that of its live sequences (all alike), else that of the first."""
        return (self.live or self.seqs)[0].status

    @property
    def is_finished(self) -> bool:
        return not self.live

    @property
    def num_prompt_tokens(self) -> int:
        return self.seqs[0].num_prompt_tokens

    @property
    def owners(self) -> list[Sequence]:
        """All that may have blocks: the live sequences and the encoder's."""
        return self.live if self.encoder_seq is None else [*self.live, self.encoder_seq]

    def add_sample(self, seq: Sequence) -> None:
        """A further completion of the request, forked from another."""
        self.seqs.append(seq)
        self.live.append(seq)

    def finish(self, seq: Sequence, status: SequenceStatus, reason: int | str | None) -> None:
        """End one sequence; what a step in flight knows of the group is out of date from here on."""
        seq.status, seq.stop_reason = status, reason
        self.live.remove(seq)
        self.generation_id += 1

    @property
    def num_seats(self) -> int:
        """Sequences this group has or will have at once."""
        params = self.sampling_params
        if params.use_beam_search or self.seqs[0].num_output_tokens == 0:
            return params.width
        return len(self.live)

    def closest_before(self, seq: Sequence) -> tuple[Sequence, int]:
        """Of the live sequences before `seq` the one that begins most like it, and the number of tokens both begin with;
        never the newest one, that is for each to feed. `seq` itself and 0 if it is the first."""
        best, longest = seq, 0
        for other in self.live[: self.live.index(seq)]:
            most = min(seq.num_tokens, other.num_tokens) - 1
            parts = np.flatnonzero(seq.token_ids[:most] != other.token_ids[:most])
            common = int(parts[0]) if len(parts) else most
            if common > longest:
                best, longest = other, common
        return best, longest

    def active(self) -> list[Sequence]:
        """The sequences that take part in the next step: the first that has more than its newest token to compute, else
        all."""
        for seq in self.live:
            if seq.num_uncomputed_tokens > 1:
                return [seq]
        return self.live.copy()

    def num_tokens_to_feed(self) -> int:
        """Tokens each active sequence has to be fed before it can draw a token, or wait for its siblings to do so."""
        num_uncomputed = self.active()[0].num_uncomputed_tokens
        return num_uncomputed - 1 if len(self.live) > 1 < num_uncomputed else num_uncomputed

    @property
    def num_encoder_tokens_to_feed(self) -> int:
        return 0 if self.encoder_seq is None else self.encoder_seq.num_uncomputed_tokens

    @property
    def is_prefill(self) -> bool:
        """False when each live sequence has just its newest token to compute."""
        first = self.active()[0]
        return first.num_uncomputed_tokens > 1 or first.num_output_tokens == 0
