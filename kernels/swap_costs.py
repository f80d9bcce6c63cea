"""From where on one kernel moves blocks between device and host faster than copies one by one, on a given machine.

`octavo kernels calibrate` measures it and writes the JSON file that `SwapCosts.from_json` reads.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Crossover:
    """The kernel is taken for `kernel_from_copies` copies or more of less than `kernel_below_bytes` bytes each.

    Over PCIe 5 the copy engines reach 4-7 GB/s with copies of up to 24 KiB, 40-44 from 28 KiB and 51 of 64 from 64 KiB
    (public figures, H100), at about 2 us of CPU time a copy; below 16 copies that time is less than the kernel's launch
    is worth.
    """

    kernel_below_bytes: int = 28 * 1024  # 0: never the kernel
    kernel_from_copies: int = 16

    def __post_init__(self) -> None:
        for name, least in (("kernel_below_bytes", 0), ("kernel_from_copies", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")

    def takes_kernel(self, bytes_per_copy: float, num_copies: int) -> bool:
        return bytes_per_copy < self.kernel_below_bytes and num_copies >= self.kernel_from_copies


@dataclass(frozen=True)
class SwapCosts:
    """Both directions; by default the public figures."""

    to_device: Crossover = Crossover()
    to_host: Crossover = Crossover()
    machine: str = ""  # where it was measured, for the reader of the file

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> SwapCosts:
        """Read what `to_json` wrote. Raises ValueError naming the file and what is wrong with it."""
        try:
            found = json.loads(Path(path).read_text())
            sides = {side: Crossover(**found.pop(side)) for side in ("to_device", "to_host")}
            return cls(**sides, **found)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"swap costs: expected a file written by `octavo kernels calibrate`, got {os.fspath(path)!r} "
                f"({type(error).__name__}: {error})"
            ) from error

    def to_json(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")


PUBLIC_FIGURES = SwapCosts()
