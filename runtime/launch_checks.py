"""What the snapshots of a step must agree on, checked on host integers: MetadataError names request and field."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .metadata import NULL_BLOCK, MetadataError, SequenceGroupMetadata, SpanChunk
from .snapshots import DecodeRows


def check_lengths(metadata: SequenceGroupMetadata) -> None:
    """Tokens to feed, tokens there are, and whether the step draws."""
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
        check_array(metadata, "block_tables", metadata.block_tables[seq_id])
        check_array(metadata, "seq_data", data.prompt_token_ids)
        check_array(metadata, "seq_data", data.output_token_ids)
        left = data.num_tokens - data.num_computed_tokens + metadata.awaits_draw(data)
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


def check_array(metadata: SequenceGroupMetadata, field: str, array: np.ndarray) -> None:
    """A wider or fractional id would be cut to int32 without a word, and name another block."""
    if not isinstance(array, np.ndarray) or array.dtype != np.int32 or array.ndim != 1:
        got = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else repr(array)
        raise MetadataError(metadata.request_id, field, f"expected int32 arrays [*], got {got:.80}")


def padded_tables(
    owners: Sequence[SequenceGroupMetadata],
    field: str,
    tables: Sequence[np.ndarray],
    num_entries: np.ndarray,
    num_blocks: int,
    first_seen: np.ndarray | int = 0,
) -> np.ndarray:
    """The first `num_entries` ids of each table, padded to one width, int32 [len(tables), width].

    Entries before `first_seen` may be the null block.
    """
    padded = np.full((len(tables), int(num_entries.max())), NULL_BLOCK, np.int32)
    for row, (table, entries) in enumerate(zip(tables, num_entries.tolist(), strict=True)):
        if len(table) < entries:
            raise MetadataError(
                owners[row].request_id,
                field,
                f"expected {entries} entries or more, got {len(table)}",
            )
        padded[row, :entries] = table[:entries]
    index = np.arange(padded.shape[1])
    lowest = np.where(index < np.reshape(first_seen, (-1, 1)), NULL_BLOCK, NULL_BLOCK + 1)
    bad = (index < num_entries[:, None]) & ((padded < lowest) | (padded >= num_blocks))
    if bad.any():
        row, index = (int(i) for i in np.argwhere(bad)[0])
        raise MetadataError(
            owners[row].request_id,
            field,
            f"expected ids in [1, {num_blocks}), got {int(padded[row, index])} at index {index}",
        )
    return padded


def check_entries(
    rows: DecodeRows, row: int, entries: np.ndarray, start: int, stop: int, num_blocks: int
) -> None:
    """Entries [start, stop) of a decode's table are there, and are ids of the pool; before the window the null block."""
    request_id, window = rows.request_ids[row], rows.sliding_window
    if len(entries) < stop - start:
        raise MetadataError(
            request_id,
            "block_tables",
            f"expected {stop} entries or more, got {start + len(entries)}",
        )
    seen = 0 if window is None else max(0, int(rows.num_tokens[row]) - window) // rows.block_size
    lowest = np.where(np.arange(start, stop) < seen, NULL_BLOCK, NULL_BLOCK + 1)
    bad = np.flatnonzero((entries < lowest) | (entries >= num_blocks))
    if len(bad):
        raise MetadataError(
            request_id,
            "block_tables",
            f"expected ids in [1, {num_blocks}), got {int(entries[bad[0]])} at index {start + int(bad[0])}",
        )


def first_seen_entries(
    owners: Sequence[SequenceGroupMetadata], context_lens: np.ndarray, block_size: int
) -> np.ndarray:
    """The first entry of each row's table that the row looks at: with a sliding window those before may be freed."""
    windows = [metadata.sliding_window for metadata in owners]
    if not any(windows):
        return np.zeros(len(owners), np.int64)
    seen = [
        0 if window is None else max(0, context_len - window + 1) // block_size
        for window, context_len in zip(windows, context_lens.tolist(), strict=True)
    ]
    return np.array(seen)


def check_slots(
    writers: Sequence[tuple[SequenceGroupMetadata, str]],
    slot_mapping: np.ndarray,
    writer_of_slot: np.ndarray,
    block_size: int,
) -> None:
    """No slot is written twice. Writers are (snapshot, the field whose table leads to its slots)."""
    order = np.argsort(slot_mapping, kind="stable")
    repeats = np.flatnonzero(np.diff(slot_mapping[order]) == 0)
    if len(repeats):
        (first, _), (second, field) = (
            writers[int(writer_of_slot[order[i]])] for i in (repeats[0], repeats[0] + 1)
        )
        block = int(slot_mapping[order[repeats[0]]]) // block_size
        raise MetadataError(
            second.request_id,
            field,
            f"expected slots of its own, block {block} is written by {first.request_id!r} too",
        )


def check_computed_blocks(
    metadata: SequenceGroupMetadata, table: np.ndarray, context_len: int, block_size: int
) -> None:
    """Computed blocks lead the table and lie within the context."""
    computed = metadata.computed_block_nums
    if not np.array_equal(computed, table[: len(computed)]):
        raise MetadataError(
            metadata.request_id,
            "computed_block_nums",
            "expected the leading entries of the block table",
        )
    if len(computed) * block_size > context_len:
        raise MetadataError(
            metadata.request_id,
            "computed_block_nums",
            f"expected at most {context_len} computed tokens, got {len(computed) * block_size} in blocks",
        )


def check_span_chunk(metadata: SequenceGroupMetadata, part: SpanChunk) -> None:
    """A part of an image or the like lies in the image, and within the tokens of the step."""
    length = part.stop - part.start
    in_span = 0 <= part.start < part.stop <= part.span.length
    if not in_span or not 0 <= part.offset <= metadata.token_chunk_size - length:
        raise MetadataError(
            metadata.request_id,
            "multi_modal_data",
            f"expected a part of {part.span.length} embeddings within {metadata.token_chunk_size} tokens, got embeddings "
            f"[{part.start}, {part.stop}) at token {part.offset}",
        )


def check_encoder(metadata: SequenceGroupMetadata) -> None:
    """A group has an encoder's tokens and a table for their keys and values, or neither."""
    data, table = metadata.encoder_seq_data, metadata.cross_block_table
    if data is None:
        raise MetadataError(
            metadata.request_id,
            "encoder_seq_data",
            "expected one with a cross_block_table, got None",
        )
    if table is None:
        raise MetadataError(
            metadata.request_id, "cross_block_table", "expected one with encoder_seq_data, got None"
        )
    check_array(metadata, "cross_block_table", table)
    check_array(metadata, "encoder_seq_data", data.prompt_token_ids)
    check_array(metadata, "encoder_seq_data", data.output_token_ids)
    if data.num_tokens == 0:
        raise MetadataError(
            metadata.request_id, "encoder_seq_data", "expected at least one token, got none"
        )
    if data.num_computed_tokens not in (0, data.num_tokens):
        raise MetadataError(
            metadata.request_id,
            "encoder_seq_data",
            f"expected none or all of {data.num_tokens} tokens computed, for each sees all, got {data.num_computed_tokens}",
        )
