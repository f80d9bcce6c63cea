"""Move whole KV blocks between two pools, device to pinned host memory or back, in stream order.

    dst_pool[pairs[i, 1]] = src_pool[pairs[i, 0]]

Large blocks go by the copy engines, one asynchronous copy for each run of blocks that are neighbours in both pools, which
leaves the multiprocessors to the model. Many small ones go by the kernel of `block_copy`, which reads and writes pinned
host memory itself in one launch.

Bytes moved: num_pairs * block_bytes over the bus, one way
Reference:   `reference.swap_blocks`
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ._checks import check_block_pairs, multiprocessors
from .block_copy import as_words, launch_copy, widest_word
from .swap_costs import PUBLIC_FIGURES, Crossover, SwapCosts


@dataclass(frozen=True)
class SwapPlan:
    """How one swap is carried out."""

    by_kernel: bool  # one kernel launch, instead of one copy per run of blocks


def plan_swap_blocks(
    *,
    block_bytes: int,
    num_pairs: int,
    num_copies: int | None = None,
    crossover: Crossover = PUBLIC_FIGURES.to_host,
) -> SwapPlan:
    """Copy engines, unless the copies are small and many.

    num_copies is that of the runs which the pairs make up, None for a run each. The thresholds are those of `Crossover`.
    """
    num_copies = num_pairs if num_copies is None else num_copies
    bytes_per_copy = block_bytes * num_pairs / max(1, num_copies)
    return SwapPlan(by_kernel=crossover.takes_kernel(bytes_per_copy, num_copies))


def contiguous_runs(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(source, destination, length) of the fewest runs that are neighbours on both sides, by ascending source."""
    runs: list[tuple[int, int, int]] = []
    for source, destination in sorted(pairs):
        if runs:
            first, to, length = runs[-1]
            if (source, destination) == (first + length, to + length):
                runs[-1] = (first, to, length + 1)
                continue
        runs.append((source, destination, 1))
    return runs


def plan_swap(
    src_pool: torch.Tensor,
    dst_pool: torch.Tensor,
    pairs: torch.Tensor,
    costs: SwapCosts = PUBLIC_FIGURES,
) -> SwapPlan:
    """The plan for these pools, which `swap_blocks` makes for itself with the public figures as costs."""
    return plan_swap_blocks(
        block_bytes=src_pool[0].numel() * src_pool.element_size(),
        num_pairs=pairs.shape[0],
        num_copies=len(_runs(src_pool, dst_pool, pairs)),
        crossover=costs.to_device if dst_pool.is_cuda else costs.to_host,
    )


def _runs(
    src_pool: torch.Tensor, dst_pool: torch.Tensor, pairs: torch.Tensor
) -> list[tuple[int, int, int]]:
    # blocks with gaps between them are not one run of bytes: torch would gather them first, not asynchronously
    if src_pool.is_contiguous() and dst_pool.is_contiguous():
        return contiguous_runs(pairs.tolist())
    return [(source, destination, 1) for source, destination in pairs.tolist()]


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
    The host may touch either pool, and pairs that are pinned, again only after the stream has passed this point.
    Raises ValueError naming the argument, what was expected and what came, before anything moves.
    """
    check_block_pairs(src_pool, dst_pool, pairs)
    if pairs.shape[0] == 0 or src_pool[0].numel() == 0:
        return
    if plan is None:
        plan = plan_swap(src_pool, dst_pool, pairs)
    device = dst_pool.device if dst_pool.is_cuda else src_pool.device
    # a kernel reaches host memory only where it is pinned
    reachable = device.type == "cpu" or all(
        p.is_cuda or p.is_pinned() for p in (src_pool, dst_pool)
    )
    if plan.by_kernel and reachable:
        launch_copy(src_pool, dst_pool, pairs, None, multiprocessors(device))
    else:
        _copy_runs(src_pool, dst_pool, _runs(src_pool, dst_pool, pairs))


def _copy_runs(
    src_pool: torch.Tensor, dst_pool: torch.Tensor, runs: list[tuple[int, int, int]]
) -> None:
    # what a copy costs here is Python: one call for all takes 2.3 us each, a call for each 3.9 (CPU, torch 2.13), and
    # a block is found faster by its index than as a slice
    word_bytes = widest_word(src_pool, dst_pool)
    src, dst = as_words(src_pool, word_bytes), as_words(dst_pool, word_bytes)
    sources = [src[i] if n == 1 else src[i : i + n] for i, _, n in runs]
    destinations = [dst[i] if n == 1 else dst[i : i + n] for _, i, n in runs]
    torch.ops.aten._foreach_copy_(destinations, sources, non_blocking=True)
