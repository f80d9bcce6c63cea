"""The heads of models that the launches are compiled for, and operands of those shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK_SIZE = 16
MAX_SEQ_LEN = 4096


@dataclass(frozen=True)
class Shape:
    """Heads of one model."""

    num_q_heads: int
    num_kv_heads: int
    head_size: int

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def hidden(self) -> int:
        return self.num_q_heads * self.head_size


SHAPES = {
    "d64": Shape(9, 3, 64),  # SmolLM2-135M
    "d128": Shape(32, 8, 128),  # Llama-3-8B
    "d256": Shape(16, 8, 256),  # Gemma-2-9B
}


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def kv_pool(shape: Shape) -> torch.Tensor:
    return bf16(8, 2, 2, BLOCK_SIZE, shape.num_kv_heads, shape.head_size)


def token_scales(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of every token and head, a part of each block as they are in a pool."""
    scales = torch.empty(8, 2, 2, 1024)[:, 1, :, : BLOCK_SIZE * shape.num_kv_heads]
    k_scale, v_scale = scales.unflatten(-1, (BLOCK_SIZE, shape.num_kv_heads)).unbind(1)
    return k_scale, v_scale
