"""A run of the kernel benchmarks as one asks for it: ops, batches and shapes, or a recorded run; plans; peers; host costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch

from ..runtime.recording import read_recording
from .attention_problem import AttentionShape
from .batch_specs import BatchSpec
from .kernel_cases import KernelCase, check_op, make_case
from .kernel_cases.attention import attention_case
from .machine import backend_of, describe_machine, measure_ceilings
from .peers import AttentionPeer
from .plans import Plan, check_plan, parse_plan, plan_grid
from .results import BenchResults, HostCost, Measurement
from .suite import describe_error, measure_case
from .tables import shorter
from .timing import check_seconds
from .traces import problems_of


@dataclass(frozen=True)
class KernelRun:
    """What is to be measured. Plans and peers are for paged attention; other ops have none."""

    ops: tuple[str, ...] = ("paged_attention",)
    batches: tuple[str, ...] = ("8q1s1k",)
    shape: AttentionShape = field(default_factory=AttentionShape)
    trace: Path | None = None  # a recording, whose batches and shape are taken instead
    num_traced: int = 8  # classes of steps
    plans: tuple[str, ...] = ()
    sweep: bool = False
    most_plans: int | None = None  # of a sweep; None: all of the grid
    peers: tuple[AttentionPeer, ...] = ()
    host_contexts: tuple[int, ...] = ()  # lengths at which the host's part of a step is timed
    device: str = "cpu"
    seconds: float = 0.5  # for each implementation of a case
    small: bool = False  # ceilings by small tensors: to rehearse

    def measure(
        self,
        progress: Callable[[str], None] = lambda _: None,
        save: Callable[[BenchResults], None] = lambda _: None,
    ) -> BenchResults:
        """`save` gets what there is after every case. A case that cannot be made, and a plan that is not for it, is a measurement
        with a note. Raises ValueError for what does not fit together, before anything is timed."""
        batches = self._checked()
        with _current(torch.device(self.device)):
            return self._measure_all(batches, progress, save)

    def _measure_all(
        self,
        batches: list[BatchSpec],
        progress: Callable[[str], None],
        save: Callable[[BenchResults], None],
    ) -> BenchResults:
        ceilings = measure_ceilings(self.device, self.shape.dtype, small=self.small)
        machine = describe_machine(self.device)
        measurements: list[Measurement] = []
        for case in self._cases(batches):
            if isinstance(case, Measurement):
                measurements.append(case)
            else:
                progress(f"{case.op} {shorter(case.batch)}")
                measurements += self._measured(case)
            save(BenchResults(machine, ceilings, list(measurements)))
        host_costs = []
        for context in self.host_contexts:
            progress(f"host step at {context} tokens")
            host_costs.append(measure_host_cost(256, context, steps=60 if self.small else 200))
            save(BenchResults(machine, ceilings, measurements, list(host_costs)))
        return BenchResults(machine, ceilings, measurements, host_costs)

    def _checked(self) -> list[BatchSpec]:
        """The batches. Raises ValueError."""
        check_seconds(self.seconds)
        if (self.plans or self.sweep) and backend_of(self.device) == "cpu":
            raise ValueError(
                "plan: expected a GPU, or OCTAVO_BACKEND=interpret: a plan is for the Triton kernels, got the CPU's"
            )
        for text in self.plans:
            check_plan(text)
        for op in self.ops:
            check_op(op)
        if "paged_attention" not in self.ops and (self.plans or self.sweep or self.trace):
            raise ValueError(
                f"op: expected paged_attention with a plan, a sweep or a trace, got {', '.join(self.ops)}"
            )
        names = [peer.name for peer in self.peers]
        if len(set(names)) < len(names):  # their rows could not be told apart
            raise ValueError(f"peer: expected each once, got {', '.join(names)}")
        return list(dict.fromkeys(BatchSpec.parse(text) for text in self.batches))

    def _cases(self, batches: list[BatchSpec]) -> Iterator[KernelCase | Measurement]:
        if self.trace is None:
            for op in dict.fromkeys(self.ops):
                for batch in batches:
                    yield self._case(op, str(batch), lambda op=op, batch=batch: make_case(op, batch, self.shape, self.device))  # fmt: skip
            return
        recording = read_recording(self.trace)
        for traced in problems_of(recording, self.device, most=self.num_traced):
            case = attention_case(traced.problem)
            yield replace(
                case, shape=f"{case.shape}, step {traced.step} of {traced.num_alike} alike"
            )

    def _case(self, op: str, batch: str, make: Callable[[], KernelCase]) -> KernelCase | Measurement:  # fmt: skip
        """What is made, or why not: there is no such batch of this op, or not enough memory."""
        row = Measurement(op, batch, str(self.shape), "octavo")
        try:
            return make()
        except ValueError as error:
            return msgspec.structs.replace(row, note=f"not measured: {error}")
        except (RuntimeError, MemoryError) as error:
            note = f"could not be made: {describe_error(error)}"
            return msgspec.structs.replace(row, note=note, is_fault=True)

    def _measured(self, case: KernelCase) -> list[Measurement]:
        plans: list[Plan] = []
        refused: list[Measurement] = []
        if (problem := case.problem) is not None:
            for text in self.plans:
                try:
                    plans.append(parse_plan(text, problem))
                except ValueError as error:
                    row = Measurement(case.op, case.batch, case.shape, "octavo", text)
                    refused.append(msgspec.structs.replace(row, note=f"not measured: {error}"))
            if self.sweep and not 0 < problem.batch.num_decodes < problem.batch.num_seqs:
                plans += plan_grid(problem)[: self.most_plans]
        measured = measure_case(
            case,
            peers=self.peers,
            plans=list(dict.fromkeys(plans)),
            device=self.device,
            seconds=self.seconds,
        )
        return [*measured, *refused]


def _current(device: torch.device) -> AbstractContextManager:
    """Streams, events and graphs are those of the current device, which need not be the one that was asked for."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def measure_host_cost(num_seqs: int, context: int, steps: int = 200) -> HostCost:
    """The host's part of a decode step and its floor, in turns, on one thread: see host_step.py."""
    from .host_step import measure

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        floor_us, _, host_us, _ = measure(num_seqs, context, steps, None)
    finally:
        torch.set_num_threads(threads)
    return HostCost(num_seqs, context, host_us, floor_us)
