"""Other implementations of the same problem, used when they can be imported or a path is given, never part of this tree.

A peer for attention is an object with `name`, `unavailable()` and `prepare(problem)`. What is prepared is verified like
Octavo's own result before it is timed: a peer that is used through the wrong API is worse than none. Importing this package
imports no peer and not torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from ..attention_problem import AttentionProblem


class Unsupported(Exception):
    """The peer is there, but cannot do this problem; the message says why."""


class AttentionPeer(Protocol):
    name: str

    def unavailable(self) -> str | None:
        """Why it cannot be used here, or None."""
        ...

    def prepare(self, problem: AttentionProblem) -> Callable[[], torch.Tensor]:
        """What is timed: gives [T, Hq, D]. All that an engine does once per step, not once per layer, happens here.

        Raises Unsupported. What it gives stays as it is until the next call.
        """
        ...


class GenerationPeer(Protocol):
    name: str

    def unavailable(self) -> str | None:
        """Why it cannot be used here, or None."""
        ...

    def generate(
        self, prompts: list[list[int]], max_tokens: int, *, n: int = 1, num_beams: int = 1
    ) -> list[list[list[int]]]:
        """For each prompt `n` outputs of exactly `max_tokens` tokens, greedy or the best beams. Raises Unsupported."""
        ...


def _peer(module: str, name: str, **options: bool) -> Callable[[Path | None], AttentionPeer]:
    """Of a class that comes with torch: there is no path to give."""

    def make(path: Path | None) -> AttentionPeer:
        if path is not None:
            raise ValueError(
                f"peer: {module} is part of torch and takes no path, got {str(path)!r}"
            )
        return getattr(import_module(f".{module}", __name__), name)(**options)

    return make


def _peer_at(module: str, name: str) -> Callable[[Path | None], AttentionPeer]:
    """Of a class that takes where the peer lies, None when it is installed."""
    return lambda path: getattr(import_module(f".{module}", __name__), name)(path)


ATTENTION_PEERS: Mapping[str, Callable[[Path | None], AttentionPeer]] = MappingProxyType(
    {
        "sdpa": _peer("sdpa", "SDPA", is_gather_timed=False),
        "sdpa+gather": _peer("sdpa", "SDPA", is_gather_timed=True),
        "flex": _peer("flex_attention", "FlexAttention", is_gather_timed=False),
        "flex+gather": _peer("flex_attention", "FlexAttention", is_gather_timed=True),
        "vllm": _peer_at("vllm_triton", "VLLMTriton"),
        "sglang": _peer_at("sglang_triton", "SGLangTriton"),
        "flashinfer": _peer_at("flashinfer", "FlashInfer"),
    }
)


def parse_peer(text: str) -> AttentionPeer:
    """The peer of a command-line value `name` or `name=path`. Raises ValueError."""
    name, has_path, path = text.partition("=")
    if name not in ATTENTION_PEERS:
        raise ValueError(f"peer: expected one of {', '.join(ATTENTION_PEERS)}, got {name!r}")
    if has_path and not Path(path).is_dir():
        raise ValueError(f"peer: expected {name}=FOLDER, got {text!r}")
    return ATTENTION_PEERS[name](Path(path) if has_path else None)
