"""Every kernel compiles for the GPUs we support, without a GPU, within budgets that are read from its machine code."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import octavo.kernels
import octavo.kernels.report
from octavo.__main__ import app
from octavo.kernels.report import measure, select_cases
from octavo.kernels.report.cases import CASES, LAYERS, SHAPES
from octavo.kernels.report.layer_cases import NARROW
from octavo.kernels.report.machine_code import MachineCode
from octavo.kernels.report.occupancy import MACHINES
from octavo.kernels.report.table import Row

ATTENTION = [
    *(f"decode-{shape}-{variant}" for shape in SHAPES for variant in ("split", "options")),
    *(f"prefill-{shape}-{variant}" for shape in SHAPES for variant in ("plain", "options")),
    *(f"{kernel}-{shape}-fp8" for kernel in ("decode", "prefill") for shape in SHAPES),
    *(f"decode-{shape}-drafts" for shape in SHAPES),
    *(
        f"{kernel}-d128-{name}-tokens"
        for kernel in ("decode", "prefill")
        for name in ("fp8", "int8")
    ),
    "decode-d128-int8",
    "decode-d64-int8-options",
    "decode-d256-fp8-options",
    "prefill-d128-int8-options",
    "prefill-d256-fp8-options",
    "decode-d128-whole",
    "prefill-d128-full",
]
OTHERS = [f"{op}-d128" for op in LAYERS]
EVERY_KERNEL = [*ATTENTION, *OTHERS]
COMPILED = {
    "sm_80": EVERY_KERNEL,
    "sm_90": [*EVERY_KERNEL, "decode-d64-window", "decode-d128-window"],
    "sm_100": [*(case for case in ATTENTION if case.endswith(("-split", "-plain"))), *OTHERS],
    "gfx942": EVERY_KERNEL,
}


@dataclass(frozen=True)
class Budgets:
    """What the kernels may take. Cases are decode and prefill on sm_90 with all options off, unless they say more."""

    per_token: dict[str, float]  # instructions per KV token
    barriers: dict[str, int]  # per tile
    window: float  # instructions per token with the window on, against off
    spills: dict[tuple[str, str], int] = field(default_factory=dict)  # bytes; all others: none


BUDGETS = {
    "default": Budgets(
        per_token={
            "decode-d64-split": 15,
            "decode-d128-split": 22,
            "decode-d128-fp8": 30,
            "decode-d128-fp8-tokens": 30,
            "decode-d128-int8-tokens": 41,
        },
        barriers={
            "decode-d64-split": 2,
            "decode-d128-split": 2,
            "decode-d256-split": 7,
            "decode-d128-fp8-tokens": 2,
        },
        window=1.35,
        # of sm_100 outside the tile loops; of int8, ptxas takes 168 registers of the 255 it may
        spills={
            ("sm_100", "prefill-d256-plain"): 32,
            ("sm_90", "decode-d64-int8-options"): 80,
            ("sm_90", "decode-d256-drafts"): 8,
        },
    ),
    "3.6": Budgets(
        per_token={"decode-d64-split": 24, "decode-d128-split": 33, "decode-d128-fp8": 49},
        barriers={"decode-d64-split": 6, "decode-d128-split": 6, "decode-d256-split": 9},
        window=1.35,
        spills={("sm_100", "prefill-d256-plain"): 40, ("gfx942", "prefill-d256-options"): 84},
    ),
}


def budgets_for(triton: str) -> Budgets:
    """By (major, minor); versions without a table of their own keep the default."""
    return BUDGETS.get(".".join(triton.split(".")[:2]), BUDGETS["default"])


def faults(rows: Sequence[Row], budgets: Budgets) -> list[str]:
    """What is over budget, a line each."""
    found = []
    codes: dict[str, MachineCode] = {}  # of the attention kernels
    for row in rows:
        if row.code is None:
            found.append(f"{row.case} {row.kernel}: {row.error}")
            continue
        if row.tile_kv:
            codes[row.case] = row.code
        allowed = budgets.spills.get((row.target, row.case), 0)
        if row.code.spill_bytes > allowed or (row.code.spill_accesses and not allowed):
            found.append(f"{row.case} {row.kernel}: spills {row.code.spill_bytes} bytes")
        if row.code.occupancy == 0:
            found.append(f"{row.case} {row.kernel}: cannot be launched, {row.code.limit}")
        if not row.tile_kv and row.kernel not in NARROW:
            for accesses in (row.code.loads, row.code.stores):
                narrow = [name for name in accesses if name.endswith((".16", ".8"))]
                if narrow or not any(name.endswith(".128") for name in accesses):
                    found.append(f"{row.case} {row.kernel}: {', '.join(accesses) or 'none'}")
    if rows[0].target != "sm_90":
        return found
    for case, most in budgets.per_token.items():
        per_token = codes[case].instructions_per_token or 0
        if not 0 < per_token <= most:
            found.append(f"{case}: {per_token} instructions per token")
    for case in [case for case in codes if case.endswith("-window")]:
        windowed = codes[case].instructions_per_token or 0
        split = codes[case.replace("-window", "-split")].instructions_per_token or 0
        if not 0 < windowed <= budgets.window * split:
            found.append(
                f"{case}: {windowed} instructions per token with the window on, {split} off"
            )
    for case, most_barriers in budgets.barriers.items():
        barriers = codes[case].barriers
        if barriers is None or barriers > most_barriers:
            found.append(f"{case}: {barriers} barriers per tile")
    for case, code in codes.items():
        if case.startswith("prefill") and code.mma != "HGMMA":
            found.append(f"{case}: {code.mma} in the main loop")
        if narrow := [load for load in code.loads if load.endswith((".16", ".8"))]:
            found.append(f"{case}: {', '.join(narrow)} in the main loop")
    return found


def kernel_names() -> set[str]:
    """All @triton.jit functions that are launched: those named `_<op>_kernel`."""
    names = set()
    for file in Path(octavo.kernels.__file__).parent.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                names.add(node.name)
    return names


@pytest.mark.parametrize("target", COMPILED)
def test_kernels_keep_their_budgets(target: str) -> None:
    rows = list(measure(target, COMPILED[target]))
    assert faults(rows, budgets_for(rows[0].triton)) == []
    if set(EVERY_KERNEL) <= set(COMPILED[target]):
        assert kernel_names() - {row.kernel for row in rows} == set()


GOOD = MachineCode(
    registers=160,
    spill_bytes=0,
    spill_accesses=0,
    scalar_spills=0,
    shared=0,
    occupancy=0.125,
    limit="registers",
    mma="HGMMA",
    loads={"LDGSTS.128": 4},
    stores={"STG.128": 4},
    barriers=2,
    loop_instructions=384,
    instructions_per_token=12.0,
)
DECODES = [
    f"decode-{s}-{variant}"
    for s in SHAPES
    for variant in ("split", "window", "fp8", "fp8-tokens", "int8-tokens")
]


def good_rows(target: str = "sm_90") -> list[Row]:
    cases = [*DECODES, *(f"prefill-{s}-plain" for s in SHAPES)]
    return [Row(target, "3.9.0", case, "_k_kernel", 1.0, 1, 32, GOOD) for case in cases]


@pytest.mark.parametrize(
    ("case", "change", "fault"),
    [
        ("decode-d64-split", {"spill_bytes": 8}, "spills 8 bytes"),
        ("decode-d64-split", {"spill_accesses": 2}, "spills 0 bytes"),
        ("decode-d64-split", {"occupancy": 0.0}, "cannot be launched, registers"),
        ("decode-d64-split", {"instructions_per_token": 15.5}, "15.5 instructions per token"),
        ("decode-d64-split", {"instructions_per_token": None}, "0 instructions per token"),
        ("decode-d128-fp8", {"instructions_per_token": 31.0}, "31.0 instructions per token"),
        ("decode-d128-window", {"instructions_per_token": 16.3}, "16.3 .* with the window on"),
        ("decode-d128-split", {"barriers": 3}, "3 barriers per tile"),
        ("prefill-d256-plain", {"mma": "HMMA"}, "HMMA in the main loop"),
        ("prefill-d256-plain", {"loads": {"LDG.16": 1}}, "LDG.16 in the main loop"),
    ],
)
def test_faults_are_found(case: str, change: dict, fault: str) -> None:
    budgets = BUDGETS["default"]
    assert faults(good_rows(), budgets) == []
    rows = [
        replace(row, code=replace(GOOD, **change)) if row.case == case else row
        for row in good_rows()
    ]
    found = faults(rows, budgets)
    assert found and all(case.rsplit("-", 1)[0] in line for line in found), found
    assert re.search(fault, found[0])


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"loads": {"LDG.64": 4}}, "x _x_kernel: LDG.64"),
        ({"stores": {"STG.128": 4, "STG.16": 1}}, "x _x_kernel: STG.128, STG.16"),
        ({"stores": {}}, "x _x_kernel: none"),
    ],
)
def test_narrow_accesses_of_small_kernels_are_faults(change: dict, fault: str) -> None:
    row = Row("sm_80", "3.9.0", "x", "_x_kernel", 1.0, 4, None, GOOD)
    assert faults([row], BUDGETS["default"]) == []
    assert faults([replace(row, code=replace(GOOD, **change))], BUDGETS["default"]) == [fault]
    exempt = replace(row, kernel="_sample_kernel", code=replace(GOOD, **change))
    assert faults([exempt], BUDGETS["default"]) == []


def test_a_launch_that_failed_is_a_fault() -> None:
    rows = [*good_rows("sm_80"), Row("sm_80", "3.9.0", "x", "_x_kernel", None, error="no such")]
    assert faults(rows, BUDGETS["default"]) == ["x _x_kernel: no such"]


def test_targets_are_the_same_in_both_tables() -> None:
    from octavo.kernels.report.compile import TARGETS

    assert set(TARGETS) == set(MACHINES) == set(COMPILED)


def test_cases_are_selected_by_parts_of_their_names() -> None:
    assert select_cases(["sm_90"], [""]) == list(CASES)
    assert select_cases(["sm_90"], ["norm-d64", "decode-d64-split"]) == [
        "decode-d64-split",
        "rms_norm-d64",
    ]
    with pytest.raises(ValueError, match=r"target: expected one of sm_80, .*, got 'sm_70'"):
        select_cases(["sm_70"], [""])
    with pytest.raises(
        ValueError, match=r"kernel: expected part of one of decode.*, got 'nothing'"
    ):
        select_cases(["sm_90"], ["decode", "nothing"])


def test_the_compiling_process_says_why_it_failed() -> None:
    with pytest.raises(
        RuntimeError, match=r"sm_90: the compiling process failed(.|\n)*got \['no such'\]"
    ):
        list(measure("sm_90", ["no such"]))


def run(*arguments: str):
    return CliRunner().invoke(app, ["kernels", "report", *arguments])


def test_command_line() -> None:
    """Although the tests run with TRITON_INTERPRET set."""
    result = run("--kernel", "rms_norm-d64", "--json")
    assert result.exit_code == 0, result.output
    rows = [Row.from_json(line) for line in result.stdout.splitlines()]
    assert [(row.target, row.kernel) for row in rows] == [("sm_90", "_rms_norm_kernel")] * 3
    assert all(row.code and "LDG.128" in row.code.loads and row.code.mma is None for row in rows)
    assert [Row.from_json(row.to_json()) for row in rows] == rows
    result = run("--kernel", "rms_norm-d64")  # now from Triton's cache
    assert result.exit_code == 0, result.output
    assert f"sm_90, Triton {rows[0].triton}" in result.stdout
    assert result.stdout.count("cached") == 3


def test_command_line_says_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Row("sm_80", "3.9.0", "decode-d64-split", "_k_kernel", None, error="too [big]")
    long = "apply_top_k_top_p_min_p", "decode-d128-int8-tokens-options"
    wide = replace(GOOD, loads={f"LDGSTS.{width}": 28 for width in (128, 64, 32, 16, 8)})
    others = [Row("sm_80", "3.9.0", long[1], f"_{long[0]}_kernel", 1.0, 4, None, wide)]
    rows = [*good_rows("sm_80"), *others, failed]
    monkeypatch.setattr(octavo.kernels.report, "measure", lambda target, cases: iter(rows))
    result = run("--target", "sm_80")
    assert result.exit_code == 1
    assert "decode-d64-split _k_kernel: too [big]" in result.stdout
    assert "12.0" in result.stdout and "HGMMA" in result.stdout
    assert all(name in result.stdout for name in long) and "…" not in result.stdout


@pytest.mark.parametrize("arguments", [["--target", "sm_70"], ["--kernel", "nothing"]])
def test_command_line_errors_are_one_line(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {arguments[0][2:]}: expected")
    assert len(result.stderr.splitlines()) == 1
