"""Pictures of a run: roofline, latency by context, a heat map of plans, growth of the host's cost.

Each function draws one PNG, or returns None where the run has nothing to draw.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .batch_specs import BatchSpec
from .results import BenchResults, Measurement
from .tables import number, shorter

# distinct for eyes that do not tell red from green, too
_COLOURS = ("#0b6e99", "#d1495b", "#edae49", "#3d5a3e", "#7b5ea7", "#5c5c5c", "#e07a5f", "#81b29a")
_MOST_NAMED = 12  # points of a roofline: more names would lie over one another
_HEAT_AXES = (("rows", "tile_kv"), ("num_splits", "tile_kv"))


def draw_all(results: BenchResults) -> dict[str, bytes]:
    """PNG files by name."""
    drawn = {name: draw(results) for name, draw in PLOTS.items()}
    return {name: png for name, png in drawn.items() if png is not None}


def roofline(results: BenchResults) -> bytes | None:
    """FLOP/s over FLOP/byte: what each case reached under the roof of this machine's own copy and matrix product."""
    rows = [row for row in results.measurements if row.flops_per_byte and row.best_us]
    if not rows:
        return None
    figure, axes = _figure("Roofline", "FLOP per byte moved", "FLOP/s")
    ceilings = results.ceilings
    intensity = np.array([row.flops_per_byte for row in rows])
    ridge = ceilings.matmul_flops_per_s / ceilings.copy_bytes_per_s
    # the flat part is wide enough for what stands above it
    x = np.geomspace(min(intensity.min(), ridge) / 3, max(intensity.max() * 3, 30 * ridge), 200)
    roof = np.minimum(x * ceilings.copy_bytes_per_s, ceilings.matmul_flops_per_s)
    axes.loglog(x, roof, color="#333333", linewidth=1.5)
    axes.annotate(
        f"copy {_rate(ceilings.copy_bytes_per_s)}B/s, {ceilings.dtype} matmul {_rate(ceilings.matmul_flops_per_s)}FLOP/s",
        (x[-1], roof[-1]),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )
    named = [row for row in rows if row.plan is None]
    for colour, (name, group) in zip(_cycle(), _by(named, lambda row: row.implementation), strict=False):  # fmt: skip
        _points(axes, group, label=_untyped(name), color=colour, s=28, zorder=3)
    if planned := [row for row in rows if row.plan is not None]:
        _points(axes, planned, label="octavo, plans asked for", color=_COLOURS[0], s=10, alpha=0.35)
    own = [row for row in rows if row.is_own_choice]
    for row in own if len(own) <= _MOST_NAMED else ():
        name = shorter(row.batch) if row.op == "paged_attention" else f"{row.op} {shorter(row.batch)}"  # fmt: skip
        axes.annotate(_untyped(name), (row.flops_per_byte, row.flops_per_s), xytext=(6, -3), textcoords="offset points", fontsize=7)  # fmt: skip
    # a point above the roof is a fault, and has to be seen
    axes.set_ylim(top=3 * max(ceilings.matmul_flops_per_s, *(row.flops_per_s or 0 for row in rows)))
    _plain_ticks(axes.xaxis)
    axes.yaxis.set_major_formatter(lambda value, _: _rate(value).strip())
    _legend(figure, axes)
    return _png(figure)


def _points(axes: Any, rows: Sequence[Measurement], **style: Any) -> None:
    axes.scatter([row.flops_per_byte for row in rows], [row.flops_per_s for row in rows], **style)


def latency_by_context(results: BenchResults) -> bytes | None:
    """Time of attention over the sequence length, a line for each implementation and kind of batch."""
    lines: dict[tuple[str, str, str], list[tuple[int, float]]] = defaultdict(list)
    for row in results.measurements:
        if row.op != "paged_attention" or row.plan is not None or not row.best_us:
            continue
        batch = BatchSpec.parse(row.batch)
        if len({*batch.query_lens}) == len({*batch.seq_lens}) == 1:
            is_prompt = batch.query_lens == batch.seq_lens
            what = "prompt" if is_prompt else f"{batch.query_lens[0]} new"
            kind = f"{batch.num_seqs} x {what}"
            lines[kind, row.shape, row.implementation].append((batch.seq_lens[0], row.best_us))
    lines = {key: sorted(points) for key, points in lines.items() if len(points) > 1}
    if not lines:
        return None
    shapes = list(dict.fromkeys(shape for _, shape, _ in lines))
    title = "Paged attention by sequence length"
    if len(shapes) == 1:
        title += f"\n{_untyped(shapes[0])}"
    figure, axes = _figure(title, "tokens in a sequence", "microseconds")
    names = list(dict.fromkeys(name for _, _, name in lines))
    kinds = list(dict.fromkeys((kind, shape) for kind, shape, _ in lines))
    for (kind, shape, name), points in lines.items():
        what = kind if len(shapes) == 1 else f"{kind}, {shape}"
        axes.loglog(
            *zip(*points, strict=True),
            marker="o",
            markersize=4,
            color=_COLOURS[names.index(name) % len(_COLOURS)],
            linestyle=("-", "--", ":", "-.")[kinds.index((kind, shape)) % 4],
            label=_untyped(f"{name}: {what}"),
        )
    _token_ticks(axes, [tokens for points in lines.values() for tokens, _ in points])
    _plain_ticks(axes.yaxis)
    _legend(figure, axes)
    return _png(figure)


def plan_heat_map(results: BenchResults) -> bytes | None:
    """The best time for each tile and split (or tile and rows), over all other fields of the plan; framed: the chosen plan's."""
    planned = [row for row in results.measurements if row.plan and row.best_us and _axes(row.plan)]
    cases = _by(planned, lambda row: row.key[:3])
    cases = [(case, rows) for case, rows in cases if len(rows) > 3]
    if not cases:
        return None
    figure, grid = _figures(
        len(cases), "Best microseconds of each tile; framed: the tile of the chosen plan"
    )
    for axes, (case, rows) in zip(grid, cases, strict=True):
        _heat_map(axes, case, rows)
    return _png(figure)


def _axes(plan: str) -> tuple[str, str] | None:
    """Fields of the plan that a map is laid out by."""
    fields = _fields(plan)
    return next((axes for axes in _HEAT_AXES if all(name in fields for name in axes)), None)


def _heat_map(axes: Any, case: tuple[str, ...], rows: Sequence[Measurement]) -> None:
    plans = [(_fields(row.plan or ""), row.best_us or 0.0) for row in rows]
    x_name, y_name = _axes(rows[0].plan or "") or ("", "")
    best: dict[tuple[int, int], float] = {}
    for plan, us in plans:
        cell = plan[x_name], plan[y_name]
        best[cell] = min(us, best.get(cell, np.inf))
    columns, lines = (sorted({cell[side] for cell in best}) for side in (0, 1))
    numbers = np.array([[best.get((x, y), np.nan) for x in columns] for y in lines])
    axes.imshow(numbers, cmap="viridis_r", aspect="auto", origin="lower")
    threshold = (np.nanmin(numbers) + np.nanmax(numbers)) / 2
    for j, i in np.ndindex(numbers.shape):
        if not np.isnan(numbers[j, i]):
            dark = numbers[j, i] > threshold  # of viridis reversed
            axes.text(i, j, number(float(numbers[j, i])), ha="center", va="center", fontsize=8,
                      color="white" if dark else "black")  # fmt: skip
    chosen = _fields(rows[0].chosen_plan or "")
    if chosen.get(x_name) in columns and chosen.get(y_name) in lines:
        from matplotlib.patches import Rectangle

        corner = columns.index(chosen[x_name]) - 0.5, lines.index(chosen[y_name]) - 0.5
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="#d1495b", linewidth=2.5))
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(lines)), lines)
    axes.set(xlabel=x_name, ylabel=y_name)
    title = f"{shorter(case[1])}  {case[2]}"
    if times := [row.best_us for row in rows if row.plan == row.chosen_plan]:
        title += f"\nchosen: {rows[0].chosen_plan}: {number(times[0])} us"
    axes.set_title(_untyped(title), fontsize=8)


def host_growth(results: BenchResults) -> bytes | None:
    """The host's part of a decode step over the context, beside bare numpy making the same changes."""
    groups = _by(results.host_costs, lambda cost: cost.num_seqs)
    groups = [(count, costs) for count, costs in groups if len(costs) > 1]
    if not groups:
        return None
    figure, axes = _figure("Host cost of a decode step", "tokens of context", "microseconds")
    for colour, (count, costs) in zip(_cycle(), groups, strict=False):
        ordered = sorted(costs, key=lambda cost: cost.context_len)
        context = [cost.context_len for cost in ordered]
        axes.plot(context, [cost.host_us for cost in ordered], marker="o", color=colour, label=f"{count} sequences: Octavo")  # fmt: skip
        axes.plot(context, [cost.floor_us for cost in ordered], linestyle=":", color=colour, label=f"{count} sequences: numpy floor")  # fmt: skip
    axes.set_xscale("log")
    _token_ticks(axes, [cost.context_len for _, costs in groups for cost in costs])
    axes.set_ylim(bottom=0)
    _legend(figure, axes)
    return _png(figure)


PLOTS: dict[str, Callable[[BenchResults], bytes | None]] = {
    "roofline": roofline,
    "latency_by_context": latency_by_context,
    "plan_heat_map": plan_heat_map,
    "host_growth": host_growth,
}


def _untyped(text: str) -> str:
    """matplotlib sets what stands between dollars as a formula."""
    return text.replace("$", r"\$")


def _fields(plan: str) -> dict[str, int]:
    parts = (part.partition("=") for part in plan.split(","))
    return {name: int(value) for name, _, value in parts if value.isdecimal()}


def _by(rows: Sequence[Any], key: Callable[[Any], Any]) -> list[tuple[Any, list[Any]]]:
    groups: dict[Any, list[Any]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.items())


def _cycle():
    while True:
        yield from _COLOURS


def _token_ticks(axes: Any, tokens: Sequence[int]) -> None:
    """Powers of two, written out: around all of them, not more than a dozen."""
    low, high = math.floor(math.log2(min(tokens))), math.ceil(math.log2(max(tokens)))
    ticks = [2**n for n in range(low, high + 1, 1 + (high - low) // 12)]
    axes.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ticks])
    axes.set_xticks([], minor=True)


def _plain_ticks(axis: Any) -> None:
    """Of a logarithmic axis: 20, 50, 100 instead of exponents."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 2000 * low else (1,), numticks=12))
    axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axis.set_minor_formatter(NullFormatter())


def _rate(value: float) -> str:
    """A rate without its unit: 18.9 G."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "


def _legend(figure: Any, axes: Any) -> None:
    """Below the picture, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 3 if max(map(len, labels)) < 40 else 1
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, handlelength=3)  # fmt: skip


def _figure(title: str, x: str, y: str) -> tuple[Any, Any]:
    figure, (axes,) = _figures(1, title)
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.25)
    return figure, axes


def _figures(count: int, title: str) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6 if count == 1 else 3.6 * count), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    return figure, list(np.atleast_1d(figure.subplots(count, 1)))


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
