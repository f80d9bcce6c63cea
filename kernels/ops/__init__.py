"""The public ops, registered with torch in the namespace `octavo`, so that `torch.compile` sees through a model.

    tensors on     OCTAVO_BACKEND             what runs
    CUDA           any                        the Triton kernels
    CPU            unset, "" or "auto"        `cpu`, vectorised torch; Triton is not imported
    CPU            "interpret"                the Triton kernels, by Triton's interpreter (exact, and slow)

The variable is read once, when this module is imported. All ops are for inference: none has a derivative. Arguments are
checked where the op runs: a ValueError names the argument, what was expected and what came. Lengths, slots and table
entries live on the device and are not checked, for that would wait for the device.
"""

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
