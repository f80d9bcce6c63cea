"""Compile the launches that the kernels' wrappers make, for a GPU that is not there.

A stand-in driver names the target, and each launch is asked for a warm-up: the real specialisation (divisibility by 16,
equality to 1, None) and the real launch options are compiled; nothing runs. One process compiles for one target, without
TRITON_INTERPRET, for Triton decides about the interpreter when a kernel is decorated: see `__init__.measure`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from .cases import CASES

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Launch:
    """One launch of a case, compiled or not."""

    case: str
    kernel: str
    seconds: float | None  # to compile; None: it came from Triton's cache
    compiled: Any = None  # triton's CompiledKernel
    tile_kv: int | None = None  # KV tokens of one iteration, where the kernel has such tiles
    error: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # what the launch was given by name


class StandInDriver(DriverBase):
    """Knows its target and nothing else."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.launcher_cls = self.utils = None

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self):
        raise RuntimeError("there is no device to time on")


def compile_launches(target: str, cases: Iterable[str]) -> Iterator[Launch]:
    """Every launch of the named cases, compiled for the target."""
    cases = list(cases)
    if unknown := set(cases) - set(CASES):
        raise ValueError(f"cases: expected names in CASES, got {sorted(unknown)}")
    compile_for(target)
    for case in cases:
        launches: list[Launch] = []
        with captured(case, launches):
            try:
                CASES[case](target)
            except Exception as error:  # a wrapper refused; the other cases go on
                launches.append(Launch(case, "", None, error=_one_line(error)))
        yield from launches


def compile_for(target: str) -> None:
    """From now on this process compiles for the target."""
    if target not in TARGETS:
        raise ValueError(f"target: expected one of {', '.join(TARGETS)}, got {target!r}")
    if knobs.runtime.interpret:
        raise ValueError("TRITON_INTERPRET: expected it unset, for interpreted kernels are no code")
    driver.set_active(StandInDriver(TARGETS[target]))


@contextlib.contextmanager
def captured(case: str, launches: list[Launch]) -> Iterator[None]:
    """Turn the launches of the block into compilations."""
    launch = JITFunction.run
    is_fresh = False

    def on_compile(*, cache_hit: bool, **_) -> None:
        nonlocal is_fresh
        is_fresh = not cache_hit

    def compile_only(self, *args, grid, warmup, **kwargs):
        nonlocal is_fresh
        is_fresh = False
        started = time.perf_counter()
        compiled = error = None
        try:
            compiled = launch(self, *args, grid=grid, warmup=True, **kwargs)
        except Exception as fault:  # reported with the launch; the other launches go on
            error = _one_line(fault)
        seconds = round(time.perf_counter() - started, 2) if is_fresh else None
        tile_kv = kwargs.get("TILE_KV")
        name = self.fn.__name__
        launches.append(Launch(case, name, seconds, compiled, tile_kv, error, kwargs))

    listener = knobs.compilation.listener
    JITFunction.run, knobs.compilation.listener = compile_only, on_compile
    try:
        yield
    finally:
        JITFunction.run, knobs.compilation.listener = launch, listener


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
