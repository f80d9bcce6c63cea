"""A run of the kernel benchmarks as one asks for it: ops, batches and shapes, or a recorded run; plans; peers; host costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ..runtime.recording import read_recording
from .attention_problem import AttentionProblem, AttentionShape
from .batch_specs import BatchSpec
from .kernel_cases import KernelCase, make_case
from .kernel_cases.attention import attention_case
from .machine import describe_machine, measure_ceilings
from .peers import AttentionPeer
from .plans import Plan, parse_plan, plan_grid
from .results import BenchResults, HostCost, Measurement
from .suite import measure_case
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
        """`save` gets what there is after every case. Raises ValueError, before anything is timed, for what does not fit
        together."""
        batches = [BatchSpec.parse(text) for text in self.batches]
        if (self.plans or self.sweep) and not self._runs_triton():
            raise ValueError(
                "plan: expected a GPU, or OCTAVO_BACKEND=interpret: a plan is for the Triton kernels, got the CPU's"
            )
        ceilings = measure_ceilings(self.device, self.shape.dtype, small=self.small)
        machine = describe_machine(self.device)
        measurements: list[Measurement] = []
        for case in self._cases(batches):
            progress(f"{case.op} {case.batch}")
            plans = () if case.problem is None else self._plans(case.problem)
            measurements += measure_case(
                case, peers=self.peers, plans=plans, device=self.device, seconds=self.seconds
            )
            save(BenchResults(machine, ceilings, list(measurements)))
        host_costs = []
        for context in self.host_contexts:
            progress(f"host step at {context} tokens")
            host_costs.append(measure_host_cost(256, context, steps=60 if self.small else 200))
        results = BenchResults(machine, ceilings, measurements, host_costs)
        save(results)
        return results

    def _runs_triton(self) -> bool:
        return describe_machine(self.device).backend != "cpu"

    def _cases(self, batches: list[BatchSpec]) -> Iterator[KernelCase]:
        if self.trace is None:
            for op in self.ops:
                for batch in batches:
                    yield make_case(op, batch, self.shape, self.device)
            return
        recording = read_recording(self.trace)
        for traced in problems_of(recording, self.device, most=self.num_traced):
            case = attention_case(traced.problem)
            yield replace(
                case, shape=f"{case.shape}, step {traced.step} of {traced.num_alike} alike"
            )

    def _plans(self, problem: AttentionProblem) -> list[Plan]:
        if 0 < problem.batch.num_decodes < problem.batch.num_seqs:
            return []  # takes two kernels, each with its own plan
        plans = [parse_plan(text, problem) for text in self.plans]
        grid = plan_grid(problem)[: self.most_plans] if self.sweep else []
        return list(dict.fromkeys([*plans, *grid]))


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
