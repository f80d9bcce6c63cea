"""Measurements as tables: on the terminal, and as Markdown for a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from .batch_specs import BatchSpec
from .results import BenchResults, Measurement, time_ratio

_LEAST_IMPORTANT_FIRST = (
    "error",
    "20-80 %",
    "host us",
    "of ceiling",
    "TFLOP/s",
    "GB/s",
    "graph us",
)
_LEAST_NAME = 16
_LONGEST_BATCH = 60
COLUMNS = ("implementation", "us", "20-80 %", "graph us", "host us", "GB/s", "TFLOP/s", "of ceiling", "ratio", "error")  # fmt: skip


def kernel_tables(results: BenchResults, width: int = 200) -> list[Table]:
    """One table for each case; `ratio` is the time over Octavo's own choice, in the same turns. In a narrow terminal columns are
    left out, for a figure that is cut short is a wrong one."""
    tables = []
    for (op, batch, shape), rows in _by_case(results.measurements):
        title = Text(f"{op}  {shorter(batch)}  {shape}", style="table.title")
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        lines = list(case_cells(rows, results))
        shown = _that_fit(lines, width)
        for i in shown:
            # names fold where they must
            table.add_column(COLUMNS[i], justify="left" if i == 0 else "right", overflow="fold", no_wrap=i > 0)  # fmt: skip
        for cells in lines:
            # what an error says is text, not markup
            table.add_row(*(Text(cells[i]) for i in shown))
        tables.append(table)
    return tables


def _that_fit(lines: Sequence[Sequence[str]], width: int) -> list[int]:
    """Numbers of the columns that say something, the least important left out until names have some room."""
    widths = [max(len(column), *map(len, cells)) for column, cells in zip(COLUMNS, zip(*lines, strict=True), strict=True)]  # fmt: skip
    shown = [i for i in range(len(COLUMNS)) if any(cells[i] for cells in lines)]
    widths[0] = min(widths[0], _LEAST_NAME)
    for column in _LEAST_IMPORTANT_FIRST:
        if sum(widths[i] + 3 for i in shown) + 2 <= width:
            break
        shown = [i for i in shown if COLUMNS[i] != column]
    return shown


def markdown(results: BenchResults) -> str:
    """All cases in one table, for a page."""
    columns = ("op", "batch", "shape", *COLUMNS)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for case, rows in _by_case(results.measurements):
        lines += [
            "| " + " | ".join(map(_plain, (*case, *cells))) + " |"
            for cells in case_cells(rows, results)
        ]
    return "\n".join(lines) + "\n"


def case_cells(rows: Sequence[Measurement], results: BenchResults) -> Iterable[tuple[str, ...]]:
    """The cells of one case, a row for each implementation; what was not measured says why."""
    own = next((row for row in rows if row.is_own_choice), None)
    for row in rows:
        name = row.implementation + (f" {row.plan}" if row.plan else "")
        if row.is_own_choice and row.chosen_plan:
            name += f" (chose {row.chosen_plan})"
        if row.median_us is None:
            yield (f"{name}: {row.note or 'not timed'}", *[""] * (len(COLUMNS) - 1))
            continue
        share = row.share_of(results.ceilings)
        ratio = None if own is None else time_ratio(row, own)
        yield (
            name,
            number(row.median_us),
            f"{number(row.low_us)}-{number(row.high_us)}",
            number(row.graph_us),
            number(row.host_us),
            number(None if row.bytes_per_s is None else row.bytes_per_s / 1e9),
            number(row.flops_per_s / 1e12 if row.flops and row.flops_per_s else None),
            "" if share is None else f"{share:.0%}",
            "" if ratio is None else f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}",
            "" if row.error is None else "exact" if row.error == 0 else f"{row.error:.1e}",
        )


def facts(results: BenchResults) -> str:
    """What was measured on, in a line or two."""
    machine, ceilings = results.machine, results.ceilings
    return (
        f"{machine.device}, {machine.backend}, {machine.num_threads} threads, torch {machine.torch}, triton {machine.triton}, "
        f"Python {machine.python}, commit {machine.commit or 'unknown'}\n"
        f"ceilings: copy {ceilings.copy_bytes_per_s / 1e9:.1f} GB/s, {ceilings.dtype} matmul "
        f"{ceilings.matmul_flops_per_s / 1e12:.3g} TFLOP/s"
    )


def shorter(batch: str) -> str:
    """A batch for a title: one that was recorded may be hundreds of different sequences."""
    if len(batch) <= _LONGEST_BATCH:
        return batch
    return f"{batch[:_LONGEST_BATCH].rpartition('_')[0]}_... ({BatchSpec.parse(batch).num_seqs} sequences)"


def _plain(cell: str) -> str:
    """As a cell of a Markdown table."""
    return cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _by_case(rows: Sequence[Measurement]):
    return [(case, list(group)) for case, group in groupby(rows, key=lambda row: row.key[:3])]


def number(value: float | None) -> str:
    """Three digits that matter, or all before the point; no exponent, unless it is tiny."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"
