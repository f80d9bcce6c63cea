"""Other implementations of the same problem, used when they can be imported or a path is given, never part of this tree.

A peer for attention is an object with `name`, `unavailable()` and `prepare(problem)`. What is prepared is verified like
Octavo's own result before it is timed: a peer that is used through the wrong API is worse than none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

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

        Raises Unsupported.
        """
        ...
