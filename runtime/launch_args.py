"""From snapshots to kernel launch arguments: the tensors of one step, built once and shared by all layers.

Example, block size 4; sequence a decodes its 6th token, sequence b feeds a chunk of 3 over a context of 2:

    rows              a (decode)      b (prefill)
    block table       [5, 2]          [7, 3]
    context, query    5, 1            2, 3
    seq_lens          6               5
    query_start_loc   0               1            4
    positions         5               2   3   4
    slot_mapping      2*4+1           7*4+2 7*4+3 3*4+0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from .cross_args import CrossArrays, build_cross_arrays
from .index_maps import adapter_order, multi_modal_places
from .launch_buffers import LaunchBuffers
from .launch_checks import (
    check_computed_blocks,
    check_lengths,
    check_slots,
    first_seen_entries,
    padded_tables,
)
from .metadata import NULL_BLOCK, MetadataError, SequenceGroupMetadata, SpanChunk
from .params import LoRARequest
from .snapshots import DecodeRows, Snapshots


@dataclass(frozen=True, slots=True)
class LaunchArgs:
    """One step's inputs, on the device. T tokens of S rows, R of which give logits.

    input_ids        int64 [T]
    positions        int64 [T]      place of each token in its sequence
    slot_mapping     int64 [T]      block_id * block_size + offset: where its K and V are written
    query_start_loc  int32 [S + 1]  first token of each row
    seq_lens         int32 [S]      context length + query length
    block_tables     int32 [S, W]   entries past ceil(seq_len / block_size) are meaningless
    logits_indices   int64 [R]      token of each row of logits that is needed
    num_decodes      rows [0, num_decodes) feed one token each, the rest are prefill chunks

    Where some row has an encoder (else None and 0), see `cross_args`:

    cross_seq_lens      int32 [S]         tokens of the row's encoder, 0 without one
    cross_block_tables  int32 [S, Wc]     blocks of the keys and values that the decoder makes of them

    and where E tokens of G encoders are computed in this step:

    encoder_input_ids        int64 [E]
    encoder_positions        int64 [E]
    encoder_query_start_loc  int32 [G + 1]   first token of each encoder's
    encoder_seq_lens         int32 [G]
    encoder_block_tables     int32 [G, L]    places among the E tokens, as if each were a block of one token: what paged
                                             attention of an encoder over its own keys takes; padded with 0
    cross_slot_mapping       int64 [E]       where what the decoder makes of each token is written

    Where M tokens are placeholders of images or the like, and where some row has one of A adapters, see `index_maps`:

    multi_modal_places   int64 [M]       the tokens that take an embedding
    multi_modal_parts                    whose embeddings these are, in that order; on the host
    lora_token_order     int32 [T]       tokens by adapter, those without one first
    lora_adapter_starts  int32 [A + 1]   the tokens of adapter i are lora_token_order[starts[i] : starts[i + 1]]
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    logits_indices: torch.Tensor
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    cross_seq_lens: torch.Tensor | None = None
    cross_block_tables: torch.Tensor | None = None
    max_cross_seq_len: int = 0
    encoder_input_ids: torch.Tensor | None = None
    encoder_positions: torch.Tensor | None = None
    encoder_query_start_loc: torch.Tensor | None = None
    encoder_seq_lens: torch.Tensor | None = None
    encoder_block_tables: torch.Tensor | None = None
    max_encoder_seq_len: int = 0
    cross_slot_mapping: torch.Tensor | None = None
    multi_modal_places: torch.Tensor | None = None
    multi_modal_parts: tuple[SpanChunk, ...] = ()
    lora_token_order: torch.Tensor | None = None
    lora_adapter_starts: torch.Tensor | None = None


# stands for a token that the step before draws; on the device its id takes this place
_UNKNOWN = np.zeros(1, np.int32)


class _Rows(NamedTuple):
    """Rows of a step as arrays: groups in list order, sequences by ascending seq_id."""

    input_ids: np.ndarray  # int64 [T]
    context_lens: np.ndarray  # int64 [S]
    query_lens: np.ndarray  # int64 [S]
    num_logits: np.ndarray  # int64 [S], rows of logits needed from each row
    block_tables: np.ndarray  # int32 [S, W]


def build_launch_args(
    seq_group_metadata_list: Sequence[SequenceGroupMetadata],
    block_size: int,
    num_blocks: int,
    buffers: LaunchBuffers,
    adapter_places: Mapping[LoRARequest, int] | None = None,
    num_adapter_places: int = 0,
) -> LaunchArgs:
    """Turn one step's snapshots into launch arguments, decode rows first.

    A token that the step before is still drawing is 0 in `input_ids`, see `drawn_tokens`.

    num_blocks      all blocks of the pool, the null block included
    adapter_places  where the adapters of the rows are, each in [0, num_adapter_places); None for a model without

    Everything is checked on host integers before
    anything is uploaded: MetadataError names the request and the field at fault.
    """
    snapshots = Snapshots.of(seq_group_metadata_list)
    if not len(snapshots):
        raise ValueError("seq_group_metadata_list: expected at least one snapshot, got none")
    parts, owners, cross = [], [], None
    if snapshots.decodes is not None:
        parts.append(_rows_of_decodes(snapshots.decodes, num_blocks, buffers))
    num_decodes_before = sum(len(part.query_lens) for part in parts)
    if snapshots.others:
        rows, owners = _rows_of(snapshots.others, block_size, num_blocks)
        parts.append(rows)
        cross = build_cross_arrays(snapshots.others, block_size, num_blocks, num_decodes_before)
    rows = parts[0] if len(parts) == 1 else _joined(parts)

    num_rows, num_tokens = len(rows.query_lens), len(rows.input_ids)
    seq_lens = rows.context_lens + rows.query_lens
    if num_tokens == num_rows:
        row_of_token, positions = np.arange(num_rows), rows.context_lens
        query_start_loc = np.arange(num_rows + 1, dtype=np.int32)
        logits_indices = row_of_token
    else:
        query_start_loc = np.zeros(num_rows + 1, np.int32)
        np.cumsum(rows.query_lens, out=query_start_loc[1:])
        row_of_token = np.repeat(np.arange(num_rows), rows.query_lens)
        positions = np.arange(num_tokens) + (rows.context_lens - query_start_loc[:-1])[row_of_token]
        logits_indices = query_start_loc[1:] - np.int64(1)
    if snapshots.others:
        logits_indices = np.repeat(logits_indices, rows.num_logits)
    block_index = positions // block_size
    slot_mapping = rows.block_tables[row_of_token, block_index] * np.int64(block_size)
    slot_mapping += positions - block_index * block_size
    _check_slots(snapshots, owners, slot_mapping, row_of_token, cross, block_size)

    arrays = {
        "input_ids": rows.input_ids,
        "positions": positions,
        "slot_mapping": slot_mapping,
        "logits_indices": logits_indices,
        "query_start_loc": query_start_loc,
        "seq_lens": seq_lens.astype(np.int32),
        "block_tables": rows.block_tables,
    }
    numbers: dict[str, Any] = {
        "num_decodes": num_rows if num_tokens == num_rows else int((rows.query_lens > 1).argmax()),
        "max_query_len": 1 if num_tokens == num_rows else int(rows.query_lens.max()),
        "max_seq_len": int(seq_lens.max()),
    }
    if cross is not None:
        arrays |= cross.arrays
        numbers |= cross.numbers
    if (embedded := multi_modal_places(snapshots.others, num_decodes_before)) is not None:
        arrays["multi_modal_places"], numbers["multi_modal_parts"] = embedded
    if adapter_places is not None:
        arrays |= adapter_order(snapshots, rows.query_lens, adapter_places, num_adapter_places)
    fields: dict[str, Any] = dict(
        zip(arrays, buffers.upload(list(arrays.values())), strict=True), **numbers
    )
    return LaunchArgs(**fields)


def _rows_of_decodes(rows: DecodeRows, num_blocks: int, buffers: LaunchBuffers) -> _Rows:
    """Columns to columns; tables are kept from step to step."""
    ones = np.ones(len(rows), np.int64)
    num_entries = (rows.num_tokens + (rows.block_size - 1)) // rows.block_size
    tables = buffers.block_tables(rows, num_entries, num_blocks)
    input_ids = np.zeros(len(rows), np.int64) if rows.awaits_draw else rows.last_token_ids
    return _Rows(input_ids, rows.num_tokens - 1, ones, ones, tables)


def _joined(parts: list[_Rows]) -> _Rows:
    """Rows of several kinds one after the other, tables padded to one width."""
    width = max(part.block_tables.shape[1] for part in parts)
    tables = np.full((sum(len(part.query_lens) for part in parts), width), NULL_BLOCK, np.int32)
    first = 0
    for part in parts:
        stop = first + len(part.query_lens)
        tables[first:stop, : part.block_tables.shape[1]] = part.block_tables
        first = stop
    input_ids, context_lens, query_lens, num_logits = (
        np.concatenate(columns) for columns in zip(*(part[:-1] for part in parts), strict=True)
    )
    return _Rows(input_ids, context_lens, query_lens, num_logits, tables)


def _check_slots(
    snapshots: Snapshots,
    owners: list[SequenceGroupMetadata],
    slot_mapping: np.ndarray,
    row_of_token: np.ndarray,
    cross: CrossArrays | None,
    block_size: int,
) -> None:
    """No slot is written twice. `owners` are those of the rows after the decodes."""
    num_writers = len(snapshots) - len(snapshots.others) + len(owners)
    if cross is not None and cross.writers:
        row_of_token = np.concatenate((row_of_token, num_writers + cross.writer_of_slot))
        slot_mapping = np.concatenate((slot_mapping, cross.slot_mapping))
    ordered = np.sort(slot_mapping)
    if (ordered[1:] != ordered[:-1]).all():
        return
    decodes = snapshots[: len(snapshots) - len(snapshots.others)]
    writers = [(owner, "block_tables") for owner in (*decodes, *owners)]
    if cross is not None:
        writers += [(owner, "cross_block_table") for owner in cross.writers]
    check_slots(writers, slot_mapping, row_of_token, block_size)


def _rows_of(
    seq_group_metadata_list: Sequence[SequenceGroupMetadata], block_size: int, num_blocks: int
) -> tuple[_Rows, list[SequenceGroupMetadata]]:
    """The rows of snapshots, checked, and the snapshot each of them is of."""
    owners, tables, tokens, context_lens, num_logits = [], [], [], [], []
    prefill_seen = False
    for metadata in seq_group_metadata_list:
        if prefill_seen and not metadata.is_prompt:
            raise MetadataError(
                metadata.request_id,
                "is_prompt",
                "expected decodes before prefills, got a decode after one",
            )
        prefill_seen = prefill_seen or metadata.is_prompt
        check_lengths(metadata)
        draws = metadata.num_logits // len(metadata.seq_data)
        for _, data, table in metadata.rows():
            context_len = data.num_computed_tokens
            owners.append(metadata)
            tables.append(table)
            fed = data.token_ids(context_len, context_len + metadata.token_chunk_size)
            tokens.append(fed if len(fed) else _UNKNOWN)
            context_lens.append(context_len)
            num_logits.append(draws)
    query_lens = np.array([metadata.token_chunk_size for metadata in owners], np.int64)
    contexts = np.array(context_lens, np.int64)
    padded = padded_tables(
        owners,
        "block_tables",
        tables,
        -(-(contexts + query_lens) // block_size),
        num_blocks,
        first_seen_entries(owners, contexts, block_size),
    )
    for owner, table, context_len in zip(owners, tables, context_lens, strict=True):
        check_computed_blocks(owner, table, context_len, block_size)
    input_ids = np.concatenate(tokens).astype(np.int64)
    return _Rows(input_ids, contexts, query_lens, np.array(num_logits, np.int64), padded), owners
