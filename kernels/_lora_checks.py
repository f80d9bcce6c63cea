"""Checks of the arguments of the grouped low-rank adapters, see `_checks`."""

from __future__ import annotations

import torch

from ._checks import FLOAT_DTYPES, check_last_axis_contiguous, check_tensor


def check_adapter_ids(adapter_ids: torch.Tensor, num_adapters: int) -> None:
    """Check the arguments of `group_by_adapter`."""
    check_tensor("adapter_ids", adapter_ids, shape=(None,), dtype=torch.int32)
    if num_adapters < 0:
        raise ValueError(f"num_adapters: expected a number >= 0, got {num_adapters}")


def check_lora_shrink(
    x: torch.Tensor,
    a: torch.Tensor,
    ranks: torch.Tensor,
    token_order: torch.Tensor,
    adapter_starts: torch.Tensor,
) -> None:
    """Check the arguments of `lora_shrink`."""
    check_tensor("x", x, shape=(None, None), dtype=FLOAT_DTYPES)
    check_last_axis_contiguous("x", x)
    check_tensor("a", a, shape=(None, None, x.shape[1]), dtype=x.dtype, device=x.device)
    check_last_axis_contiguous("a", a)
    _check_groups(x.shape[0], a.shape[0], ranks, token_order, adapter_starts, x.device)


def check_lora_expand(
    y: torch.Tensor,
    b: torch.Tensor,
    ranks: torch.Tensor,
    token_order: torch.Tensor,
    adapter_starts: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Check the arguments of `lora_expand`."""
    check_tensor("y", y, shape=(None, None), dtype=torch.float32)
    check_last_axis_contiguous("y", y)
    num_tokens, max_rank = y.shape
    check_tensor("b", b, shape=(None, None, max_rank), dtype=FLOAT_DTYPES, device=y.device)
    check_last_axis_contiguous("b", b)
    check_tensor("out", out, shape=(num_tokens, b.shape[1]), dtype=b.dtype, device=y.device)
    check_last_axis_contiguous("out", out)
    _check_groups(num_tokens, b.shape[0], ranks, token_order, adapter_starts, y.device)


def _check_groups(
    num_tokens: int,
    num_adapters: int,
    ranks: torch.Tensor,
    token_order: torch.Tensor,
    adapter_starts: torch.Tensor,
    device: torch.device,
) -> None:
    for name, tensor, size in (
        ("ranks", ranks, num_adapters),
        ("token_order", token_order, num_tokens),
        ("adapter_starts", adapter_starts, num_adapters + 1),
    ):
        check_tensor(name, tensor, shape=(size,), dtype=torch.int32, device=device)
        check_last_axis_contiguous(name, tensor)
