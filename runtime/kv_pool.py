"""The KV pool: one tensor per device that holds the K and V of every layer, block-major.

    NHD   [num_blocks, num_layers, 2 (K, V), block_size, num_kv_heads, head_size]      tokens first
    HND   [num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_size]      heads first

One block of all layers is contiguous, so copy-on-write and swap move one long run of bytes per block; a pool laid out
layer by layer moves 2 * num_layers short ones. Kernels see a layer as two strided views, at no cost.
"""

from __future__ import annotations

import enum
import math

import torch


class KVLayout(enum.Enum):
    """Order of the axes inside one layer's block: tokens first or heads first. Carried with the pool."""

    NHD = "NHD"
    HND = "HND"


class KVPool:
    """K and V of `num_blocks` blocks, block 0 being the null block that nobody owns.

    block_bytes = num_layers * 2 * block_size * num_kv_heads * head_size * element_size
    """

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        layout: KVLayout = KVLayout.NHD,
        pin_memory: bool = False,
    ) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks: expected the null block and at least one more, got {num_blocks}"
            )
        self.layout = layout
        self.block_size = block_size
        inner = (block_size, num_kv_heads) if layout is KVLayout.NHD else (num_kv_heads, block_size)
        shape = (num_blocks, num_layers, 2, *inner, head_size)
        self.data = torch.zeros(shape, dtype=dtype, device=device, pin_memory=pin_memory)
        by_layer = self.data.permute(1, 2, 0, 3, 4, 5)
        if layout is KVLayout.HND:
            by_layer = by_layer.transpose(3, 4)
        self._layers = [(kv[0], kv[1]) for kv in by_layer]

    @property
    def num_blocks(self) -> int:
        """All blocks, the null block included."""
        return self.data.shape[0]

    @property
    def block_bytes(self) -> int:
        return self.data[0].numel() * self.data.element_size()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(k_cache, v_cache) of one layer, each [num_blocks, block_size, num_kv_heads, head_size], views."""
        return self._layers[index]


def block_bytes(
    num_layers: int, block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype
) -> int:
    """Bytes of one block of all layers, K and V."""
    return math.prod((num_layers, 2, block_size, num_kv_heads, head_size)) * dtype.itemsize
