"""The command line: `octavo generate`, `octavo kernels report` and `octavo kernels calibrate`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    import torch

    from .models.llm import LLM
    from .scheduler.outputs import RequestOutput

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Paged-attention inference on Triton kernels."
)
kernels = typer.Typer(no_args_is_help=True, help="Look at the Triton kernels.")
app.add_typer(kernels, name="kernels")


@app.callback()
def _commands() -> None:
    """Paged-attention inference on Triton kernels."""


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts, completed together.")],
    model: Annotated[
        str, typer.Option(help="Bundled name, .gguf file, Hugging Face directory or hub id.")
    ] = "smollm2-135m",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate for each prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus, 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Most likely tokens kept, -1 is off.")] = -1,
    seed: Annotated[
        int, typer.Option(help="Seed of the first prompt; the others count on from it.")
    ] = 0,
    chat: Annotated[bool, typer.Option(help="Ask through the model's chat template.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            help="auto (the model's), fp8, fp8_e5m2, fp8_per_token_head or int8_per_token_head."
        ),
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    num_gpu_blocks: Annotated[
        int | None, typer.Option(help="KV blocks in the pool; by default what memory allows.")
    ] = None,
    stats: Annotated[
        bool, typer.Option(help="Show speed, KV block use and where each request's time went.")
    ] = False,
) -> None:
    """Complete prompts and stream the text: one prompt as it grows, several when each is done."""
    from . import LLM, SamplingParams

    errors = Console(stderr=True)
    try:
        params = [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                seed=seed + i,
            )
            for i in range(len(prompts))
        ]
        with errors.status("loading the model"):
            llm = LLM(
                model,
                dtype=dtype,
                kv_cache_dtype=kv_cache_dtype,
                device=device,
                num_gpu_blocks=num_gpu_blocks,
            )
        started = time.perf_counter()
        asked = (
            [llm.tokenizer.encode_chat([{"role": "user", "content": p}]) for p in prompts]
            if chat
            else prompts
        )
        outputs = _stream(llm, prompts, asked, params)
    except ValueError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(2) from error
    if stats:
        _print_stats(llm, outputs, time.perf_counter() - started)


def _stream(llm: LLM, prompts: list[str], asked: list, params: list) -> list[RequestOutput]:
    """Print the completions while they are made, as the model wrote them; returns the outputs in order."""
    from .models.llm import progress_bar

    outputs: dict[int, RequestOutput] = {}
    if len(prompts) == 1:
        typer.secho(prompts[0], bold=True, nl=False)
        shown = 0
        for _, output in llm.stream(asked, params):
            text = output.outputs[0].text
            typer.echo(text[shown:], nl=False)
            shown, outputs[0] = len(text), output
        typer.echo()
        return [outputs[0]]
    with progress_bar(len(prompts), show=True) as advance:
        for place, output in llm.stream(asked, params):
            if output.finished:
                outputs[place] = output
                typer.secho(prompts[place], bold=True, nl=False)
                typer.echo(output.outputs[0].text + "\n")
                advance(1)
    return [outputs[place] for place in range(len(prompts))]


def _print_stats(llm: LLM, outputs: list[RequestOutput], seconds: float) -> None:
    console = Console(highlight=False)
    table = Table(
        title="where each request's time went, in ms",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),  # fits 80 columns
    )
    for name in ("prompt", "in", "hit", "out", "end", "queue", "first", "model", "sched", "total"):
        is_text = name in ("prompt", "end")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for output in outputs:
        metrics, completion = output.metrics, output.outputs[0]
        assert metrics is not None and metrics.finished_time is not None
        times = (
            metrics.time_in_queue,
            metrics.time_to_first_token,
            metrics.model_time,
            metrics.scheduler_time,
            metrics.finished_time - metrics.arrival_time,
        )
        table.add_row(
            Text((output.prompt or "(chat)")[:16]),
            str(len(output.prompt_token_ids)),
            str(metrics.num_cached_tokens),
            str(len(completion.token_ids)),
            str(completion.finish_reason),
            *(f"{1000 * (t or 0):.0f}" for t in times),
        )
    console.print(table)
    stats = llm.stats()
    generated = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    console.print(
        f"{generated} tokens in {seconds:.2f} s: {generated / seconds:.1f} tokens/s, {stats.num_steps} steps, "
        f"{stats.num_batched_tokens} tokens fed\n"
        f"KV blocks: at most {stats.peak_used_blocks} of {stats.num_blocks} in use, "
        f"{stats.block_bytes / 1024:.0f} KiB each"
    )


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
    from .kernels.report import measure, select_cases
    from .kernels.report.table import print_table

    targets = target or ["sm_90"]
    try:
        cases = select_cases(targets, kernel or [""])
    except ValueError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(2) from error
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
    from .models.llm import torch_device
    from .runtime.swap_calibration import find_costs, measure_swaps, timings_table

    console = Console(highlight=False)
    try:
        place = torch_device(device)
        if output is not None and place.type == "cpu":
            raise ValueError("output: expected a GPU to compare the two ways on, got a CPU")
        if output is not None and not output.absolute().parent.is_dir():
            raise ValueError(
                f"output: expected a file in a folder that exists, got {str(output)!r}"
            )
    except ValueError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(2) from error
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


def main() -> None:
    app()


if __name__ == "__main__":
    main()
