"""AMD machine code, from the assembly text that Triton keeps with the code object."""

from __future__ import annotations

import re

from .listing import Instruction, UnreadableCode

_LINE = re.compile(r"(?P<opcode>[a-z]\w*)(?:\s+(?P<operands>.*))?")
_LABEL = re.compile(r"(?P<name>[.$\w]+):")
_LOAD = re.compile(r"(?P<unit>global|buffer|flat)_load_(?P<lds>lds_)?(?P<size>[a-z]+\d?)")
_STORE = re.compile(r"(?P<unit>global|buffer|flat)_store_(?P<size>[a-z]+\d?)")
_BITS = {"dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}
_BITS |= {"ushort": 16, "sshort": 16, "short": 16, "ubyte": 8, "sbyte": 8, "byte": 8}


def parse_assembly(text: str, kernel: str) -> list[Instruction]:
    """The instructions of one kernel."""
    match = re.search(rf"^{re.escape(kernel)}:.*?^\.Lfunc_end\d+:", text, re.M | re.S)
    if match is None:
        raise UnreadableCode(f"{kernel}: expected its code up to .Lfunc_end, got none")
    parsed, labels = [], {}
    for line in match[0].splitlines():
        line = line.split(";")[0].strip()
        if match := _LABEL.fullmatch(line):
            labels[match["name"]] = len(parsed)
        elif match := _LINE.fullmatch(line):
            parsed.append((match["opcode"], match["operands"] or ""))
        elif line and not line.startswith("."):  # directives
            raise UnreadableCode(f"{kernel}: expected an instruction or a label, got {line!r}")
    if not parsed:
        raise UnreadableCode(f"{kernel}: expected instructions in its code, got none")
    return [_instruction(*parts, labels, kernel) for parts in parsed]


def parse_metadata(text: str, kernel: str) -> dict[str, int]:
    """Registers per lane, bytes of scratch memory per lane, and scalar registers kept in lanes of vector registers."""
    metadata = text.partition(".amdgpu_metadata")[2]
    return {
        "registers": _field(metadata, "vgpr_count", kernel),
        "spill_bytes": max(
            _field(metadata, "private_segment_fixed_size", kernel),
            4 * _field(metadata, "vgpr_spill_count", kernel),
        ),
        "scalar_spills": _field(metadata, "sgpr_spill_count", kernel),
    }


def _field(metadata: str, name: str, kernel: str) -> int:
    match = re.search(rf"\.{name}:\s+(\d+)", metadata)
    if match is None:
        raise UnreadableCode(f"{kernel}: expected .{name} in the metadata, got none")
    return int(match[1])


def _instruction(opcode: str, operands: str, labels: dict[str, int], kernel: str) -> Instruction:
    if opcode.startswith(("s_setpc", "s_swappc", "s_call")):
        raise UnreadableCode(f"{kernel}: {opcode} jumps to a place the listing does not name")
    target = None
    if opcode.startswith(("s_branch", "s_cbranch")):
        target = labels.get(operands)
        if target is None:
            raise UnreadableCode(f"{kernel}: expected a known label, got {opcode} {operands}")
    return Instruction(
        opcode,
        target,
        falls_through=opcode not in ("s_branch", "s_endpgm"),
        mma="mfma" if opcode.startswith(("v_mfma", "v_smfma")) else None,
        load=_load(opcode, operands, kernel),
        store=_store(opcode, kernel),
        is_barrier=opcode == "s_barrier",
        is_spill=opcode.startswith("scratch_"),
    )


def _store(opcode: str, kernel: str) -> str | None:
    if not re.match(r"(global|buffer|flat)_store", opcode):
        return None
    match = _STORE.match(opcode)
    if match is None or match["size"] not in _BITS:
        raise UnreadableCode(f"{kernel}: expected a store of a known width, got {opcode}")
    return f"{match['unit']}_store.{_BITS[match['size']]}"


def _load(opcode: str, operands: str, kernel: str) -> str | None:
    if not re.match(r"(global|buffer|flat)_load", opcode):
        return None
    match = _LOAD.match(opcode)
    if match is None or match["size"] not in _BITS:
        raise UnreadableCode(f"{kernel}: expected a load of a known width, got {opcode}")
    to_lds = "_lds" if match["lds"] or operands.endswith(" lds") else ""
    return f"{match['unit']}_load{to_lds}.{_BITS[match['size']]}"
