"""Compile every kernel launch of the wrappers for a GPU that is not there, and say what came of it.

    python -m octavo.tests.kernels.aot sm_90       one JSON object per launch

A stand-in driver names the target, and each launch is asked for a warm-up: the real specialisation (divisibility by 16,
equality to 1, None) and the real launch options are compiled; nothing runs. One process compiles for one target, without
TRITON_INTERPRET, for Triton decides about the interpreter when a kernel is decorated.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
NUM_SMS = 132  # of the GPU that the plans are made for


@dataclass
class Compiled:
    """One launch."""

    case: str
    kernel: str
    seconds: float
    registers: int | None = None  # per thread
    spills: int | None = None  # bytes of local memory per thread (NVIDIA), spilled registers (AMD)
    shared: int | None = None  # bytes per program
    error: str | None = None


def compile_launches(target: str) -> list[Compiled]:
    """Every launch that the cases below make, compiled for the target."""
    os.environ.pop("TRITON_INTERPRET", None)
    results: list[Compiled] = []
    for name, case in CASES.items():
        with _captured(name, target, results):
            case(target)
    return results


@contextlib.contextmanager
def _captured(case: str, target: str, results: list[Compiled]) -> Iterator[None]:
    """Turn the launches of the block into compilations."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    class StandInDriver(DriverBase):
        """Knows its target and nothing else."""

        def __init__(self) -> None:
            self.launcher_cls = self.utils = None

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> GPUTarget:
            return GPUTarget(*TARGETS[target])

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_benchmarker(self):
            raise RuntimeError("there is no device to time on")

    launch = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        start = time.perf_counter()
        result = Compiled(case, self.fn.__name__, 0.0)
        try:
            kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
            result.shared = kernel.metadata.shared
            result.registers, result.spills = _resources(kernel.asm)
        except Exception as error:  # reported with the launch; the other launches go on
            result.error = f"{type(error).__name__}: {error}"
        result.seconds = round(time.perf_counter() - start, 2)
        results.append(result)

    driver.set_active(StandInDriver())
    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = launch


def _resources(asm: dict) -> tuple[int | None, int | None]:
    """Registers and spills, from the machine code."""
    if "amdgcn" in asm:
        registers = re.search(r"\.vgpr_count:\s+(\d+)", asm["amdgcn"])
        spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", asm["amdgcn"])
    else:
        import triton.backends.nvidia

        tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
        if not tool.exists():
            return None, None
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(asm["cubin"])
            file.flush()
            report = subprocess.run(
                [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        registers, spills = re.search(r"REG:(\d+)", report), re.search(r"LOCAL:(\d+)", report)
        stack = re.search(r"STACK:(\d+)", report)
        if stack and spills and int(stack[1]) > int(spills[1]):
            spills = stack
    return (int(registers[1]) if registers else None), (int(spills[1]) if spills else None)


# ---------------------------------------------------------------- what is compiled

SHAPES = {
    "d64": (9, 3, 64),
    "d128": (32, 8, 128),
    "d256": (16, 8, 256),
}  # query heads, KV heads, head size: SmolLM2-135M, Llama-3-8B, Gemma-2-9B


def _attention(shape: str, num_seqs: int, query_len: int, max_seq_len: int, **options) -> dict:
    num_q_heads, num_kv_heads, head_size = SHAPES[shape]
    pool = torch.empty(8, 2, 2, 16, num_kv_heads, head_size, dtype=torch.bfloat16)
    return {
        "q": torch.empty(num_seqs * query_len, num_q_heads, head_size, dtype=torch.bfloat16),
        "k_cache": pool[:, 1, 0],
        "v_cache": pool[:, 1, 1],
        "seq_lens": torch.full((num_seqs,), max_seq_len, dtype=torch.int32),
        "block_tables": torch.zeros(num_seqs, max_seq_len // 16, dtype=torch.int32),
        "max_seq_len": max_seq_len,
        "scale": head_size**-0.5,
        **options,
    }


def _all_options(shape: str) -> dict:
    num_q_heads, num_tokens = SHAPES[shape][0], 64
    return {
        "window": 1024,
        "softcap": 30.0,
        "alibi_slopes": torch.empty(num_q_heads),
        "sinks": torch.empty(num_q_heads, dtype=torch.bfloat16),
        "lse": torch.empty(num_tokens, num_q_heads),
    }


def _decode(shape: str, num_seqs: int, **options) -> None:
    from octavo.kernels.paged_decode import paged_decode, plan_paged_decode

    num_q_heads, num_kv_heads, head_size = SHAPES[shape]
    plan = plan_paged_decode(
        num_seqs=num_seqs,
        num_kv_heads=num_kv_heads,
        group=num_q_heads // num_kv_heads,
        head_size=head_size,
        max_seq_len=4096,
        num_sms=NUM_SMS,
    )
    paged_decode(**_attention(shape, num_seqs, 1, 4096), **options, plan=plan)


def _prefill(shape: str, target: str, **options: object) -> None:
    from octavo.kernels.paged_prefill import paged_prefill, plan_paged_prefill

    num_q_heads, num_kv_heads, head_size = SHAPES[shape]
    plan = plan_paged_prefill(
        group=num_q_heads // num_kv_heads,
        head_size=head_size,
        element_size=2,
        warpgroup_mma=target == "sm_90",
    )
    starts = torch.tensor([0, 32, 64], dtype=torch.int32)
    arguments = _attention(shape, 2, 32, 4096)
    paged_prefill(**arguments, **options, query_start_loc=starts, max_query_len=32, plan=plan)


def _layer_ops(shape: str) -> None:
    from octavo.kernels.activation import silu_and_mul
    from octavo.kernels.cache_write import reshape_and_cache
    from octavo.kernels.merge_states import merge_attention_states
    from octavo.kernels.norm import fused_add_rms_norm, rms_norm
    from octavo.kernels.rotary import rotary_embedding

    num_q_heads, num_kv_heads, head_size = SHAPES[shape]
    num_tokens, hidden = 32, num_q_heads * head_size
    qkv = torch.empty(num_tokens, num_q_heads + 2 * num_kv_heads, head_size, dtype=torch.bfloat16)
    q, k, v = qkv.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    x, weight = q.reshape(num_tokens, hidden), torch.empty(hidden, dtype=torch.bfloat16)
    pool = torch.empty(8, 2, 2, 16, num_kv_heads, head_size, dtype=torch.bfloat16)
    positions, lse = torch.arange(num_tokens), torch.empty(num_tokens, num_q_heads)
    rms_norm(x, weight, 1e-5)
    fused_add_rms_norm(x, x, weight, 1e-5)
    silu_and_mul(torch.empty(num_tokens, 6 * hidden, dtype=torch.bfloat16))
    for is_neox in (True, False):
        rotary_embedding(positions, q, k, torch.empty(4096, head_size), is_neox)
    reshape_and_cache(k, v, pool[:, 1, 0], pool[:, 1, 1], positions)
    merge_attention_states(q, lse, q, lse)


def _extra_layer_ops(shape: str) -> None:
    from octavo.kernels.activation import gelu_and_mul
    from octavo.kernels.norm import fused_add_rms_norm
    from octavo.kernels.rotary_cache_write import rope_and_cache

    num_q_heads, num_kv_heads, head_size = SHAPES[shape]
    num_tokens, hidden = 32, num_q_heads * head_size
    x = torch.empty(num_tokens, hidden, dtype=torch.bfloat16)
    gate_up = torch.empty(num_tokens, 6 * hidden, dtype=torch.bfloat16)
    for approximate in ("none", "tanh"):
        gelu_and_mul(gate_up, approximate)
    fused_add_rms_norm(x, x, torch.empty(hidden, dtype=torch.bfloat16), 1e-5, True)
    qkv = torch.empty(num_tokens, num_q_heads + 2 * num_kv_heads, head_size, dtype=torch.bfloat16)
    q, k, v = qkv.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    pool = torch.empty(8, 2, 2, 16, num_kv_heads, head_size, dtype=torch.bfloat16)
    positions = torch.arange(num_tokens)
    for rotary_size, is_neox in ((head_size, True), (head_size // 2, False)):
        cos_sin, caches = torch.empty(4096, rotary_size), (pool[:, 1, 0], pool[:, 1, 1])
        rope_and_cache(positions, q, k, v, cos_sin, *caches, positions, is_neox)
    for num_tokens in (32, 2048):
        _lora(num_tokens, hidden)
    for dtype in (torch.float32, torch.bfloat16):
        _sampling(dtype)


def _lora(num_tokens: int, hidden: int) -> None:
    from octavo.kernels.lora import lora_expand, lora_shrink

    num_adapters, max_rank, dtype = 8, 64, torch.bfloat16
    x, out = torch.empty(2, num_tokens, 3 * hidden, dtype=dtype)
    a = torch.empty(num_adapters, max_rank, 3 * hidden, dtype=dtype)
    ranks, order = (torch.zeros(size, dtype=torch.int32) for size in (num_adapters, num_tokens))
    starts = torch.zeros(num_adapters + 1, dtype=torch.int32)
    y = lora_shrink(x, a, ranks, order, starts, 1.0)
    lora_expand(y, a.transpose(1, 2).contiguous(), ranks, order, starts, out)


def _sampling(dtype: torch.dtype) -> None:
    from octavo.kernels.penalties import apply_penalties
    from octavo.kernels.sampling import sample
    from octavo.kernels.top_k_top_p import apply_top_k_top_p_min_p

    num_rows, vocab = 64, 128256
    logits = torch.empty(num_rows, vocab, dtype=dtype)
    column, seeds = torch.empty(num_rows), torch.arange(num_rows)
    counts = torch.empty(num_rows, vocab, dtype=torch.int32)
    apply_penalties(logits, counts > 0, counts, column, column, column)
    for temperatures in (column, None):
        apply_top_k_top_p_min_p(logits, seeds.int(), column, column, temperatures)
    sample(logits, column, seeds, seeds)


def _copies() -> None:
    from octavo.kernels.block_copy import copy_blocks
    from octavo.kernels.block_swap import SwapPlan, swap_blocks

    pool = torch.empty(8, 30, 2, 16, 3, 64, dtype=torch.bfloat16)
    pairs = torch.tensor([[0, 4], [1, 5]])
    copy_blocks(pool, pairs)
    swap_blocks(pool, torch.empty_like(pool), pairs, plan=SwapPlan(by_kernel=True))


CASES = {
    **{f"decode-{s}-split": lambda _, s=s: _decode(s, 1) for s in SHAPES},
    **{f"decode-{s}-whole": lambda _, s=s: _decode(s, 2048) for s in SHAPES},
    "decode-d128-options": lambda _: _decode("d128", 64, **_all_options("d128")),
    **{f"prefill-{s}": lambda target, s=s: _prefill(s, target) for s in SHAPES},
    "prefill-d128-full": lambda target: _prefill("d128", target, causal=False),
    **{
        f"prefill-{s}-options": lambda target, s=s: _prefill(s, target, **_all_options(s))
        for s in SHAPES
    },
    **{f"layer-{s}": lambda _, s=s: _layer_ops(s) for s in SHAPES if s != "d256"},
    **{f"layer-extra-{s}": lambda _, s=s: _extra_layer_ops(s) for s in SHAPES if s != "d256"},
    "copies": lambda _: _copies(),
}


if __name__ == "__main__":
    for compiled in compile_launches(sys.argv[1]):
        print(json.dumps(asdict(compiled)))
