"""torch's scaled_dot_product_attention on dense keys and values.

`sdpa` gets them gathered and padded: what attention would cost with no paging at all, a lower bound and not a rival.
`sdpa+gather` gathers them from the paged cache, and converts an fp8 cache, within the timed call: what a paged cache costs
without a paged kernel. Sequences of one query length make one call. A mask is given only where the lengths need one; on a
GPU keys and values are then repeated for each query head, as transformers does, because torch's fused kernels take a mask
or grouped heads but not both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from ..attention_problem import AttentionProblem
from . import Unsupported
from ._gather import DenseBatch, dense_batches

Tensor = torch.Tensor


class SDPA:
    def __init__(self, is_gather_timed: bool) -> None:
        self.name = "sdpa+gather" if is_gather_timed else "sdpa"
        self._is_gather_timed = is_gather_timed

    def unavailable(self) -> str | None:
        return None

    def prepare(self, problem: AttentionProblem) -> Callable[[], Tensor]:
        if problem.shape.softcap is not None:
            raise Unsupported("scaled_dot_product_attention has no soft cap")
        attends = [_Attend(batch) for batch in dense_batches(problem)]
        inputs = [None if self._is_gather_timed else attend.inputs() for attend in attends]
        out = torch.empty_like(problem.q)

        def run() -> Tensor:
            for attend, made in zip(attends, inputs, strict=True):
                q, k, v = made or attend.inputs()
                attend.batch.scatter(attend(q, k, v), out)
            return out

        return run


class _Attend:
    """One call, with the least of a mask that is right."""

    def __init__(self, batch: DenseBatch) -> None:
        self.batch = batch
        shape, query_len = batch.problem.shape, batch.query_len
        self._options: dict = {"scale": batch.problem.scale}
        self._repeats = 1
        if not batch.is_even or batch.hides_by_window:
            self._options["attn_mask"] = batch.mask
            if batch.problem.q.is_cuda:
                self._repeats = shape.num_q_heads // shape.num_kv_heads
        elif query_len == batch.width:
            self._options["is_causal"] = True
        elif query_len > 1:  # is_causal would align the first query with the first key
            self._options["attn_mask"] = causal_lower_right(query_len, batch.width)
        self._options["enable_gqa"] = shape.num_q_heads != shape.num_kv_heads * self._repeats

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = self.batch.keys_and_values()
        if self._repeats > 1:
            keys, values = (x.repeat_interleave(self._repeats, dim=1) for x in (keys, values))
        return self.batch.queries(), keys, values

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self._options)
