"""What must hold between steps, whatever happened. Numbers are those of docs/design.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..runtime.metadata import NULL_BLOCK
from .block_manager import cdiv
from .sequence import SequenceGroup, SequenceStatus

if TYPE_CHECKING:
    from .scheduler import Scheduler
    from .step import SchedulerOutputs, Step


def check_invariants(scheduler: Scheduler) -> None:
    """RuntimeError unless block accounting, tables and queues agree (I1, I2, I3, I5, and the baseline of I9)."""
    blocks = scheduler.blocks
    blocks.check_integrity(scheduler.flight.fenced)  # I1, I2, I5
    scheduler.batch.check_integrity()
    queues = (
        (scheduler.running, SequenceStatus.RUNNING),
        (scheduler.swapped, SequenceStatus.SWAPPED),
        (scheduler.waiting, SequenceStatus.WAITING),
    )
    queued = [group.request_id for queue, _ in queues for group in queue]
    known = [group.request_id for group in scheduler.groups]
    if sorted(queued) != sorted(known):
        raise RuntimeError(f"queues hold {sorted(queued)}, known requests are {sorted(known)}")
    for queue, status in queues:
        for group in queue:
            _check_group(scheduler, group, status)
    for step in scheduler.flight:
        _check_fence(scheduler, step)
    if not scheduler.flight and not known and (blocks.num_used_blocks or blocks.host.num_used):
        raise RuntimeError(
            f"idle, but {blocks.num_used_blocks} blocks and {blocks.host.num_used} on the host are still referenced"
        )


def _check_fence(scheduler: Scheduler, step: Step) -> None:
    """Nobody else can be given a block that a step in flight reads or writes."""
    for metadata in step.snapshots:
        tables = [table for _, _, table in metadata.rows()]
        if metadata.cross_block_table is not None:
            tables.append(metadata.cross_block_table)
        for block in {block for table in tables for block in table.tolist()} - {NULL_BLOCK}:
            if scheduler.blocks.ref_count[block] == 0:
                raise RuntimeError(
                    f"request {metadata.request_id!r}: block {block} is free, but a step in flight names it"
                )


def _check_group(scheduler: Scheduler, group: SequenceGroup, status: SequenceStatus) -> None:
    """A group is in one state, as a whole, and its tables are where that state says (I3, I8)."""
    blocks, name = scheduler.blocks, f"request {group.request_id!r}"
    if any(seq.status is not status for seq in group.live):
        raise RuntimeError(f"{name}: a sequence is not {status.value}, as its group is")
    ids = [seq.seq_id for seq in group.live]
    if ids != sorted(ids):
        raise RuntimeError(f"{name}: sequences are not in order: {ids}")
    for seq in group.owners:
        on_device, on_host = blocks.has_table(seq.seq_id), blocks.has_host_table(seq.seq_id)
        if on_device and status is not SequenceStatus.RUNNING:
            raise RuntimeError(f"{name} is {status.value}, but sequence {seq.seq_id} has a table")
        if on_host and status is not SequenceStatus.SWAPPED:
            raise RuntimeError(
                f"{name} is {status.value}, but sequence {seq.seq_id} is on the host"
            )
        if on_device:
            table = blocks.table(seq.seq_id)
            if len(table) != cdiv(seq.num_computed_tokens, blocks.block_size):
                raise RuntimeError(
                    f"{name}: {seq.num_computed_tokens} computed tokens in {len(table)} blocks"
                )
            num_null = int((table == NULL_BLOCK).sum())
            if num_null and (
                blocks.sliding_window is None or (table[num_null:] == NULL_BLOCK).any()
            ):
                raise RuntimeError(f"{name}: null blocks in {table.tolist()}")


def check_step(scheduler: Scheduler, outputs: SchedulerOutputs) -> None:
    """RuntimeError unless a step that has just been scheduled is sound (I4, I6, I7, I8, I11)."""
    if outputs.blocks_to_swap_in and outputs.blocks_to_swap_out:
        raise RuntimeError("a step swaps in both directions")  # I11
    copied = [destination for _, destination in outputs.blocks_to_copy]
    moved = [destination for _, destination in outputs.blocks_to_swap_in]
    if len(set(copied + moved)) != len(copied) + len(moved):
        raise RuntimeError("two moves of a step have one destination")
    size, num_tokens = scheduler.config.block_size, 0
    writer: dict[int, str] = {}  # block written -> who
    for metadata in outputs.seq_group_metadata_list:
        name = f"request {metadata.request_id!r}"
        if metadata.encoder_seq_data is not None:
            encoder = metadata.encoder_seq_data
            num_tokens += encoder.num_tokens - encoder.num_computed_tokens
        for _, data, table in metadata.rows():
            start, chunk = data.num_computed_tokens, metadata.token_chunk_size
            num_tokens += chunk
            num_known = data.num_tokens + (len(scheduler.flight) > 1 and metadata.awaits_draw(data))
            if chunk < 1 or start + chunk > num_known:  # I7
                raise RuntimeError(f"{name}: {chunk} tokens after {start} of {num_known}")
            if metadata.do_sample != (start + chunk == num_known):  # I8
                raise RuntimeError(
                    f"{name}: do_sample is {metadata.do_sample} too early or too late"
                )
            for block in table[start // size : cdiv(start + chunk, size)].tolist():
                if block in writer or block == NULL_BLOCK:  # I6
                    raise RuntimeError(f"{name} and {writer.get(block)} write block {block}")
                writer[block] = name
                if scheduler.blocks.ref_count[block] > 1:  # I4
                    raise RuntimeError(f"{name} writes block {block}, which others name")
    if num_tokens != outputs.num_batched_tokens:  # I7
        raise RuntimeError(f"{num_tokens} tokens are fed, {outputs.num_batched_tokens} are counted")
