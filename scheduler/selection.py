"""Filling one step: running groups take their places, in order of turn, and make room at the expense of those behind."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..runtime.metadata import NULL_BLOCK
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
        if not self._come_first(others):
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

    def _come_first(self, others: list[SequenceGroup]) -> bool:
        """Whether all plain decodes are in line before the prefills among `others` and before who is to come in."""
        scheduler, config = self.scheduler, self.config
        if config.policy == "fcfs" and config.order == "decode-first":
            return True
        prefills = (group for group in others if group.is_prefill)
        behind = itertools.chain(scheduler.waiting[:1], scheduler.swapped[:1], prefills)
        if config.order == "decode-first":  # among equally urgent ones decodes are first
            return all(group.priority >= scheduler.running[-1].priority for group in behind)
        return not any(True for _ in behind)

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
        seqs = self.next_of(group)
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

    def next_of(self, group: SequenceGroup) -> list[Sequence]:
        """The group's active sequences. One that begins to compute its tokens again after a preemption gets the blocks that
        those before it have made, or that the prefix cache knows, up to where it parts from them."""
        while True:
            seqs = group.active()
            if self.blocks.has_table(seqs[0].seq_id):
                return seqs
            [seq] = seqs
            parent, common = group.closest_before(seq)
            shared = self.blocks.table(parent.seq_id)[: common // self.config.block_size].tolist()
            cached = self.blocks.match(seq, group.namespace, seq.num_tokens)
            choices = (self.usable_prefix(group, known) for known in (shared, cached))
            self.blocks.allocate(seq, max(choices, key=len))

    def usable_prefix(self, group: SequenceGroup, known: list[int]) -> list[int]:
        """The part of these blocks, which hold the beginning of the group's next sequence, that it can go on from."""
        size, window = self.config.block_size, self.config.sliding_window
        known = known.copy()
        while known and self.without_part_spans(group, len(known) * size) < len(known) * size:
            known.pop()  # the model needs the whole of a span at once, of which a part is known
        if window is None:
            return known
        # what was shortened, or computed further, may have lost what the window at its end sees
        seen = known[max(0, len(known) * size - window + 1) // size :]
        return [] if NULL_BLOCK in seen else known

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
        seq = group.active()[0]
        start = seq.num_computed_tokens + num_cached
        for span in seq.spans:
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
            elif group.is_prefill and (fitting := self.fitting_chunk(group, seqs, chunk)) > 0:
                return fitting
            else:
                if len(self.scheduler.running) == 1:  # the whole pool does not hold it
                    self.outgrow(group)
                return 0
        return chunk

    def fitting_chunk(self, group: SequenceGroup, seqs: list[Sequence], chunk: int) -> int:
        """Tokens, up to `chunk`, that the sequence of a prefill can be fed with the blocks that are free."""
        [seq], size = seqs, self.config.block_size
        room = -seq.num_computed_tokens % size + self.blocks.num_free_blocks * size
        if self.blocks.num_blocks_needed([seq], room) > self.blocks.num_free_blocks:
            room -= size  # one goes for a copy of its last block
        room = min(chunk, room)
        return self.without_part_spans(group, room) if self.config.enable_chunked_prefill else 0

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
