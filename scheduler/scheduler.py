"""Which requests run in the next step. One read from top to bottom explains it.

    add_seq_group ──> waiting ──admit──> running ──finish──> gone
                         ^                  │
                         └─────preempt──────┘

`schedule()` spends one budget of tokens and seats: running groups first (decodes, then unfinished prefills), then
waiting ones, first come first served. A group moves as a whole or not at all. When blocks run out for a group, the
youngest running ones that came after it and have no place in this step yet give up theirs and wait for their turn to
compute their tokens again; where there is none, the group sits this step out. The oldest group is nobody's victim, so
each step advances it or a younger one that was placed before it. `schedule()` returns immutable snapshots; `update()`
writes the drawn tokens back by row.
"""

from __future__ import annotations

import itertools
import logging
import time
from bisect import insort
from collections import deque

from ..runtime.metadata import SamplerOutput
from .block_manager import BlockManager, cdiv
from .config import SchedulerConfig
from .sequence import Sequence, SequenceGroup, SequenceStatus
from .step import Row, SchedulerOutputs, Step, create_metadata

logger = logging.getLogger(__name__)


class Scheduler:
    """Owns all mutable request state. Not thread-safe: one owner calls it."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.blocks = BlockManager(
            config.num_gpu_blocks, config.block_size, config.enable_prefix_caching
        )
        self.waiting: deque[SequenceGroup] = deque()  # both in order of arrival
        self.running: list[SequenceGroup] = []
        self._groups: dict[str, SequenceGroup] = {}
        self._in_flight: Step | None = None
        self._seq_ids = itertools.count()
        self._arrivals = itertools.count()
        self._steps = itertools.count()
        self._watermark_blocks = int(config.watermark * config.num_gpu_blocks)

    # -- requests come and go

    def add_seq_group(self, group: SequenceGroup) -> None:
        """Queue a request. Raises ValueError, and changes nothing, when it could never run."""
        self._check_admissible(group)
        first_id = next(self._seq_ids)
        for _ in range(group.sampling_params.n - 1):
            next(self._seq_ids)  # a group's ids are consecutive, in order of its samples
        group.seqs[0].seq_id = first_id
        group.arrival_order = next(self._arrivals)
        # two requests of one id never share a version
        group.generation_id = group.arrival_order << 32
        self._groups[group.request_id] = group
        self.waiting.append(group)

    def _check_admissible(self, group: SequenceGroup) -> None:
        config, prompt = self.config, group.seqs[0].prompt_token_ids
        if group.request_id in self._groups:
            raise ValueError(
                f"request_id: expected one not in use, got {group.request_id!r}, which is in flight"
            )
        if len(prompt) == 0:
            raise ValueError("prompt_token_ids: expected at least one token, got an empty prompt")
        if config.vocab_size is not None and not (
            prompt.min() >= 0 and prompt.max() < config.vocab_size
        ):
            bad = int(prompt.min()) if prompt.min() < 0 else int(prompt.max())
            raise ValueError(
                f"prompt_token_ids: expected ids in [0, {config.vocab_size}), got {bad}"
            )
        if len(prompt) + 1 > config.max_seq_len:
            raise ValueError(
                f"prompt_token_ids: {len(prompt)} tokens and one to generate do not fit: max_model_len is "
                f"{config.max_model_len}, the KV pool holds {config.num_gpu_blocks} blocks of {config.block_size} tokens"
            )
        if group.sampling_params.n > config.num_seats:
            raise ValueError(
                f"n: expected at most {config.num_seats} (the seats), got {group.sampling_params.n}"
            )
        for name in ("lora_request", "prompt_adapter_request", "encoder_seq"):
            if getattr(group, name) is not None:
                raise ValueError(
                    f"{name}: expected None, no loaded model takes one, got {getattr(group, name)!r}"
                )

    def abort(self, request_id: str) -> SequenceGroup | None:
        """End a request in whatever state it is; returns it, or None when no such request is unfinished.

        If it takes part in a step in flight its blocks stay untouched until that step is written back.
        """
        group = self._groups.get(request_id)
        if group is None:
            return None
        self._finish(group, SequenceStatus.FINISHED_ABORTED)
        return group

    def finish_sequence(
        self,
        group: SequenceGroup,
        seq: Sequence,
        status: SequenceStatus,
        reason: int | str | None = None,
    ) -> None:
        """End one sequence, and with the last one its group.

        Its blocks are free at once unless a step in flight names them.
        """
        group.finish(seq, status, reason)
        step = self._in_flight
        if step is None or not any(seq in row.seqs for row in step.rows):
            self.blocks.free(seq)
        if group.is_finished:
            del self._groups[group.request_id]
            (self.running if group in self.running else self.waiting).remove(group)
            group.metrics.finished_time = time.perf_counter()

    def _finish(self, group: SequenceGroup, status: SequenceStatus) -> None:
        for seq in group.live.copy():
            self.finish_sequence(group, seq, status)

    def has_unfinished(self) -> bool:
        return bool(self._groups)

    def generation_of(self, request_id: str) -> int | None:
        """Current placement version of a request, None when it is gone."""
        group = self._groups.get(request_id)
        return None if group is None else group.generation_id

    # -- one step

    def schedule(self) -> SchedulerOutputs:
        """Choose the next step's work, make room for it and freeze it into snapshots.

        A step that is not empty is in flight until `update` or `rollback`; RuntimeError while one is.
        """
        if self._in_flight is not None:
            raise RuntimeError(
                "schedule: a step is in flight, expected update() or rollback() first"
            )
        step = Step(next(self._steps), self.config.max_num_batched_tokens)
        self._schedule_running(step)
        if not step.is_short_of_blocks:
            self._schedule_waiting(step)
        return self._order(step)

    def _schedule_running(self, step: Step) -> None:
        # a stable sort: decodes first, in order of arrival within a phase
        for group in sorted(self.running, key=lambda group: group.is_prefill):
            if group.state is not SequenceStatus.RUNNING:
                continue  # preempted or finished for the sake of an older one
            seqs = group.active()
            chunk = self._chunk(
                group.num_tokens_to_feed(), step.token_budget // len(seqs), may_split=len(seqs) > 1
            )
            if chunk > 0 and self._make_room(group, seqs, chunk, step):
                self._place(group, seqs, chunk, step)

    def _chunk(self, num_tokens: int, budget: int, may_split: bool = False) -> int:
        """Tokens to feed now: as many as the budget allows, or with chunking off all or none."""
        if num_tokens > budget and not (self.config.enable_chunked_prefill or may_split):
            return 0
        return min(num_tokens, budget)

    def _make_room(
        self, group: SequenceGroup, seqs: list[Sequence], chunk: int, step: Step
    ) -> bool:
        """Free blocks for `group` at the expense of younger groups that have no place in this step yet."""
        while self.blocks.num_blocks_needed(seqs, chunk) > self.blocks.num_free_blocks:
            step.is_short_of_blocks = True
            younger = self.running[self.running.index(group) + 1 :]
            victim = next((victim for victim in reversed(younger) if not step.has(victim)), None)
            if victim is not None:
                self._preempt(victim)
                step.preempted.append(victim)
                continue
            if len(self.running) == 1:  # the whole pool does not hold it: it ends with what it has
                self._finish(group, SequenceStatus.FINISHED_LENGTH)
                step.ignored.append(group)
            return False
        return True

    def _preempt(self, group: SequenceGroup) -> None:
        """Recompute preemption: give up all blocks; the tokens stay and are computed again later."""
        for seq in group.live:
            self.blocks.free(seq)
            seq.num_computed_tokens = 0
            seq.status = SequenceStatus.WAITING
        group.generation_id += 1
        group.metrics.num_preemptions += 1
        self.running.remove(group)
        insort(self.waiting, group, key=lambda g: g.arrival_order)
        logger.debug("preempted request_id=%s", group.request_id)

    def _resume_blocks(self, group: SequenceGroup) -> int:
        """Blocks the group holds once all its tokens are computed and one more is fed to each sequence."""
        live = group.live
        size = self.config.block_size
        shared = group.num_prompt_tokens // size if len(live) > 1 else 0
        return shared + sum(cdiv(seq.num_tokens + 1, size) - shared for seq in live)

    def _schedule_waiting(self, step: Step) -> None:
        seats = self.config.num_seats - sum(group.num_seats for group in self.running)
        while self.waiting and step.token_budget > 0:
            group = self.waiting[0]
            if group.num_seats > seats or not self._admit(group, step):
                break
            seats -= group.num_seats

    def _admit(self, group: SequenceGroup, step: Step) -> bool:
        """Give a waiting group its first blocks and a place in the step, or leave everything as it was.

        A new request needs room for its first chunk only. One that was preempted needs room for all it will hold,
        else it would be admitted for one chunk and preempted again.
        """
        leader = group.live[0]
        target = group.num_tokens_to_feed()  # nothing is computed yet
        cached = self.blocks.match(leader, group.cache_salt, target)
        context_len = len(cached) * self.config.block_size
        chunk = self._chunk(target - context_len, step.token_budget)
        if chunk == 0:
            return False
        needed = cdiv(context_len + chunk, self.config.block_size)
        if group.metrics.num_preemptions:
            needed = min(self._resume_blocks(group), self.blocks.num_blocks)
        reserve = self._watermark_blocks if self.running else 0
        available = self.blocks.num_free_blocks - self.blocks.num_evictable(cached)
        if needed - len(cached) + reserve > available:
            return False

        self.waiting.popleft()
        self.blocks.allocate(leader, cached)
        for seq in group.live:
            seq.status = SequenceStatus.RUNNING
        insort(self.running, group, key=lambda g: g.arrival_order)
        if group.metrics.first_scheduled_time is None:
            group.metrics.first_scheduled_time = time.perf_counter()
            group.metrics.num_cached_tokens = context_len
        self._place(group, [leader], chunk, step)
        return True

    def _place(self, group: SequenceGroup, seqs: list[Sequence], chunk: int, step: Step) -> None:
        copies = self.blocks.grow(seqs, chunk)
        if copies:
            step.copies += copies
            group.generation_id += 1
        step.token_budget -= chunk * len(seqs)
        step.rows.append(Row(group, seqs, chunk, group.is_prefill))

    def _order(self, step: Step) -> SchedulerOutputs:
        """Freeze the step: snapshots first, then progress, then what the prefix cache may know of it."""
        # a preempted group that finds all but its newest token cached comes back as a decode, after prefills were placed
        step.rows.sort(key=lambda row: row.is_prefill)
        snapshots = []
        for row in step.rows:
            snapshot = create_metadata(
                row.group, row.seqs, row.chunk, row.is_prefill, self.blocks, self.config
            )
            row.num_samples = snapshot.num_samples
            snapshots.append(snapshot)
        size = self.config.block_size
        for row in step.rows:
            for seq in row.seqs:
                context_len = seq.num_computed_tokens
                seq.num_computed_tokens += row.chunk
                if context_len // size != seq.num_computed_tokens // size:
                    row.published += self.blocks.publish(seq, row.group.cache_salt, context_len)
            if len(row.group.live) > 1:
                self._attach_siblings(row.group)
        if step.rows:
            self._in_flight = step
        if logger.isEnabledFor(logging.DEBUG):
            for snapshot in snapshots:
                logger.debug("step=%d %s", step.number, snapshot.describe())
        return SchedulerOutputs(
            seq_group_metadata_list=snapshots,
            scheduled_seq_groups=[row.group for row in step.rows],
            blocks_to_copy=step.copies,
            num_batched_tokens=self.config.max_num_batched_tokens - step.token_budget,
            ignored=step.ignored,
            preempted=step.preempted,
        )

    def _attach_siblings(self, group: SequenceGroup) -> None:
        """After a preemption the leader has computed the prompt again: its siblings share it from here on."""
        leader, *siblings = group.live
        if leader.num_computed_tokens == leader.num_prompt_tokens:
            for seq in siblings:
                if not self.blocks.has_table(seq.seq_id):
                    self.blocks.fork(leader, seq)
                    seq.num_computed_tokens = leader.num_computed_tokens

    def rollback(self) -> None:
        """The step in flight will not run: its groups lose their blocks and wait to compute their tokens again."""
        step, self._in_flight = self._take_in_flight(), None
        for row in reversed(step.rows):
            self.blocks.unpublish(row.published)
            if row.group in self.running:
                self._preempt(row.group)
            for seq in row.seqs:
                self.blocks.free(seq)  # those that ended meanwhile had waited for this step

    # -- write-back

    def update(self, outputs: SamplerOutput) -> list[SequenceGroup]:
        """Write the tokens of the step in flight back, row by row; returns the groups that got tokens.

        Sequences end here by an end-of-sequence or stop token, by length, or, with a token below 0, because their
        logits were not finite. Results of requests that ended meanwhile are dropped.
        """
        step = self._take_in_flight()
        expected = sum(row.num_samples for row in step.rows)
        if len(outputs.token_ids) != expected:
            raise ValueError(
                f"outputs: expected {expected} tokens, one for each sample, got {len(outputs.token_ids)}"
            )
        self._in_flight = None
        results = zip(outputs.token_ids.tolist(), outputs.logprobs.tolist(), strict=True)
        changed = []
        for row in step.rows:
            drawn = list(itertools.islice(results, row.num_samples))
            if drawn and row.group.live:
                self._write_back(row, drawn)
                changed.append(row.group)
            for seq in row.seqs:
                if seq.is_finished:
                    self.blocks.free(seq)  # waited for this step
        return changed

    def _take_in_flight(self) -> Step:
        if self._in_flight is None:
            raise RuntimeError("expected a step in flight, there is none: schedule() comes first")
        return self._in_flight

    def _write_back(self, row: Row, drawn: list[tuple[int, float]]) -> None:
        group, seqs = row.group, row.seqs
        if group.metrics.first_token_time is None:
            group.metrics.first_token_time = time.perf_counter()
        if len(drawn) > len(seqs):
            seqs = self._fork_samples(group)
        for seq, (token, logprob) in zip(seqs, drawn, strict=True):
            if seq.is_finished:
                continue
            if token < 0:
                reason = "the model's logits were not finite"
                self.finish_sequence(group, seq, SequenceStatus.FINISHED_ABORTED, reason)
                continue
            seq.append(token, logprob)
            self._finish_if_over(group, seq, token)

    def _fork_samples(self, group: SequenceGroup) -> list[Sequence]:
        """The first tokens are drawn: n - 1 siblings branch off the leader and share its blocks."""
        leader = group.seqs[0]
        for index in range(1, group.sampling_params.n):
            child = leader.fork(leader.seq_id + index, index)
            group.add_sample(child)
            self.blocks.fork(leader, child)
        return group.seqs

    def _finish_if_over(self, group: SequenceGroup, seq: Sequence, token: int) -> None:
        params = group.sampling_params
        if token in group.eos_token_ids:
            self.finish_sequence(group, seq, SequenceStatus.FINISHED_STOPPED)
        elif token in params.stop_token_ids:
            self.finish_sequence(group, seq, SequenceStatus.FINISHED_STOPPED, token)
        elif seq.num_tokens >= self.config.max_seq_len or (
            params.max_tokens is not None and seq.num_output_tokens >= params.max_tokens
        ):
            self.finish_sequence(group, seq, SequenceStatus.FINISHED_LENGTH)

    # -- checking

    def check_invariants(self) -> None:
        """Raise RuntimeError unless block accounting, tables and queues agree. Meant for between steps."""
        self.blocks.check_integrity()
        size = self.config.block_size
        for group in self.running:
            for seq in group.active():
                entries = len(self.blocks.table(seq.seq_id))
                if entries != cdiv(seq.num_computed_tokens, size):
                    raise RuntimeError(
                        f"request {group.request_id!r}: {seq.num_computed_tokens} computed tokens in {entries} blocks"
                    )
        queued = {group.request_id for group in (*self.running, *self.waiting)}
        if queued != set(self._groups):
            raise RuntimeError(
                f"queues hold {sorted(queued)}, known requests are {sorted(self._groups)}"
            )
        if not self._groups and self._in_flight is None and self.blocks.num_used_blocks:
            raise RuntimeError(
                f"idle, but {self.blocks.num_used_blocks} blocks are still referenced"
            )
