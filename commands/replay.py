"""`octavo replay`: a recording run again and compared, or its kernels timed."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from .refusing import refusing

if TYPE_CHECKING:
    from ..runtime.recording import Recording


class Backend(enum.Enum):
    auto = "auto"
    cpu = "cpu"
    interpret = "interpret"
    cuda = "cuda"


def replay(
    recording: Annotated[Path, typer.Argument(help="What `octavo record` or LLM(record=) wrote.")],
    backend: Annotated[
        Backend, typer.Option(help="auto: the GPU if there is one, else the CPU.")
    ] = Backend.auto,
    timing_only: Annotated[
        bool, typer.Option("--timing-only", help="Time attention and cache writes; no weights.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Where the model is, if not under its recorded name.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Only so many steps.")] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Of log probabilities.", show_default="by the model's dtype"),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times each step is timed.")] = 5,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write the outcome to this file, too.")
    ] = None,
) -> None:
    """Run a recording again and compare its tokens, or only time the kernels on its launches.

    Exit code 0: equal, or timed; 1: it differs; 2: the recording or the model cannot be used.
    """
    if backend is Backend.interpret:
        os.environ["OCTAVO_BACKEND"] = "interpret"  # read when the kernels are imported
    from ..models.llm import torch_device
    from ..runtime.recording import read_recording

    on_gpu = {Backend.auto: "auto", Backend.cuda: "cuda"}
    with refusing():
        device = str(torch_device(on_gpu.get(backend, "cpu")))
        opened = read_recording(recording)
        if opened.notice:
            typer.secho(f"notice: {opened.notice}", fg="yellow", err=True)
        if not timing_only and model is None and opened.header.model is None:
            typer.echo("notice: the recording names no model, only kernels are timed", err=True)
            timing_only = True
        if timing_only:
            outcome, is_equal = _time(opened, device, backend, repeats, steps), True
        else:
            outcome, is_equal = _compare(opened, device, backend, model, tolerance, steps)
        if as_json is not None:
            _write(as_json, outcome)
    if not is_equal:
        raise typer.Exit(1)


def _write(path: Path, outcome: object) -> None:
    import msgspec

    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(outcome)))
    except OSError as error:
        raise ValueError(f"json: {path} cannot be written: {error.strerror}") from error


def _time(
    recording: Recording, device: str, backend: Backend, repeats: int, steps: int | None
) -> object:
    from ..runtime.recording.timing import time_kernels, timings_table

    timings = []
    with Console(stderr=True).status("timing kernels"):
        timings += time_kernels(recording, device, repeats=repeats, most_steps=steps)
    where = "the interpreter" if backend is Backend.interpret else device
    title = f"kernels of {recording.path.name} on {where}, all {len(recording.header.layers)} layers, median"
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, len(title))
    console.print(timings_table(timings, title))
    if backend is Backend.interpret:
        console.print("Times of an interpreter say nothing about those of a GPU.")
    return timings


def _compare(
    recording: Recording,
    device: str,
    backend: Backend,
    model: str | None,
    tolerance: float | None,
    steps: int | None,
) -> tuple[object, bool]:
    from ..models.replay import TOLERANCES, load_runner
    from ..runtime.recording import replay as run_again

    errors = Console(stderr=True)
    check = os.environ.get("OCTAVO_CHECK") == "1"
    with errors.status("loading the model"):
        runner = load_runner(recording.header, model, device=device, check=check)
    if tolerance is None:
        tolerance = TOLERANCES.get(recording.header.dtype, max(TOLERANCES.values()))
    total = len(recording) if steps is None else min(steps, len(recording))
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("replaying", total=total)
        result = run_again(
            recording,
            runner,
            tolerance=tolerance,
            most_steps=steps,
            progress=lambda done: bar.update(task, completed=done),
        )
    where = "the interpreter" if backend is Backend.interpret else device
    typer.echo(
        f"{result.num_steps} steps, {result.num_tokens} tokens on {where}: "
        f"{result.num_token_differences} tokens and {result.num_logprob_differences} log probabilities differ, "
        f"largest error {result.largest_error:.2g}, tolerance {tolerance:g}"
    )
    if result.first is not None:
        typer.echo(f"first difference: {result.first}")
    return result, result.is_equal
