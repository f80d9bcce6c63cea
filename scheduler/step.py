"""One step: what is put together while scheduling, and the immutable result that leaves the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from ..runtime.metadata import SequenceGroupMetadata
from .block_manager import BlockManager
from .config import SchedulerConfig
from .sequence import Sequence, SequenceGroup


@dataclass(frozen=True, kw_only=True)
class SchedulerOutputs:
    """One step. Rows are the groups in list order, decodes before prefills, their sequences by ascending seq_id.

    blocks_to_swap_out, blocks_to_swap_in, blocks_to_copy are (source, destination) pairs, applied in this order before
    any KV of the step is written. So a device block that a swap-out vacates may be filled in the same step; a host block
    that a swap-in vacates may not. `scheduled_seq_groups` are the groups of the rows. `ignored` are groups that ended
    without being run; `preempted` lost their blocks in this step and wait again.
    """

    seq_group_metadata_list: list[SequenceGroupMetadata]
    scheduled_seq_groups: list[SequenceGroup] = field(default_factory=list)
    blocks_to_swap_out: list[tuple[int, int]] = field(default_factory=list)
    blocks_to_swap_in: list[tuple[int, int]] = field(default_factory=list)
    blocks_to_copy: list[tuple[int, int]] = field(default_factory=list)
    num_batched_tokens: int = 0
    ignored: list[SequenceGroup] = field(default_factory=list)
    preempted: list[SequenceGroup] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.seq_group_metadata_list


@dataclass
class Row:
    """One group's place in a step."""

    group: SequenceGroup
    seqs: list[Sequence]
    chunk: int  # tokens fed to each of seqs
    is_prefill: bool
    num_samples: int = 0  # tokens to be drawn for it, known once its snapshot is made
    published: list[int] = field(default_factory=list)


@dataclass
class Step:
    """A step being put together, then in flight."""

    number: int
    token_budget: int
    rows: list[Row] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[SequenceGroup] = field(default_factory=list)
    ignored: list[SequenceGroup] = field(default_factory=list)
    is_short_of_blocks: bool = False  # some running group found no room

    def has(self, group: SequenceGroup) -> bool:
        return any(row.group is group for row in self.rows)


def create_metadata(
    group: SequenceGroup,
    seqs: list[Sequence],
    chunk: int,
    is_prefill: bool,
    blocks: BlockManager,
    config: SchedulerConfig,
) -> SequenceGroupMetadata:
    """The one place where a living group becomes a step's snapshot: extend it here when a model needs to know more."""
    leader = seqs[0]
    computed = leader.num_computed_tokens
    tables = {seq.seq_id: blocks.table(seq.seq_id) for seq in seqs}
    return SequenceGroupMetadata(
        request_id=group.request_id,
        is_prompt=is_prefill,
        seq_data=MappingProxyType({seq.seq_id: seq.snapshot() for seq in seqs}),
        block_tables=MappingProxyType(tables),
        sampling_params=group.sampling_params,
        token_chunk_size=chunk,
        computed_block_nums=_computed_blocks(seqs, list(tables.values()), config.block_size),
        do_sample=computed + chunk == leader.num_tokens,
        generation_id=group.generation_id,
        sliding_window=config.sliding_window,
        lora_request=group.lora_request,
        prompt_adapter_request=group.prompt_adapter_request,
    )


def _computed_blocks(seqs: list[Sequence], tables: list[np.ndarray], block_size: int) -> np.ndarray:
    """The leading full blocks that all sequences have computed, and have in common: samples part where their text does."""
    common = tables[0][: min(seq.num_computed_tokens for seq in seqs) // block_size]
    for table in tables[1:]:
        parts = np.flatnonzero(common != table[: len(common)])
        if len(parts):
            common = common[: parts[0]]
    return common
