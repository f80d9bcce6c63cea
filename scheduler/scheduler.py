"""Which requests run in the next step. One read from top to bottom explains it.

                         ┌──────────── preempt (recompute) ───────────┐
                         v                                            │
    add_seq_group ──> waiting ──────────────admit────────────────> running ──finish──> gone
                                                                   │     ^
                                              preempt (swap) ──────┘     │
                                                 v                       │
                                              swapped ──────resume───────┘

`schedule()` spends one budget of tokens and seats on groups in order of turn: by default running ones (decodes, then
unfinished prefills), then swapped ones, then waiting ones, first come first served. A group moves as a whole or not at
all. When blocks run out for a running group, the last ones in line that have no place in this step yet give up theirs;
where there is none, the group sits this step out. The first in line is nobody's victim, so each step advances it or a
group that was placed before it. Nobody comes in past one that found no room. `schedule()` returns immutable snapshots;
`update()` (in `write_back`) gives the drawn tokens to their sequences.
"""

from __future__ import annotations

import itertools
import logging
import time
from bisect import bisect_left, insort

from ..runtime.metadata import SamplerOutput
from ..runtime.snapshots import Snapshots
from .admission import check_admissible
from .block_manager import BlockManager
from .config import SchedulerConfig
from .decode_batch import DecodeBatch
from .entrance import Entrance
from .flight import Flight
from .invariants import check_invariants
from .reissue import drop_stale
from .run_ahead import decodes_to_come
from .sequence import Sequence, SequenceGroup, SequenceStatus
from .stats import SchedulerStats, Totals
from .step import Row, SchedulerOutputs, Step, create_metadata
from .write_back import conclude_search, write_back

logger = logging.getLogger(__name__)


class Scheduler:
    """Owns all mutable request state. Not thread-safe: one owner calls it."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.blocks = BlockManager(
            config.num_gpu_blocks,
            config.block_size,
            config.enable_prefix_caching,
            num_cpu_blocks=config.num_cpu_blocks,
            sliding_window=config.sliding_window,
        )
        self.batch = DecodeBatch(self.blocks, config)
        # each in order of turn
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.swapped: list[SequenceGroup] = []
        self._groups: dict[str, SequenceGroup] = {}
        self.flight = Flight()
        self._seq_ids = itertools.count()
        self._arrivals = itertools.count()
        self._steps = itertools.count()
        # decodes that found no place in the last step come first in the next, whatever the order
        self.decodes_wait = False
        self.watermark_blocks = 0
        if config.admission == "optimistic":
            self.watermark_blocks = int(config.watermark * config.num_gpu_blocks)
        self.totals = Totals()
        # the next step; between steps it takes up swaps that are asked for
        self._ahead = self._new_step()

    # -- requests come and go

    def add_seq_group(self, group: SequenceGroup) -> None:
        """Queue a request. Raises ValueError, and changes nothing, when it could never run."""
        if group.request_id in self._groups:
            raise ValueError(
                f"request_id: expected one not in use, got {group.request_id!r}, which is in flight"
            )
        check_admissible(group, self.config)
        group.seqs[0].seq_id = next(self._seq_ids)
        for _ in range(group.sampling_params.width - 1):
            next(self._seq_ids)  # a group's first ids are consecutive, in order of its samples
        if group.encoder_seq is not None:
            group.encoder_seq.seq_id = next(self._seq_ids)
        group.arrival_order = next(self._arrivals)
        # two requests of one id never share a version
        group.generation_id = group.arrival_order << 32
        self._groups[group.request_id] = group
        insort(self.waiting, group, key=self.turn)

    def turn(self, group: SequenceGroup) -> tuple[int, int]:
        """Order within a queue."""
        return (group.priority if self.config.policy == "priority" else 0, group.arrival_order)

    def abort(self, request_id: str) -> SequenceGroup | None:
        """End a request in whatever state it is; returns it, or None when no such request is unfinished.

        If it takes part in a step in flight its blocks stay untouched until that step is written back.
        """
        group = self._groups.get(request_id)
        if group is None:
            return None
        self.finish_group(group, SequenceStatus.FINISHED_ABORTED)
        return group

    def preempt(self, request_id: str) -> SequenceGroup | None:
        """Take a running request's device blocks, as if they had run out; returns it, or None when it is not running.

        It goes on as soon as there is room, with the same tokens. Between steps `preemption_mode` says what becomes of its
        KV; while a step is in flight it is always given up, for what the step leaves of it is not known. If it takes part
        in that step, its snapshot there is stale: it is left out of the launch, or, if that has been, what the step draws
        for it is dropped and drawn again. Its blocks stay untouched until then.
        """
        group = self._groups.get(request_id)
        if group is None or group.state is not SequenceStatus.RUNNING:
            return None
        if not self.flight:
            self.take_blocks(group, self._ahead)
            return group
        self._stop_running(group)
        self.flight.make_void(group)
        for seq in group.owners:
            self.flight.newest.fenced += self.blocks.detach(seq)
        self._give_up_blocks(group)
        return group

    def finish_sequence(
        self,
        group: SequenceGroup,
        seq: Sequence,
        status: SequenceStatus,
        reason: int | str | None = None,
    ) -> None:
        """End one sequence, and with the last one its group."""
        group.finish(seq, status, reason)
        self.release(seq)
        if group.is_finished:
            self._take_leave(group)

    def finish_group(
        self, group: SequenceGroup, status: SequenceStatus, reason: int | str | None = None
    ) -> None:
        """End all sequences that are left."""
        for seq in group.live.copy():
            self.finish_sequence(group, seq, status, reason)

    def release(self, seq: Sequence) -> None:
        """A sequence needs its blocks no more: they are free at once, unless a step in flight names them."""
        if not self.flight.names(seq):
            self.blocks.free(seq)

    def release_encoder(self, group: SequenceGroup) -> None:
        """`release` of an encoder's sequence, if there is one."""
        if group.encoder_seq is not None and not self.flight.has(group):
            self.blocks.free(group.encoder_seq)

    def end_search(self, group: SequenceGroup) -> None:
        """A beam search is over: what still runs is given up."""
        for seq in group.live:
            self.release(seq)
        group.generation_id += 1
        group.live = []
        self._take_leave(group)

    def next_seq_id(self) -> int:
        return next(self._seq_ids)

    def _take_leave(self, group: SequenceGroup) -> None:
        del self._groups[group.request_id]
        self._ahead.swaps_out.pop(group, None)
        self.batch.leave(group)
        for queue in (self.running, self.swapped, self.waiting):
            place = bisect_left(queue, self.turn(group), key=self.turn)
            if place < len(queue) and queue[place] is group:
                del queue[place]
                break
        self.release_encoder(group)
        if group.sampling_params.use_beam_search:
            conclude_search(group)
        group.metrics.finished_time = time.perf_counter()
        group.metrics.num_generated_tokens = sum(seq.num_output_tokens for seq in group.seqs)
        self.totals.num_finished += 1

    def has_unfinished(self) -> bool:
        return bool(self._groups)

    def generation_of(self, request_id: str) -> int | None:
        """Current placement version of a request, None when it is gone."""
        group = self._groups.get(request_id)
        return None if group is None else group.generation_id

    @property
    def groups(self) -> list[SequenceGroup]:
        """All unfinished requests."""
        return list(self._groups.values())

    # -- one step

    def schedule(self) -> SchedulerOutputs:
        """Choose the next step's work, make room for it and freeze it into snapshots.

        A step that is not empty is in flight until `update` or `rollback`; RuntimeError while one is.
        """
        if self.flight:
            raise RuntimeError(
                "schedule: a step is in flight, expected update() or rollback() first"
            )
        return self._schedule()

    def schedule_ahead(self) -> SchedulerOutputs | None:
        """`schedule` while the last step runs: its decodes go on from tokens that are not known yet.

        None, and nothing changes, if the tokens have to be seen first (see `run_ahead`), or two steps are in flight.
        """
        joining = decodes_to_come(self) if len(self.flight) == 1 else None
        if joining is None:
            return None
        for group in joining:
            self.batch.join(group)
        return self._schedule()

    def _schedule(self) -> SchedulerOutputs:
        step, self._ahead = self._ahead, self._new_step()
        self.batch.refresh(self.flight.fence)
        others, batched = [], self.batch.row_of
        if len(batched) < len(self.running):
            others = [group for group in self.running if group not in batched]
        seats = len(self.batch) + sum(group.num_seats for group in others)
        step.seats = self.config.num_seats - seats
        taken_before = len(step.preempted)
        entrance = Entrance(self, step)
        if not entrance.decode(others):
            self.batch.clear()
            others = self.running.copy()
        for group in entrance.turns(others):
            if group in step.preempted[taken_before:] or group.is_finished:
                continue  # lost its place, or ended, for the sake of one before it
            if group.state is SequenceStatus.RUNNING:
                entrance.advance(group)
            elif step.admits and step.token_budget > 0:
                entrance.bring_in(group)
        self.decodes_wait = step.decodes_wait
        return self._freeze(step)

    def _new_step(self) -> Step:
        return Step(next(self._steps), self.config.max_num_batched_tokens)

    def take_blocks(self, group: SequenceGroup, step: Step) -> None:
        """Take all device blocks of a group: it computes its tokens again later, or has its blocks moved to the host.

        No step both swaps in and swaps out, see `SchedulerOutputs`.
        """
        step.preempted.append(group)
        step.seats += group.num_seats
        self._stop_running(group)
        holders = [seq for seq in group.owners if self.blocks.has_table(seq.seq_id)]
        mode = self.config.preemption_mode
        wants_swap = mode == "swap" or (mode == "auto" and len(group.active()) > 1)
        for seq in holders if wants_swap else ():
            # what no token to come sees need not move, nor have room to come back
            if seq is not group.encoder_seq:
                self.blocks.drop_out_of_window(seq)
        if wants_swap and not step.swaps_in and self.blocks.can_swap_out(holders):
            pairs = self.blocks.swap_out(holders)
            if pairs:  # its window may have passed all it had
                step.swaps_out[group] = pairs
            self.totals.num_swapped_out += 1
            self._set_state(group, SequenceStatus.SWAPPED)
            insort(self.swapped, group, key=self.turn)
        else:
            self._give_up_blocks(group)
        logger.debug("preempted request_id=%s into state=%s", group.request_id, group.state.value)

    def _stop_running(self, group: SequenceGroup) -> None:
        """A preempted group is in no queue from here on."""
        self.running.remove(group)
        self.batch.leave(group)
        group.metrics.num_preemptions += 1

    def _give_up_blocks(self, group: SequenceGroup) -> None:
        """Recompute preemption of a group that is in no queue now: the tokens stay and are computed again."""
        for seq in group.owners:
            self.blocks.free(seq)
            seq.num_computed_tokens = 0
        self.totals.num_recomputed += 1
        self._set_state(group, SequenceStatus.WAITING)
        insort(self.waiting, group, key=self.turn)

    def start(self, group: SequenceGroup) -> None:
        """A group that is in no queue now runs."""
        for seq in group.live:
            seq.status = SequenceStatus.RUNNING
        insort(self.running, group, key=self.turn)

    @staticmethod
    def _set_state(group: SequenceGroup, status: SequenceStatus) -> None:
        """Every such event makes the block tables already issued wrong."""
        for seq in group.live:
            seq.status = status
        group.generation_id += 1

    # -- out of the scheduler

    def _freeze(self, step: Step) -> SchedulerOutputs:
        """Snapshots first, then progress, then what the prefix cache may know of it."""
        # a stable sort: decodes first. A preempted group that finds all but its newest token cached is a decode
        step.rows.sort(key=lambda row: row.is_prefill)
        snapshots = []
        for row in step.rows:
            snapshot = create_metadata(
                row.group, row.seqs, row.chunk, row.is_prefill, self.blocks, self.config
            )
            row.num_samples, row.num_candidates = snapshot.num_samples, snapshot.num_candidates
            snapshots.append(snapshot)
        step.snapshots = Snapshots(None if step.decodes is None else step.decodes.rows, snapshots)
        for group, published in step.returned.items():
            # they may have been evicted where they were before
            for seq in filter(lambda seq: self.blocks.has_table(seq.seq_id), group.live):
                published += self.blocks.publish(seq, group.namespace, 0)
        for row in step.rows:
            self._progress(row)
        outputs = self._outputs(step)
        if not outputs.is_empty:
            self.flight.steps.append(step)
        if logger.isEnabledFor(logging.DEBUG):
            for snapshot in step.snapshots:
                logger.debug("step=%d %s", step.number, snapshot.describe())
        return outputs

    def _outputs(self, step: Step) -> SchedulerOutputs:
        return SchedulerOutputs(
            seq_group_metadata_list=step.snapshots,
            scheduled_seq_groups=step.groups,
            blocks_to_swap_in=step.swaps_in,
            blocks_to_swap_out=[pair for pairs in step.swaps_out.values() for pair in pairs],
            blocks_to_copy=step.copies,
            num_batched_tokens=self.config.max_num_batched_tokens - step.token_budget,
            ignored=step.ignored,
            preempted=step.preempted,
        )

    def _progress(self, row: Row) -> None:
        """The step is ordered: what it computes counts as computed for all that is scheduled after it."""
        group, size = row.group, self.config.block_size
        for seq in row.seqs:
            context_len = seq.num_computed_tokens
            seq.num_computed_tokens += row.chunk
            if context_len // size != seq.num_computed_tokens // size:
                row.published += self.blocks.publish(seq, group.namespace, context_len)
        if group.encoder_seq is not None:
            group.encoder_seq.num_computed_tokens = group.encoder_seq.num_tokens

    def reissue(self) -> SchedulerOutputs:
        """The newest step in flight again, nothing of which was launched, without the rows whose snapshots went stale meanwhile.

        RuntimeError if none did.
        """
        step = self.flight.newest
        drop_stale(self, step)
        return self._outputs(step)

    def rollback(self) -> None:
        """What is in flight will not run, or failed: its groups, and those it was to swap out, lose their blocks and wait to
        compute their tokens again."""
        steps = self.flight.cancel()
        self.batch.clear()
        for step in steps:
            self._undo_step(step)

    def _undo_step(self, step: Step) -> None:
        if step.decodes is not None:
            self.blocks.unpublish(block for _, block in step.decodes.published)
            for group, seq in zip(step.decodes.groups, step.decodes.seqs, strict=True):
                self._undo(group, [seq])
        for row in reversed((*step.rows, *step.left_out)):
            self.blocks.unpublish(row.published)
            if row.group not in step.voided:
                self._undo(row.group, row.seqs)
        for group, published in step.returned.items():
            self.blocks.unpublish(published)
            if group not in step.voided:
                self._undo(group, group.seqs)
        self.blocks.release(step.fenced)
        for group in step.swaps_out:
            if group in self.swapped:
                self.swapped.remove(group)
                self._give_up_blocks(group)

    def _undo(self, group: SequenceGroup, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self.blocks.free(seq)  # those that ended meanwhile had waited for this step
        if group.is_finished and group.encoder_seq is not None:
            self.blocks.free(group.encoder_seq)
        if group in self.running:
            self._stop_running(group)
            self._give_up_blocks(group)

    def update(self, outputs: SamplerOutput) -> list[SequenceGroup]:
        """Write the tokens of the oldest step in flight back, row by row; returns the groups that got tokens.

        Sequences end here by an end-of-sequence or stop token, by length, or, with a token below 0, because their
        logits were not finite. Results of requests that ended meanwhile are dropped.
        """
        step = self.flight.oldest
        expected = sum(row.num_samples for row in step.rows)
        expected += step.num_decodes
        got = len(outputs.token_ids), len(outputs.logprobs)
        if got != (expected, expected):
            raise ValueError(
                f"outputs: expected {expected} tokens and log probabilities, one for each sample, got {got[0]} and {got[1]}"
            )
        del self.flight.steps[0]
        try:
            changed = write_back(self, step, outputs)
        except BaseException:
            # part of it may be written: `rollback` makes the rest run again
            self.flight.steps.insert(0, step)
            raise
        self.totals.num_steps += 1
        self.totals.num_batched_tokens += self.config.max_num_batched_tokens - step.token_budget
        return changed

    # -- looking in

    def stats(self) -> SchedulerStats:
        """Where the scheduler stands, and its totals so far."""
        return SchedulerStats.of(self, self.totals)

    def check_invariants(self) -> None:
        """Raise RuntimeError unless block accounting, tables and queues agree. Meant for between steps."""
        check_invariants(self)
