"""Filling one step: running groups take their places, in order of turn, and make room at the expense of those behind."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .sequence import Sequence, SequenceGroup, SequenceStatus
from .step import Row, Step

if TYPE_CHECKING:
    from .scheduler import Scheduler


class Selection:
    """One step in the making. `Entrance` adds how those that do not run yet come in."""

    def __init__(self, scheduler: Scheduler, step: Step) -> None:
        self.scheduler = scheduler
        self.config = scheduler.config
        self.blocks = scheduler.blocks
        self.step = step

    def decode(self, others: list[SequenceGroup]) -> bool:
        """Place all plain decodes at once, if that is what going through the groups in order would come to: all decodes
        are before all others in line, and there are blocks for every one of them. `others` run too.
        """
        batch, scheduler = self.scheduler.batch, self.scheduler
        if not batch:
            return False
        is_first = self.config.policy == "fcfs" and self.config.order == "decode-first"
        if not is_first and (
            scheduler.waiting or scheduler.swapped or any(group.is_prefill for group in others)
        ):
            return False
        ahead = len(scheduler.flight)
        opening = batch.opening(ahead)
        needed = len(opening)
        for group in others:
            if not group.is_prefill:
                needed += self.blocks.num_blocks_needed(group.active(), 1)
        if needed > self.blocks.num_free_blocks:
            return False
        if ahead and not len(batch.going_on(ahead)):
            return True  # the tokens in flight are everybody's last
        step = self.step
        step.decodes = batch.place(opening, ahead, scheduler.flight.fence)
        step.token_budget -= len(step.decodes.groups)
        return True

    def turns(self, running: list[SequenceGroup]) -> Iterator[SequenceGroup]:
        """Groups in the order in which they may take from the step's budget: these running ones, and those to come in."""
        scheduler = self.scheduler
        decodes = [group for group in running if not group.is_prefill]
        prefills = [group for group in running if group.is_prefill]
        newcomers = scheduler.swapped.copy(), scheduler.waiting[: self.config.num_seats + 1]
        if self.config.order == "decode-first" or scheduler.decodes_wait:
            phases = (decodes, prefills, *newcomers)
        else:
            phases = (prefills, *newcomers, decodes)
        if self.config.policy == "priority":
            return heapq.merge(*phases, key=lambda group: group.priority)
        return itertools.chain(*phases)

    def advance(self, group: SequenceGroup) -> None:
        """Give a running group its place in the step, or let it sit this step out."""
        seqs = group.active()
        for seq in seqs:
            self.blocks.drop_out_of_window(seq, self.scheduler.flight.fence)
        chunk = self.chunk(group, len(seqs))
        if chunk > 0:
            chunk = self._make_room(group, seqs, chunk)
        if chunk > 0:
            self.place(group, seqs, chunk)
        else:
            # what newcomers took of the budget, or the blocks, would be missed here
            self.step.admits = False
            self.step.decodes_wait |= not (group.is_finished or group.is_prefill)

    def place(self, group: SequenceGroup, seqs: list[Sequence], chunk: int) -> None:
        """Feed `chunk` tokens to each of these sequences; there is room for them."""
        copies = self.blocks.grow(seqs, chunk)
        if copies:
            self.step.copies += copies
            group.generation_id += 1
        self.step.token_budget -= chunk * len(seqs) + group.num_encoder_tokens_to_feed
        self.step.rows.append(Row(group, seqs, chunk, group.is_prefill))
        self.step.placed.add(group)

    # -- how many tokens

    def chunk(self, group: SequenceGroup, num_seqs: int, num_cached: int = 0) -> int:
        """Tokens to feed each sequence now: as many as the budget allows, or where they cannot be split all or none."""
        wanted = group.num_tokens_to_feed() - num_cached
        budget = (self.step.token_budget - group.num_encoder_tokens_to_feed) // num_seqs
        if wanted <= budget:
            return wanted
        may_split = self.config.enable_chunked_prefill or num_seqs > 1
        return self.without_part_spans(group, budget, num_cached) if may_split else 0

    def without_part_spans(self, group: SequenceGroup, chunk: int, num_cached: int = 0) -> int:
        """The longest chunk up to `chunk` that does not end inside a span that must stay whole."""
        leader = group.live[0]
        start = leader.num_computed_tokens + num_cached
        for span in leader.spans:
            if span.is_whole and span.offset < start + chunk < span.stop:
                return max(0, span.offset - start)
        return max(0, chunk)

    # -- room for them

    def _make_room(self, group: SequenceGroup, seqs: list[Sequence], chunk: int) -> int:
        """Have blocks for `chunk` tokens, or as many as there are blocks for, at the expense of groups later in line that
        have no place in this step yet; returns the tokens there is room for."""
        while self.blocks.num_blocks_needed(seqs, chunk) > self.blocks.num_free_blocks:
            self.step.admits = False
            victim = self.last_without_place(self.scheduler.turn(group))
            if victim is not None:
                self.scheduler.take_blocks(victim, self.step)
            elif group.is_prefill and (fitting := self._fitting_chunk(group, seqs, chunk)) > 0:
                return fitting
            else:
                if len(self.scheduler.running) == 1:  # the whole pool does not hold it
                    self.outgrow(group)
                return 0
        return chunk

    def _fitting_chunk(self, group: SequenceGroup, seqs: list[Sequence], chunk: int) -> int:
        """Tokens, up to `chunk`, that each sequence can be fed with the blocks that are free."""
        if len(seqs) > 1:
            # what they had generated before a preemption: a window may let it in bit by bit
            return self.halved_to_fit(seqs, chunk)
        leader, size = group.live[0], self.config.block_size
        room = -leader.num_computed_tokens % size + self.blocks.num_free_blocks * size
        if self.blocks.num_blocks_needed([leader], room) > self.blocks.num_free_blocks:
            room -= size  # one goes for a copy of its last block
        room = min(chunk, room)
        return self.without_part_spans(group, room) if self.config.enable_chunked_prefill else 0

    def halved_to_fit(self, seqs: list[Sequence], chunk: int) -> int:
        """`chunk`, halved until the free blocks suffice for so many tokens of each sequence."""
        while chunk and self.blocks.num_blocks_needed(seqs, chunk) > self.blocks.num_free_blocks:
            chunk //= 2
        return chunk

    def last_without_place(
        self, after: tuple[int, int], less_urgent: bool = False
    ) -> SequenceGroup | None:
        """The last running group in line after the turn `after` that has no place in the step."""
        for victim in reversed(self.scheduler.running):
            turn = self.scheduler.turn(victim)
            if turn <= after or (less_urgent and turn[0] <= after[0]):
                return None
            if not self.step.has(victim):
                return victim
        return None

    def outgrow(self, group: SequenceGroup) -> None:
        """A group that needs more than there is ends with what it has."""
        self.scheduler.finish_group(group, SequenceStatus.FINISHED_LENGTH)
        self.step.ignored.append(group)
