"""Every public op on the shapes of a batch: what is timed, what it must give, the bytes and the arithmetic it takes.

    attention.py   paged attention, a shared prefix, merging of states
    memory.py      KV written to the cache, blocks copied and swapped
    layers.py      norms, rotary embedding, activations, adapters
    sampling.py    penalties, top-k/top-p, drawing

Where plain torch has the same function it is a case's second implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..attention_problem import AttentionShape
from ..batch_specs import BatchSpec
from . import attention, layers, memory, sampling
from .case import KernelCase

__all__ = ["OPS", "KernelCase", "check_op", "make_case"]

OPS: dict[str, Callable[[BatchSpec, AttentionShape, torch.device], KernelCase]] = {
    "paged_attention": attention.paged_attention,
    "cascade_attention": attention.cascade_attention,
    "merge_attention_states": attention.merge_attention_states,
    "reshape_and_cache": memory.reshape_and_cache,
    "rope_and_cache": memory.rope_and_cache,
    "copy_blocks": memory.copy_blocks,
    "swap_blocks": memory.swap_blocks,
    "rms_norm": layers.rms_norm,
    "fused_add_rms_norm": layers.fused_add_rms_norm,
    "rotary_embedding": layers.rotary_embedding,
    "silu_and_mul": partial(layers.gate_and_mul, op="silu_and_mul"),
    "gelu_and_mul": partial(layers.gate_and_mul, op="gelu_and_mul"),
    "lora": layers.lora,
    "apply_penalties": sampling.apply_penalties,
    "apply_top_k_top_p_min_p": sampling.apply_top_k_top_p_min_p,
    "sample": sampling.sample,
}


def check_op(op: str) -> None:
    """Raises ValueError."""
    if op not in OPS:
        raise ValueError(f"op: expected one of {', '.join(OPS)}, got {op!r}")


def make_case(
    op: str, batch: BatchSpec, shape: AttentionShape, device: torch.device | str = "cpu"
) -> KernelCase:
    """Raises ValueError for an op that is not one of `OPS`, or that has no such batch."""
    check_op(op)
    with torch.inference_mode():
        return OPS[op](batch, shape, torch.device(device))
