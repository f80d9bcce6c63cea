"""The command line: `octavo generate`, `record`, `replay`, `bench` and `kernels`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .commands.bench import bench
from .commands.kernels import kernels
from .commands.refusing import refusing
from .commands.replay import replay
from .commands.simulate import simulate

if TYPE_CHECKING:
    from .models.llm import LLM
    from .scheduler.outputs import RequestOutput

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Paged-attention inference on Triton kernels."
)
bench.command()(simulate)
app.add_typer(bench, name="bench")
app.add_typer(kernels, name="kernels")


@app.callback()
def _commands() -> None:
    """Paged-attention inference on Triton kernels."""


Prompts = Annotated[list[str], typer.Argument(help="One or more prompts, completed together.")]
ModelName = Annotated[
    str, typer.Option(help="Bundled name, .gguf file, Hugging Face directory or hub id.")
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate for each prompt.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus, 1 is off.")]
TopK = Annotated[int, typer.Option(help="Most likely tokens kept, -1 is off.")]
Seed = Annotated[int, typer.Option(help="Seed of the first prompt; the others count on from it.")]
Chat = Annotated[bool, typer.Option(help="Ask through the model's chat template.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")]
KVCacheDtype = Annotated[
    str,
    typer.Option(
        help="auto (the model's), fp8, fp8_e5m2, fp8_per_token_head or int8_per_token_head."
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
NumBlocks = Annotated[
    int | None, typer.Option(help="KV blocks in the pool; by default what memory allows.")
]
Stats = Annotated[
    bool, typer.Option(help="Show speed, KV block use and where each request's time went.")
]


@app.command()
def generate(
    prompts: Prompts,
    model: ModelName = "smollm2-135m",
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = -1,
    seed: Seed = 0,
    chat: Chat = False,
    dtype: Dtype = "auto",
    kv_cache_dtype: KVCacheDtype = "auto",
    device: Device = "auto",
    num_gpu_blocks: NumBlocks = None,
    stats: Stats = False,
) -> None:
    """Complete prompts and stream the text: one prompt as it grows, several when each is done."""
    _complete(
        prompts,
        {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k},
        seed,
        chat,
        stats,
        model=model,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        device=device,
        num_gpu_blocks=num_gpu_blocks,
    )


@app.command()
def record(
    prompts: Prompts,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The recording; one that is there is replaced.")
    ],
    model: ModelName = "smollm2-135m",
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = -1,
    seed: Seed = 0,
    chat: Chat = False,
    dtype: Dtype = "auto",
    kv_cache_dtype: KVCacheDtype = "auto",
    device: Device = "auto",
    num_gpu_blocks: NumBlocks = None,
    stats: Stats = False,
) -> None:
    """Complete prompts as `generate` does, and write every executed step to a file for `replay`."""
    llm = _complete(
        prompts,
        {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k},
        seed,
        chat,
        stats,
        model=model,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        device=device,
        num_gpu_blocks=num_gpu_blocks,
        record=output,
    )
    written = llm.recording
    assert written is not None
    typer.echo(f"{written.num_steps} steps, {written.num_bytes} bytes in {output}", err=True)


app.command()(replay)


def _complete(
    prompts: list[str], sampling: dict, seed: int, chat: bool, stats: bool, **engine: Any
) -> LLM:
    """Load a model, complete the prompts and print the texts."""
    from . import LLM, SamplingParams

    errors = Console(stderr=True)
    with refusing():
        params = [SamplingParams(seed=seed + i, **sampling) for i in range(len(prompts))]
        with errors.status("loading the model"):
            llm = LLM(**engine)
        started = time.perf_counter()
        asked = (
            [llm.tokenizer.encode_chat([{"role": "user", "content": p}]) for p in prompts]
            if chat
            else prompts
        )
        outputs = _stream(llm, prompts, asked, params)
        llm.close()
    if stats:
        _print_stats(llm, outputs, time.perf_counter() - started)
    return llm


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


def main() -> None:
    app()


if __name__ == "__main__":
    main()
