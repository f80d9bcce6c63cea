"""Memory in which the arguments of a step are put together on the host and cross to the device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from .launch_checks import check_entries
from .snapshots import DecodeRows


class _Places(NamedTuple):
    """Where the arrays of a step lie in a pair of buffers."""

    shapes: list  # (dtype, shape) of each
    end: int  # bytes
    staging: list[np.ndarray]
    on_device: list[torch.Tensor]


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
        self._places: list[_Places | None] = [None, None]
        self._tables = np.zeros((0, 0), np.int32)
        self._entries = np.zeros(0, np.int64)  # of each row, that are those of its table
        self._sources: list[np.ndarray] = []  # the array each row was read from

    def _allocate(self, size: int, device: torch.device | str) -> torch.Tensor:
        pin = self.device.type == "cuda" and torch.device(device).type == "cpu"
        return torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pin)

    def _on_device(self, host: torch.Tensor) -> torch.Tensor:
        return host if self.device.type == "cpu" else self._allocate(host.numel(), self.device)

    def block_tables(
        self, rows: DecodeRows, num_entries: np.ndarray, num_blocks: int
    ) -> np.ndarray:
        """Block tables of a step's decodes, int32 [R, most entries], kept from step to step: only what has changed is
        written, and checked. Entries past a row's own are meaningless. Valid until the next call.

        A table is known by its array, which is append-only, so a row whose array and number of entries are those of the
        last step has not changed.
        """
        width, tables = int(num_entries.max()), rows.tables
        if len(tables) > self._tables.shape[0] or width > self._tables.shape[1]:
            shape = (2 * len(tables), width + 64)
            self._tables, self._entries = np.zeros(shape, np.int32), np.zeros(shape[0], np.int64)
            self._sources = []
        known = self._sources
        if tables is not known:
            same = min(len(tables), len(known))
            fresh = [i for i in range(same) if tables[i] is not known[i]]
            self._entries[fresh] = 0
            self._entries[same:] = 0
            self._sources = tables
        for row in (self._entries[: len(tables)] != num_entries).nonzero()[0].tolist():
            start, stop = int(self._entries[row]), int(num_entries[row])
            table = tables[row]
            if stop == start + 1 <= len(table) and 0 < (entry := int(table[start])) < num_blocks:
                self._tables[row, start] = entry  # by far the most frequent change
            else:
                check_entries(rows, row, table[start:stop], start, stop, num_blocks)
                self._tables[row, start:stop] = table[start:stop]
            self._entries[row] = stop
        return self._tables[: len(tables), :width]

    def upload(self, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        """Copy host arrays to the device together; returns a view of the device buffer for each."""
        turn = self._turn = 1 - self._turn
        if (copied := self._copied[turn]) is not None:
            copied.synchronize()  # the copy of two steps ago may still be reading the buffer
        shapes = [(array.dtype.char, array.shape) for array in arrays]
        places = self._places[turn]
        if places is None or places.shapes != shapes:  # in a run of decodes they stay the same
            places = self._places[turn] = self._lay_out(turn, arrays, shapes)
        for staging, array in zip(places.staging, arrays, strict=True):
            staging[...] = array
        host, device = self._host[turn], self._device[turn]
        if device is not host:
            device[: places.end].copy_(host[: places.end], non_blocking=True)
            copied = self._copied[turn] = torch.cuda.Event()
            copied.record()
        return places.on_device

    def _lay_out(self, turn: int, arrays: list[np.ndarray], shapes: list) -> _Places:
        """Places for arrays of these shapes in the buffers of one turn, larger ones if need be."""
        offsets, end = [], 0
        for array in arrays:
            offsets.append(end)
            end += -(-array.nbytes // self._ALIGNMENT) * self._ALIGNMENT
        if end > self._host[turn].numel():
            self._host[turn] = self._allocate(2 * end, "cpu")
            self._device[turn] = self._on_device(self._host[turn])
        staging = self._host[turn].numpy()
        spans = [(offset, offset + a.nbytes) for offset, a in zip(offsets, arrays, strict=True)]
        return _Places(
            shapes,
            end,
            [
                staging[start:stop].view(a.dtype).reshape(a.shape)
                for (start, stop), a in zip(spans, arrays, strict=True)
            ],
            [
                self._device[turn][start:stop].view(_TORCH_DTYPE[a.dtype.name]).view(a.shape)
                for (start, stop), a in zip(spans, arrays, strict=True)
            ],
        )


_TORCH_DTYPE = {"int32": torch.int32, "int64": torch.int64}
