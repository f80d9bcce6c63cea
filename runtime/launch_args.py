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

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from .cross_args import CrossArrays, build_cross_arrays
from .launch_buffers import LaunchBuffers
from .launch_checks import (
    check_computed_blocks,
    check_lengths,
    check_slots,
    first_seen_entries,
    padded_tables,
)
from .metadata import MetadataError, SequenceGroupMetadata


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


class _Rows(NamedTuple):
    """Snapshots flattened to rows: groups in list order, sequences by ascending seq_id."""

    owners: list[SequenceGroupMetadata]
    tables: list[np.ndarray]
    tokens: list[np.ndarray]  # those fed in this step
    context_lens: np.ndarray  # int32 [S]
    query_lens: np.ndarray  # int32 [S]
    num_logits: list[int]  # rows of logits needed from each row


def build_launch_args(
    seq_group_metadata_list: list[SequenceGroupMetadata],
    block_size: int,
    num_blocks: int,
    buffers: LaunchBuffers,
) -> LaunchArgs:
    """Turn one step's snapshots into launch arguments, decode rows first.

    num_blocks counts all blocks of the pool, the null block included. Everything is checked on host integers before
    anything is uploaded: MetadataError names the request and the field at fault.
    """
    rows = _flatten(seq_group_metadata_list)
    num_rows, num_tokens = len(rows.owners), int(rows.query_lens.sum())
    seq_lens = rows.context_lens + rows.query_lens
    query_start_loc = np.zeros(num_rows + 1, np.int32)
    np.cumsum(rows.query_lens, out=query_start_loc[1:])

    block_tables = padded_tables(
        rows.owners,
        "block_tables",
        rows.tables,
        -(-seq_lens // block_size),
        num_blocks,
        first_seen_entries(rows.owners, rows.context_lens, block_size),
    )
    row_of_token = np.repeat(np.arange(num_rows), rows.query_lens)
    positions = np.arange(num_tokens) + (rows.context_lens - query_start_loc[:-1])[row_of_token]
    block_index, offset = np.divmod(positions, block_size)
    slot_mapping = block_tables[row_of_token, block_index].astype(np.int64) * block_size + offset
    cross = build_cross_arrays(seq_group_metadata_list, block_size, num_blocks)
    _check_slots(rows, slot_mapping, row_of_token, cross, block_size)
    for owner, table, context_len in zip(
        rows.owners, rows.tables, rows.context_lens.tolist(), strict=True
    ):
        check_computed_blocks(owner, table, context_len, block_size)

    arrays = {
        "input_ids": np.concatenate(rows.tokens).astype(np.int64),
        "positions": positions,
        "slot_mapping": slot_mapping,
        "logits_indices": np.repeat(query_start_loc[1:].astype(np.int64) - 1, rows.num_logits),
        "query_start_loc": query_start_loc,
        "seq_lens": seq_lens,
        "block_tables": block_tables,
    }
    is_decode = rows.query_lens == 1
    numbers = {
        "num_decodes": num_rows if is_decode.all() else int(is_decode.argmin()),
        "max_query_len": int(rows.query_lens.max()),
        "max_seq_len": int(seq_lens.max()),
    }
    if cross is not None:
        arrays |= cross.arrays
        numbers |= cross.numbers
    fields: dict[str, Any] = dict(
        zip(arrays, buffers.upload(list(arrays.values())), strict=True), **numbers
    )
    return LaunchArgs(**fields)


def _check_slots(
    rows: _Rows,
    slot_mapping: np.ndarray,
    row_of_token: np.ndarray,
    cross: CrossArrays | None,
    block_size: int,
) -> None:
    writers = [(owner, "block_tables") for owner in rows.owners]
    if cross is not None and cross.writers:
        row_of_token = np.concatenate((row_of_token, len(writers) + cross.writer_of_slot))
        slot_mapping = np.concatenate((slot_mapping, cross.slot_mapping))
        writers += [(owner, "cross_block_table") for owner in cross.writers]
    check_slots(writers, slot_mapping, row_of_token, block_size)


def _flatten(seq_group_metadata_list: list[SequenceGroupMetadata]) -> _Rows:
    if not seq_group_metadata_list:
        raise ValueError("seq_group_metadata_list: expected at least one snapshot, got none")
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
            tokens.append(data.token_ids(context_len, context_len + metadata.token_chunk_size))
            context_lens.append(context_len)
            num_logits.append(draws)
    query_lens = [metadata.token_chunk_size for metadata in owners]
    return _Rows(
        owners,
        tables,
        tokens,
        np.array(context_lens, np.int32),
        np.array(query_lens, np.int32),
        num_logits,
    )
