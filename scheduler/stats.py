"""Where a scheduler stands, in numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .scheduler import Scheduler


@dataclass
class Totals:
    """Counted since the scheduler began."""

    num_steps: int = 0  # that were run
    num_batched_tokens: int = 0
    num_finished: int = 0
    num_recomputed: int = 0  # preemptions that gave up the KV
    num_swapped_out: int = 0  # preemptions that moved it to the host
    num_prompt_tokens: int = 0  # of requests that came in
    num_cached_tokens: int = 0  # of these, found in the prefix cache


@dataclass(kw_only=True)
class SchedulerStats(Totals):
    """Requests by state, blocks by class, and the totals. The null block is not counted."""

    num_running: int
    num_swapped: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int  # nobody's, but a known prefix can be found in them
    num_cpu_blocks: int
    num_used_cpu_blocks: int

    @classmethod
    def of(cls, scheduler: Scheduler, totals: Totals) -> SchedulerStats:
        device, host = scheduler.blocks.device, scheduler.blocks.host
        return cls(
            num_running=len(scheduler.running),
            num_swapped=len(scheduler.swapped),
            num_waiting=len(scheduler.waiting),
            num_blocks=device.num_blocks,
            num_used_blocks=device.num_used,
            num_cached_blocks=device.num_cached,
            num_cpu_blocks=host.num_blocks,
            num_used_cpu_blocks=host.num_used,
            **dataclasses.asdict(totals),
        )
