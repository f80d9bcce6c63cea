"""Copy whole KV blocks, all layers of K and V at once.

    dst_pool[pairs[i, 1]] = src_pool[pairs[i, 0]]

A block is contiguous over all layers, so it is moved as 64-bit words (or the widest its size and address allow), whatever
the dtype. Program i owns part i % num_parts of pair i // num_parts, and walks it tile by tile.

Bytes moved: 2 * num_pairs * block_bytes
Reference:   `reference.copy_blocks`
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._checks import check_block_pairs, multiprocessors

_WORD_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


# Nothing about the number of pairs may choose a variant: a new one must not compile.
@triton.jit(do_not_specialize=["num_parts", "part_tiles"])
def _copy_blocks_kernel(
    dst_ptr, src_ptr, pairs_ptr, block_words, num_parts, part_tiles, dst_stride_block, src_stride_block,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid (num_pairs * num_parts,); a part is part_tiles tiles, the last one of a block may be shorter."""
    program = tl.program_id(0)
    pair = program // num_parts
    first = (program - pair * num_parts) * part_tiles * TILE
    source = tl.load(pairs_ptr + pair.to(tl.int64) * 2)  # int64
    destination = tl.load(pairs_ptr + pair.to(tl.int64) * 2 + 1)
    src_ptr += source * src_stride_block
    dst_ptr += destination * dst_stride_block
    for start in range(first, tl.minimum(first + part_tiles * TILE, block_words), TILE):
        words = start + tl.arange(0, TILE)
        mask = words < block_words
        tl.store(dst_ptr + words, tl.load(src_ptr + words, mask=mask, other=0), mask=mask)


@dataclass(frozen=True)
class CopyPlan:
    """Launch choices of one block copy."""

    tile_words: int  # words a program loads at once
    part_tiles: int  # tiles a program copies
    num_warps: int
    num_stages: int  # depth of the load pipeline


def plan_copy_blocks(*, block_words: int, num_pairs: int, num_sms: int) -> CopyPlan:
    """Tiles of 1024 words (at four warps, four 16-byte loads of 64-bit words a thread), in long parts where pairs are many.

    Eight programs fit on a multiprocessor: parts grow from one tile to eight as long as that many programs remain.
    """
    tile_words = min(1024, triton.next_power_of_2(block_words))
    tiles = num_pairs * triton.cdiv(block_words, tile_words)
    part_tiles = max(1, min(8, tiles // (8 * num_sms)))
    return CopyPlan(tile_words, part_tiles, num_warps=4, num_stages=3)


def as_words(pool: torch.Tensor, word_bytes: int) -> torch.Tensor:
    """The pool as [num_blocks, block_words] of a word type, sharing its memory."""
    return pool.unsqueeze(-1).flatten(1).view(_WORD_DTYPES[word_bytes])


def widest_word(*pools: torch.Tensor) -> int:
    """Bytes of the widest word in which blocks of all these pools can be addressed."""
    word_bytes = 8
    for pool in pools:
        block_bytes = pool[0].numel() * pool.element_size()
        stride_bytes = pool.stride(0) * pool.element_size()
        while (block_bytes | stride_bytes | pool.data_ptr()) % word_bytes:
            word_bytes //= 2
    return word_bytes


def launch_copy(
    src_pool: torch.Tensor,
    dst_pool: torch.Tensor,
    pairs: torch.Tensor,
    plan: CopyPlan | None,
    num_sms: int,
) -> None:
    """Launch the copy of checked pairs between pools that the device can address."""
    word_bytes = widest_word(src_pool, dst_pool)
    src, dst = as_words(src_pool, word_bytes), as_words(dst_pool, word_bytes)
    block_words, num_pairs = src.shape[1], pairs.shape[0]
    if plan is None:
        plan = plan_copy_blocks(block_words=block_words, num_pairs=num_pairs, num_sms=num_sms)
    num_parts = triton.cdiv(block_words, plan.tile_words * plan.part_tiles)
    device = dst.device if dst.device.type != "cpu" else src.device
    _copy_blocks_kernel[(num_pairs * num_parts,)](
        dst_ptr=dst,
        src_ptr=src,
        pairs_ptr=pairs.contiguous().to(device, non_blocking=True),
        block_words=block_words,
        num_parts=num_parts,
        part_tiles=plan.part_tiles,
        dst_stride_block=dst.stride(0),
        src_stride_block=src.stride(0),
        TILE=plan.tile_words,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        enable_fp_fusion=True,
    )


def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor, *, plan: CopyPlan | None = None) -> None:
    """Copy block `pairs[i, 0]` of the pool over block `pairs[i, 1]`, in place.

    pool   [num_blocks, ...]   any dtype; each block contiguous
    pairs  [num_pairs, 2] int64 on the CPU: (source, destination) ids in [0, num_blocks), each destination once, and no
           destination that is also a source
    Raises ValueError naming the argument, what was expected and what came, before anything moves.
    """
    check_block_pairs(pool, pool, pairs)
    if pairs.shape[0] > 0 and pool[0].numel() > 0:
        launch_copy(pool, pool, pairs, plan, multiprocessors(pool.device))
