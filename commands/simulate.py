"""`octavo bench simulate`: the scheduler's policies side by side, on a device that is a formula."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from .refusing import refusing

if TYPE_CHECKING:
    from ..bench.simulation import SimulationResult, Workload


def simulate(
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="default, priority, reserve, prefill-first, recompute, swap, no-prefix-cache, no-chunks, or fields of "
            "SchedulerConfig: block_size=32,max_num_batched_tokens=512. Give it several times.",
            show_default="default",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="h200 or a100.")] = "h200",
    model: Annotated[
        str, typer.Option(help="llama-3-8b, llama-3-70b-tp8 or smollm2-135m.")
    ] = "llama-3-8b",
    requests: Annotated[int, typer.Option(help="How many requests.")] = 2000,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second.", show_default="all at once")
    ] = None,
    prompt: Annotated[int, typer.Option(help="Mean tokens of a prompt of one's own.")] = 512,
    output: Annotated[int, typer.Option(help="Mean tokens of a completion.")] = 128,
    spread: Annotated[
        float, typer.Option(help="Deviation of the lengths' logarithms; 0 for equal lengths.")
    ] = 0.6,
    shared_prefix: Annotated[int, typer.Option(help="Tokens of a system prompt before it.")] = 0,
    shared_share: Annotated[float, typer.Option(help="Share of requests that have it.")] = 1.0,
    beams: Annotated[float, typer.Option(help="Share of requests that are beam searches.")] = 0.0,
    samples: Annotated[
        float, typer.Option(help="Share of requests with several completions.")
    ] = 0.0,
    width: Annotated[int, typer.Option(help="Beams or completions of such requests.")] = 4,
    urgent: Annotated[float, typer.Option(help="Share of requests with priority 0, not 1.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and kinds.")] = 0,
    pool_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of KV the device holds.", show_default="0.9 of its memory less the weights"
        ),
    ] = None,
    swap_space_gib: Annotated[float, typer.Option(help="Host memory to swap to.")] = 4.0,
    max_num_seqs: Annotated[int, typer.Option(help="Seats.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of a step.")] = 2048,
    async_scheduling: Annotated[
        bool, typer.Option("--async", help="Put steps together while the last one runs.")
    ] = False,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file, too.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw blocks and queues over time into this image.")
    ] = None,
) -> None:
    """Run the real scheduler on simulated time and compare policies. Nothing here is a measurement.

    Exit code 0: done; 2: an argument cannot be used.
    """
    from ..bench.simulation import make_workload

    with refusing():
        workload = make_workload(
            requests,
            rate=rate,
            prompt_len=prompt,
            output_len=output,
            spread=spread,
            shared_prefix=shared_prefix,
            shared_share=shared_share,
            beam_share=beams,
            sample_share=samples,
            width=width,
            urgent_share=urgent,
            seed=seed,
        )
        results = _run(
            workload,
            policy or ["default"],
            model,
            device,
            pool_tokens,
            swap_space_gib,
            {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens},
            async_scheduling,
        )
        _print(results)
        _write(results, as_json, plot)


def _run(
    workload: Workload,
    policies: list[str],
    model: str,
    device: str,
    pool_tokens: int | None,
    swap_space_gib: float,
    base: dict[str, object],
    async_scheduling: bool,
) -> dict[str, SimulationResult]:
    from ..bench import simulation

    shape = _known("model", model, simulation.MODELS)
    machine = _known("device", device, simulation.DEVICES)
    if not 0 <= swap_space_gib < 1 << 20:
        raise ValueError(f"swap_space_gib: expected a number >= 0, got {swap_space_gib!r}")
    if pool_tokens is None:
        pool_tokens = simulation.pool_tokens(shape, machine)
    configs = simulation.make_configs(
        policies,
        pool_tokens=pool_tokens,
        host_tokens=int(swap_space_gib * 2**30 // shape.kv_bytes_per_token),
        max_model_len=workload.longest,
        base=base,
    )
    results = {}
    with Console(stderr=True).status("simulating") as status:
        for name, config in configs.items():
            status.update(f"simulating {name}")
            results |= simulation.simulate(
                workload,
                {name: config},
                model=shape,
                device=machine,
                async_scheduling=async_scheduling,
            )
    return results


def _known(name: str, value: str, choices: Mapping):
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
    return choices[value]


def _print(results: Mapping[str, SimulationResult]) -> None:
    from ..bench.simulation import comparison_table, step_table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 400  # nothing is folded or cut short in a file
    console.print(comparison_table(results), step_table(results))


def _write(
    results: Mapping[str, SimulationResult], as_json: Path | None, plot: Path | None
) -> None:
    from ..bench import simulation

    if as_json is not None:
        try:
            as_json.write_bytes(simulation.as_json(results))
        except OSError as error:
            raise ValueError(f"json: {as_json} cannot be written: {error.strerror}") from error
    if plot is not None:
        simulation.plot_simulation(results, plot)
