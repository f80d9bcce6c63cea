"""The public ops: paged attention and what a transformer needs around it. See `ops` for every argument.

Names are imported on first use. A program started in the repository's root finds this folder under the bare name
`kernels` too, which is another package's name that transformers probes for; probing must not register our ops twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ops import (
        apply_penalties,
        apply_top_k_top_p_min_p,
        cascade_attention,
        copy_blocks,
        fused_add_rms_norm,
        gelu_and_mul,
        group_by_adapter,
        lora_expand,
        lora_shrink,
        merge_attention_states,
        paged_attention,
        reshape_and_cache,
        rms_norm,
        rope_and_cache,
        rotary_embedding,
        sample,
        silu_and_mul,
        swap_blocks,
    )

__all__ = [
    "apply_penalties",
    "apply_top_k_top_p_min_p",
    "cascade_attention",
    "copy_blocks",
    "fused_add_rms_norm",
    "gelu_and_mul",
    "group_by_adapter",
    "lora_expand",
    "lora_shrink",
    "merge_attention_states",
    "paged_attention",
    "reshape_and_cache",
    "rms_norm",
    "rope_and_cache",
    "rotary_embedding",
    "sample",
    "silu_and_mul",
    "swap_blocks",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import ops

    value = globals()[name] = getattr(ops, name)
    return value
