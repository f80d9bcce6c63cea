"""How groups that do not run yet come into a step: new and preempted ones with their first blocks, swapped ones with all."""

from __future__ import annotations

import time

from .admission import num_cross_blocks, peak_blocks
from .block_manager import cdiv
from .selection import Selection
from .sequence import Sequence, SequenceGroup, SequenceStatus


class Entrance(Selection):
    """Who may come in now. A failed attempt leaves everything as it was."""

    def bring_in(self, group: SequenceGroup) -> None:
        """Give a waiting or swapped group a place in the step if there is room.

        Without room nobody behind it comes in either, but for want of an adapter's place only those who need one.
        """
        if not self._has_adapter_place(group):
            self.step.awaits_adapter = True
            return
        enter = self._resume if group.state is SequenceStatus.SWAPPED else self._admit
        if enter(group):
            return
        may_preempt = self.config.policy == "priority" and self.config.admission == "optimistic"
        if may_preempt and self._clear_way(group) and enter(group):
            return
        self.step.admits = False

    def _has_adapter_place(self, group: SequenceGroup) -> bool:
        """Adapters of running groups keep their places. Nobody who needs one overtakes a group that waits for a place,
        else those in use could stay so for ever."""
        lora = group.lora_request
        if lora is None:
            return True
        if self.step.awaits_adapter:
            return False
        running = self.scheduler.running
        used = {other.lora_request for other in running if other.lora_request is not None}
        return lora in used or len(used) < self.config.max_loras

    def _admit(self, group: SequenceGroup) -> bool:
        """Bring a waiting group in: its first blocks, and a first chunk."""
        if group.num_seats > self.step.seats:  # told at once, a match takes time
            return False
        cached, chunk = first = self._first_chunk(group)
        if chunk < 1 or self._blocks_to_enter(group, first) > self.blocks.num_free_blocks:
            return False
        if not self._is_reserved(group):
            return False
        leader, size = group.live[0], self.config.block_size
        free = self.blocks.num_free_blocks - self.blocks.num_evictable(cached)
        free -= num_cross_blocks(group, self.config)
        chunk = self.without_part_spans(group, min(chunk, free * size), len(cached) * size)
        if chunk < 1:
            return False
        self.scheduler.waiting.remove(group)
        self.blocks.allocate(leader, cached)
        if group.encoder_seq is not None:
            self.blocks.allocate(group.encoder_seq, [])
            self.blocks.grow([group.encoder_seq], group.encoder_seq.num_tokens)
        if group.metrics.first_scheduled_time is None:
            group.metrics.first_scheduled_time = time.perf_counter()
            group.metrics.num_cached_tokens = leader.num_computed_tokens
            self.scheduler.totals.num_prompt_tokens += leader.num_prompt_tokens
            self.scheduler.totals.num_cached_tokens += leader.num_computed_tokens
        self._enter(group, [leader], chunk)
        return True

    def _resume(self, group: SequenceGroup) -> bool:
        """Bring a swapped group back with all its blocks. No step swaps both ways."""
        if self.step.swaps_out or self.chunk(group, len(group.active())) < 1:
            return False
        if group.num_seats > self.step.seats:
            return False
        if self._blocks_to_enter(group) > self.blocks.num_free_blocks:
            if self.scheduler.running:
                return False
            self.outgrow(group)  # the whole pool does not hold it any more
            return True
        if not self._is_reserved(group):
            return False
        self.scheduler.swapped.remove(group)
        self.step.swaps_in += self.blocks.swap_in(group.owners)
        self.step.returned[group] = []
        group.generation_id += 1
        seqs = self.next_of(group)
        chunk = self.chunk(group, len(seqs))
        if chunk and self.blocks.num_blocks_needed(seqs, chunk) > self.blocks.num_free_blocks:
            chunk = self.fitting_chunk(group, seqs, chunk) if len(seqs) == 1 else 0
        self._enter(group, seqs, chunk)
        return True

    def _enter(self, group: SequenceGroup, seqs: list[Sequence], chunk: int) -> None:
        self.step.seats -= group.num_seats
        self.scheduler.start(group)
        if chunk > 0:
            self.place(group, seqs, chunk)
        else:  # it is back, and feeds nothing yet; that it just came keeps others from taking its blocks
            self.step.placed.add(group)

    # -- what it takes

    def _blocks_to_enter(
        self,
        group: SequenceGroup,
        first: tuple[list[int], int] | None = None,
        alone: bool | None = None,
    ) -> int:
        """Free blocks without which a group does not come in: those it takes now, and a reserve while others run.

        first   of a waiting group, what `_first_chunk` found; a swapped one has none

        A new request needs room for its first chunk only. One that was preempted needs room for all it will hold, else it
        would come in for one chunk and be preempted again.
        """
        alone = not self.scheduler.running if alone is None else alone
        reserve = 0 if alone else self.scheduler.watermark_blocks
        if first is None:
            own = self.blocks.num_blocks_to_swap_in(group.owners)
            seqs = group.active()
            if not self.blocks.has_host_table(seqs[0].seq_id):
                return reserve + own + 1  # it has just begun to compute its tokens again
            return reserve + own + self.blocks.num_blocks_needed(seqs, 1)
        cached, chunk = first
        size = self.config.block_size
        needed = cdiv(len(cached) * size + chunk, size)
        if group.metrics.num_preemptions:
            needed = max(needed, self._resume_blocks(group))
        cross = num_cross_blocks(group, self.config)
        needed = min(needed, self.blocks.num_blocks - cross) + cross
        return reserve + max(needed - len(cached), 1) + self.blocks.num_evictable(cached)

    def _first_chunk(self, group: SequenceGroup) -> tuple[list[int], int]:
        """(blocks of its prefix that are known, tokens to feed after them) for a waiting group: nothing is computed yet.

        Found anew at each attempt: what was known at the last one may have been evicted.
        """
        leader, most = group.live[0], group.num_tokens_to_feed()
        if group.sampling_params.prompt_logprobs is not None and leader.num_output_tokens == 0:
            # positions whose logits are still needed have to be computed; none is when the prompt is through
            most = min(most, len(group.prompt_logprobs) + 1)
        known = self.blocks.match(leader, group.namespace, most)
        cached = self.usable_prefix(group, known)
        return cached, self.chunk(group, 1, len(cached) * self.config.block_size)

    def _resume_blocks(self, group: SequenceGroup) -> int:
        """Blocks the group holds once all its tokens are computed and one more is fed to each sequence."""
        live, size = group.live, self.config.block_size
        shared = (group.closest_before(seq)[1] // size for seq in live)
        blocks = sum(cdiv(seq.num_tokens + 1, size) for seq in live) - sum(shared)
        window = self.config.sliding_window
        if window is not None:
            blocks = min(blocks, len(live) * (cdiv(window - 1, size) + 1))
        return blocks

    def _is_reserved(self, group: SequenceGroup) -> bool:
        """With admission "reserve": nobody will run out of blocks if the group comes in."""
        if self.config.admission == "optimistic":
            return True
        scheduler = self.scheduler
        drawing = scheduler.batch.row_of if scheduler.flight else ()
        peak = peak_blocks([*scheduler.running, group], self.config, drawing)
        return peak <= self.blocks.num_blocks

    def _clear_way(self, group: SequenceGroup) -> bool:
        """Preempt less urgent running groups, the last first, until seats and blocks suffice; nobody if they never would."""
        running, step = self.scheduler.running, self.step
        victims = [g for g in running if g.priority > group.priority and not step.has(g)]
        owners = [seq for victim in victims for seq in victim.owners]
        seats = step.seats + sum(victim.num_seats for victim in victims)
        freed, first = self.blocks.held_alone(owners), None
        if group.state is SequenceStatus.WAITING:
            first = self._first_chunk(group)
            if first[1] < 1:
                return False  # the step's budget is what it lacks
            freed.difference_update(first[0])  # it would take these at once
        blocks = self.blocks.num_free_blocks + len(freed)
        alone = len(victims) == len(running)
        if group.num_seats > seats or self._blocks_to_enter(group, first, alone) > blocks:
            return False
        while (
            group.num_seats > step.seats
            or self._blocks_to_enter(group, first) > self.blocks.num_free_blocks
        ):
            victim = self.last_without_place(self.scheduler.turn(group), less_urgent=True)
            if victim is None:
                return False
            self.scheduler.take_blocks(victim, step)
        return True
