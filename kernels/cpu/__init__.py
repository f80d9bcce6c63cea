"""Every op in vectorised torch, for machines without a GPU: few torch calls per op, little copying."""

from .attention import cascade_attention, merge_attention_states, paged_attention
from .cache import copy_blocks, reshape_and_cache, swap_blocks
from .layers import fused_add_rms_norm, rms_norm, rotary_embedding, silu_and_mul

__all__ = [
    "cascade_attention",
    "copy_blocks",
    "fused_add_rms_norm",
    "merge_attention_states",
    "paged_attention",
    "reshape_and_cache",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "swap_blocks",
]
