"""The launch arguments of a recording: what a kernel developer benchmarks, as it was launched."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..kv_pool import KVLayout, KVPool, LayerKV, Layers
from ..launch_args import LaunchArgs, build_launch_args
from ..launch_buffers import LaunchBuffers
from ..metadata import MetadataError
from .format import RecordingHeader
from .frames import RecordingError
from .reader import Recording


def launch_args_of(
    recording: Recording, device: torch.device | str = "cpu"
) -> Iterator[LaunchArgs]:
    """The launch arguments of each step that fed tokens, in tensors of their own.

    Raises RecordingError where the file is damaged or a step could not have been launched.
    """
    for _, args in numbered_launch_args(recording, device):
        yield args


def numbered_launch_args(
    recording: Recording, device: torch.device | str = "cpu"
) -> Iterator[tuple[int, LaunchArgs]]:
    """The same, with the number of the step."""
    header = recording.header
    for number, step in enumerate(recording):
        if not step.snapshots:
            continue
        buffers = LaunchBuffers(device)  # of its own: the caller may keep what it gets
        try:
            args = build_launch_args(
                step.snapshots, header.block_size, header.num_gpu_blocks + 1, buffers
            )
        except MetadataError as error:
            raise RecordingError(recording.path, number + 1, f"cannot be run: {error}") from error
        yield number, args


def layers_of(header: RecordingHeader) -> Layers:
    """What the recorded pool kept of each layer. Raises ValueError for a dtype that torch does not have."""
    layers: list[LayerKV | int] = []
    for index, shape in enumerate(header.layers):
        if shape.reads is not None:
            layers.append(shape.reads)
            continue
        dtype = getattr(torch, shape.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"layers[{index}].dtype: expected one of torch, got {shape.dtype!r}")
        layers.append(
            LayerKV(
                shape.num_kv_heads,
                shape.head_size,
                dtype,
                None if shape.head_size_v == shape.head_size else shape.head_size_v,
                shape.scale_per_token_head,
            )
        )
    return layers


def pool_of(
    header: RecordingHeader, device: torch.device | str = "cpu", num_blocks: int | None = None
) -> KVPool:
    """A pool as the recorded one, zeros, or with so many blocks, the null block included."""
    count = header.num_gpu_blocks + 1 if num_blocks is None else num_blocks
    return _pool("num_gpu_blocks", header, count, device)


def host_pool_of(header: RecordingHeader, device: torch.device | str = "cpu") -> KVPool | None:
    """The recorded pool in host memory, if there was one; pinned where `device` is a GPU."""
    if header.num_cpu_blocks == 0:
        return None
    is_pinned = torch.device(device).type == "cuda"
    return _pool("num_cpu_blocks", header, header.num_cpu_blocks + 1, "cpu", is_pinned)


def _pool(
    field: str,
    header: RecordingHeader,
    num_blocks: int,
    device: torch.device | str,
    is_pinned: bool = False,
) -> KVPool:
    layers, layout = layers_of(header), KVLayout(header.kv_layout)
    try:
        return KVPool(num_blocks, layers, header.block_size, device, layout, is_pinned)
    except (RuntimeError, MemoryError) as error:
        raise ValueError(
            f"{field}: expected a pool that fits the memory, the recorded one has {num_blocks} blocks"
        ) from error
