"""From cases, peers and plans to measurements: everything is verified, then timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from .attention_problem import AttentionProblem, WrongResult
from .kernel_cases import KernelCase
from .peers import AttentionPeer, Unsupported
from .plans import Plan, plan_in_use, plan_label
from .results import Measurement
from .timing import TimedCall, time_in_turns


@dataclass(frozen=True)
class _Candidate:
    implementation: str
    prepare: Callable[[], TimedCall]
    plan: str | None = None


def measure_case(
    case: KernelCase,
    *,
    peers: Sequence[AttentionPeer] = (),
    plans: Sequence[Plan] = (),
    device: torch.device | str = "cpu",
    seconds: float = 0.5,
) -> Iterator[Measurement]:
    """Octavo, then what else there is of this case: plain torch, plans, peers.

    What is missing, unable, wrong or fails, now or while it is timed, is a measurement with a note, and the others go on.
    """
    rows: dict[int, Measurement] = {}
    calls: dict[str, TimedCall] = {}
    chosen = None if case.problem is None else plan_in_use(case.problem)
    for number, candidate in enumerate(_candidates(case, peers, plans)):
        row = Measurement(
            case.op,
            case.batch,
            case.shape,
            candidate.implementation,
            candidate.plan,
            chosen if candidate.implementation == "octavo" else None,
            case.bytes_moved,
            case.flops,
        )
        try:
            timed = candidate.prepare()
            rows[number] = msgspec.structs.replace(row, error=case.verify(timed))
            calls[str(number)] = timed
        except Unsupported as reason:
            rows[number] = msgspec.structs.replace(row, note=" ".join(str(reason).split()))
        except WrongResult as reason:
            rows[number] = _faulty(row, f"wrong result, not timed: {reason}")
        except Exception as reason:  # of a peer, or of a plan the compiler refuses: the others are still worth having
            rows[number] = _faulty(row, f"failed: {describe_error(reason)}")

    def failed(name: str, error: Exception) -> None:
        number = int(name)
        rows[number] = _faulty(rows[number], f"failed while timed: {describe_error(error)}")

    timings = time_in_turns(calls, device, seconds=seconds, on_error=failed)
    for name in timings:
        # once more: a call may go wrong from some repetition on, or spoil what the others read
        try:
            case.verify(calls[name])
        except WrongResult as reason:
            rows[int(name)] = _faulty(rows[int(name)], f"wrong result after it was timed: {reason}")
        except Exception as error:
            failed(name, error)
    for number, row in rows.items():
        if row.is_fault:
            timings.pop(str(number), None)
        timing = timings.get(str(number))
        fields = {} if timing is None else vars(timing)
        yield msgspec.structs.replace(row, **fields)


def _faulty(row: Measurement, note: str) -> Measurement:
    return msgspec.structs.replace(row, note=note, is_fault=True)


def _candidates(
    case: KernelCase, peers: Sequence[AttentionPeer], plans: Sequence[Plan]
) -> Iterator[_Candidate]:
    for name, timed in case.calls.items():
        yield _Candidate(name, lambda timed=timed: timed)
    if case.problem is not None:
        for plan in plans:
            timed = TimedCall(partial(case.problem.run, plan))
            yield _Candidate("octavo", lambda timed=timed: timed, plan_label(plan))
        for peer in peers:
            yield _Candidate(peer.name, partial(_prepared, peer, case.problem))


def _prepared(peer: AttentionPeer, problem: AttentionProblem) -> TimedCall:
    if (reason := peer.unavailable()) is not None:
        raise Unsupported(reason)
    with torch.inference_mode():
        return TimedCall(peer.prepare(problem))


def describe_error(error: BaseException) -> str:
    """In one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
