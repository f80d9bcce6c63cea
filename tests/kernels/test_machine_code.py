"""The machine-code reader on small listings: what it counts, and that it refuses what it does not understand."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import pytest

from octavo.kernels.report import amdgcn, sass
from octavo.kernels.report.listing import Instruction, UnreadableCode, find_loops, main_loop
from octavo.kernels.report.machine_code import loop_figures
from octavo.kernels.report.occupancy import MACHINES, occupancy

HEADER = '\t.section\t.text._k_kernel,"ax",@progbits\n\t.align\t128\n.text._k_kernel:\n'


def listing(*lines: str) -> str:
    """As nvdisasm prints it: labels as they are, instructions with their addresses."""
    text, address = HEADER, 0
    for line in lines:
        if line.endswith(":"):
            text += line + "\n"
        else:
            text += f"        /*{address:04x}*/                   {line} ;\n"
            address += 16
    return text


def opcodes(code: Sequence[Instruction]) -> list[str]:
    return [instruction.opcode for instruction in code]


# a masked loop, the bulk, and a masked loop whose wait is repeated behind the kernel's end
THREE_LOOPS = listing(
    "LDC R1, c[0x0][0x28]",
    "@P0 BRA `(.L_x_2)",
    ".L_x_1:",
    "LDG.E R2, desc[UR4][R4.64]",
    "FSEL R6, R7, -INF , P1",
    "FSEL R8, R9, -INF , P1",
    "HMMA.16816.F32.BF16 R8, R4, R6, R8",
    "HMMA.16816.F32.BF16 R8, R4, R6, R8",
    "@!P0 BRA `(.L_x_1)",
    ".L_x_2:",
    "LDGSTS.E.BYPASS.128 [R20], desc[UR4][R4.64]",
    "BAR.SYNC.DEFER_BLOCKING 0x0",
    "HMMA.16816.F32.BF16 R8, R4, R6, R8",
    "HMMA.16816.F32.BF16 R8, R4, R6, R8",
    "BRA.U !UP0, `(.L_x_2)",
    ".L_x_3:",
    "LDG.E R2, desc[UR4][R4.64]",
    "LDG.E.U16 R2, desc[UR4][R4.64]",
    "LDG.E R2, desc[UR4][R4.64]",
    ".L_x_4:",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2",
    "@!P0 BRA `(.L_x_5)",
    ".L_x_6:",
    "FSEL R6, R7, -INF , P1",
    "HMMA.16816.F32.BF16 R8, R4, R6, R8",
    "HMMA.16816.F32.BF16 R8, R4, R6, R8",
    "@P2 BRA `(.L_x_3)",
    "@P0 EXIT",
    "STL [R1+0x8], R4",
    "EXIT",
    ".L_x_5:",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2",
    "@!P0 BRA `(.L_x_5)",
    "BRA `(.L_x_6)",
    ".L_x_7:",
    "BRA `(.L_x_7)",
    "NOP",
)


def test_sass_loops() -> None:
    code = sass.parse_listing(THREE_LOOPS, "_k_kernel")
    sizes = sorted(len(loop) for loop in find_loops(code))
    # the wait; the bulk; the masked loops, the second with its wait; the trailing trap is never reached
    assert sizes == [2, 5, 6, 12]
    bulk = main_loop(code)
    assert bulk is not None and "BAR.SYNC.DEFER_BLOCKING" in opcodes(bulk)


def test_sass_figures() -> None:
    code = sass.parse_listing(THREE_LOOPS, "_k_kernel")
    assert loop_figures(code, kernel="_k_kernel", num_warps=4, tile_kv=16) == {
        "mma": "HMMA",
        "loads": {"LDGSTS.128": 1},
        "stores": {},
        "barriers": 1,
        "loop_instructions": 5,
        "instructions_per_token": 1.25,
    }
    assert sum(instruction.is_spill for instruction in code) == 1


def test_the_bulk_is_the_shortest_loop_with_the_most_products() -> None:
    def loop(start: int, products: int, others: int) -> list[Instruction]:
        body = [Instruction("mma", mma="mma")] * products + [Instruction("other")] * others
        # equal instructions must stay different places
        return [Instruction(f"{i.opcode}.{start}.{n}", mma=i.mma) for n, i in enumerate(body)] + [
            Instruction(f"branch.{start}", target=start)
        ]

    code: list[Instruction] = []
    for products, others in ((0, 1), (4, 9), (4, 7), (4, 12), (2, 1)):
        code += loop(len(code), products, others)
    found = main_loop(code)
    assert found is not None and len(found) == 4 + 7 + 1
    # around it goes a loop that repeats all of them: it has more products, but is not a loop over tiles
    outer = [*code, Instruction("outer", target=0)]
    found = main_loop(outer)
    assert found is not None and len(found) == 4 + 7 + 1


def test_code_without_products() -> None:
    code = sass.parse_listing(
        listing(
            "LDG.E.64 R2, [R4]",
            "LDG.E.ENL2.256 R8, R2, [R4]",
            "UTMALDG.2D [UR4]",
            "@P0 STG.E.128 [R4.64], R8",
            "STG.E.U16 [R4.64], R8",
            "STG.E [R4.64], R8",
            "EXIT",
        ),
        "_k_kernel",
    )
    figures = loop_figures(code, kernel="_k_kernel", num_warps=4, tile_kv=None)
    assert figures["loads"] == {"LDG.256": 1, "LDG.64": 1, "UTMALDG": 1}
    assert figures["stores"] == {"STG.128": 1, "STG.32": 1, "STG.16": 1}
    assert figures["mma"] is figures["barriers"] is figures["instructions_per_token"] is None
    with pytest.raises(UnreadableCode, match="expected a loop with matrix products"):
        loop_figures(code, kernel="_k_kernel", num_warps=4, tile_kv=32)


def test_a_call_to_a_subroutine_comes_back() -> None:
    text = listing(
        ".L_x_1:",
        "CALL.REL.NOINC `($__internal_0_$__div)",
        "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24",
        "@P0 CALL.REL.NOINC `(.L_x_2)",
        "BRA `(.L_x_1)",
        ".L_x_2:",
        "EXIT",
        "$__internal_0_$__div:",
        "RET.REL.NODEC R2 `(_k_kernel)",
    )
    loop = main_loop(sass.parse_listing(text, "_k_kernel"))
    assert loop is not None and len(loop) == 4


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "expected instructions in its section"),
        (HEADER, "expected instructions in its section"),
        (listing("EXIT").replace("_k_", "_other_"), "expected instructions in its section"),
        (listing("exit now"), "expected an instruction or a label"),
        (listing("EXIT") + "    what is this\n", "expected an instruction or a label"),
        (listing("BRA `(.L_x_9)"), "expected a known label"),
        (listing("BRA 0x80"), "expected a known label"),
        (listing("BRX R4 -0x90"), "does not name"),
    ],
)
def test_unreadable_sass(text: str, fault: str) -> None:
    with pytest.raises(UnreadableCode, match=fault):
        sass.parse_listing(text, "_k_kernel")


def test_sass_usage() -> None:
    usage = " Function _k_kernel:\n  REG:161 STACK:{} SHARED:{} LOCAL:0 CONSTANT[0]:660 TEXTURE:0"
    assert sass.parse_usage(usage.format(24, 1024), "_k_kernel") == {
        "registers": 161,
        "spill_bytes": 24,
        "static_shared": 0,
    }
    assert sass.parse_usage(usage.format(0, 512), "_k_kernel")["static_shared"] == 512
    for text in ("", usage.format("UNKNOWN", 0), usage.format(0, 0).replace("_k_", "_other_")):
        with pytest.raises(UnreadableCode, match="expected its resource usage"):
            sass.parse_usage(text, "_k_kernel")


ASSEMBLY = textwrap.dedent("""\
    \t.text
    _k_kernel:                               ; @_k_kernel
    .Lfunc_begin0:
    ; %bb.0:
    \ts_load_dwordx2 s[2:3], s[0:1], 0x0
    \ts_cbranch_scc1 .LBB0_2
    .LBB0_1:                                ; =>This Inner Loop Header: Depth=1
    \t.loc\t1 2 3                         ; k.py:2:3
    \tbuffer_load_dwordx4 v[0:3], v4, s[4:7], 0 offen ; masked
    \tv_cndmask_b32_e32 v1, v2, v3, vcc
    \tv_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
    \ts_cbranch_vccnz .LBB0_1
    .LBB0_2:
    \tbuffer_load_dwordx2 v[0:1], v4, s[4:7], 0 offen
    \tglobal_load_lds_dwordx4 v[0:1], off
    \tglobal_load_short_d16_hi v1, v[2:3], off
    \tv_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
    \ts_barrier
    \ts_cbranch_scc0 .LBB0_2
    ; %bb.3:
    \tbuffer_store_dwordx4 v[0:3], v4, s[4:7], 0 offen
    \tglobal_store_short_d16_hi v[2:3], v1, off
    \tscratch_store_dword off, v1, s32
    \ts_endpgm
    .Lfunc_end0:
    \t.size\t_k_kernel, .Lfunc_end0-_k_kernel
    \t.amdgpu_metadata
        .private_segment_fixed_size: 8
        .sgpr_count:     85
        .sgpr_spill_count: 5
        .vgpr_count:     254
        .vgpr_spill_count: 3
    \t.end_amdgpu_metadata
    """)


def test_amdgcn_figures() -> None:
    code = amdgcn.parse_assembly(ASSEMBLY, "_k_kernel")
    figures = loop_figures(code, kernel="_k_kernel", num_warps=2, tile_kv=8)
    assert figures["loop_instructions"] == 4  # equal products: the shorter loop
    longer = ASSEMBLY.replace("\tv_cndmask", "\tv_nop\n\tv_nop\n\tv_nop\n\tv_cndmask")
    code = amdgcn.parse_assembly(longer, "_k_kernel")
    assert loop_figures(code, kernel="_k_kernel", num_warps=2, tile_kv=8) == {
        "mma": "mfma",
        "loads": {"global_load_lds.128": 1, "buffer_load.64": 1, "global_load.16": 1},
        "stores": {"buffer_store.128": 1, "global_store.16": 1},
        "barriers": 1,
        "loop_instructions": 6,
        "instructions_per_token": 1.5,
    }
    assert sum(instruction.is_spill for instruction in code) == 1
    assert amdgcn.parse_metadata(ASSEMBLY, "_k_kernel") == {
        "registers": 254,
        "spill_bytes": 12,  # the larger of the scratch and the spilled registers
        "scalar_spills": 5,
    }


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("_k_kernel:  ", "_other_kernel:  ", "expected its code"),
        (".Lfunc_end0:", "", "expected its code"),
        ("\ts_endpgm", "\t??", "expected an instruction or a label"),
        ("s_cbranch_scc0 .LBB0_2", "s_cbranch_scc0 .LBB0_9", "expected a known label"),
        ("s_endpgm", "s_setpc_b64 s[0:1]", "does not name"),
        ("buffer_load_dwordx2", "buffer_load_format_x", "expected a load of a known width"),
    ],
)
def test_unreadable_amdgcn(old: str, new: str, fault: str) -> None:
    assert old in ASSEMBLY
    with pytest.raises(UnreadableCode, match=fault):
        amdgcn.parse_assembly(ASSEMBLY.replace(old, new), "_k_kernel")


def test_amdgcn_code_without_instructions() -> None:
    with pytest.raises(UnreadableCode, match="expected instructions in its code"):
        amdgcn.parse_assembly("_k_kernel:\n; %bb.0:\n.Lfunc_end0:\n", "_k_kernel")


@pytest.mark.parametrize("field", ["vgpr_count", "vgpr_spill_count", "private_segment_fixed_size"])
def test_amdgcn_metadata_that_is_missing(field: str) -> None:
    with pytest.raises(UnreadableCode, match=rf"expected \.{field} in the metadata"):
        amdgcn.parse_metadata(ASSEMBLY.replace(f".{field}:", ".unknown:"), "_k_kernel")


@pytest.mark.parametrize(
    ("target", "launch", "expected"),
    [
        # 168 registers * 32 lanes = 5376 of 16384 in a partition: 3 warps in each of 4
        ("sm_90", {"registers": 161, "num_warps": 1, "shared": 0}, (12 / 64, "registers")),
        # 228 KiB over 19 KiB and the system's one: 11 programs
        ("sm_90", {"registers": 161, "num_warps": 1, "shared": 19456}, (11 / 64, "shared")),
        ("sm_80", {"registers": 32, "num_warps": 8, "shared": 0}, (1.0, "registers")),
        ("sm_80", {"registers": 16, "num_warps": 1, "shared": 0}, (0.5, "programs")),
        ("sm_80", {"registers": 32, "num_warps": 4, "shared": 200_000}, (0.0, "shared")),
        # 512 columns of tensor memory
        (
            "sm_100",
            {"registers": 64, "num_warps": 4, "shared": 0, "tensor_memory": 256},
            (8 / 64, "tensors"),
        ),
        (
            "sm_100",
            {"registers": 64, "num_warps": 4, "shared": 0, "tensor_memory": 576},
            (0.0, "tensors"),
        ),
        # 128 of 512 registers a lane: 4 waves in each of 4
        ("gfx942", {"registers": 128, "num_warps": 4, "shared": 0}, (0.5, "registers")),
        ("gfx942", {"registers": 64, "num_warps": 4, "shared": 32768}, (0.25, "shared")),
    ],
)
def test_occupancy(target: str, launch: dict, expected: tuple[float, str]) -> None:
    assert occupancy(MACHINES[target], **launch) == expected
