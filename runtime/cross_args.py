"""The encoder's part of the launch arguments of a step: what decoders attend across to, and what encoders compute.

The keys and values that decoder layer i makes of the encoder's output lie in layer i of the same pool, in blocks named
by `cross_block_table`, one table per group: its sequences share it, and it is written once, in the step in which
`encoder_seq_data` has nothing computed.

Example, block size 4; group a decodes with two sequences, its encoder's 6 tokens are in the cache; group b feeds its
first chunk, so its encoder's 3 tokens are computed in this step; group c has no encoder:

    rows                     a, first     a, second    b           c
    cross block table        [5, 2]       (the same)   [7]         none
    cross_seq_lens           6            6            3           0
    cross_block_tables       [5, 2]       [5, 2]       [7, -]      [-, -]
    encoder_positions                                  0  1  2
    cross_slot_mapping                                 28 29 30
    encoder_query_start_loc                            0        3
    encoder_block_tables                               [0, 1, 2]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .launch_checks import check_encoder, padded_tables
from .metadata import NULL_BLOCK, SequenceData, SequenceGroupMetadata


class CrossArrays(NamedTuple):
    """Fields of LaunchArgs by name, and who writes which of the cross slots."""

    arrays: dict[str, np.ndarray]
    numbers: dict[str, int]
    writers: list[SequenceGroupMetadata]
    slot_mapping: np.ndarray  # int64 [E]
    writer_of_slot: np.ndarray  # [E]


def build_cross_arrays(
    seq_group_metadata_list: Sequence[SequenceGroupMetadata],
    block_size: int,
    num_blocks: int,
    num_rows_before: int = 0,
) -> CrossArrays | None:
    """None when no row of the step has an encoder. So many rows without one come before the snapshots'."""
    groups: list[SequenceGroupMetadata] = []
    encoders: list[SequenceData] = []
    tables: list[np.ndarray] = []
    group_of_row = [-1] * num_rows_before  # -1: none
    for metadata in seq_group_metadata_list:
        data, table = metadata.encoder_seq_data, metadata.cross_block_table
        group = -1
        if data is not None or table is not None:
            check_encoder(metadata)
            group = len(groups)
            groups.append(metadata)
            encoders.append(data)  # type: ignore[arg-type]  # checked
            tables.append(table)  # type: ignore[arg-type]
        group_of_row += [group] * len(metadata.seq_data)
    if not groups:
        return None

    lens = np.array([data.num_tokens for data in encoders], np.int32)
    padded = padded_tables(groups, "cross_block_table", tables, -(-lens // block_size), num_blocks)
    # the last line stands for rows without an encoder: index -1
    tables_of = np.concatenate((padded, np.full_like(padded[:1], NULL_BLOCK)))
    lens_of = np.append(lens, np.int32(0))
    arrays = {
        "cross_seq_lens": lens_of[group_of_row],
        "cross_block_tables": tables_of[group_of_row],
    }
    numbers = {"max_cross_seq_len": int(lens.max())}

    computing = [i for i, data in enumerate(encoders) if data.num_computed_tokens == 0]
    if not computing:
        none = np.zeros(0, np.int64)
        return CrossArrays(arrays, numbers, [], none, none)
    lens = lens[computing]
    writer_of_slot = np.repeat(np.arange(len(computing)), lens)
    starts = np.zeros(len(computing) + 1, np.int32)
    np.cumsum(lens, out=starts[1:])
    positions = np.arange(starts[-1]) - starts[writer_of_slot]
    blocks = padded[computing][writer_of_slot, positions // block_size].astype(np.int64)
    slot_mapping = blocks * block_size + positions % block_size
    places = np.arange(int(lens.max()), dtype=np.int32)
    arrays |= {
        "encoder_input_ids": np.concatenate(
            [encoders[i].token_ids(0, encoders[i].num_tokens) for i in computing]
        ).astype(np.int64),
        "encoder_positions": positions.astype(np.int64),
        "encoder_query_start_loc": starts,
        "encoder_seq_lens": lens,
        "encoder_block_tables": np.where(places < lens[:, None], starts[:-1, None] + places, 0),
        "cross_slot_mapping": slot_mapping,
    }
    numbers["max_encoder_seq_len"] = int(lens.max())
    return CrossArrays(
        arrays, numbers, [groups[i] for i in computing], slot_mapping, writer_of_slot
    )
