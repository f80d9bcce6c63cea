"""Executes one step: block operations, launch arguments, forward pass, sampling. Holds no request state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from ..kernels.swap_costs import PUBLIC_FIGURES, SwapCosts
from .block_mover import BlockMover
from .kv_pool import KVPool
from .launch_args import LaunchArgs, LaunchBuffers, build_launch_args
from .metadata import SamplerOutput, SequenceGroupMetadata
from .sampler import sample, sampling_rows
from .shadow_cache import ShadowCache
from .snapshots import Snapshots

_NO_TOKENS = SamplerOutput(np.zeros(0, np.int64), np.zeros(0, np.float32))


class Model(Protocol):
    """What the runner needs of a model; `octavo.models` has the layers to write one."""

    def __call__(
        self, args: LaunchArgs, kv: KVPool
    ) -> torch.Tensor: ...  # hidden states [T, hidden]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...  # [R, hidden] -> [R, vocab]


class ModelRunner:
    """A model, its KV pool and, for swapping, a pool in host memory.

    check       ask a `ShadowCache` before each launch whether every row will read its own tokens
    swap_costs  of this machine, as `octavo kernels calibrate` measured them
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        host_pool: KVPool | None = None,
        check: bool = False,
        swap_costs: SwapCosts = PUBLIC_FIGURES,
    ) -> None:
        self.model = model
        self.pool = pool
        self.mover = BlockMover(pool, host_pool, swap_costs)
        self._buffers = LaunchBuffers(pool.data.device)
        num_host_blocks = 0 if host_pool is None else host_pool.num_blocks
        self._shadow = (
            ShadowCache(pool.block_size, pool.num_blocks, num_host_blocks) if check else None
        )

    @torch.inference_mode()
    def execute(
        self,
        seq_group_metadata_list: Sequence[SequenceGroupMetadata],
        *,
        blocks_to_swap_out: list[tuple[int, int]] | tuple[()] = (),
        blocks_to_swap_in: list[tuple[int, int]] | tuple[()] = (),
        blocks_to_copy: list[tuple[int, int]] | tuple[()] = (),
        generation_of: Callable[[str], int | None],
    ) -> SamplerOutput:
        """Run one step and return its tokens in row order. Of a step without rows only the moves are made.

        Blocks move as `BlockMover` says: swap-outs, swap-ins, copies, before any key and value of the step is written.
        Raises MetadataError or StaleMetadataError before any memory is touched.
        """
        has_moves = blocks_to_swap_out or blocks_to_swap_in or blocks_to_copy
        args = None
        if seq_group_metadata_list or not has_moves:
            args = build_launch_args(
                seq_group_metadata_list, self.pool.block_size, self.pool.num_blocks, self._buffers
            )
        rows = sampling_rows(seq_group_metadata_list)
        Snapshots.of(seq_group_metadata_list).check_current(generation_of)
        if self._shadow is not None:
            self.mover.check(blocks_to_swap_out, blocks_to_swap_in, blocks_to_copy)
            self._shadow.check_step(
                seq_group_metadata_list, blocks_to_swap_out, blocks_to_swap_in, blocks_to_copy
            )
        self.mover.move(
            blocks_to_swap_out,
            blocks_to_swap_in,
            blocks_to_copy,
            blocks_written(seq_group_metadata_list, self.pool.block_size),
        )
        if args is None:
            return _NO_TOKENS
        hidden = self.model(args, self.pool)
        if len(rows.seed) == 0:
            return _NO_TOKENS
        return sample(self.model.compute_logits(hidden[args.logits_indices]), rows)


def blocks_written(
    seq_group_metadata_list: Sequence[SequenceGroupMetadata], block_size: int
) -> Iterator[int]:
    """The blocks that the step's new keys and values go to."""
    for metadata in seq_group_metadata_list:
        for _, data, table in metadata.rows():
            first = data.num_computed_tokens
            last = first + metadata.token_chunk_size - 1
            yield from table[first // block_size : last // block_size + 1].tolist()
