"""`octavo bench`: kernels timed beside peers on batches one writes down or has recorded; runs compared."""

from __future__ import annotations

import enum
import importlib.util
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from .refusing import refusing

if TYPE_CHECKING:
    from ..bench.attention_problem import AttentionShape
    from ..bench.kernel_run import KernelRun
    from ..bench.results import BenchResults

bench = typer.Typer(invoke_without_command=True, help="Time kernels, beside peers.")

_CPU_BATCHES = ("q512", "8q1s256", "8q1s1k", "8q1s4k", "q256s1k_8q1s1k")
_GPU_BATCHES = ("q2k", "q8k", "8q1s1k", "8q1s8k", "8q1s32k", "64q1s2k", "256q1s1k", "2q512s4k_64q1s2k")  # fmt: skip
_HOST_CONTEXTS = (128, 1024, 8192)


class Dtype(enum.Enum):
    auto = "auto"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class CacheDtype(enum.Enum):
    auto = "auto"
    float8_e4m3fn = "float8_e4m3fn"
    float8_e5m2 = "float8_e5m2"


@bench.callback()
def run(
    context: typer.Context,
    op: Annotated[
        list[str] | None,
        typer.Option(help="An op, or all; may be repeated.", show_default="paged_attention"),
    ] = None,
    batch: Annotated[
        list[str] | None,
        typer.Option(
            help="8q1s1k: 8 sequences of 1 new token, 1024 tokens long; q2k_8q1s1k: and a prompt of 2048. May be repeated.",
            show_default="a set for the device",
        ),
    ] = None,
    heads: Annotated[str, typer.Option(help="Query heads/KV heads.")] = "32/8",
    head_size: Annotated[int, typer.Option()] = 128,
    block_size: Annotated[int, typer.Option(help="Tokens of a KV block.")] = 16,
    dtype: Annotated[
        Dtype, typer.Option(help="auto: bfloat16 on a GPU, else float32.")
    ] = Dtype.auto,
    cache_dtype: Annotated[CacheDtype, typer.Option(help="auto: the dtype.")] = CacheDtype.auto,
    window: Annotated[int | None, typer.Option(help="Tokens a query may see.")] = None,
    softcap: Annotated[float | None, typer.Option(help="c of c * tanh(score / c).")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="A recorded run (octavo record): its batches, block tables and shapes."),
    ] = None,
    traced: Annotated[int, typer.Option(min=1, help="Most kinds of steps from a recording.")] = 8,
    plan: Annotated[
        list[str] | None,
        typer.Option(help="tile_kv=32,num_warps=2: time this plan, too. May be repeated."),
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Time a grid of plans around the chosen one.")
    ] = False,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="sdpa, flex, vllm=CHECKOUT, ...: docs/peers.md. May be repeated.",
            show_default="sdpa, sdpa+gather",
        ),
    ] = None,
    host: Annotated[
        bool, typer.Option("--host", help="Time the host's part of a decode step, too.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seconds: Annotated[float, typer.Option(min=0, help="For each implementation of a case.")] = 0.5,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file, too.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="A folder for the plots and one HTML page that opens offline."),
    ] = None,
) -> None:
    """Verify kernels against an fp64 computation, then time them, in turns with torch and peers.

    Exit code 0: measured; 1: one of Octavo's own kernels was wrong or failed; 2: what was asked for cannot be run; 130:
    interrupted, and what was measured until then is shown and written.
    """
    if context.invoked_subcommand is not None:
        return
    from ..bench.kernel_cases import OPS
    from ..bench.kernel_run import KernelRun
    from ..bench.peers import parse_peer
    from ..models.llm import torch_device

    with refusing():
        on_gpu = (place := str(torch_device(device))).startswith("cuda")
        asked = KernelRun(
            ops=tuple(OPS) if op == ["all"] else tuple(op or ["paged_attention"]),
            batches=tuple(batch or (_GPU_BATCHES if on_gpu else _CPU_BATCHES)),
            shape=_shape(heads, head_size, block_size, dtype, cache_dtype, window, softcap, on_gpu),
            trace=trace,
            num_traced=traced,
            plans=tuple(plan or ()),
            sweep=sweep,
            peers=tuple(map(parse_peer, peer or ("sdpa", "sdpa+gather"))),
            host_contexts=_HOST_CONTEXTS if host else (),
            device=place,
            seconds=seconds,
        )
        if trace is not None and batch:
            raise ValueError("batch: expected none beside --trace, which has its own")
        _check_places(as_json, report)
        results, is_whole = _measure(asked, as_json)
        if results is None:
            raise typer.Exit(130)
        if is_whole and all(
            row.median_us is None and not row.is_fault for row in results.measurements
        ):
            notes = {row.note for row in results.measurements if row.is_own_choice and row.note}
            raise ValueError("; ".join(sorted(notes)) or "nothing was measured")
        _show(results)
        if as_json is not None:
            results.write(as_json)
        if report is not None:
            _write_report(results, report)
    if not is_whole:
        raise typer.Exit(130)
    if any(row.is_own_choice and row.is_fault for row in results.measurements):
        raise typer.Exit(1)


def _measure(asked: KernelRun, as_json: Path | None) -> tuple[BenchResults | None, bool]:
    """(what was measured, whether that is all): after Ctrl-C what there was after the last case."""
    so_far: list[BenchResults] = []

    def save(results: BenchResults) -> None:
        so_far[:] = [results]
        if as_json is not None:
            results.write(as_json)

    with Console(stderr=True).status("measuring") as status:
        try:
            return asked.measure(lambda what: status.update(escape(what)), save), True
        except KeyboardInterrupt:
            return (so_far[-1] if so_far else None), False


def _check_places(as_json: Path | None, report: Path | None) -> None:
    """That results can be written, before minutes are spent on them. Raises ValueError."""
    if as_json is not None and (as_json.is_dir() or not os.access(as_json.parent, os.W_OK)):
        raise ValueError(f"json: expected a file in a folder that can be written, got {as_json}")
    if report is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("report: expected matplotlib: pip install 'octavo[bench]'")
    try:
        report.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"report: {report} cannot be written: {error.strerror}") from error
    if not os.access(report, os.W_OK):
        raise ValueError(f"report: expected a folder that can be written, got {report}")


@bench.command()
def compare(
    old: Annotated[Path, typer.Argument(help="What --json wrote before.")],
    new: Annotated[Path, typer.Argument(help="And now.")],
    tolerance: Annotated[float, typer.Option(min=0, help="Share by which a time may grow.")] = 0.1,
) -> None:
    """Lay two runs side by side. Exit code 1 if something has become slower, or is lost; 2 if a file cannot be used."""
    from ..bench.compare import changes, changes_table, differences_of_machines
    from ..bench.results import read_results

    with refusing():
        if not tolerance < math.inf:
            raise ValueError(f"tolerance: expected a number from 0, got {tolerance}")
        before, after = read_results(old), read_results(new)
        listed = changes(before, after)
        if not any(change.old and change.new for change in listed):  # must not pass for "no slower"
            raise ValueError(
                f"compare: expected two runs of the same cases, got none that is in both {old} and {new}"
            )
    for note in differences_of_machines(before, after):
        typer.secho(f"notice: {note}", fg="yellow", err=True)
    for name, path, results in (("old", old, before), ("new", new, after)):
        typer.echo(f"{name}: {path}, commit {results.machine.commit or 'unknown'}")
    _wide_console().print(changes_table(listed, tolerance))
    if any(change.is_slower(tolerance) for change in listed):
        raise typer.Exit(1)


def _shape(
    heads: str,
    head_size: int,
    block_size: int,
    dtype: Dtype,
    cache_dtype: CacheDtype,
    window: int | None,
    softcap: float | None,
    on_gpu: bool,
) -> AttentionShape:
    import torch

    from ..bench.attention_problem import AttentionShape

    query, _, kv = heads.partition("/")
    if not (query.isdecimal() and kv.isdecimal()):
        raise ValueError(f"heads: expected QUERY/KV as in 32/8, got {heads!r}")
    name = ("bfloat16" if on_gpu else "float32") if dtype is Dtype.auto else dtype.value
    return AttentionShape(
        int(query),
        int(kv),
        head_size,
        block_size,
        getattr(torch, name),
        None if cache_dtype is CacheDtype.auto else getattr(torch, cache_dtype.value),
        window,
        softcap,
    )


def _wide_console() -> Console:
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 200  # nothing is folded or cut short in a file
    return console


def _show(results: BenchResults) -> None:
    from ..bench.tables import facts, kernel_tables

    console = _wide_console()
    console.print(facts(results))
    for table in kernel_tables(results, console.width):
        console.print(table)
    for cost in results.host_costs:
        console.print(
            f"host step, {cost.num_seqs} sequences x {cost.context_len} tokens: {cost.host_us:.0f} us, "
            f"{cost.host_us / cost.floor_us:.2f} x floor"
        )
    if results.machine.backend == "interpret":
        console.print("Times of an interpreter say nothing about those of a GPU.")


def _write_report(results: BenchResults, folder: Path) -> None:
    from ..bench.html_report import html_report
    from ..bench.plots import draw_all
    from ..bench.tables import markdown

    pictures = draw_all(results)
    try:
        for name, png in pictures.items():
            (folder / f"{name}.png").write_bytes(png)
        (folder / "report.html").write_text(html_report(results, pictures), encoding="utf-8")
        (folder / "report.md").write_text(markdown(results), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"report: {folder} cannot be written: {error.strerror}") from error
    results.write(folder / "results.json")
    typer.echo(f"{folder / 'report.html'}", err=True)
