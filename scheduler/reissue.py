"""A step that was overtaken before its launch: the same step again, without those whose snapshots went stale.

Nothing was launched, so everybody else's part still stands: blocks, moves, progress. What stale rows were to compute is
not computed, so the prefix cache forgets it; their blocks stay behind the fence until the step is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ..runtime.snapshots import DecodeRows, Snapshots
from .step import Step

if TYPE_CHECKING:
    from ..runtime.metadata import SequenceGroupMetadata
    from .scheduler import Scheduler
    from .step import Row


def drop_stale(scheduler: Scheduler, step: Step) -> None:
    """Take stale rows out of a step in flight. RuntimeError if there is none, for then nothing would change."""
    decodes = _fresh_decodes(scheduler, step)
    others, rows_left = [], []
    num_stale = 0 if decodes is step.snapshots.decodes else 1
    for row, metadata in zip(step.rows, step.snapshots.others, strict=True):
        if scheduler.generation_of(metadata.request_id) == metadata.generation_id:
            others.append(metadata)
            rows_left.append(row)
            continue
        num_stale += 1
        remaining = _without_ended(scheduler, step, row, metadata)
        if remaining is not None:
            others.append(remaining)
            rows_left.append(row)
        else:
            scheduler.blocks.unpublish(row.published)
            step.token_budget += row.chunk * len(row.seqs)
            row.num_samples = 0
            step.left_out.append(row)
    if not num_stale:
        raise RuntimeError("reissue: expected a stale snapshot in the step, there is none")
    step.rows = rows_left
    step.snapshots = Snapshots(decodes, others)


def _fresh_decodes(scheduler: Scheduler, step: Step) -> DecodeRows | None:
    """The columns of those plain decodes that still stand; the very same if all do."""
    rows, place = step.snapshots.decodes, step.decodes
    if rows is None or place is None:
        return None
    current = [scheduler.generation_of(name) for name in rows.request_ids]
    if current == rows.generation_ids:
        return rows
    before = np.arange(len(place.groups)) if step.decodes_left is None else step.decodes_left
    fresh = [i for i, now in enumerate(current) if now == rows.generation_ids[i]]
    step.decodes_left = before[fresh]
    step.token_budget += len(rows) - len(fresh)
    standing = set(step.decodes_left.tolist())
    lost = [block for row, block in place.published if row not in standing]
    scheduler.blocks.unpublish(lost)
    place.published[:] = [(row, block) for row, block in place.published if row in standing]
    return rows.take(fresh) if fresh else None


def _without_ended(
    scheduler: Scheduler, step: Step, row: Row, metadata: SequenceGroupMetadata
) -> SequenceGroupMetadata | None:
    """The snapshot of a group of which some sequences have ended and nothing else has changed, else None."""
    group = row.group
    left = [seq for seq in row.seqs if not seq.is_finished]
    if row.group in step.voided or not left or len(left) == len(row.seqs):
        return None
    ended = [seq for seq in row.seqs if seq.is_finished]
    row.seqs = left
    for seq in ended:
        scheduler.release(seq)
    ids = {seq.seq_id for seq in left}
    remaining = msgspec.structs.replace(
        metadata,
        seq_data={i: data for i, data in metadata.seq_data.items() if i in ids},
        block_tables={i: table for i, table in metadata.block_tables.items() if i in ids},
        generation_id=group.generation_id,
    )
    row.num_samples = remaining.num_samples
    return remaining
