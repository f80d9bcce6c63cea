"""What the compiler made of our attention kernels and of the Triton peers', side by side, with no GPU.

    python bench/peer_code.py --peer vllm=FOLDER --peer sglang=FOLDER [--target sm_90] [--markdown]

Every implementation is given the same problem (decodes and a prompt, bf16, blocks of 16) and its launches are compiled as its own code
makes them. `per token` is the main loop's instructions x warps / tile: what one cached token costs to issue, for each KV head.
`per row` divides it by the query rows that share the token: what to compare prompts by. Figures rank the work that is issued; they do
not say how fast a kernel is. Only launches that attend are shown, not those that merge splits.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from octavo.bench.attention_problem import AttentionProblem, AttentionShape, make_problem
from octavo.bench.batch_specs import BatchSpec
from octavo.bench.peers import Unsupported, parse_peer
from octavo.bench.plans import Plan, chosen_plan
from octavo.kernels.paged_prefill import plan_paged_prefill
from octavo.kernels.report.compile import Launch, captured, compile_for
from octavo.kernels.report.table import Row
from octavo.kernels.report.worker import row_of

_SHAPES = {
    "d64 9/3": AttentionShape(9, 3, 64),
    "d128 32/8": AttentionShape(32, 8, 128),
    "d128 32/8 fp8": AttentionShape(32, 8, 128, cache_dtype=torch.float8_e4m3fn),
    "d128 32/8 window": AttentionShape(32, 8, 128, window=96),
}
_BATCHES = {"decode, split": "2q1s512", "decode, whole": "256q1s32", "prompt": "q256"}
# what the peers call the KV tokens of an iteration
_TILES = ("TILE_KV", "TILE_SIZE", "BLOCK_N")
# and the rows of its matrix product, all query heads of a KV head
_ROWS = ("ROWS", "BLOCK_M", "BLOCK_H")
_MERGES = ("reduce_segments",)
_COLUMNS = ("implementation", "kernel", "warps", "rows", "tile", "regs", "spill", "shared", "mma", "bar", "loop", "per token", "per row")  # fmt: skip


def ours(target: str, problem: AttentionProblem) -> Callable[[], torch.Tensor]:
    """By its plan: past torch's dispatcher, which would send CPU tensors to the CPU's attention."""
    shape, group = problem.shape, problem.shape.num_q_heads // problem.shape.num_kv_heads
    if problem.batch.num_decodes:
        plan: Plan = chosen_plan(problem)
    else:
        plan = plan_paged_prefill(
            group=group,
            head_size=shape.head_size,
            element_size=shape.dtype.itemsize,
            warpgroup_mma=target == "sm_90",
            quantised=shape.stored_dtype != shape.dtype,
            warp_size=64 if target.startswith("gfx") else 32,
        )
    return lambda: problem.run(plan)


def rows(
    target: str, implementations: dict[str, Callable], problem: AttentionProblem
) -> Iterator[tuple[str, Row | str, int]]:
    """(implementation, figures of its launch or why there are none, query rows of a program)."""
    for name, prepare in implementations.items():
        launches: list[Launch] = []
        try:
            with captured(name, launches):
                prepare(problem)()
        except Unsupported as reason:
            yield name, str(reason), 0
            continue
        for launch in launches:
            tile, query_rows = (
                next((launch.options[key] for key in keys if key in launch.options), None)
                for keys in (_TILES, _ROWS)
            )
            if launch.kernel not in _MERGES and (tile is not None or launch.error):
                row = row_of(target, dataclasses.replace(launch, tile_kv=tile))
                yield name, row, query_rows or 0


def cells(name: str, row: Row | str, query_rows: int) -> tuple[str, ...]:
    if isinstance(row, str) or row.code is None:
        reason = row if isinstance(row, str) else row.error or "no code"
        return (f"{name}: {reason}", *[""] * (len(_COLUMNS) - 1))
    code = row.code
    return (
        name,
        row.kernel.strip("_"),
        str(row.num_warps),
        str(query_rows),
        str(row.tile_kv),
        str(code.registers),
        str(code.spill_bytes),
        str(code.shared),
        str(code.mma or ""),
        str(code.barriers),
        str(code.loop_instructions),
        f"{code.instructions_per_token or 0:.1f}",
        f"{(code.instructions_per_token or 0) / max(1, query_rows):.2f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Machine code of Triton attention kernels.")
    parser.add_argument("--peer", action="append", default=[], help="vllm=FOLDER, sglang=FOLDER")
    parser.add_argument("--target", default="sm_90")
    parser.add_argument("--markdown", action="store_true")
    asked = parser.parse_args()
    peers = [parse_peer(text) for text in asked.peer]
    implementations = {
        "octavo": partial(ours, asked.target),
        **{peer.name: peer.prepare for peer in peers},
    }
    compile_for(asked.target)
    console = Console(width=160)
    for shape_name, shape in _SHAPES.items():
        for batch_name, batch in _BATCHES.items():
            problem = make_problem(BatchSpec.parse(batch), shape)
            lines = [cells(*row) for row in rows(asked.target, implementations, problem)]
            title = f"{shape_name}, {batch_name}, {asked.target}"
            if asked.markdown:
                print(f"\n{title}\n\n| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}")
                print("\n".join(f"| {' | '.join(line)} |" for line in lines))
                continue
            table = Table(*_COLUMNS, title=title, title_justify="left", box=SIMPLE_HEAD)
            for line in lines:
                table.add_row(*line)
            console.print(table)


if __name__ == "__main__":
    main()
