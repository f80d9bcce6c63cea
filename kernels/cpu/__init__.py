"""Every op in vectorised torch, for machines without a GPU: few torch calls per op, little copying."""

from .attention import cascade_attention, merge_attention_states, paged_attention
from .cache import copy_blocks, reshape_and_cache, swap_blocks
from .layers import (
    fused_add_rms_norm,
    gelu_and_mul,
    rms_norm,
    rope_and_cache,
    rotary_embedding,
    silu_and_mul,
)
from .lora import (
    group_by_adapter,
    lora_expand,
    lora_shrink,
)
from .sampling import (
    apply_penalties,
    apply_top_k_top_p_min_p,
    sample,
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
