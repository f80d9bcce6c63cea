"""Low-rank adapters of a linear layer, several in one batch, each token with its own or none.

    shrink: y[t, :r]  = scale * a[adapter, :r] @ x[t]            r = ranks[adapter], fp32
    expand: out[t]   += b[adapter, :, :r] @ y[t, :r]

Tokens come grouped by adapter (`group_by_adapter`, once a step). Program (i, j, s) of shrink owns tile i of the tokens
of one adapter, tile j of its rank and split s of the input features; program (i, j) of expand tile i and tile j of the
output features. How many tiles an adapter has only the device knows: each program counts them up to its own, and the
grid is as large as any grouping can need. So no tile mixes adapters, none is read twice by chance of order, and what has
no adapter, or lies past an adapter's rank, costs nothing.

Bytes moved: shrink num_tokens * (in_features * element_size * rank_tiles + 4 * rank) + adapter_tiles * in_features * rank
             * element_size, expand likewise with 2 * out_features * element_size a token
Reference:   `reference.lora_shrink`, `reference.lora_expand`
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._lora_checks import check_lora_expand, check_lora_shrink


@triton.jit
def _tile_of_program(
    adapter_starts_ptr, num_adapters, ADAPTERS: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """(adapter, first row, end row) of tile `program_id(0)`, rows counted in `token_order`; adapter >= num_adapters: none."""
    tile = tl.program_id(0)
    adapters = tl.arange(0, ADAPTERS)
    mask = adapters < num_adapters
    starts = tl.load(adapter_starts_ptr + adapters, mask=mask, other=0)
    ends = tl.load(adapter_starts_ptr + 1 + adapters, mask=mask, other=0)
    tiles = (ends - starts + TOKENS - 1) // TOKENS
    adapter = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)
    before = tl.sum(tl.where(adapters < adapter, tiles, 0), axis=0)
    found = adapter < num_adapters
    first = tl.load(adapter_starts_ptr + adapter, mask=found, other=0) + (tile - before) * TOKENS
    end = tl.load(adapter_starts_ptr + adapter + 1, mask=found, other=0)
    return adapter, first, end


@triton.jit
def _lora_shrink_kernel(
    y_ptr, x_ptr, a_ptr, ranks_ptr, token_order_ptr, adapter_starts_ptr,
    scale, num_adapters, in_features, max_rank, split_size,
    y_stride_split, y_stride_token, x_stride_token, a_stride_adapter, a_stride_rank,
    ADAPTERS: tl.constexpr, TOKENS: tl.constexpr, TILE_RANK: tl.constexpr, TILE_IN: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, cdiv(max_rank, TILE_RANK), num_splits)."""
    adapter, first, end = _tile_of_program(
        adapter_starts_ptr, num_adapters, ADAPTERS, TOKENS
    )  # fmt: skip
    if adapter >= num_adapters:
        return
    rank = tl.minimum(tl.load(ranks_ptr + adapter), max_rank)
    columns = tl.program_id(1) * TILE_RANK + tl.arange(0, TILE_RANK)
    if tl.program_id(1) * TILE_RANK >= rank:
        return
    rows = first + tl.arange(0, TOKENS)
    tokens = tl.load(token_order_ptr + rows, mask=rows < end, other=0).to(tl.int64)
    features = tl.arange(0, TILE_IN)
    x_rows_ptr = x_ptr + tokens[:, None] * x_stride_token
    a_ptr += adapter.to(tl.int64) * a_stride_adapter
    a_rows_ptr = a_ptr + columns[None, :].to(tl.int64) * a_stride_rank
    acc = tl.zeros([TOKENS, TILE_RANK], dtype=tl.float32)
    start = tl.program_id(2) * split_size
    for k in range(start, tl.minimum(start + split_size, in_features), TILE_IN):
        dims = k + features
        x_mask = (rows < end)[:, None] & (dims < in_features)[None, :]
        a_mask = (dims < in_features)[:, None] & (columns < rank)[None, :]
        x = tl.load(x_rows_ptr + dims[None, :], mask=x_mask, other=0.0)  # [TOKENS, TILE_IN]
        a = tl.load(a_rows_ptr + dims[:, None], mask=a_mask, other=0.0)  # [TILE_IN, TILE_RANK]
        acc = tl.dot(x, a, acc, input_precision="ieee")
    y_ptr += tl.program_id(2).to(tl.int64) * y_stride_split
    y_mask = (rows < end)[:, None] & (columns < rank)[None, :]
    y_offsets = tokens[:, None] * y_stride_token + columns[None, :]
    tl.store(y_ptr + y_offsets, acc * scale, mask=y_mask)


@triton.jit
def _lora_expand_kernel(
    out_ptr, y_ptr, b_ptr, ranks_ptr, token_order_ptr, adapter_starts_ptr,
    num_adapters, out_features, max_rank,
    out_stride_token, y_stride_token, b_stride_adapter, b_stride_out,
    ADAPTERS: tl.constexpr, TOKENS: tl.constexpr, TILE_RANK: tl.constexpr, TILE_OUT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, cdiv(out_features, TILE_OUT))."""
    adapter, first, end = _tile_of_program(
        adapter_starts_ptr, num_adapters, ADAPTERS, TOKENS
    )  # fmt: skip
    if adapter >= num_adapters:
        return
    rank = tl.minimum(tl.load(ranks_ptr + adapter), max_rank)
    if rank <= 0:
        return
    rows = first + tl.arange(0, TOKENS)
    tokens = tl.load(token_order_ptr + rows, mask=rows < end, other=0).to(tl.int64)
    features = tl.program_id(1) * TILE_OUT + tl.arange(0, TILE_OUT)
    b_ptr += adapter.to(tl.int64) * b_stride_adapter
    acc = tl.zeros([TOKENS, TILE_OUT], dtype=tl.float32)
    for k in range(0, rank, TILE_RANK):
        columns = k + tl.arange(0, TILE_RANK)
        y_mask = (rows < end)[:, None] & (columns < rank)[None, :]
        b_mask = (columns < rank)[:, None] & (features < out_features)[None, :]
        y_offsets = tokens[:, None] * y_stride_token + columns[None, :]
        b_offsets = features[None, :].to(tl.int64) * b_stride_out + columns[:, None]
        y = tl.load(y_ptr + y_offsets, mask=y_mask, other=0.0)  # [TOKENS, TILE_RANK]
        b = tl.load(b_ptr + b_offsets, mask=b_mask, other=0.0)  # [TILE_RANK, TILE_OUT]
        acc = tl.dot(y.to(b.dtype), b, acc, input_precision="ieee")
    mask = (rows < end)[:, None] & (features < out_features)[None, :]
    out_ptrs = out_ptr + tokens[:, None] * out_stride_token + features[None, :]
    out = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32) + acc
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class LoraPlan:
    """Launch choices of both halves."""

    tokens: int  # of one tile, a power of two >= 16
    tile_in: int  # input features of one step of shrink
    tile_rank: int  # columns of y of one program of shrink, of one step of expand
    tile_out: int  # output features of one program of expand
    num_splits: int  # programs that share the input features of one tile of shrink
    num_warps: int
    num_stages: int


def plan_lora(*, num_tokens: int, in_features: int, element_size: int) -> LoraPlan:
    """Tiles for weights that are read once, by the least a matrix product takes (16 x 16) up to long prefills.

    The shape of the batch picks one of two tiles and nothing else, and splits depend on the layer alone: a batch of
    another size compiles nothing new and, but for that one step, adds in the same order.
    """
    # Past 512 tokens an adapter has tiles enough to fill 64 rows, which quarters the reads of its weights.
    tokens = 16 if num_tokens <= 512 else 64
    tile_in = 256 // element_size
    # One program walks 4096 features in 32 steps; longer rows are shared, at the price of one more launch to add up.
    num_splits = max(1, min(8, in_features // 4096))
    # Four stages of small tiles: a program that walks a whole row alone lives on what it has in flight.
    return LoraPlan(tokens, tile_in, 16, 128, num_splits, num_warps=4, num_stages=4)


def _num_tiles(num_tokens: int, num_adapters: int, tokens: int) -> int:
    """As many as any grouping can need: each adapter may have one tile that is not full."""
    return min(num_tokens, (num_tokens + num_adapters * (tokens - 1)) // tokens)


def lora_shrink(
    x: torch.Tensor,
    a: torch.Tensor,
    ranks: torch.Tensor,
    token_order: torch.Tensor,
    adapter_starts: torch.Tensor,
    scale: float,
    *,
    plan: LoraPlan | None = None,
) -> torch.Tensor:
    """x through the first factor of each token's adapter: y [num_tokens, max_rank] fp32.

    x               [num_tokens, in_features]              fp32 | fp16 | bf16, last axis contiguous
    a               [num_adapters, max_rank, in_features]  dtype of x, last axis contiguous
    ranks           [num_adapters] int32                   rows of `a` past an adapter's rank are not read
    token_order     [num_tokens] int32                     see `group_by_adapter`
    adapter_starts  [num_adapters + 1] int32
    scale           multiplies y
    Rows of y without an adapter, and columns past an adapter's rank, are not written: they may hold anything.
    Raises ValueError naming the argument, what was expected and what came.
    """
    check_lora_shrink(x, a, ranks, token_order, adapter_starts)
    num_tokens, in_features = x.shape
    num_adapters, max_rank, _ = a.shape
    if plan is None:
        plan = plan_lora(
            num_tokens=num_tokens, in_features=in_features, element_size=x.element_size()
        )
    y = x.new_empty(num_tokens, max_rank, dtype=torch.float32)
    if y.numel() == 0 or num_adapters == 0:
        return y
    splits = plan.num_splits
    partial = y[None] if splits == 1 else y.new_empty(splits, num_tokens, max_rank)
    grid = (
        _num_tiles(num_tokens, num_adapters, plan.tokens),
        triton.cdiv(max_rank, plan.tile_rank),
        splits,
    )
    _lora_shrink_kernel[grid](
        y_ptr=partial,
        x_ptr=x,
        a_ptr=a,
        ranks_ptr=ranks,
        token_order_ptr=token_order,
        adapter_starts_ptr=adapter_starts,
        scale=scale,
        num_adapters=num_adapters,
        in_features=in_features,
        max_rank=max_rank,
        split_size=triton.cdiv(triton.cdiv(in_features, splits), plan.tile_in) * plan.tile_in,
        y_stride_split=partial.stride(0),
        y_stride_token=partial.stride(1),
        x_stride_token=x.stride(0),
        a_stride_adapter=a.stride(0),
        a_stride_rank=a.stride(1),
        ADAPTERS=triton.next_power_of_2(num_adapters),
        TOKENS=plan.tokens,
        TILE_RANK=plan.tile_rank,
        TILE_IN=plan.tile_in,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        enable_fp_fusion=True,
    )
    return y if splits == 1 else torch.sum(partial, dim=0, out=y)


def lora_expand(
    y: torch.Tensor,
    b: torch.Tensor,
    ranks: torch.Tensor,
    token_order: torch.Tensor,
    adapter_starts: torch.Tensor,
    out: torch.Tensor,
    *,
    plan: LoraPlan | None = None,
) -> None:
    """Add y through the second factor of each token's adapter to `out`, in place.

    y               [num_tokens, max_rank] fp32            from `lora_shrink`; rounded to the dtype of b
    b               [num_adapters, out_features, max_rank] fp32 | fp16 | bf16, last axis contiguous; columns past an
                    adapter's rank are not read
    ranks, token_order, adapter_starts                     as in `lora_shrink`
    out             [num_tokens, out_features]             dtype of b, any row stride, last axis contiguous
    Rows without an adapter stay as they are. Raises ValueError naming the argument, what was expected and what came.
    """
    check_lora_expand(y, b, ranks, token_order, adapter_starts, out)
    num_tokens, max_rank = y.shape
    num_adapters, out_features, _ = b.shape
    if out.numel() == 0 or max_rank == 0 or num_adapters == 0:
        return
    if plan is None:
        plan = plan_lora(num_tokens=num_tokens, in_features=0, element_size=b.element_size())
    grid = (
        _num_tiles(num_tokens, num_adapters, plan.tokens),
        triton.cdiv(out_features, plan.tile_out),
    )
    _lora_expand_kernel[grid](
        out_ptr=out,
        y_ptr=y,
        b_ptr=b,
        ranks_ptr=ranks,
        token_order_ptr=token_order,
        adapter_starts_ptr=adapter_starts,
        num_adapters=num_adapters,
        out_features=out_features,
        max_rank=max_rank,
        out_stride_token=out.stride(0),
        y_stride_token=y.stride(0),
        b_stride_adapter=b.stride(0),
        b_stride_out=b.stride(1),
        ADAPTERS=triton.next_power_of_2(num_adapters),
        TOKENS=plan.tokens,
        TILE_RANK=plan.tile_rank,
        TILE_OUT=plan.tile_out,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        enable_fp_fusion=True,
    )
