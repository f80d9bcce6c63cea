"""Attention over the paged cache, over a shared prefix, and the union of two states."""

from __future__ import annotations

import torch

from ... import kernels
from ..attention_problem import AttentionProblem, AttentionShape, make_problem
from ..batch_specs import BatchSpec
from ..block_tables import scattered_tables
from ..timing import TimedCall
from .case import KernelCase, relative_error


def paged_attention(batch: BatchSpec, shape: AttentionShape, device: torch.device) -> KernelCase:
    return attention_case(make_problem(batch, shape, device))


def attention_case(problem: AttentionProblem) -> KernelCase:
    return KernelCase(
        "paged_attention",
        str(problem.batch),
        str(problem.shape),
        {"octavo": TimedCall(problem.run)},
        problem.verify,
        problem.bytes_moved,
        problem.flops,
        problem,
    )


def cascade_attention(batch: BatchSpec, shape: AttentionShape, device: torch.device) -> KernelCase:
    """All sequences begin with the same blocks: half of the shortest context, whole blocks. Beside paged attention over the
    same tables, which reads them once for each sequence."""
    shortest = min(s - q for q, s in zip(batch.query_lens, batch.seq_lens, strict=True))
    num_shared = shortest // 2 // shape.block_size
    if batch.num_seqs < 2 or num_shared == 0:
        raise ValueError(
            f"batch: expected two sequences or more, with contexts of two blocks or more, got {batch}"
        )
    tables = scattered_tables(batch, shape.block_size)
    tables[:, :num_shared] = tables[0, :num_shared].clone()
    prefix_len = num_shared * shape.block_size
    problem = make_problem(batch, shape, device, tables=tables, edges=(prefix_len - 1, prefix_len))
    shared = problem.block_tables[0, :num_shared].clone()
    index = {
        "query_start_loc": problem.query_start_loc,
        "seq_lens": problem.seq_lens,
        "block_tables": problem.block_tables,
        "max_query_len": max(batch.query_lens),
        "max_seq_len": max(batch.seq_lens),
        "scale": problem.scale,
        "window": shape.window,
        "softcap": shape.softcap,
        "num_decodes": batch.num_decodes,
    }
    caches = problem.q, problem.k_cache, problem.v_cache
    return KernelCase(
        "cascade_attention",
        str(batch),
        f"{shape} shared {num_shared} blocks",
        {
            "octavo": TimedCall(
                lambda: kernels.cascade_attention(*caches, prefix_block_ids=shared, **index)
            ),
            "paged_attention": TimedCall(problem.run),
        },
        problem.verify,
        problem.bytes_moved,
        problem.flops,
    )


def merge_attention_states(
    batch: BatchSpec, shape: AttentionShape, device: torch.device
) -> KernelCase:
    """Of all new tokens of the batch: 3 vectors and 3 numbers a token and head."""
    size = (batch.num_tokens, shape.num_q_heads, shape.head_size)
    out_a, out_b = (torch.randn(size, device=device).to(shape.dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(size[:2], device=device) for _ in range(2))

    def plain() -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.logaddexp(lse_a, lse_b)
        a, b = ((x - lse).exp()[..., None] for x in (lse_a, lse_b))
        return (a * out_a + b * out_b).to(shape.dtype), lse

    weights = torch.stack([lse_a, lse_b]).double().softmax(0)[..., None]
    exact = (
        weights[0] * out_a.double() + weights[1] * out_b.double(),
        torch.logaddexp(lse_a.double(), lse_b.double()),
    )
    return KernelCase(
        "merge_attention_states",
        str(batch),
        str(shape),
        {
            "octavo": TimedCall(lambda: kernels.merge_attention_states(out_a, lse_a, out_b, lse_b)),
            "torch": TimedCall(plain),
        },
        lambda got: relative_error(got, exact),
        3 * (out_a.nbytes + lse_a.nbytes),
        3 * out_a.numel(),
    )
