"""One op on one batch, and the measure of error that all cases share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..attention_problem import TOLERANCES, AttentionProblem, WrongResult
from ..timing import TimedCall, overwrite

Tensor = torch.Tensor
_TOLERANCES = {**TOLERANCES, torch.float8_e4m3fn: 0.06, torch.float8_e5m2: 0.12}


@dataclass(frozen=True)
class KernelCase:
    """`calls` by implementation, Octavo's first. `check` takes what a call returned, and raises WrongResult."""

    op: str
    batch: str
    shape: str
    calls: dict[str, TimedCall]
    check: Callable[[Any], float]
    bytes_moved: int  # read and written at the least
    flops: int  # multiplications and additions of the formula; 0 where there are next to none
    problem: AttentionProblem | None = None  # of attention, for its peers and plans
    spoil: Callable[[], object] | None = (
        None  # undoes what a call left behind, so that each is seen to do it
    )

    @torch.inference_mode()
    def verify(self, timed: TimedCall) -> float:
        """Run one of the calls, or a peer's, and return its largest error. Raises WrongResult.

        It runs twice, and what it returned first is overwritten: a call that writes nothing could else be given memory in
        which another's right result still lies.
        """
        self._prepare(timed)
        overwrite(timed.call())
        self._prepare(timed)
        return self.check(timed.call())

    def _prepare(self, timed: TimedCall) -> None:
        if self.spoil:
            self.spoil()
        if timed.reset:
            timed.reset()


def relative_error(got: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest |got - exact| / |exact| of a row, vectors along the last axis; `exact` is fp64.

    Raises WrongResult beyond the tolerance of the result's dtype, which of fp8 is what a scale of 1 leaves of normal numbers.
    """
    worst = 0.0
    for x, y in zip(got, exact, strict=True):
        if x.shape != y.shape:
            raise WrongResult(f"expected shape {tuple(y.shape)}, got {tuple(x.shape)}")
        error = (x.double() - y).norm(dim=-1) / y.norm(dim=-1).clamp_min(1e-6)
        largest = float(error.nan_to_num(nan=torch.inf).max())
        if not largest <= (most := _TOLERANCES[x.dtype]):
            raise WrongResult(
                f"relative error {largest:.2g}, expected at most {most:g} for {x.dtype}"
            )
        worst = max(worst, largest)
    return worst


def equal(got: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """0, of what is moved and not computed. Raises WrongResult where a byte differs."""
    for x, y in zip(got, exact, strict=True):
        if x.shape != y.shape or not torch.equal(_bytes(x), _bytes(y)):
            raise WrongResult("expected the same bytes")
    return 0.0


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
