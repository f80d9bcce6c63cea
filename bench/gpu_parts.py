"""What the parts of `bench/on_gpu.sh` measure. Each saves after every case, so that a part that is stopped has not run in vain."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from .attention_problem import AttentionShape, make_problem
from .batch_specs import BatchSpec
from .kernel_cases import OPS
from .kernel_run import KernelRun
from .machine import describe_machine, measure_ceilings
from .peers import AttentionPeer, parse_peer
from .plans import plan_grid
from .results import BenchResults


@dataclass(frozen=True)
class Setting:
    """Where and how large: a GPU, or a rehearsal."""

    results: Path
    dry_run: bool

    @property
    def device(self) -> str:
        return "cpu" if self.dry_run else "cuda"

    @property
    def shape(self) -> AttentionShape:
        if self.dry_run:
            return AttentionShape(4, 2, 16, dtype=torch.float32)
        return AttentionShape(dtype=torch.bfloat16)

    @property
    def seconds(self) -> float:
        return 0.0 if self.dry_run else 0.2

    def run(self, name: str, asked: KernelRun) -> BenchResults:
        """Measure, and save under the part's name after every case."""
        path = self.results / f"{name}.json"
        return asked.measure(lambda what: print(what, flush=True), lambda so_far: so_far.write(path))  # fmt: skip

    def kernel_run(self, **asked) -> KernelRun:
        return KernelRun(
            shape=asked.pop("shape", self.shape),
            device=self.device,
            seconds=self.seconds,
            small=self.dry_run,
            **asked,
        )


def machine(setting: Setting) -> None:
    """Names, versions and ceilings; without a GPU nothing else is worth starting."""
    if not setting.dry_run and not torch.cuda.is_available():
        raise SystemExit("no GPU is visible to torch")
    facts = describe_machine(setting.device)
    ceilings = measure_ceilings(setting.device, setting.shape.dtype, small=setting.dry_run)
    BenchResults(facts, ceilings, []).write(setting.results / "machine.json")
    print(facts, ceilings)


def kernels(setting: Setting) -> None:
    """Paged attention beside peers: what budgets are for; fp8; prompts, decodes, chunks and mixed batches; a window, a smaller head;
    last what is compiled for each shape anew, on a few batches that no other run has."""
    batches = ("8q1s32k", "q8k", "8q1s1k", "64q1s2k", "256q1s1k", "q512s8k", "2q512s4k_64q1s2k")
    few, last = ("8q1s32k", "q4k"), ("8q1s8k", "q2k")
    if setting.dry_run:
        batches, few, last = ("q32", "q16s48_2q1s40"), ("2q1s64",), ("4q1s64",)
    base, everybody = setting.shape, tuple(_peers())
    peers = tuple(peer for peer in everybody if not peer.name.startswith("flex"))
    fp8 = replace(base, cache_dtype=torch.float8_e4m3fn)
    runs = [
        setting.kernel_run(batches=batches[:2], peers=peers),
        setting.kernel_run(batches=few, shape=fp8, peers=peers),
        setting.kernel_run(batches=batches[2:], peers=peers),
        setting.kernel_run(batches=few, shape=replace(base, window=24 if setting.dry_run else 1024), peers=peers),
        setting.kernel_run(batches=few, shape=replace(base, head_size=64), peers=peers),
        setting.kernel_run(batches=last, peers=everybody),
    ]  # fmt: skip
    _run_all(setting, "kernels", runs)


def ops(setting: Setting) -> None:
    """Every other op, on decodes and on a prompt; blocks that move, in megabytes."""
    others = tuple(op for op in OPS if op not in ("paged_attention", "cascade_attention"))
    batches = ("4q1s32", "q32") if setting.dry_run else ("256q1s128", "q4k")
    prefix = ("4q1s64",) if setting.dry_run else ("64q1s8k",)
    _run_all(
        setting,
        "ops",
        [
            setting.kernel_run(ops=others, batches=batches),
            setting.kernel_run(ops=("cascade_attention",), batches=prefix),
        ],
    )


def sweep(setting: Setting) -> None:
    """The grid of plans: how far from the best of it the chosen plan is. Plans are compiled by several processes first."""
    batches = ("2q1s48",) if setting.dry_run else ("8q1s8k", "64q1s2k", "q4k")
    asked = setting.kernel_run(batches=batches, sweep=True, most_plans=4 if setting.dry_run else None)  # fmt: skip
    if not setting.dry_run:
        _compile_plans(setting, batches)
    setting.run("sweep", asked)


def _compile_plans(setting: Setting, batches: tuple[str, ...], processes: int = 8) -> None:
    """Fill Triton's cache on disk: each process runs its share of the plans once."""
    command = [
        sys.executable,
        "-m",
        __name__ if __name__ != "__main__" else "octavo.bench.gpu_parts",
    ]
    running = [
        subprocess.Popen([*command, "sweep", str(setting.results), "--share", f"{i}/{processes}", "--batches", *batches])
        for i in range(processes)
    ]  # fmt: skip
    for process in running:
        process.wait()  # a plan that the compiler refuses is a note in the sweep


def run_share(setting: Setting, share: str, batches: list[str]) -> None:
    number, of = map(int, share.split("/"))
    for text in batches:
        problem = make_problem(BatchSpec.parse(text), setting.shape, setting.device)
        plans = plan_grid(problem)
        # neighbours differ in the number of splits alone, for which nothing is compiled anew
        for plan in plans[len(plans) * number // of : len(plans) * (number + 1) // of]:
            try:
                problem.run(plan)
            except Exception as error:  # the sweep will say so, too
                print(f"{text} {plan}: {type(error).__name__}", flush=True)


def host_step(setting: Setting) -> None:
    """The host's part of a decode step on this machine's processor, beside the numpy floor."""
    contexts = (64, 256) if setting.dry_run else (128, 1024, 8192)
    setting.run("host_step", setting.kernel_run(batches=(), host_contexts=contexts))


def end_to_end(setting: Setting) -> None:
    from .end_to_end_random import run

    run(setting.results / "end_to_end.json", setting.device, setting.dry_run)


PARTS: dict[str, Callable[[Setting], None]] = {
    part.__name__: part for part in (machine, kernels, ops, sweep, host_step, end_to_end)
}


def _peers() -> list[AttentionPeer]:
    """All there are; one that is not installed is a note in each table."""
    from .peers import ATTENTION_PEERS

    return [parse_peer(name) for name in ATTENTION_PEERS]


def _run_all(setting: Setting, name: str, runs: list[KernelRun]) -> None:
    """Several runs into one file."""
    path = setting.results / f"{name}.json"
    total: BenchResults | None = None
    for asked in runs:
        before = [] if total is None else total.measurements

        def save(so_far: BenchResults, before=before) -> None:
            rows = [*before, *so_far.measurements]
            msgspec.structs.replace(so_far, measurements=rows).write(path)

        measured = asked.measure(lambda what: print(what, flush=True), save)
        total = msgspec.structs.replace(measured, measurements=[*before, *measured.measurements])
    if total is not None:
        total.write(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("results", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--share", help="compile the plans of this share of a sweep, I/N")
    parser.add_argument("--batches", nargs="*", default=[])
    asked = parser.parse_args()
    setting = Setting(asked.results, asked.dry_run)
    if asked.share:
        run_share(setting, asked.share, asked.batches)
    else:
        PARTS[asked.part](setting)


if __name__ == "__main__":
    main()
