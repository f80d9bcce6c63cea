"""Running a paged batch on every implementation of attention, and holding the result against the oracle."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from octavo import kernels
from octavo.kernels import ops, reference
from octavo.tests.kernels.cases import Batch, assert_close, naive_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def attend_with(implementation: str, monkeypatch, watch=None) -> Attend:
    """A function that runs a batch on the CPU's version or on Triton's and returns (out, lse or None).

    The output starts as NaN, and under the interpreter the slots that no query sees may not be read.
    """
    device = "cpu"
    if implementation == "triton":
        monkeypatch.setattr(ops.attention, "_paged_attention", ops.attention._triton_attention)
        monkeypatch.setattr(ops.attention, "_cascade_attention", ops.attention._triton_cascade)
        _vary_splits(monkeypatch)
        device = DEVICE

    def run(batch: Batch, return_lse: bool = True, **more: Any):
        if watch is not None:
            scales = (batch.options.get(name) for name in ("k_scale", "v_scale"))
            for cache in (batch.k_cache, batch.v_cache, *scales):
                if cache is not None and cache.dim() >= 3:
                    unread = ~batch.used.view(*batch.used.shape, *[1] * (cache.dim() - 2))
                    watch.poison(cache, unread.expand(cache.shape))
        arguments = {
            name: x.to(device) if isinstance(x, torch.Tensor) else x
            for name, x in {**batch.arguments, **more}.items()
        }
        shape = (*batch.q.shape[:2], batch.v_cache.shape[3])
        out = arguments.pop("out", None)
        if out is None:
            out = torch.full(shape, float("nan"), dtype=batch.dtype, device=device)
        result = getattr(kernels, batch.op)(
            *(x.to(device) for x in (batch.q, batch.k_cache, batch.v_cache)),
            **arguments,
            out=out,
            return_lse=return_lse,
        )
        return tuple(x.cpu() for x in result) if return_lse else (result.cpu(), None)

    return run


def _vary_splits(monkeypatch) -> None:
    """Cut the short sequences of tests into several splits, more than one round of the merge among them.

    The planned launch is for long ones: at test lengths it would never split.
    """
    from octavo.kernels import paged_decode

    planned, draw = paged_decode.plan_paged_decode, random.Random(0)

    def varied(**shape: Any) -> paged_decode.DecodePlan:
        plan = planned(**shape)
        if plan.split_len is not None:
            return plan
        return replace(
            plan, num_splits=draw.choice([1, 2, 2, 3, 5, 18]), tile_kv=draw.choice([16, 32])
        )

    monkeypatch.setattr(paged_decode, "plan_paged_decode", varied)
    monkeypatch.setattr(paged_decode, "INVARIANT_SPLIT", 64)


def check_batch(attend: Attend, batch: Batch, return_lse: bool = True, **more: Any) -> None:
    """The result is no further from the oracle than torch's own computation allows."""
    out, lse = attend(batch, return_lse, **more)
    exact_out, exact_lse = getattr(reference, batch.op)(
        batch.q, batch.k_cache, batch.v_cache, **batch.index, **batch.options
    )
    naive_out, naive_lse = naive_attention(batch)
    rows = batch.somebodys
    assert_close(out[rows], exact_out[rows], naive_out[rows])
    if lse is not None:
        assert_close(lse[rows], exact_lse[rows], naive_lse[rows])
    if batch.op == "paged_attention":
        assert out[: rows.start].isnan().all() and out[rows.stop :].isnan().all()
