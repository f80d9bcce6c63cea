"""Results side by side: one column for each policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .result import Distribution, SimulationResult

_PERCENTILES = ("p50", "p90", "p99")


def comparison_table(results: Mapping[str, SimulationResult]) -> Table:
    """What a policy does to the requests and to the pool."""
    first = next(iter(results.values()))
    title = f"simulated: {first.num_requests} requests, {first.model} on {first.device}"
    if first.async_scheduling:
        title += ", async scheduling"
    table = _table(title, results)
    for name, show in _rows(first, results):
        table.add_row(name, *map(show, results.values()))
    return table


def step_table(results: Mapping[str, SimulationResult]) -> Table:
    """Where the steps' time goes, in percent of all parts together."""
    table = _table("simulated: share of the steps' time, in %", results)
    steps = [result.step_seconds for result in results.values()]
    for field in dataclasses.fields(steps[0]):
        parts = [100 * getattr(step, field.name) / step.total for step in steps]
        if any(parts):
            table.add_row(field.name, *(f"{part:.1f}" for part in parts))
    milliseconds = (
        f"{1e3 * result.step_seconds.total / result.num_steps:.2f}" for result in results.values()
    )
    table.add_row("ms a step", *milliseconds)
    return table


def _table(title: str, results: Mapping[str, SimulationResult]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        min_width=len(title),  # the title is not folded
    )
    table.add_column("")
    for name in results:
        table.add_column(name.replace(",", ",\n"), justify="right")
    return table


Row = tuple[str, Callable[[SimulationResult], str]]


def _rows(first: SimulationResult, results: Mapping[str, SimulationResult]) -> list[Row]:
    rows: list[Row] = [
        ("seconds", lambda r: f"{r.seconds:.1f}"),
        ("output tokens/s", lambda r: f"{r.output_tokens_per_s:.0f}"),
        ("prompt tokens/s", lambda r: f"{r.input_tokens_per_s:.0f}"),
    ]
    rows += _distribution("first token, ms", lambda r: r.ttft)
    priorities = list(first.ttft_by_priority)
    for priority in priorities if len(priorities) > 1 else ():
        rows += _distribution(
            f"  of priority {priority}", lambda r, p=priority: r.ttft_by_priority[p], ("p50", "p99")
        )
    rows += _distribution("token after token, ms", lambda r: r.tpot)
    rows += _distribution("queue, ms", lambda r: r.queue, ("p50", "p99"))
    rows += [
        ("preempted: recomputed", lambda r: str(r.num_recomputed)),
        ("preempted: swapped", lambda r: str(r.num_swapped_out)),
        ("blocks swapped out", lambda r: str(r.num_blocks_swapped_out)),
        ("blocks copied", lambda r: str(r.num_blocks_copied)),
        ("prefix hits, %", lambda r: f"{100 * r.hit_rate:.1f}"),
        ("tokens fed", lambda r: str(r.num_fed_tokens)),
        ("blocks used at most, %", lambda r: f"{100 * r.peak_used_blocks / r.num_blocks:.1f}"),
        ("blocks used on average, %", lambda r: f"{100 * r.mean_used_blocks / r.num_blocks:.1f}"),
        ("steps", lambda r: str(r.num_steps)),
    ]
    if any(result.num_cut_short for result in results.values()):
        rows.append(("requests cut short", lambda r: str(r.num_cut_short)))
    return rows


def _distribution(
    name: str,
    get: Callable[[SimulationResult], Distribution | None],
    percentiles: tuple[str, ...] = _PERCENTILES,
) -> list[Row]:
    def show(result: SimulationResult, percentile: str) -> str:
        found = get(result)
        return "-" if found is None else f"{1e3 * getattr(found, percentile):.1f}"

    return [(f"{name}, {p}", lambda r, p=p: show(r, p)) for p in percentiles]
