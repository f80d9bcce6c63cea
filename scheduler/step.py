"""One step: what is put together while scheduling, and the immutable result that leaves the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from ..runtime.metadata import SequenceGroupMetadata, SpanChunk
from ..runtime.snapshots import Snapshots
from .block_manager import BlockManager
from .config import SchedulerConfig
from .decode_batch import DecodePlace
from .sequence import Sequence, SequenceGroup


@dataclass(frozen=True, kw_only=True)
class SchedulerOutputs:
    """One step. Rows are the groups in list order, decodes before prefills, their sequences by ascending seq_id.

    blocks_to_swap_out, blocks_to_swap_in, blocks_to_copy are (source, destination) pairs, applied in this order before any
    KV of the step is written: a device block that a swap-out vacates may be filled in the same step. No step swaps in both
    directions. `scheduled_seq_groups` are the groups of the rows. `ignored` are groups that ended without being run;
    `preempted` lost their place and their device blocks in this step.
    """

    seq_group_metadata_list: Snapshots
    scheduled_seq_groups: list[SequenceGroup] = field(default_factory=list)
    blocks_to_swap_out: list[tuple[int, int]] = field(default_factory=list)
    blocks_to_swap_in: list[tuple[int, int]] = field(default_factory=list)
    blocks_to_copy: list[tuple[int, int]] = field(default_factory=list)
    num_batched_tokens: int = 0
    ignored: list[SequenceGroup] = field(default_factory=list)
    preempted: list[SequenceGroup] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Nothing to run and nothing to move."""
        return not (
            self.seq_group_metadata_list or self.blocks_to_swap_out or self.blocks_to_swap_in
        )


@dataclass
class Row:
    """One group's place in a step."""

    group: SequenceGroup
    seqs: list[Sequence]
    chunk: int  # tokens fed to each of seqs
    is_prefill: bool
    num_samples: int = 0  # tokens that come back for it, known once its snapshot is made
    num_candidates: int = 1
    published: list[int] = field(default_factory=list)


@dataclass
class Step:
    """A step being put together, then in flight."""

    number: int
    token_budget: int
    seats: int = 0  # that are not taken by running groups
    decodes: DecodePlace | None = None  # the batch of plain decodes, whose rows come first
    rows: list[Row] = field(default_factory=list)
    placed: set[SequenceGroup] = field(default_factory=set)  # those of `rows`, and who came back
    # groups that come back from the host, some without a row, and blocks of theirs that can be found from now on
    returned: dict[SequenceGroup, list[int]] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)
    swaps_in: list[tuple[int, int]] = field(default_factory=list)
    swaps_out: dict[SequenceGroup, list[tuple[int, int]]] = field(default_factory=dict)
    preempted: list[SequenceGroup] = field(default_factory=list)
    ignored: list[SequenceGroup] = field(default_factory=list)
    admits: bool = True  # False once somebody found no room: those behind do not overtake
    decodes_wait: bool = False  # a decode found no place
    awaits_adapter: bool = False  # somebody needs an adapter for which there is no place
    snapshots: Snapshots = field(default_factory=Snapshots)
    left_out: list[Row] = field(
        default_factory=list
    )  # rows whose snapshots went stale before the launch
    decodes_left: np.ndarray | None = None  # rows of the batch that still stand; None for all
    # blocks given up meanwhile, in use until the step is over
    fenced: list[int] = field(default_factory=list)
    # groups preempted meanwhile: what the step draws for them is drawn again later
    voided: set[SequenceGroup] = field(default_factory=set)

    def has(self, group: SequenceGroup) -> bool:
        """Whether the group has its place in the step."""
        decodes = self.decodes
        return group in self.placed or (decodes is not None and group in decodes.row_of)

    @property
    def num_decodes(self) -> int:
        """Rows of the batch that take part."""
        decodes = self.snapshots.decodes
        return 0 if decodes is None else len(decodes)

    @property
    def groups(self) -> list[SequenceGroup]:
        """Those that take part, in row order."""
        others = [row.group for row in self.rows]
        return others if self.decodes is None else [*self.decodes.groups, *others]

    def names(self, seq: Sequence) -> bool:
        """Whether the step reads or writes the sequence's blocks."""
        if self.decodes is not None and seq in self.decodes.seqs:
            return True
        if any(seq in row.seqs for row in (*self.rows, *self.left_out)):
            return True
        return any(seq in group.seqs for group in self.returned)


def create_metadata(
    group: SequenceGroup,
    seqs: list[Sequence],
    chunk: int,
    is_prefill: bool,
    blocks: BlockManager,
    config: SchedulerConfig,
) -> SequenceGroupMetadata:
    """The one place where a living group becomes a step's snapshot: extend it here when a model needs to know more."""
    leader, encoder = seqs[0], group.encoder_seq
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
        multi_modal_data=span_chunks(leader, computed, computed + chunk) if leader.spans else (),
        lora_request=group.lora_request,
        prompt_adapter_request=group.prompt_adapter_request,
        eos_token_ids=group.eos_token_ids,
        encoder_seq_data=None if encoder is None else encoder.snapshot(),
        cross_block_table=None if encoder is None else blocks.table(encoder.seq_id),
        num_prompt_logprobs=len(group.prompt_logprobs),
    )


def span_chunks(seq: Sequence, start: int, stop: int) -> tuple[SpanChunk, ...]:
    """The parts of the sequence's images and the like among its tokens [start, stop)."""
    parts = []
    for span in seq.spans:
        first, last = max(start, span.offset), min(stop, span.stop)
        if first < last:
            parts.append(SpanChunk(span, first - span.offset, last - span.offset, first - start))
    return tuple(parts)


def _computed_blocks(seqs: list[Sequence], tables: list[np.ndarray], block_size: int) -> np.ndarray:
    """The leading full blocks that all sequences have computed, and have in common: samples part where their text does."""
    common = tables[0][: min(seq.num_computed_tokens for seq in seqs) // block_size]
    for table in tables[1:]:
        parts = np.flatnonzero(common != table[: len(common)])
        if len(parts):
            common = common[: parts[0]]
    return common
