"""The figures of one compiled launch, read from its machine code."""

from __future__ import annotations

import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import amdgcn, sass
from .listing import Instruction, UnreadableCode, main_loop
from .occupancy import MACHINES, occupancy


@dataclass(frozen=True)
class MachineCode:
    """One compiled launch. The main loop is `listing.main_loop`, the loop over unmasked KV tiles."""

    registers: int  # per thread
    spill_bytes: int  # memory per thread that registers are moved to
    spill_accesses: int  # instructions that move them
    scalar_spills: int  # AMD: scalar registers kept in lanes of vector registers
    shared: int  # bytes per program
    occupancy: float  # share of the resident warps that the hardware allows
    limit: str  # what limits the occupancy
    mma: str | None  # kind of matrix product in the main loop; None: there is no main loop
    loads: dict[
        str, int
    ]  # global loads by width, in the main loop if there is one, else in the whole kernel
    stores: dict[str, int]  # global stores by width, in the whole kernel
    barriers: int | None  # in the main loop, so per tile
    loop_instructions: int | None
    instructions_per_token: (
        float | None
    )  # of all warps, per KV token: what one cached token costs to issue


def read_machine_code(
    asm: Mapping[str, Any],
    *,
    target: str,
    kernel: str,
    num_warps: int,
    shared: int,
    tensor_memory: int,
    tile_kv: int | None,
) -> MachineCode:
    """The figures of Triton's compiled `asm`. Raises UnreadableCode instead of guessing."""
    if "amdgcn" in asm:
        code = amdgcn.parse_assembly(asm["amdgcn"], kernel)
        usage = amdgcn.parse_metadata(asm["amdgcn"], kernel)
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(asm["cubin"])
            file.flush()
            # -ndf: no search for the targets of indirect jumps, which the parser refuses
            code = sass.parse_listing(_nvidia_tool("nvdisasm", "-c", "-ndf", file.name), kernel)
            report = _nvidia_tool("cuobjdump", "-res-usage", file.name)
        usage = sass.parse_usage(report, kernel)
    shared += usage.pop("static_shared", 0)
    resident, limit = occupancy(
        MACHINES[target],
        registers=usage["registers"],
        num_warps=num_warps,
        shared=shared,
        tensor_memory=tensor_memory,
    )
    return MachineCode(
        **{"scalar_spills": 0, **usage},
        spill_accesses=sum(i.is_spill for i in code),
        shared=shared,
        occupancy=round(resident, 3),
        limit=limit,
        **loop_figures(code, kernel=kernel, num_warps=num_warps, tile_kv=tile_kv),
    )


def loop_figures(
    code: Sequence[Instruction], *, kernel: str, num_warps: int, tile_kv: int | None
) -> dict[str, Any]:
    """The fields of `MachineCode` that are counted in the main loop."""
    loop = main_loop(code)
    if tile_kv is not None and loop is None:
        # a kernel that cannot run on the target may compile to a bare trap
        raise UnreadableCode(f"{kernel}: expected a loop with matrix products, got none")
    return {
        "mma": "+".join(sorted({i.mma for i in loop if i.mma})) if loop else None,
        "loads": _by_width(i.load for i in loop or code),
        "stores": _by_width(i.store for i in code),
        "barriers": sum(i.is_barrier for i in loop) if loop else None,
        "loop_instructions": len(loop) if loop else None,
        "instructions_per_token": (
            round(len(loop) * num_warps / tile_kv, 2) if loop and tile_kv else None
        ),
    }


def _by_width(accesses: Iterable[str | None]) -> dict[str, int]:
    return dict(sorted(Counter(filter(None, accesses)).items(), key=_widest))


def _widest(load: tuple[str, int]) -> tuple[int, str]:
    name, _, bits = load[0].partition(".")
    return -int(bits or 0), name


def _nvidia_tool(name: str, *arguments: str) -> str:
    """Standard output of a disassembler of Triton's package."""
    from triton import knobs

    done = subprocess.run(
        [getattr(knobs.nvidia, name).path, *arguments], capture_output=True, text=True
    )
    if done.returncode:
        raise UnreadableCode(f"{name}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
