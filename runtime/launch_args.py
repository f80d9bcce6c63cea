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
from typing import NamedTuple

import numpy as np
import torch

from .metadata import NULL_BLOCK, MetadataError, SequenceGroupMetadata


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


class _Rows(NamedTuple):
    """Snapshots flattened to rows: groups in list order, sequences by ascending seq_id."""

    owners: list[SequenceGroupMetadata]
    tables: list[np.ndarray]
    tokens: list[np.ndarray]  # those fed in this step
    context_lens: np.ndarray  # int32 [S]
    query_lens: np.ndarray  # int32 [S]
    num_logits: list[int]  # rows of logits needed from each row


class LaunchBuffers:
    """Host and device memory for launch arguments: grows, is reused, and crosses to the device in one copy.

    Two buffers take turns, so that the arguments of a step stay valid while those of the next one are built.
    """

    _ALIGNMENT = 64  # bytes; keeps every argument's address as wide loads want it

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._turn = 0
        self._host = [self._allocate(1 << 16, "cpu") for _ in range(2)]
        self._device = [self._on_device(host) for host in self._host]
        self._copied: list[torch.cuda.Event | None] = [None, None]

    def _allocate(self, size: int, device: torch.device | str) -> torch.Tensor:
        pin = self.device.type == "cuda" and torch.device(device).type == "cpu"
        return torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pin)

    def _on_device(self, host: torch.Tensor) -> torch.Tensor:
        return host if self.device.type == "cpu" else self._allocate(host.numel(), self.device)

    def upload(self, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        """Copy host arrays to the device together; returns a view of the device buffer for each."""
        offsets, end = [], 0
        for array in arrays:
            offsets.append(end)
            end += -(-array.nbytes // self._ALIGNMENT) * self._ALIGNMENT
        turn = self._turn = 1 - self._turn
        if (copied := self._copied[turn]) is not None:
            copied.synchronize()  # the copy of two steps ago may still be reading the buffer
        if end > self._host[turn].numel():
            self._host[turn] = self._allocate(2 * end, "cpu")
            self._device[turn] = self._on_device(self._host[turn])
        host, device = self._host[turn], self._device[turn]
        staging = host.numpy()
        for array, offset in zip(arrays, offsets, strict=True):
            staging[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)[...] = (
                array
            )
        if device is not host:
            device[:end].copy_(host[:end], non_blocking=True)
            copied = self._copied[turn] = torch.cuda.Event()
            copied.record()
        return [
            device[offset : offset + array.nbytes]
            .view(_TORCH_DTYPE[array.dtype.name])
            .view(array.shape)
            for array, offset in zip(arrays, offsets, strict=True)
        ]


_TORCH_DTYPE = {"int32": torch.int32, "int64": torch.int64}


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

    max_seq_len = int(seq_lens.max())
    num_entries = -(-seq_lens // block_size)
    block_tables = np.full((num_rows, -(-max_seq_len // block_size)), NULL_BLOCK, np.int32)
    for row, (table, entries) in enumerate(zip(rows.tables, num_entries.tolist(), strict=True)):
        if len(table) < entries:
            raise MetadataError(
                rows.owners[row].request_id,
                "block_tables",
                f"expected {entries} entries or more, got {len(table)}",
            )
        block_tables[row, :entries] = table[:entries]

    row_of_token = np.repeat(np.arange(num_rows), rows.query_lens)
    positions = np.arange(num_tokens) + (rows.context_lens - query_start_loc[:-1])[row_of_token]
    block_index, offset = np.divmod(positions, block_size)
    slot_mapping = block_tables[row_of_token, block_index].astype(np.int64) * block_size + offset
    _check_blocks(rows, block_tables, num_entries, block_size, num_blocks)
    _check_slots(rows, slot_mapping, row_of_token, block_size)

    is_decode = rows.query_lens == 1
    num_decodes = num_rows if is_decode.all() else int(is_decode.argmin())
    uploaded = buffers.upload(
        [
            np.concatenate(rows.tokens).astype(np.int64),
            positions,
            slot_mapping,
            np.repeat(query_start_loc[1:].astype(np.int64) - 1, rows.num_logits),
            query_start_loc,
            seq_lens,
            block_tables,
        ]
    )
    input_ids, positions_, slots, logits_indices, starts, lens, tables = uploaded
    return LaunchArgs(
        input_ids=input_ids,
        positions=positions_,
        slot_mapping=slots,
        query_start_loc=starts,
        seq_lens=lens,
        block_tables=tables,
        logits_indices=logits_indices,
        num_decodes=num_decodes,
        max_query_len=int(rows.query_lens.max()),
        max_seq_len=max_seq_len,
    )


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
        _check_lengths(metadata)
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


def _check_lengths(metadata: SequenceGroupMetadata) -> None:
    chunk = metadata.token_chunk_size
    if not isinstance(chunk, int) or chunk < 1:
        raise MetadataError(
            metadata.request_id, "token_chunk_size", f"expected an integer >= 1, got {chunk!r}"
        )
    if metadata.seq_data.keys() != metadata.block_tables.keys() or not metadata.seq_data:
        raise MetadataError(
            metadata.request_id,
            "block_tables",
            f"expected one table for each of {sorted(metadata.seq_data)}, got {sorted(metadata.block_tables)}",
        )
    for seq_id, data in metadata.seq_data.items():
        _check_array(metadata, "block_tables", metadata.block_tables[seq_id])
        _check_array(metadata, "seq_data", data.prompt_token_ids)
        _check_array(metadata, "seq_data", data.output_token_ids)
        left = data.num_tokens - data.num_computed_tokens
        if data.num_computed_tokens < 0 or chunk > left:
            raise MetadataError(
                metadata.request_id,
                "token_chunk_size",
                f"expected at most the {left} tokens that sequence {seq_id} has to compute, got {chunk}",
            )
        if metadata.do_sample != (chunk == left):
            raise MetadataError(
                metadata.request_id,
                "do_sample",
                f"expected True exactly when no token is left to compute, got {metadata.do_sample} with {left - chunk} left",
            )


def _check_array(metadata: SequenceGroupMetadata, field: str, array: np.ndarray) -> None:
    """A wider or fractional id would be cut to int32 without a word, and name another block."""
    if not isinstance(array, np.ndarray) or array.dtype != np.int32 or array.ndim != 1:
        got = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else repr(array)
        raise MetadataError(metadata.request_id, field, f"expected int32 arrays [*], got {got:.80}")


def _check_blocks(
    rows: _Rows, block_tables: np.ndarray, num_entries: np.ndarray, block_size: int, num_blocks: int
) -> None:
    """Ids of the pool in every entry; the null block only before all that a row's window shows it."""
    first_seen = np.array(
        [
            0 if metadata.sliding_window is None else context_len - metadata.sliding_window + 1
            for metadata, context_len in zip(rows.owners, rows.context_lens.tolist(), strict=True)
        ]
    )
    index = np.arange(block_tables.shape[1])
    seen = (index < num_entries[:, None]) & (index >= first_seen[:, None] // block_size)
    bad = (index < num_entries[:, None]) & ((block_tables < 0) | (block_tables >= num_blocks))
    bad |= seen & (block_tables == NULL_BLOCK)
    if bad.any():
        row, index = (int(i) for i in np.argwhere(bad)[0])
        got = int(block_tables[row, index])
        raise MetadataError(
            rows.owners[row].request_id,
            "block_tables",
            f"expected ids in [1, {num_blocks}), got {got} at index {index}",
        )


def _check_slots(
    rows: _Rows, slot_mapping: np.ndarray, row_of_token: np.ndarray, block_size: int
) -> None:
    order = np.argsort(slot_mapping, kind="stable")
    repeats = np.flatnonzero(np.diff(slot_mapping[order]) == 0)
    if len(repeats):
        first, second = (
            rows.owners[row_of_token[order[i]]].request_id for i in (repeats[0], repeats[0] + 1)
        )
        block = int(slot_mapping[order[repeats[0]]]) // block_size
        raise MetadataError(
            second,
            "block_tables",
            f"expected slots of its own, block {block} is written by {first!r} too",
        )
    for row, metadata in enumerate(rows.owners):
        computed = len(metadata.computed_block_nums) * block_size
        table = rows.tables[row]
        if not np.array_equal(
            metadata.computed_block_nums, table[: len(metadata.computed_block_nums)]
        ):
            raise MetadataError(
                metadata.request_id,
                "computed_block_nums",
                "expected the leading entries of the block table",
            )
        if computed > rows.context_lens[row]:
            raise MetadataError(
                metadata.request_id,
                "computed_block_nums",
                f"expected at most {rows.context_lens[row]} computed tokens, got {computed} in blocks",
            )
