"""Move whole KV blocks between two pools, device to pinned host memory or back, in stream order.

    dst_pool[pairs[i, 1]] = src_pool[pairs[i, 0]]

Large blocks go by the copy engines, one asynchronous copy per block, which leaves the multiprocessors to the model.
Many small ones go by the kernel of `block_copy`, which reads and writes pinned host memory itself in one launch.

Bytes moved: num_pairs * block_bytes over the bus, one way
Reference:   `reference.swap_blocks`
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._checks import check_block_pairs, multiprocessors
from .block_copy import launch_copy


@dataclass(frozen=True)
class SwapPlan:
    """How one swap is carried out."""

    by_kernel: bool  # one kernel launch, instead of one copy per block


def plan_swap_blocks(*, block_bytes: int, num_pairs: int) -> SwapPlan:
    """Copy engines, unless the blocks are small and many.

    Over PCIe 5 the copy engines reach 4-7 GB/s for blocks up to 24 KiB, 40-44 from 28 KiB and 51 of 64 from 64 KiB (public
    figures, H100), at about 2 us of CPU time a copy; below 16 pairs that time is less than the kernel's launch is worth.
    """
    return SwapPlan(by_kernel=block_bytes < 28 * 1024 and num_pairs >= 16)


def swap_blocks(
    src_pool: torch.Tensor,
    dst_pool: torch.Tensor,
    pairs: torch.Tensor,
    *,
    plan: SwapPlan | None = None,
) -> None:
    """Copy block `pairs[i, 0]` of `src_pool` over block `pairs[i, 1]` of `dst_pool`.

    src_pool, dst_pool   [num_blocks, ...]   alike but for num_blocks and device; each block contiguous. Copies run in
                         the current stream; host memory has to be pinned for them to be asynchronous
    pairs                [num_pairs, 2] int64 on the CPU: ids in range, each destination once
    The host may touch either pool again only after the stream has passed this point.
    Raises ValueError naming the argument, what was expected and what came, before anything moves.
    """
    check_block_pairs(src_pool, dst_pool, pairs)
    num_pairs = pairs.shape[0]
    if num_pairs == 0 or src_pool[0].numel() == 0:
        return
    if plan is None:
        plan = plan_swap_blocks(
            block_bytes=src_pool[0].numel() * src_pool.element_size(), num_pairs=num_pairs
        )
    device = dst_pool.device if dst_pool.is_cuda else src_pool.device
    # a kernel reaches host memory only where it is pinned
    reachable = device.type == "cpu" or all(
        p.is_cuda or p.is_pinned() for p in (src_pool, dst_pool)
    )
    if plan.by_kernel and reachable:
        launch_copy(src_pool, dst_pool, pairs, None, multiprocessors(device))
    else:
        for source, destination in pairs.tolist():
            dst_pool[destination].copy_(src_pool[source], non_blocking=True)
