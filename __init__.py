"""Octavo: a paged-attention inference engine with hand-written Triton kernels.

The public names are imported on first use, so that `import octavo` costs neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .kernels.swap_costs import SwapCosts
    from .models.async_llm import AsyncLLM
    from .models.llm import LLM
    from .runtime.params import Guided, LoRARequest, SamplingParams
    from .scheduler.outputs import CompletionOutput, RequestOutput

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Guided",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "SwapCosts",
    "__version__",
]

_HOME = {
    "AsyncLLM": ".models.async_llm",
    "LLM": ".models.llm",
    "SamplingParams": ".runtime.params",
    "Guided": ".runtime.params",
    "LoRARequest": ".runtime.params",
    "SwapCosts": ".kernels.swap_costs",
    "CompletionOutput": ".scheduler.outputs",
    "RequestOutput": ".scheduler.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME))
