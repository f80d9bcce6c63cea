"""The step loop: schedule, launch, write back, decode text. One call of `step()` brings one forward pass to its end.

serial        | schedule 1 | ....... runs 1 ....... | write back 1, text | schedule 2 | ....... runs 2 ....... |
overlapped    | schedule 1 | ....... runs 1 ....... | ....... runs 2 ....... | ....... runs 3 ....... |
                           | schedule 2 |           | write back 1, text, schedule 3 |
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from ..runtime.metadata import SamplerOutput, SequenceGroupMetadata, StaleMetadataError
from ..runtime.params import LoRARequest, MultiModalSpan, SamplingParams
from .bad_words import with_bad_words
from .invariants import check_step
from .logprobs import Logprob, TokenDetail, TokenTexts, as_dict
from .outputs import CompletionOutput, RequestOutput
from .scheduler import Scheduler
from .sequence import Sequence, SequenceGroup, SequenceStatus
from .text_stream import TextStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from .step import SchedulerOutputs


class Launch(Protocol):
    """A step that runs, or has run."""

    def result(self) -> SamplerOutput:
        """Its tokens, as soon as they are there. Raises what the step raised."""
        ...


class Runner(Protocol):
    """What runs a step; `runtime.runner.ModelRunner` is the real one."""

    def launch(
        self,
        seq_group_metadata_list: Seq[SequenceGroupMetadata],
        *,
        blocks_to_swap_in: list[tuple[int, int]],
        blocks_to_swap_out: list[tuple[int, int]],
        blocks_to_copy: list[tuple[int, int]],
        generation_of: Callable[[str], int | None],
        after: Launch | None,
    ) -> Launch:
        """after   the step in flight that this one goes on from; if that fails, so does this"""
        ...


@dataclasses.dataclass
class _Flying:
    """A step in flight. Times are seconds of `time.perf_counter`, durations seconds."""

    launch: Launch
    groups: list[SequenceGroup]
    schedule_time: float
    launched: float


class _NothingToRun:
    """The launch of a step of which nothing is left."""

    def result(self) -> SamplerOutput:
        return SamplerOutput(np.zeros(0, np.int64), np.zeros(0, np.float32))


class Request:
    """A request in the engine: the scheduler's group and the text of its completions."""

    def __init__(
        self,
        group: SequenceGroup,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        token_texts: TokenTexts,
    ) -> None:
        self.group = group
        self.prompt = prompt
        self._tokenizer = tokenizer
        self._token_texts = token_texts
        self._streams: dict[int, TextStream] = {}  # by sample index
        # what `output` has made of log probabilities, so that a token is looked at once; None is for the prompt
        self._logprobs: dict[Sequence | None, list[dict[int, Logprob]]] = {}

    @property
    def finished(self) -> bool:
        return self.group.is_finished

    @property
    def _is_searched(self) -> bool:
        """A beam search has ended, and found something."""
        return self.finished and bool(self.group.hypotheses)

    def decode(self, seq: Sequence) -> str | None:
        """Bring the text of `seq` up to its tokens; returns the stop string that ended it, if any.

        A token that ended the sequence is not part of the text unless special tokens are to be shown. The text of a beam
        may change from its beginning, so it is made when the search has ended.
        """
        params = self.group.sampling_params
        if self._tokenizer is None or (params.use_beam_search and not self.finished):
            return None
        stream = self._streams.get(seq.index)
        if stream is None:
            stream = self._streams[seq.index] = TextStream(
                self._tokenizer,
                seq.prompt_token_ids.tolist(),
                tuple(params.stop),
                params.include_stop_str_in_output,
                params.skip_special_tokens,
                params.min_tokens,
            )
        token_ids = seq.output_token_ids[stream.num_tokens :].tolist()
        if seq.status is SequenceStatus.FINISHED_STOPPED and params.skip_special_tokens:
            token_ids = token_ids[:-1]
        stop = next(
            (found for token in token_ids if (found := stream.push(token)) is not None), None
        )
        if seq.is_finished or stop is not None:
            stop = stream.close() or stop
        return stop

    def output(self) -> RequestOutput:
        """The request's present state, as new objects that later steps leave alone."""
        group = self.group
        return RequestOutput(
            request_id=group.request_id,
            prompt=self.prompt,
            prompt_token_ids=group.seqs[0].prompt_token_ids.tolist(),
            outputs=[self._completion(seq, place) for place, seq in enumerate(self._returned())],
            finished=self.finished,
            metrics=dataclasses.replace(group.metrics),
            num_cached_tokens=group.metrics.num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs(),
        )

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self.group.sampling_params.prompt_logprobs is None:
            return None
        return [None, *self._converted(None, self.group.prompt_logprobs)]

    def _converted(
        self, owner: Sequence | None, details: list[TokenDetail]
    ) -> list[dict[int, Logprob]]:
        known = self._logprobs.setdefault(owner, [])
        known += [as_dict(detail, self._token_texts) for detail in details[len(known) :]]
        return known.copy()

    def _returned(self) -> list[Sequence]:
        """The n sequences to be returned: all, or the most likely ones where more are made."""
        group, params = self.group, self.group.sampling_params
        if params.width == params.n and not params.use_beam_search:
            return group.seqs
        if self._is_searched:
            return group.seqs  # by score
        return sorted(group.seqs, key=lambda seq: -seq.cumulative_logprob)[: params.n]

    def _completion(self, seq: Sequence, place: int) -> CompletionOutput:
        stream = self._streams.get(seq.index)
        return CompletionOutput(
            index=place,
            text=stream.visible if stream is not None else "",
            token_ids=seq.output_token_ids.tolist(),
            cumulative_logprob=seq.cumulative_logprob,
            logprobs=self._logprobs_of(seq),
            finish_reason=seq.status.value if seq.is_finished else None,
            stop_reason=seq.stop_reason,
            score=self.group.hypotheses[place].score if self._is_searched else None,
        )

    def _logprobs_of(self, seq: Sequence) -> list[dict[int, Logprob]] | None:
        params = self.group.sampling_params
        if params.logprobs is None:
            return None
        if params.use_beam_search:
            self._logprobs.clear()  # most beams are gone by the next look
        return self._converted(seq, seq.output_details[: seq.num_output_tokens])


class Engine:
    """Drives requests from arrival to their one terminal event."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        check: bool = False,
        async_scheduling: bool = False,
    ) -> None:
        """async_scheduling: put the next step together while the last one runs, which the runner then has to do elsewhere."""
        self.scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._token_texts = TokenTexts(tokenizer)
        self._seed = seed
        self._check = check
        # by group: an id may be in use again before its last owner has been told
        self._requests: dict[SequenceGroup, Request] = {}
        self._aborted: list[SequenceGroup] = []
        self._undelivered: list[Request] = []  # what a step that raised would have returned
        self._most_in_flight = 2 if async_scheduling else 1
        self._in_flight: list[_Flying] = []  # oldest first, as `Scheduler.flight`
        self._num_added = 0
        self.peak_used_blocks = 0

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        prompt: str | None = None,
        cache_salt: str = "",
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        encoder_token_ids: Seq[int] | None = None,
        multi_modal_spans: Seq[MultiModalSpan] = (),
    ) -> Request:
        """Queue a request. Raises ValueError, with nothing changed, when it can never run."""
        params = sampling_params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params: expected SamplingParams, got {params!r}")
        if params.stop and self._tokenizer is None:
            raise ValueError(f"stop: expected none without a tokenizer, got {params.stop!r}")
        if params.guided is not None:
            raise ValueError("guided: expected None here, LLM makes a processor of it")
        if params.bad_words:
            params = with_bad_words(params, self._tokenizer)
        if params.seed is None and not params.is_greedy:
            params = msgspec.structs.replace(params, seed=_derive_seed(self._seed, self._num_added))
        group = SequenceGroup(
            request_id,
            prompt_token_ids,
            params,
            time.perf_counter(),
            eos_token_ids=self._eos_token_ids,
            cache_salt=cache_salt,
            priority=priority,
            lora_request=lora_request,
            encoder_seq=None
            if encoder_token_ids is None
            else Sequence(-1, encoder_token_ids, name="encoder_token_ids"),
            multi_modal_spans=multi_modal_spans,
        )
        self.scheduler.add_seq_group(group)
        self._num_added += 1
        request = self._requests[group] = Request(group, prompt, self._tokenizer, self._token_texts)
        return request

    def abort(self, request_id: str) -> bool:
        """End a request; its terminal output comes with the next `step()`. False when it is not in flight."""
        group = self.scheduler.abort(request_id)
        if group is not None:
            self._aborted.append(group)
        return group is not None

    def has_unfinished(self) -> bool:
        """Somebody waits for something, or a step is in flight, of what has ended even."""
        waiting = self._aborted or self._undelivered or self._in_flight
        return self.scheduler.has_unfinished() or bool(waiting)

    def step(self) -> list[Request]:
        """Bring one forward pass to its end; returns the requests that got tokens or ended, finished ones for the last time.

        When the model or the making of a text raises, so does this, after everyone's state is right again; the next
        call returns what this one would have.
        """
        changed, self._aborted = self._aborted, []
        failures: list[BaseException] = []
        try:
            while len(self._in_flight) < self._most_in_flight and self._launch_next(changed):
                pass
            if self._in_flight:
                changed += self._conclude()
            elif not (changed or self._undelivered) and self.scheduler.has_unfinished():
                raise RuntimeError(
                    "no progress: requests are unfinished, but none could be scheduled"
                )
        except BaseException as failure:
            failures.append(failure)
            # who ended in a write-back that got half way
            changed += [g for g in self._requests if g.is_finished and g not in self._aborted]
        requests = [self._requests[group] for group in dict.fromkeys(changed)]
        failures += [failure for request in requests if (failure := self._decode(request))]
        for request in requests:
            if request.finished:
                del self._requests[request.group]
        if self._check:
            self.scheduler.check_invariants()
        requests, self._undelivered = list(dict.fromkeys(self._undelivered + requests)), []
        if failures:
            self._undelivered = requests
            raise failures[0]
        return requests

    def _launch_next(self, changed: list[SequenceGroup]) -> bool:
        """Schedule and launch one more step, if there is one to be had now. Who ends without being run has `changed`."""
        started = time.perf_counter()
        scheduler = self.scheduler
        outputs = scheduler.schedule_ahead() if self._in_flight else scheduler.schedule()
        if outputs is None:
            return False
        scheduled = time.perf_counter()
        changed += outputs.ignored
        self.peak_used_blocks = max(self.peak_used_blocks, scheduler.blocks.num_used_blocks)
        if outputs.is_empty:
            return False
        try:
            if self._check:
                check_step(scheduler, outputs)
            launch = self._launch(outputs)
        except BaseException:
            self._give_up()
            raise
        self._in_flight.append(
            _Flying(launch, outputs.scheduled_seq_groups, scheduled - started, scheduled)
        )
        return True

    def _conclude(self) -> list[SequenceGroup]:
        """Wait for the oldest step in flight and write its tokens back; returns the groups that got some."""
        step = self._in_flight[0]
        try:
            sampled = step.launch.result()
            returned = time.perf_counter()
            changed = self.scheduler.update(sampled)
        except BaseException:
            self._give_up()
            raise
        del self._in_flight[0]
        write_back_time = time.perf_counter() - returned
        for group in step.groups:
            group.metrics.scheduler_time += step.schedule_time + write_back_time
            group.metrics.model_time += returned - step.launched
        return changed

    def _give_up(self) -> None:
        """A step failed: what came after it builds on it. Every request in flight can still be run again or aborted."""
        steps, self._in_flight = self._in_flight, []
        try:
            for step in steps:
                with contextlib.suppress(Exception):
                    step.launch.result()  # until then it may still write to its blocks
        finally:
            self.scheduler.rollback()

    def _launch(self, outputs: SchedulerOutputs) -> Launch:
        """Launch a step; what was overtaken before that is left out, and the rest issued again."""
        while not outputs.is_empty:
            try:
                return self._runner.launch(
                    outputs.seq_group_metadata_list,
                    blocks_to_swap_in=outputs.blocks_to_swap_in,
                    blocks_to_swap_out=outputs.blocks_to_swap_out,
                    blocks_to_copy=outputs.blocks_to_copy,
                    generation_of=self.scheduler.generation_of,
                    after=self._in_flight[-1].launch if self._in_flight else None,
                )
            except StaleMetadataError:
                outputs = self.scheduler.reissue()
        return _NothingToRun()

    def _decode(self, request: Request) -> Exception | None:
        """Bring a request's text up to its tokens. One whose text cannot be made is ended; nobody else is touched."""
        group = request.group
        try:
            for seq in group.seqs:
                stop = request.decode(seq)
                if stop is None:
                    continue
                if seq.is_finished:  # the last token that was allowed completed a stop string
                    seq.status, seq.stop_reason = SequenceStatus.FINISHED_STOPPED, stop
                else:
                    self.scheduler.finish_sequence(
                        group, seq, SequenceStatus.FINISHED_STOPPED, stop
                    )
        except Exception as failure:
            if not group.is_finished:
                self.scheduler.abort(group.request_id)
            return failure
        return None


def _derive_seed(engine_seed: int, number: int) -> int:
    """A seed for a request that has none: depends on the engine's seed and the request's place in line alone."""
    return (engine_seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9 + 1) % 2**63
