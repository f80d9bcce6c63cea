"""Checks of the arguments of the sampling ops, see `_checks`."""

from __future__ import annotations

import torch

from ._checks import FLOAT_DTYPES, check_last_axis_contiguous, check_tensor


def _check_logits(logits: torch.Tensor) -> None:
    check_tensor("logits", logits, shape=(None, None), dtype=FLOAT_DTYPES)
    check_last_axis_contiguous("logits", logits)


def _check_column(
    name: str, column: torch.Tensor, logits: torch.Tensor, dtype: torch.dtype
) -> None:
    check_tensor(name, column, shape=(logits.shape[0],), dtype=dtype, device=logits.device)
    check_last_axis_contiguous(name, column)


def check_penalties(
    logits: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Check the arguments of `apply_penalties`."""
    _check_logits(logits)
    for name, tensor, dtype in (
        ("prompt_mask", prompt_mask, torch.bool),
        ("output_counts", output_counts, torch.int32),
    ):
        check_tensor(name, tensor, shape=tuple(logits.shape), dtype=dtype, device=logits.device)
        check_last_axis_contiguous(name, tensor)
    _check_column("repetition", repetition, logits, torch.float32)
    _check_column("frequency", frequency, logits, torch.float32)
    _check_column("presence", presence, logits, torch.float32)


def check_filters(
    logits: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    temperatures: torch.Tensor | None,
) -> None:
    """Check the arguments of `apply_top_k_top_p_min_p`."""
    _check_logits(logits)
    _check_column("top_k", top_k, logits, torch.int32)
    _check_column("top_p", top_p, logits, torch.float32)
    _check_column("min_p", min_p, logits, torch.float32)
    if temperatures is not None:
        _check_column("temperatures", temperatures, logits, torch.float32)


def check_sample(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, steps: torch.Tensor
) -> None:
    """Check the arguments of `sample`."""
    _check_logits(logits)
    _check_column("temperatures", temperatures, logits, torch.float32)
    _check_column("seeds", seeds, logits, torch.int64)
    _check_column("steps", steps, logits, torch.int64)
    if logits.shape[1] == 0 and logits.shape[0] > 0:
        raise ValueError(f"logits: expected a vocabulary, got {list(logits.shape)}")
