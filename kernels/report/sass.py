"""NVIDIA machine code (SASS), as `nvdisasm -c` lists it and `cuobjdump -res-usage` sums it up."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .listing import Instruction, UnreadableCode

_LINE = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+(?P<guard>@\S+\s+)?(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*);"
)
_LABEL = re.compile(r"(?P<name>[.$\w]+):")
_LABEL_OPERAND = re.compile(r"`\((?P<name>[^)]+)\)")
_MMA = re.compile(r"(UTC)?[A-Z]+MMA")  # HMMA: one warp; HGMMA: a warpgroup; UTCHMMA: tensor memory
_INDIRECT = {"BRX", "BRXU", "JMX", "JMXU"}
_SYSTEM_SHARED = 1024  # bytes per program that some versions of the tools list as the kernel's own


def parse_listing(text: str, kernel: str) -> list[Instruction]:
    """The instructions of one kernel."""
    parsed, labels = [], {}
    for line in _section(text, kernel):
        if match := _LINE.match(line):
            parsed.append((match["guard"], match["opcode"], match["operands"].strip()))
        elif match := _LABEL.fullmatch(line):
            labels[match["name"]] = len(parsed)
        elif not line.startswith("."):  # directives
            raise UnreadableCode(f"{kernel}: expected an instruction or a label, got {line!r}")
    if not parsed:
        raise UnreadableCode(f"{kernel}: expected instructions in its section, got none")
    return [_instruction(*parts, labels, kernel) for parts in parsed]


def parse_usage(text: str, kernel: str) -> dict[str, int]:
    """Registers per thread, bytes of local memory per thread and bytes of static shared memory per program."""
    match = re.search(
        rf"Function {re.escape(kernel)}:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text
    )
    if match is None:
        raise UnreadableCode(f"{kernel}: expected its resource usage, got {text.strip()[-200:]!r}")
    registers, stack, shared, local = map(int, match.groups())
    return {
        "registers": registers,
        "spill_bytes": max(stack, local),
        "static_shared": 0 if shared == _SYSTEM_SHARED else shared,
    }


def _section(text: str, kernel: str) -> Iterator[str]:
    inside = False
    for line in map(str.strip, text.splitlines()):
        if line.split()[:1] == [".section"]:
            inside = line.split()[1].startswith(f".text.{kernel},")
        elif inside and line and not line.startswith("//"):
            yield line


def _instruction(
    guard: str | None, opcode: str, operands: str, labels: dict[str, int], kernel: str
) -> Instruction:
    base = opcode.split(".")[0]
    if base in _INDIRECT:
        raise UnreadableCode(f"{kernel}: {opcode} jumps to a place the listing does not name")
    target, falls_through = None, True
    if base in ("BRA", "CALL", "EXIT", "RET"):
        label = _LABEL_OPERAND.search(operands)
        condition = guard or (label and operands[: label.start()])  # `@P0 BRA` or `BRA.U UP0,`
        # to a label a call is a long jump; to a name it is a subroutine, and comes back
        if base == "BRA" or (base == "CALL" and label and label["name"].startswith(".L")):
            target = labels.get(label["name"]) if label else None
            if target is None:
                raise UnreadableCode(f"{kernel}: expected a known label, got {opcode} {operands}")
            falls_through = bool(condition)
        elif base in ("EXIT", "RET"):
            falls_through = bool(guard)
    return Instruction(
        opcode,
        target,
        falls_through,
        mma=base if _MMA.fullmatch(base) else None,
        load=_load(base, opcode),
        store=f"{base}.{_width(opcode)}" if base == "STG" else None,
        is_barrier=base == "BAR",
        is_spill=base in ("LDL", "STL"),
    )


def _load(base: str, opcode: str) -> str | None:
    if base.startswith(("UTMALDG", "UBLKCP")):  # the copy engine; its width is in no operand
        return base
    if base not in ("LDG", "LDGSTS"):
        return None
    return f"{base}.{_width(opcode)}"


def _width(opcode: str) -> str:
    for part in opcode.split(".")[1:]:
        if match := re.fullmatch(r"(?:U|S|ENL2)?(8|16|64|128|256)", part):
            return match[1]
    return "32"
