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


def register(name: str, schema: str, triton_impl: Any, fake: Any) -> Any:
    """Define an op with its three implementations; returns the callable that dispatches to them."""
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, triton_impl, "CUDA")
    _LIBRARY.impl(name, triton_impl if _INTERPRETED else getattr(cpu, name), "CPU")
    torch.library.register_fake(f"octavo::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.octavo, name).default


def no_result(*args) -> None:
    """Fake of an op that only writes to its arguments."""


def empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
