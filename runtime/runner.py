"""Executes one step: block operations, launch arguments, forward pass, sampling. Holds no request state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from .. import kernels
from .kv_pool import KVPool
from .launch_args import LaunchArgs, LaunchBuffers, build_launch_args
from .metadata import SamplerOutput, SequenceGroupMetadata, StaleMetadataError
from .sampler import sample, sampling_rows
from .shadow_cache import ShadowCache


class Model(Protocol):
    """What the runner needs of a model; `octavo.models` has the layers to write one."""

    def __call__(
        self, args: LaunchArgs, kv: KVPool
    ) -> torch.Tensor: ...  # hidden states [T, hidden]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...  # [R, hidden] -> [R, vocab]


class ModelRunner:
    """A model, its KV pool and, for swapping, a pool in host memory.

    check   ask a `ShadowCache` before each launch whether every row will read its own tokens
    """

    def __init__(
        self, model: Model, pool: KVPool, host_pool: KVPool | None = None, check: bool = False
    ) -> None:
        self.model = model
        self.pool = pool
        self.host_pool = host_pool
        self._buffers = LaunchBuffers(pool.data.device)
        num_host_blocks = 0 if host_pool is None else host_pool.num_blocks
        self._shadow = (
            ShadowCache(pool.block_size, pool.num_blocks, num_host_blocks) if check else None
        )

    @torch.inference_mode()
    def execute(
        self,
        seq_group_metadata_list: list[SequenceGroupMetadata],
        *,
        blocks_to_swap_in: list[tuple[int, int]] | tuple[()] = (),
        blocks_to_swap_out: list[tuple[int, int]] | tuple[()] = (),
        blocks_to_copy: list[tuple[int, int]] | tuple[()] = (),
        generation_of: Callable[[str], int | None],
    ) -> SamplerOutput:
        """Run one step and return its tokens in row order.

        Raises MetadataError or StaleMetadataError before any memory is touched.
        """
        args = build_launch_args(
            seq_group_metadata_list, self.pool.block_size, self.pool.num_blocks, self._buffers
        )
        rows = sampling_rows(seq_group_metadata_list)
        for metadata in seq_group_metadata_list:
            current = generation_of(metadata.request_id)
            if current != metadata.generation_id:
                raise StaleMetadataError(metadata.request_id, metadata.generation_id, current)
        if self._shadow is not None:
            self._shadow.check_step(
                seq_group_metadata_list, blocks_to_swap_in, blocks_to_swap_out, blocks_to_copy
            )
        self._move_blocks(blocks_to_swap_in, blocks_to_swap_out, blocks_to_copy)
        hidden = self.model(args, self.pool)
        if len(rows.seed) == 0:
            return SamplerOutput(np.zeros(0, np.int64), np.zeros(0, np.float32))
        return sample(self.model.compute_logits(hidden[args.logits_indices]), rows)

    def _move_blocks(self, swap_in, swap_out, copies) -> None:
        """Swaps, then copies, all before the step's K and V are written."""
        if swap_in or swap_out:
            if self.host_pool is None:
                raise ValueError("blocks_to_swap: expected none without a host pool")
            if swap_in:
                kernels.swap_blocks(self.host_pool.data, self.pool.data, torch.tensor(swap_in))
            if swap_out:
                kernels.swap_blocks(self.pool.data, self.host_pool.data, torch.tensor(swap_out))
        if copies:
            kernels.copy_blocks(self.pool.data, torch.tensor(copies))
