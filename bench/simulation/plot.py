"""Block use and queues over time, one column of panels for each policy. matplotlib is imported when it is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .result import SimulationResult


def plot_simulation(results: Mapping[str, SimulationResult], path: str | Path) -> None:
    """Write an image in the format that the path's ending names. ValueError if that cannot be done."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"plot: expected matplotlib to be installed: {error}") from error

    figure = Figure(figsize=(4.5 * len(results), 5), layout="constrained")
    FigureCanvasAgg(figure)
    first = next(iter(results.values()))
    figure.suptitle(f"simulated: {first.num_requests} requests, {first.model} on {first.device}")
    panels = figure.subplots(2, len(results), squeeze=False, sharex=True, sharey="row")
    for (name, result), (blocks, queues) in zip(results.items(), panels.T, strict=True):
        series = result.series
        used = [100 * count / result.num_blocks for count in series.used_blocks]
        cached = [100 * count / result.num_blocks for count in series.cached_blocks]
        blocks.stackplot(series.time, used, cached, labels=("used", "cached"))
        blocks.set(title=name, ylim=(0, 100))
        for label in ("running", "swapped", "waiting"):
            queues.plot(series.time, getattr(series, label), label=label)
        queues.set(xlabel="simulated seconds")
    panels[0, 0].set_ylabel("blocks of the pool, %")
    panels[1, 0].set_ylabel("requests")
    for panel in panels[:, -1]:  # beside them, where it hides nothing
        panel.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ValueError(f"plot: {path} cannot be written: {error}") from error
