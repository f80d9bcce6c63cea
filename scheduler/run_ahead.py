"""Whether the next step can be put together while the last one still draws its tokens.

Most steps can: a plain decode needs its newest token's place, not its id. What does depend on the ids is left to `schedule`,
after they have been written back: samples and beams branch, and whoever lacks blocks takes them from others, which gives
nothing while a step in flight names these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .decode_batch import DecodeBatch

if TYPE_CHECKING:
    from .scheduler import Scheduler
    from .sequence import SequenceGroup


def decodes_to_come(scheduler: Scheduler) -> list[SequenceGroup] | None:
    """Groups whose first token the step in flight draws, and which are plain decodes from then on.

    None if the next step cannot be put together yet. Otherwise everybody who runs gets a place in it.
    """
    step, config, batch = scheduler.flight.newest, scheduler.config, scheduler.batch
    if scheduler.swapped or scheduler.decodes_wait or batch.has_newcomers:
        return None
    if config.policy == "priority" and scheduler.waiting:
        return None  # a newcomer may take the place of one who runs
    drawing = [
        row.group
        for row in step.rows
        if row.num_samples and row.group.live and row.group not in step.voided
    ]
    if not all(map(DecodeBatch.takes, drawing)):
        return None
    known = {*batch.row_of, *drawing}
    others = [group for group in scheduler.running if group not in known]
    if not all(group.is_prefill and _has_begun(scheduler, group) for group in others):
        return None
    is_first = config.policy == "fcfs" and config.order == "decode-first"
    if not is_first and (scheduler.waiting or others):
        return None  # decodes have to wait for their turn
    return drawing if _has_room(scheduler, drawing, others) else None


def _has_begun(scheduler: Scheduler, group: SequenceGroup) -> bool:
    """What is fed next of the group has its blocks so far; after a preemption the next sequence may have none."""
    return all(scheduler.blocks.has_table(seq.seq_id) for seq in group.active())


def _has_room(
    scheduler: Scheduler, drawing: list[SequenceGroup], others: list[SequenceGroup]
) -> bool:
    """Whether there are blocks for one more token of every decode, and a chunk of every prefill."""
    blocks, needed = scheduler.blocks, len(scheduler.batch.opening(ahead=1))
    for group in drawing:
        needed += blocks.num_blocks_needed(group.live, 1)
    for group in others:
        chunk = min(group.num_tokens_to_feed(), scheduler.config.max_num_batched_tokens)
        needed += blocks.num_blocks_needed(group.active(), chunk)
    return needed <= blocks.num_free_blocks
