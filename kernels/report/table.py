"""The report's rows, and how they are printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .machine_code import MachineCode

_COLUMNS = (
    "case",
    "kernel",
    "warps",
    "regs",
    "spill",
    "shared",
    "occupancy",
    "mma",
    "global loads",
    "global stores",
)
_COLUMNS += ("bar", "loop", "per token", "compile s")
_TEXT_COLUMNS = {"case", "kernel", "mma", "global loads", "global stores"}


@dataclass(frozen=True)
class Row:
    """One launch on one target."""

    target: str
    triton: str  # version
    case: str
    kernel: str
    seconds: float | None  # to compile; None: it came from Triton's cache
    num_warps: int | None = None
    tile_kv: int | None = None  # KV tokens of one iteration of the main loop
    code: MachineCode | None = None
    error: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Row:
        fields = json.loads(line)
        code = fields.pop("code")
        return cls(**fields, code=MachineCode(**code) if code else None)


def print_table(rows: Sequence[Row], console: Console) -> None:
    """The rows of one target, and below them what failed."""
    table = Table(
        title=f"{rows[0].target}, Triton {rows[0].triton}",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in _TEXT_COLUMNS else "right")
    for row in rows:
        table.add_row(*(Text(cell) for cell in _cells(row)))
    console.print(table)
    for row in rows:
        if row.error:
            console.print(Text(f"{row.case} {row.kernel}: {row.error}", style="red"))


def _cells(row: Row) -> list[str]:
    code = row.code
    cells = [
        row.case,
        row.kernel.strip("_").removesuffix("_kernel"),
        _number(row.num_warps),
        _number(row.tile_kv),
    ]
    if code is None:
        return [*cells, "failed", *[""] * (len(_COLUMNS) - len(cells) - 1)]
    return [
        *cells,
        str(code.registers),
        str(code.spill_bytes),
        str(code.shared),
        f"{code.occupancy:.0%} {code.limit}",
        code.mma or "",
        " ".join(f"{count}×{load}" for load, count in code.loads.items()),
        " ".join(f"{count}×{store}" for store, count in code.stores.items()),
        _number(code.barriers),
        _number(code.loop_instructions),
        "" if code.instructions_per_token is None else f"{code.instructions_per_token:.1f}",
        "cached" if row.seconds is None else f"{row.seconds:.1f}",
    ]


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
