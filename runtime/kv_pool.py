"""The KV pool: one tensor of bytes per device that holds the K and V of every layer, block-major.

    data [num_blocks, block_bytes] uint8, and of each block

    | layer 0                     | layer 1                               |   | padding
    | K        | V                | K        | V        | K scale | V scale |...|
    ^ each part begins at a multiple of 16 bytes             the block ends at a multiple of 128

    K, V    NHD [block_size, num_kv_heads, head_size or head_size_v]     tokens first
            HND [num_kv_heads, block_size, head_size or head_size_v]     heads first
    scales  [num_kv_heads, block_size] fp32 in both: what a program reads, one head's scales of a block, is then one run

One block of all layers is contiguous, so copy-on-write and swap move one long run of bytes per block, scales with the
keys they belong to; a pool laid out layer by layer moves 2 * num_layers short ones. Layers may differ in everything but
the number of tokens in a block, and all share one block table. Kernels see a layer as strided views, made once.

16 bytes are the widest load of one thread, and what a compiler must know of an address to use it. At 128, a cache line, no
two blocks share a line, every element size divides the distance of two blocks, and that distance is a multiple of 16
elements in every dtype, which is what Triton looks for in a stride.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..kernels._checks import FLOAT_DTYPES, QUANTISED_DTYPES

_PART_ALIGNMENT = 16
_BLOCK_ALIGNMENT = 128


class KVLayout(enum.Enum):
    """Order of the axes inside one layer's block: tokens first or heads first. Carried with the pool."""

    NHD = "NHD"
    HND = "HND"


@dataclass(frozen=True)
class LayerKV:
    """What one layer keeps of a token: `num_kv_heads` keys of `head_size` and values of `head_size_v` numbers.

    head_size_v           None: as head_size
    scale_per_token_head  one fp32 scale beside each key and each value; for 8-bit dtypes only
    """

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    head_size_v: int | None = None
    scale_per_token_head: bool = False

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_size", "head_size_v"):
            value = getattr(self, name)
            if value is not None or name != "head_size_v":
                _check_count(name, value)
        if self.dtype not in (*FLOAT_DTYPES, *QUANTISED_DTYPES):
            raise ValueError(
                f"dtype: expected one that the kernels read, of 8, 16 or 32 bits, got {self.dtype!r}"
            )
        if self.scale_per_token_head and self.dtype.itemsize != 1:
            raise ValueError(
                f"scale_per_token_head: expected False unless dtype is an 8-bit one, got {self.dtype}"
            )


def _check_count(name: str, value: object, least: int = 1, what: str = "1 or more") -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name}: expected an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name}: expected {what}, got {value}")


# A layer's own keys and values, or the index of an earlier layer whose it reads
Layers = Sequence[LayerKV | int]


_CACHE_LINE = 64  # bytes


def _zeros(shape: tuple[int, int], device: torch.device, pin_memory: bool) -> torch.Tensor:
    """uint8. Plain host memory is taken from the system as it is used: a pool for many requests costs little while there are
    few."""
    if device.type == "cpu" and not pin_memory:
        flat = np.zeros(shape[0] * shape[1] + _CACHE_LINE, np.uint8)
        start = -flat.ctypes.data % _CACHE_LINE
        return torch.from_numpy(flat[start : start + shape[0] * shape[1]].reshape(shape))
    return torch.zeros(shape, dtype=torch.uint8, device=device, pin_memory=pin_memory)


class KVPool:
    """K and V of `num_blocks` blocks, block 0 being the null block that nobody owns.

    layers  what each layer keeps: `[LayerKV(num_kv_heads, head_size, dtype)] * num_layers` if they are alike. An index
            stands for a layer that keeps nothing and reads what that earlier layer wrote
    """

    def __init__(
        self,
        num_blocks: int,
        layers: Layers,
        block_size: int,
        device: torch.device | str = "cpu",
        layout: KVLayout = KVLayout.NHD,
        pin_memory: bool = False,
    ) -> None:
        _check_count("num_blocks", num_blocks, 2, "the null block and at least one more")
        if not isinstance(layout, KVLayout):
            raise ValueError(f"layout: expected a KVLayout, got {layout!r}")
        parts, num_bytes = _place(layers, block_size)
        self.layers = tuple(layers)
        self.layout = layout
        self.block_size = block_size
        self.data = _zeros((num_blocks, num_bytes), torch.device(device), pin_memory)
        self._layers = []
        for k, v, k_scale, v_scale in parts:
            scales = (None, None)
            if k_scale is not None and v_scale is not None:
                k_scales, v_scales = (self._view(s, KVLayout.HND) for s in (k_scale, v_scale))
                scales = k_scales.squeeze(-1), v_scales.squeeze(-1)
            self._layers.append(((self._view(k, layout), self._view(v, layout)), scales))

    @property
    def num_blocks(self) -> int:
        """All blocks, the null block included."""
        return self.data.shape[0]

    @property
    def block_bytes(self) -> int:
        return self.data.shape[1]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(k_cache, v_cache) of a layer, views [num_blocks, block_size, num_kv_heads, head_size or head_size_v]."""
        return self._layers[index][0]

    def scales(self, index: int) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """(k_scale, v_scale) of a layer, fp32 views [num_blocks, block_size, num_kv_heads], or Nones if it keeps none."""
        return self._layers[index][1]

    def _view(self, part: _Part, layout: KVLayout) -> torch.Tensor:
        """[num_blocks, block_size, num_kv_heads, width], whatever the layout."""
        shape = (self.block_size, part.num_heads, part.width)
        if layout is KVLayout.HND:
            shape = (part.num_heads, self.block_size, part.width)
        size = part.dtype.itemsize
        begin = part.offset // size
        end = begin + part.num_bytes(self.block_size) // size
        view = self.data.view(part.dtype)[:, begin:end].unflatten(1, shape)
        return view.transpose(1, 2) if layout is KVLayout.HND else view


def block_bytes(layers: Layers, block_size: int) -> int:
    """Bytes of one block of all layers, K, V, scales and padding."""
    return _place(layers, block_size)[1]


class _Part(NamedTuple):
    """K, V or the scales of one layer inside a block."""

    offset: int  # bytes
    num_heads: int
    width: int  # numbers per token and head
    dtype: torch.dtype

    def num_bytes(self, block_size: int) -> int:
        return block_size * self.num_heads * self.width * self.dtype.itemsize


class _Parts(NamedTuple):
    k: _Part
    v: _Part
    k_scale: _Part | None = None
    v_scale: _Part | None = None


def _place(layers: Layers, block_size: int) -> tuple[list[_Parts], int]:
    """Where each layer's parts lie in a block, and the block's size in bytes."""
    _check_count("block_size", block_size)
    if not layers:
        raise ValueError("layers: expected at least one, got none")
    placed: list[_Parts] = []
    end = 0
    for index, layer in enumerate(layers):
        if not isinstance(layer, LayerKV):
            if type(layer) is not int or not 0 <= layer < index:
                raise ValueError(
                    f"layers: expected a LayerKV or an earlier layer's index, got {layer!r} for layer {index}"
                )
            placed.append(placed[layer])
            continue
        widths = [
            (layer.head_size, layer.dtype),
            (layer.head_size_v or layer.head_size, layer.dtype),
        ]
        if layer.scale_per_token_head:
            widths += [(1, torch.float32)] * 2
        parts = []
        for width, dtype in widths:
            parts.append(_Part(end, layer.num_kv_heads, width, dtype))
            end = _aligned(end + parts[-1].num_bytes(block_size), _PART_ALIGNMENT)
        placed.append(_Parts(*parts))
    return placed, _aligned(end, _BLOCK_ALIGNMENT)


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
