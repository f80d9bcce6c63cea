"""Memory in which the arguments of a step are put together on the host and cross to the device."""

from __future__ import annotations

import numpy as np
import torch


class LaunchBuffers:
    """Host and device memory for launch arguments: grows, is reused, and crosses to the device in one copy.

    Two buffers take turns, so that the arguments of a step stay valid while those of the next one are built.
    """

    _ALIGNMENT = 64  # bytes; keeps every argument's address as wide loads want it

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._turn = 0
        self._host = [self._allocate(1 << 16, "cpu") for _ in range(2)]
        self._device = [self._on_device(host) for host in self._host]
        self._copied: list[torch.cuda.Event | None] = [None, None]

    def _allocate(self, size: int, device: torch.device | str) -> torch.Tensor:
        pin = self.device.type == "cuda" and torch.device(device).type == "cpu"
        return torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pin)

    def _on_device(self, host: torch.Tensor) -> torch.Tensor:
        return host if self.device.type == "cpu" else self._allocate(host.numel(), self.device)

    def upload(self, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        """Copy host arrays to the device together; returns a view of the device buffer for each."""
        offsets, end = [], 0
        for array in arrays:
            offsets.append(end)
            end += -(-array.nbytes // self._ALIGNMENT) * self._ALIGNMENT
        turn = self._turn = 1 - self._turn
        if (copied := self._copied[turn]) is not None:
            copied.synchronize()  # the copy of two steps ago may still be reading the buffer
        if end > self._host[turn].numel():
            self._host[turn] = self._allocate(2 * end, "cpu")
            self._device[turn] = self._on_device(self._host[turn])
        host, device = self._host[turn], self._device[turn]
        staging = host.numpy()
        for array, offset in zip(arrays, offsets, strict=True):
            staging[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)[...] = (
                array
            )
        if device is not host:
            device[:end].copy_(host[:end], non_blocking=True)
            copied = self._copied[turn] = torch.cuda.Event()
            copied.record()
        return [
            device[offset : offset + array.nbytes]
            .view(_TORCH_DTYPE[array.dtype.name])
            .view(array.shape)
            for array, offset in zip(arrays, offsets, strict=True)
        ]


_TORCH_DTYPE = {"int32": torch.int32, "int64": torch.int64}
