"""How many programs of a kernel fit on one multiprocessor (NVIDIA) or compute unit (AMD), and what stands in the way."""

from __future__ import annotations

from dataclasses import dataclass

PARTITIONS = 4  # of registers and warps; the same on every target


@dataclass(frozen=True)
class Machine:
    """What one multiprocessor has."""

    lanes: int  # of a warp (wave)
    registers: int  # 32-bit, of one partition
    max_warps: int
    max_programs: int
    shared: int  # bytes
    system_shared: int = 0  # bytes that the system takes of it for each program
    tensor_memory: int | None = None  # columns


MACHINES = {
    "sm_80": Machine(32, 16384, 64, 32, 164 * 1024, 1024),
    "sm_90": Machine(32, 16384, 64, 32, 228 * 1024, 1024),
    "sm_100": Machine(32, 16384, 64, 32, 228 * 1024, 1024, 512),
    "gfx942": Machine(64, 32768, 32, 32, 64 * 1024),
}


def occupancy(
    machine: Machine, *, registers: int, num_warps: int, shared: int, tensor_memory: int = 0
) -> tuple[float, str]:
    """Share of the warps that can be resident, and what limits it. 0.0: the kernel cannot be launched."""
    warp_registers = _round_up(registers, 8) * machine.lanes
    limits = {
        "registers": machine.registers // warp_registers * PARTITIONS // num_warps,
        "shared": machine.max_programs,
        "warps": machine.max_warps // num_warps,
        "programs": machine.max_programs,
    }
    if program_shared := _round_up(shared + machine.system_shared, 128):
        limits["shared"] = machine.shared // program_shared
    if machine.tensor_memory is not None and tensor_memory:
        limits["tensors"] = machine.tensor_memory // tensor_memory
    limit = min(limits, key=limits.__getitem__)
    return limits[limit] * num_warps / machine.max_warps, limit


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
