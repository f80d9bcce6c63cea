"""What was measured on: names and versions, and how fast this machine copies and multiplies, the ceilings of every kernel."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from ..runtime.memory import free_cpu_memory
from .timing import TimedCall, time_in_turns


class Machine(msgspec.Struct, frozen=True):
    """Facts that a figure is worth nothing without."""

    device: str  # name of the GPU, or of the processor
    num_threads: int
    python: str
    torch: str
    triton: str
    backend: str  # what ran: "triton", "cpu" or "interpret"
    commit: str  # "" outside of a git checkout; "+" behind it: with changes


class Ceilings(msgspec.Struct, frozen=True):
    """The most that plain torch reaches here, in one run with what is compared with it."""

    copy_bytes_per_s: Annotated[
        float, msgspec.Meta(gt=0)
    ]  # read and written, of a copy within the device
    matmul_flops_per_s: Annotated[
        float, msgspec.Meta(gt=0)
    ]  # of a square matrix product in `dtype`
    dtype: str


def backend_of(device: torch.device | str) -> str:
    """What runs a kernel called with tensors of this device: "triton", "interpret" or "cpu"."""
    if torch.device(device).type == "cuda":
        return "triton"
    return "interpret" if os.environ.get("OCTAVO_BACKEND") == "interpret" else "cpu"


def describe_machine(device: torch.device | str) -> Machine:
    place = torch.device(device)
    return Machine(
        device=torch.cuda.get_device_name(place) if place.type == "cuda" else _processor(),
        num_threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        triton=_version("triton"),
        backend=backend_of(place),
        commit=_commit(),
    )


def measure_ceilings(
    device: torch.device | str, dtype: torch.dtype, *, seconds: float = 0.5, small: bool = False
) -> Ceilings:
    """Time a copy and a matrix product. `small` shrinks both, to rehearse."""
    on_gpu = torch.device(device).type == "cuda"
    num_bytes = 1 << (22 if small else 30 if on_gpu else 27)
    size = 128 if small else 8192 if on_gpu else 1024
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    timings = time_in_turns(
        {
            "copy": TimedCall(lambda: target.copy_(source)),
            "matmul": TimedCall(lambda: a @ b),
        },
        device,
        seconds=seconds,
    )
    return Ceilings(
        copy_bytes_per_s=2 * num_bytes / timings["copy"].low_us * 1e6,
        matmul_flops_per_s=2 * size**3 / timings["matmul"].low_us * 1e6,
        dtype=str(dtype).removeprefix("torch."),
    )


def free_bytes(device: torch.device) -> int:
    """Memory that can be had there, of what this process keeps for later, too."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return free_cpu_memory()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    def git(*arguments: str) -> str:
        here = Path(__file__).parent
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=here, capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD")
    return commit + ("+" if commit and git("status", "--porcelain", "-uno") else "")
