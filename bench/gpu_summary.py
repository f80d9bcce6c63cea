"""The results of `bench/on_gpu.sh` as Markdown: budgets first, then the tables."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from .generation_results import GenerationResults
from .results import BenchResults, Measurement, read_results, time_ratio
from .tables import facts, markdown

BUDGETS = Path(__file__).parent / "gpu_budgets.toml"


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a measurement of Octavo's own choice must reach. One of the last three is given, or ValueError."""

    op: str
    batch: str
    shape: str
    bytes_per_s: float | None = None
    flops_per_s: float | None = None
    at_most_us: float | None = None

    def __post_init__(self) -> None:
        given = (self.bytes_per_s, self.flops_per_s, self.at_most_us)
        if sum(each is not None for each in given) != 1:
            raise ValueError(
                f"budget: expected one of bytes_per_s, flops_per_s and at_most_us, got {given}"
            )

    def share_of(self, row: Measurement) -> float | None:
        """How much of the budget was reached, 1 and more is met; None where it was not measured."""
        if row.best_us is None:
            return None
        if self.at_most_us is not None:
            return self.at_most_us / row.best_us
        if self.bytes_per_s is not None:
            return (row.bytes_per_s or 0) / self.bytes_per_s
        assert self.flops_per_s is not None
        return (row.flops_per_s or 0) / self.flops_per_s

    def is_for(self, row: Measurement) -> bool:
        return row.key == (self.op, self.batch, self.shape, "octavo", "")


def read_budgets(path: Path = BUDGETS) -> dict[str, Budget]:
    with path.open("rb") as file:
        return {name: msgspec.convert(fields, Budget) for name, fields in tomllib.load(file).items()}  # fmt: skip


def judge_budgets(rows: list[Measurement], budgets: dict[str, Budget]) -> dict[str, str]:
    """Met, missed or not measured, by budget."""
    verdicts = {}
    for name, budget in budgets.items():
        shares = [budget.share_of(row) for row in rows if budget.is_for(row)]
        share = next((share for share in shares if share is not None), None)
        verdicts[name] = (
            "not measured"
            if share is None
            else f"{'met' if share >= 1 else 'MISSED'}: {share:.3f} of it"
        )
    return verdicts


def regrets(rows: list[Measurement]) -> list[tuple[str, str, str, float]]:
    """(case, chosen plan, best plan, time of the chosen over the best) of each swept case."""
    cases: dict[tuple[str, ...], list[Measurement]] = {}
    for row in rows:
        if row.implementation == "octavo" and row.best_us is not None:
            cases.setdefault(row.key[:3], []).append(row)
    found = []
    for case, measured in cases.items():
        own = next((row for row in measured if row.plan is None), None)
        planned = [row for row in measured if row.plan is not None]
        if own is None or own.best_us is None or not planned:
            continue
        regret, best = max(((time_ratio(own, row) or 0, row) for row in planned), key=lambda pair: pair[0])  # fmt: skip
        found.append((" ".join(case[1:]), own.chosen_plan or "", best.plan or "", regret))
    return found


def sections(results: Path) -> list[str]:
    """Of every file that is there; of one that cannot be read, why."""
    runs: dict[str, BenchResults] = {}
    lines: list[str] = []
    for name in ("machine", "kernels", "ops", "sweep", "host_step"):
        if (path := results / f"{name}.json").exists():
            try:
                runs[name] = read_results(path)
            except ValueError as error:
                lines += [str(error), ""]
    if runs:
        lines += ["```", facts(next(iter(runs.values()))), "```", ""]
    rows = [row for name in ("kernels", "ops") if name in runs for row in runs[name].measurements]
    if rows:
        lines += ["## Budgets", "", "| budget | |", "|---|---|"]
        lines += [f"| {name} | {verdict} |" for name, verdict in judge_budgets(rows, read_budgets()).items()]  # fmt: skip
        lines.append("")
    for name in ("kernels", "ops"):
        if name in runs:
            lines += [f"## {name}", "", markdown(runs[name])]
    if "sweep" in runs and (swept := regrets(runs["sweep"].measurements)):
        lines += ["## Plans", "", "| case | chosen | best of the sweep | chosen / best |", "|---|---|---|---|"]  # fmt: skip
        lines += [f"| {case} | {chosen} | {best} | {regret:.2f} |" for case, chosen, best, regret in swept]  # fmt: skip
        lines.append("")
    if "host_step" in runs:
        lines += ["## Host step", "", "| sequences | context | host us | x floor |", "|---|---|---|---|"]  # fmt: skip
        lines += [
            f"| {cost.num_seqs} | {cost.context_len} | {cost.host_us:.0f} | {cost.host_us / cost.floor_us:.2f} |"
            for cost in runs["host_step"].host_costs
        ]
        lines.append("")
    return lines + _generation(results / "end_to_end.json")


def _generation(path: Path) -> list[str]:
    if not path.exists():
        return []
    try:
        found = msgspec.json.decode(path.read_bytes(), type=GenerationResults)
    except msgspec.DecodeError as error:
        return [f"{path}: {error}", ""]
    lines = ["## End to end", "", found.model, "", "| requests | prompt | new tokens | mode | tokens/s |", "|---|---|---|---|---|"]  # fmt: skip
    lines += [
        f"| {row.num_requests} | {row.prompt_len} | {row.output_len} | {row.mode} | {row.tokens_per_s:.0f} |"
        for row in found.rows
    ]
    return [*lines, ""]
