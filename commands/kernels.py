"""`octavo kernels`: what the compiler makes of them, and how fast blocks move."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from .refusing import refusing

if TYPE_CHECKING:
    import torch

kernels = typer.Typer(no_args_is_help=True, help="Look at the Triton kernels.")


@kernels.callback()
def _kernels() -> None:
    """Look at the Triton kernels."""


@kernels.command()
def report(
    target: Annotated[
        list[str] | None,
        typer.Option(help="sm_80, sm_90, sm_100 or gfx942; may be repeated.", show_default="sm_90"),
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(help="Only launches with this in their name; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per launch.")] = False,
) -> None:
    """Compile the kernels' launches and show registers, spills, loads and the cost of a KV token; needs no GPU."""
    from ..kernels.report import measure, select_cases
    from ..kernels.report.table import print_table

    targets = target or ["sm_90"]
    with refusing():
        cases = select_cases(targets, kernel or [""])
    tables = Console(highlight=False)
    if not tables.is_terminal:
        tables.width = 400  # nothing is folded or cut short in a file
    failed = False
    for name in targets:
        rows = []
        with _compile_progress(name, cases) as show:
            for row in measure(name, cases):
                show(row.case)
                rows.append(row)
                failed |= row.error is not None
                if as_json:
                    typer.echo(row.to_json())
        if not as_json:
            print_table(rows, tables)
    if failed:
        raise typer.Exit(1)


@kernels.command()
def calibrate(
    output: Annotated[
        Path | None,
        typer.Option(help="Write the thresholds to this JSON file, for SwapCosts.from_json."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    most_mib: Annotated[int, typer.Option(min=1, help="Most MiB moved by one swap.")] = 128,
) -> None:
    """Time swaps of KV blocks between device and host, by copies and by the kernel, and find where the kernel is faster."""
    from ..models.llm import torch_device
    from ..runtime.swap_calibration import find_costs, measure_swaps, timings_table

    console = Console(highlight=False)
    with refusing():
        place = torch_device(device)
        if output is not None and place.type == "cpu":
            raise ValueError("output: expected a GPU to compare the two ways on, got a CPU")
        if output is not None and not output.absolute().parent.is_dir():
            raise ValueError(
                f"output: expected a file in a folder that exists, got {str(output)!r}"
            )
    timings = []
    with Console(stderr=True).status("timing swaps"):
        timings += measure_swaps(place, most_bytes=most_mib << 20)
    machine = _machine_name(place)
    console.print(timings_table(timings, f"swaps on {machine}"))
    if place.type == "cpu":
        console.print(
            "Only plain copies were timed: without a GPU the kernel runs in an interpreter, whose time says nothing."
        )
        return
    costs = find_costs(timings, machine)
    for side, crossover in (("device", costs.to_device), ("host", costs.to_host)):
        below, least = crossover.kernel_below_bytes, crossover.kernel_from_copies
        rule = f"below {below} bytes a copy and from {least} copies on" if below else "never"
        console.print(f"to the {side}: the kernel {rule}")
    if output is not None:
        costs.to_json(output)
        console.print(f"written to {output}")


def _machine_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "this CPU"
    from torch.cuda import get_device_name

    return get_device_name(device)


@contextlib.contextmanager
def _compile_progress(target: str, cases: list[str]) -> Iterator[Callable[[str], None]]:
    """A bar on standard error; yields what is to be called with the case that a row came from."""
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task(f"compiling for {target}", total=len(cases))
        yield lambda case: progress.update(task, completed=cases.index(case) + 1, description=case)
