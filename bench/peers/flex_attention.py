"""torch's FlexAttention, compiled, on gathered keys and values with a block mask that `prepare` builds.

torch has a paged helper too (`torch.nn.attention.experimental._paged_attention`). It is experimental, and it takes a page as
a block of the mask: with pages of 16 tokens the kernel would load 16 keys at a time, so its users take pages of 128.
Gathering has no such bound and is what the documentation of FlexAttention shows. `flex` gets the gathered tensors (a lower
bound, as `sdpa` does), `flex+gather` gathers within the timed call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from ..attention_problem import AttentionProblem
from ._gather import DenseBatch, dense_batches

Tensor = torch.Tensor

# of keys: what torch 2.13 compiles for a CPU is wrong at 24 and 40 keys, right at 32, 48 and 64
_KEYS_ON_CPU = 64
_MOST_SHAPES = 1024  # compiled in one process; torch's own limit is 8


class FlexAttention:
    def __init__(self, is_gather_timed: bool, is_compiled: bool = True) -> None:
        self.name = "flex+gather" if is_gather_timed else "flex"
        self._is_gather_timed, self._is_compiled = is_gather_timed, is_compiled

    def unavailable(self) -> str | None:
        return None

    def prepare(self, problem: AttentionProblem) -> Callable[[], Tensor]:
        attend: Callable[..., Any] = flex_attention
        if self._is_compiled:
            # fullgraph: past the limit it raises, where it would silently run uncompiled
            attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        batches = dense_batches(problem, 1 if problem.q.is_cuda else _KEYS_ON_CPU)
        options = [_options(batch) for batch in batches]
        inputs = [None if self._is_gather_timed else _inputs(batch) for batch in batches]
        out = torch.empty_like(problem.q)

        def run() -> Tensor:
            for batch, made, chosen in zip(batches, inputs, options, strict=True):
                q, k, v = made or _inputs(batch)
                batch.scatter(attend(q, k, v, **chosen), out)
            return out

        with torch._dynamo.config.patch(recompile_limit=_MOST_SHAPES):
            run()  # compiles
        return run


def _inputs(batch: DenseBatch) -> tuple[Tensor, Tensor, Tensor]:
    return (batch.queries(), *batch.keys_and_values())


def _options(batch: DenseBatch) -> dict[str, Any]:
    shape = batch.problem.shape
    sizes = (
        len(batch.num_keys),
        None,
        batch.query_len,
        batch.width,
    )  # every head has the same mask
    return {
        "block_mask": create_block_mask(_visible(batch), *sizes, device=batch.rows.device),
        "score_mod": None if shape.softcap is None else _capped(shape.softcap),
        "scale": batch.problem.scale,
        "enable_gqa": shape.num_q_heads != shape.num_kv_heads,
    }


def _visible(batch: DenseBatch) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    contexts, window = batch.contexts, batch.problem.shape.window

    def is_visible(seq: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        last = contexts[seq] + query
        visible = key <= last
        return visible if window is None else visible & (key > last - window)

    return is_visible


def _capped(limit: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    def cap(score: Tensor, seq: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return limit * torch.tanh(score / limit)

    return cap
