"""The process that `measure` starts: `python -m octavo.kernels.report.worker TARGET CASE...`, one JSON row a line."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import triton

from .compile import Launch, compile_launches
from .listing import UnreadableCode
from .machine_code import MachineCode, read_machine_code
from .table import Row


def rows(target: str, cases: Sequence[str]) -> Iterator[Row]:
    """The rows in order. The disassembler runs beside the compiler, for it takes half a second a launch."""
    with ThreadPoolExecutor(1) as reader:
        pending: deque[Future[Row]] = deque()
        for launch in compile_launches(target, cases):
            pending.append(reader.submit(row_of, target, launch))
            while pending and pending[0].done():
                yield pending.popleft().result()
        for row in pending:
            yield row.result()


def row_of(target: str, launch: Launch) -> Row:
    """What the machine code of a launch says."""
    code, error = None, launch.error
    if launch.compiled is not None:
        try:
            code = _read(target, launch)
        except UnreadableCode as fault:
            error = f"{type(fault).__name__}: {fault}"
    return Row(
        target=target,
        triton=triton.__version__,
        case=launch.case,
        kernel=launch.kernel,
        seconds=launch.seconds,
        num_warps=launch.compiled.metadata.num_warps if launch.compiled else None,
        tile_kv=launch.tile_kv,
        code=code,
        error=error,
    )


def _read(target: str, launch: Launch) -> MachineCode:
    metadata = launch.compiled.metadata
    return read_machine_code(
        launch.compiled.asm,
        target=target,
        kernel=launch.kernel,
        num_warps=metadata.num_warps,
        shared=metadata.shared,
        tensor_memory=getattr(metadata, "tmem_size", None) or 0,
        tile_kv=launch.tile_kv,
    )


def main() -> None:
    target, *cases = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for rows alone
        for row in rows(target, cases):
            print(row.to_json(), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
