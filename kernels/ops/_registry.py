"""How an op is registered with torch, and which of its implementations runs. See `ops`."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from .. import cpu

Tensor = torch.Tensor

_KERNELS = cpu.__name__.rpartition(".")[0]  # the package of the kernel files
_LIBRARY = torch.library.Library("octavo", "DEF")


def _interpreted() -> bool:
    """Whether CPU tensors go to Triton's interpreter; prepares the interpreter if so."""
    backend = os.environ.get("OCTAVO_BACKEND", "")
    if backend not in ("", "auto", "interpret"):
        raise ValueError(f'OCTAVO_BACKEND: expected "auto" or "interpret", got "{backend}"')
    if backend != "interpret":
        return False
    os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when a kernel is decorated
    importlib.import_module(".interpreter", _KERNELS).install()
    return True


_INTERPRETED = _interpreted()


def triton_op(module: str, name: str) -> Any:
    """The Triton wrapper `name`, its file imported at the first call."""

    def wrapper(*args, **options):
        return getattr(importlib.import_module(module, _KERNELS), name)(*args, **options)

    return wrapper


# The scales of what writes to a cache, in the schema of an op: only scale caches are written, and torch has to know.
SCALES = " Tensor? k_scale=None, Tensor? v_scale=None, Tensor(e!)? k_scale_cache=None, Tensor(f!)? v_scale_cache=None) -> ()"


def static_and_caches(k_scale: Tensor | None, v_scale: Tensor | None) -> tuple[Tensor | None, ...]:
    """The arguments of `SCALES`."""
    is_cache = [scale is not None and scale.dim() == 3 for scale in (k_scale, v_scale)]
    return (
        None if is_cache[0] else k_scale,
        None if is_cache[1] else v_scale,
        k_scale if is_cache[0] else None,
        v_scale if is_cache[1] else None,
    )


def with_scales(function: Any, num_others: int) -> Any:
    """`function`, whose arguments are so many and k_scale and v_scale, with those of `SCALES` instead of the two."""

    def wrapper(*args):
        # torch leaves out what is at its default
        scales = [*args[num_others:], None, None, None, None][:4]
        k_scale, v_scale, k_scale_cache, v_scale_cache = scales
        function(
            *args[:num_others],
            k_scale if k_scale_cache is None else k_scale_cache,
            v_scale if v_scale_cache is None else v_scale_cache,
        )

    return wrapper


def register(name: str, schema: str, triton_impl: Any, fake: Any, cpu_impl: Any = None) -> Any:
    """Define an op with its three implementations, on the CPU by default the one of its name in `cpu`; returns the callable
    that dispatches to them.
    """
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, triton_impl, "CUDA")
    if _INTERPRETED:
        cpu_impl = triton_impl
    _LIBRARY.impl(name, cpu_impl or getattr(cpu, name), "CPU")
    torch.library.register_fake(f"octavo::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.octavo, name).default


def no_result(*args) -> None:
    """Fake of an op that only writes to its arguments."""


def empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
