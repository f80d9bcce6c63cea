"""Low-rank adapters, grouped."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .._lora_checks import check_adapter_ids, check_lora_expand, check_lora_shrink

Tensor = torch.Tensor


def group_by_adapter(adapter_ids: Tensor, num_adapters: int) -> tuple[Tensor, Tensor]:
    """A few torch calls on whatever device the ids are on, none of which waits for it."""
    check_adapter_ids(adapter_ids, num_adapters)
    ordered, token_order = adapter_ids.sort(stable=True)
    adapters = torch.arange(num_adapters + 1, dtype=torch.int32, device=adapter_ids.device)
    starts = torch.searchsorted(ordered, adapters, out_int32=True)
    return token_order.int(), starts


def lora_shrink(
    x: Tensor, a: Tensor, ranks: Tensor, token_order: Tensor, adapter_starts: Tensor, scale: float
) -> Tensor:
    check_lora_shrink(x, a, ranks, token_order, adapter_starts)
    y = x.new_empty(x.shape[0], a.shape[1], dtype=torch.float32)
    for adapter, rank, tokens in _groups(ranks, token_order, adapter_starts, a.shape[1]):
        y[tokens, :rank] = x[tokens].float() @ a[adapter, :rank].float().t() * scale
    return y


def lora_expand(
    y: Tensor, b: Tensor, ranks: Tensor, token_order: Tensor, adapter_starts: Tensor, out: Tensor
) -> None:
    check_lora_expand(y, b, ranks, token_order, adapter_starts, out)
    for adapter, rank, tokens in _groups(ranks, token_order, adapter_starts, b.shape[2]):
        added = y[tokens, :rank].to(b.dtype).float() @ b[adapter, :, :rank].float().t()
        out[tokens] = (out[tokens].float() + added).to(out.dtype)


def _groups(
    ranks: Tensor, token_order: Tensor, adapter_starts: Tensor, max_rank: int
) -> Iterator[tuple[int, int, Tensor]]:
    """(adapter, rank, tokens) of every adapter that has tokens and a rank."""
    starts = adapter_starts.tolist()
    for adapter, rank in enumerate(ranks.tolist()):
        rank = min(rank, max_rank)
        if rank > 0 and starts[adapter] < starts[adapter + 1]:
            yield adapter, rank, token_order[starts[adapter] : starts[adapter + 1]].long()
