"""The ops as torch sees them: schemas, fakes, compilation, backends, and errors that name the argument."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from octavo import kernels
from octavo.kernels import ops
from octavo.tests.kernels.cases import Batch

BATCH = {"seq_lens": [5, 9, 20], "query_lens": [1, 4, 20], "num_q_heads": 3, "num_kv_heads": 1}


def op_arguments() -> dict[str, tuple[Any, ...]]:
    """Example arguments of every registered op."""
    batch = Batch(**BATCH)
    state = torch.randn(4, 2, 8), torch.randn(4, 2)
    x, weight = torch.randn(4, 16), torch.randn(16)
    adapter_ids = torch.tensor([1, 0, 1, 1], dtype=torch.int32)
    adapters = (torch.tensor([3, 3], dtype=torch.int32), *kernels.group_by_adapter(adapter_ids, 2))
    index = (batch.query_start_loc, batch.seq_lens_tensor, batch.block_tables)
    out, lse = torch.zeros(25, 3, 32), torch.zeros(25, 3)
    attention = (
        batch.q,
        batch.k_cache.nan_to_num(),
        batch.v_cache.nan_to_num(),
        *index,
        20,
        20,
        0.2,
        True,
    )
    rules = (
        7,
        5,
        2.0,
        torch.rand(3),
        torch.randn(3),
        None,
        None,
        None,
        None,
        1,
        1,
        False,
        out,
        lse,
    )
    q, k_cache, v_cache, *index, _, _, _, _ = attention
    prefix = (torch.zeros(0, dtype=torch.int32), index[2], *index[:2])
    return {
        "paged_attention": (*attention, *rules),
        "cascade_attention": (q, k_cache, v_cache, *prefix, 20, 20, 0.2, True, *rules),
        "merge_attention_states": (*state, *state),
        "reshape_and_cache": (
            torch.randn(4, 2, 8),
            torch.randn(4, 2, 8),
            torch.zeros(3, 4, 2, 8),
            torch.zeros(3, 4, 2, 8),
            torch.tensor([3, -1, 7, 8]),
        ),
        "copy_blocks": (torch.randn(4, 6), torch.tensor([[0, 1], [0, 2]])),
        "swap_blocks": (torch.randn(4, 6), torch.randn(3, 6), torch.tensor([[3, 1], [0, 2]])),
        "rms_norm": (x, weight, 1e-5),
        "fused_add_rms_norm": (x, x.clone(), weight, 1e-5),
        "rotary_embedding": (
            torch.arange(4),
            torch.randn(4, 3, 8),
            torch.randn(4, 1, 8),
            torch.randn(9, 8),
            True,
        ),
        "rope_and_cache": (
            torch.arange(4),
            torch.randn(4, 3, 8),
            torch.randn(4, 1, 8),
            torch.randn(4, 1, 8),
            torch.randn(9, 8),
            torch.zeros(3, 4, 1, 8),
            torch.zeros(3, 4, 1, 8),
            torch.tensor([3, -1, 7]),
            True,
        ),
        "group_by_adapter": (adapter_ids, 2),
        "lora_shrink": (x, torch.randn(2, 3, 16), *adapters, 0.5),
        "lora_expand": (
            torch.randn(4, 3),
            torch.randn(2, 20, 3),
            *adapters,
            torch.randn(4, 60)[:, 20:40],
        ),
        "apply_penalties": (
            x,
            x > 0,
            torch.randint(0, 3, (4, 16), dtype=torch.int32),
            *(0.5 + torch.rand(3, 4)),
        ),
        "apply_top_k_top_p_min_p": (
            x,
            torch.tensor([0, 3, 16, 1], dtype=torch.int32),
            *torch.rand(2, 4),
            torch.rand(4),
        ),
        "sample": (x, torch.tensor([0.0, 1.0, 0.5, 2.0]), torch.arange(4), torch.arange(4)),
        "silu_and_mul": (x,),
        "gelu_and_mul": (x, "tanh"),
    }


@pytest.mark.parametrize("name", kernels.__all__)
def test_opcheck(name) -> None:
    torch.library.opcheck(getattr(torch.ops.octavo, name).default, op_arguments()[name])


def test_opcheck_of_attention_without_options() -> None:
    arguments = list(op_arguments()["paged_attention"])
    arguments[10:19] = [None] * 9
    arguments[-1] = None
    torch.library.opcheck(torch.ops.octavo.paged_attention.default, tuple(arguments))


@pytest.mark.parametrize("name", ["reshape_and_cache", "rope_and_cache"])
@pytest.mark.parametrize("kind", ["head", "token"])
def test_opcheck_of_scaled_writes(name, kind) -> None:
    """Only scale caches are written to, and they may be parts of one tensor with the caches."""
    arguments = [*op_arguments()[name]]
    at = next(i for i, x in enumerate(arguments) if isinstance(x, torch.Tensor) and x.dim() == 4)
    num_blocks, block_size, heads, _ = arguments[at].shape
    arguments[at : at + 2] = [x.char() for x in arguments[at : at + 2]]
    beside = torch.ones(num_blocks, 2, block_size, heads)
    scales = [torch.ones(heads)] * 2 if kind == "head" else list(beside.unbind(1))
    scales = ops.cache.static_and_caches(*scales)
    op = getattr(torch.ops.octavo, name).default
    torch.library.opcheck(op, (*arguments, *scales))
    op(*arguments, *scales)
    assert (beside != 1).any() == (kind == "token")


def test_scales_are_written_in_a_compiled_graph() -> None:
    k, slots = torch.randn(4, 2, 8), torch.tensor([3, -1, 7, 8])

    def write(caches, scales):
        kernels.reshape_and_cache(k, -k, *caches, slots, *scales)
        return scales[0].sum()

    states = []
    for function in (write, torch.compile(write, fullgraph=True, backend="aot_eager")):
        caches = torch.zeros(2, 3, 4, 2, 8, dtype=torch.int8)
        scales = torch.ones(3, 2, 4, 2)
        total = function(tuple(caches), scales.unbind(1))
        states.append((caches, scales, total))
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
    assert (states[0][1] != 1).sum() == 2 * 3 * 2


def layer(
    batch: Batch, qkv: torch.Tensor, caches, slots, positions, weight, cos_sin
) -> torch.Tensor:
    """One attention layer, as a model would write it."""
    normed, residual = kernels.fused_add_rms_norm(qkv, qkv, weight, 1e-5)
    q, k, v = normed.unflatten(-1, (5, 32)).split([3, 1, 1], dim=1)
    kernels.rotary_embedding(positions, q, k, cos_sin)
    kernels.reshape_and_cache(k, v, *caches, slots)
    out, lse = kernels.paged_attention(q, *caches, **batch.arguments, return_lse=True)
    out, _ = kernels.merge_attention_states(out, lse, out, lse)
    gated = kernels.silu_and_mul(kernels.rms_norm(residual, weight, 1e-5))
    return out.sum() + gated.sum()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_layer_is_one_graph_and_gives_the_same(backend) -> None:
    batch = Batch(**BATCH, num_decodes=1)
    slots = [
        int(batch.block_tables[row, i // 16]) * 16 + i % 16
        for row, (length, queries) in enumerate(zip(batch.seq_lens, batch.query_lens, strict=True))
        for i in range(length - queries, length)
    ]
    angles = torch.randn(20, 16)
    arguments = (
        torch.randn(25, 160),
        torch.tensor(slots),
        torch.randint(0, 20, (25,)),
        torch.rand(160),
        torch.cat([angles.cos(), angles.sin()], dim=-1),
    )
    pool = torch.zeros(batch.k_cache.shape[0], 2, *batch.k_cache.shape[1:])
    pools = pool, pool.clone()

    def run(function, pool):
        qkv, *rest = arguments
        return function(batch, qkv, (pool[:, 0], pool[:, 1]), *rest)

    expected = run(layer, pools[0])
    actual = run(torch.compile(layer, fullgraph=True, backend=backend), pools[1])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pools[1], pools[0])


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "OCTAVO_BACKEND")}
    return subprocess.run(
        [sys.executable, "-c", code], env={**env, **environment}, capture_output=True, text=True
    )


def test_triton_is_not_imported_for_cpu_tensors() -> None:
    code = (
        "import sys, torch, octavo.kernels as kernels\n"
        "kernels.silu_and_mul(torch.randn(2, 8))\n"
        "assert 'triton' not in sys.modules"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_the_interpreter_is_a_backend() -> None:
    code = (
        "import sys, torch, octavo.kernels as kernels\n"
        "x = torch.randn(2, 8, dtype=torch.bfloat16)\n"
        "gate, up = x.float().chunk(2, dim=-1)\n"
        "expected = (torch.nn.functional.silu(gate) * up).bfloat16()\n"
        "torch.testing.assert_close(kernels.silu_and_mul(x), expected)\n"
        "assert 'octavo.kernels.activation' in sys.modules\n"
        "assert callable(kernels.rms_norm) and callable(kernels.copy_blocks)"
    )
    done = run_python(code, OCTAVO_BACKEND="interpret")
    assert done.returncode == 0, done.stderr


def test_an_unknown_backend_is_refused() -> None:
    done = run_python("import octavo.kernels.ops", OCTAVO_BACKEND="gpu")
    assert 'OCTAVO_BACKEND: expected "auto" or "interpret", got "gpu"' in done.stderr


def attention_with(**changes: Any) -> None:
    batch = Batch(**BATCH)
    arguments = {
        "q": batch.q,
        "k_cache": batch.k_cache,
        "v_cache": batch.v_cache,
        **batch.arguments,
    }
    kernels.paged_attention(**{**arguments, **changes})


QUANTISED_CACHES = {
    name: torch.zeros(6, 16, 1, 32, dtype=torch.int8) for name in ("k_cache", "v_cache")
}
BAD_ATTENTION = {
    "q: expected": {"q": torch.randn(25, 3, 64)[..., ::2]},
    "k_cache: expected float32": {"k_cache": torch.zeros(4, 16, 1, 32).half()},
    "v_cache: expected": {"v_cache": torch.zeros(4, 8, 1, 32)},
    "block_tables: expected int32": {"block_tables": torch.zeros(3, 9, dtype=torch.int64)},
    "seq_lens: expected int32": {"seq_lens": torch.tensor([5, 9, 20])},
    "query_start_loc: expected int32": {"query_start_loc": torch.zeros(3, dtype=torch.int32)},
    "alibi_slopes: expected float32": {"alibi_slopes": torch.zeros(4)},
    "sinks: expected": {"sinks": torch.zeros(3, dtype=torch.int32)},
    "window: expected a positive": {"window": 0},
    "softcap: expected a positive": {"softcap": -1.0},
    "num_decodes: expected 0 to 3": {"num_decodes": 4},
    "out: expected float32": {"out": torch.zeros(25, 3, 16)},
    "k_scale: expected None with a cache that is not": {"k_scale": torch.zeros(6, 16, 1)},
    r"v_scale: expected float32 \[6, 16, 1\] like the other scale, got None": {
        **QUANTISED_CACHES,
        "k_scale": torch.zeros(6, 16, 1),
    },
    r"k_scale: expected float32 \[6, 16, 1\], got float32 \[\]": {
        **QUANTISED_CACHES,
        "k_scale": torch.tensor(1.0),
        "v_scale": torch.zeros(6, 16, 1),
    },
    r"v_scale: expected float32 \[6, 16, 1\], got float32 \[6, 8, 1\]": {
        **QUANTISED_CACHES,
        "k_scale": torch.zeros(6, 16, 1),
        "v_scale": torch.zeros(6, 8, 1),
    },
}


@pytest.mark.parametrize("message", BAD_ATTENTION)
@pytest.mark.parametrize("triton", [False, True], ids=["cpu", "triton"])
def test_bad_attention_arguments(monkeypatch, message, triton) -> None:
    """B81: an index tensor of another dtype or shape is refused, not read as garbage."""
    if triton:
        monkeypatch.setattr(ops.attention, "_paged_attention", ops.attention._triton_attention)
    with pytest.raises(ValueError, match=message):
        attention_with(**BAD_ATTENTION[message])


def test_the_whole_message() -> None:
    with pytest.raises(ValueError) as raised:
        attention_with(block_tables=torch.zeros(2, 9, dtype=torch.int64))
    assert str(raised.value) == "block_tables: expected int32 [3, *], got int64 [2, 9]"


def test_heads_must_divide() -> None:
    with pytest.raises(ValueError, match="q: expected a multiple of 2 KV heads, got 3 heads"):
        attention_with(k_cache=torch.zeros(4, 16, 2, 32), v_cache=torch.zeros(4, 16, 2, 32))


X, CACHE, SLOTS = torch.randn(4, 2, 8), torch.zeros(3, 4, 2, 8), torch.arange(4)
INDEX, COLUMN = SLOTS.int(), torch.rand(4)
BAD_ARGUMENTS = {
    "slot_mapping: expected int64": ("reshape_and_cache", (X, X, CACHE, CACHE, SLOTS.int())),
    "slot_mapping: expected at most 4": (
        "reshape_and_cache",
        (X, X, CACHE, CACHE, torch.arange(5)),
    ),
    "k_cache: expected": ("reshape_and_cache", (X, X, CACHE[..., :4], CACHE[..., :4], SLOTS)),
    "v: expected": ("reshape_and_cache", (X, X[:3], CACHE, CACHE, SLOTS)),
    "pairs: expected int64": ("copy_blocks", (X, torch.zeros(2, 3, dtype=torch.int64))),
    "dst_pool: expected": ("swap_blocks", (X, CACHE, torch.zeros(0, 2, dtype=torch.int64))),
    "k: expected heads of one number or more, got [4, 0, 8]": (
        "reshape_and_cache",
        (X[:, :0], X[:, :0], CACHE[:, :, :0], CACHE[:, :, :0], SLOTS),
    ),
    "v: expected heads of one number or more, got [4, 2, 0]": (
        "rope_and_cache",
        (SLOTS, X, X, X[..., :0], torch.zeros(9, 8), CACHE, CACHE[..., :0], SLOTS),
    ),
    "x: expected at least one axis": ("rms_norm", (torch.tensor(1.0), torch.ones(1), 1e-5)),
    "weight: expected": ("rms_norm", (X, torch.ones(4), 1e-5)),
    "residual: expected": ("fused_add_rms_norm", (X, X[:2], torch.ones(8), 1e-5)),
    "positions: expected int64": ("rotary_embedding", (SLOTS.int(), X, X, torch.zeros(9, 8))),
    "cos_sin: expected an even width": ("rotary_embedding", (SLOTS, X, X, torch.zeros(9, 10))),
    'approximate: expected "none" or "tanh"': ("gelu_and_mul", (X, "sigmoid")),
    "q: expected float32|float16|bfloat16": (
        "rope_and_cache",
        (SLOTS, X.double(), X, X, torch.zeros(9, 8), CACHE, CACHE, SLOTS),
    ),
    "cos_sin: expected float32": (
        "rope_and_cache",
        (SLOTS, X, X, X, torch.zeros(9, 8).half(), CACHE, CACHE, SLOTS),
    ),
    "v_cache: expected": (
        "rope_and_cache",
        (SLOTS, X, X, X, torch.zeros(9, 8), CACHE, CACHE[:, :2], SLOTS),
    ),
    "adapter_ids: expected int32": ("group_by_adapter", (SLOTS, 2)),
    "num_adapters: expected a number >= 0": ("group_by_adapter", (SLOTS.int(), -1)),
    "a: expected": ("lora_shrink", (X[:, 0], X[..., :4], INDEX, INDEX, INDEX, 1.0)),
    "adapter_starts: expected": ("lora_shrink", (X[:, 0], X, INDEX, INDEX, INDEX, 1.0)),
    "token_order: expected": ("lora_expand", (X[:, 0], X, INDEX, INDEX[:3], INDEX, X[:, 0, :2])),
    "out: expected float32": ("lora_expand", (X[:, 0], X, INDEX, INDEX, INDEX, X[:, 0])),
    "prompt_mask: expected bool": (
        "apply_penalties",
        (X[:, 0], X[:, 0], INDEX, *(X[:, 0, 0],) * 3),
    ),
    "frequency: expected float32": (
        "apply_penalties",
        (X[:, 0], X[:, 0] > 0, X[:, 0].int(), COLUMN, COLUMN.half(), COLUMN),
    ),
    "top_k: expected int32": ("apply_top_k_top_p_min_p", (X[:, 0], SLOTS, COLUMN, COLUMN)),
    "min_p: expected float32 [4]": (
        "apply_top_k_top_p_min_p",
        (X[:, 0], INDEX, COLUMN, COLUMN[:3]),
    ),
    "logits: expected": ("sample", (X, COLUMN, SLOTS, SLOTS)),
    "logits: expected a vocabulary": ("sample", (X[:, 0, :0], COLUMN, SLOTS, SLOTS)),
    "logits: expected a contiguous last axis": (
        "sample",
        (torch.zeros(8, 4).t(), COLUMN, SLOTS, SLOTS),
    ),
    "seeds: expected int64": ("sample", (X[:, 0], COLUMN, INDEX, SLOTS)),
    "x: expected an even last axis": ("silu_and_mul", (torch.zeros(2, 3),)),
    "x: expected float32|float16|bfloat16": ("silu_and_mul", (torch.zeros(2, 4).double(),)),
    "lse_b: expected float32": ("merge_attention_states", (X, X[..., 0], X, X[..., 0].double())),
}


@pytest.mark.parametrize("message", BAD_ARGUMENTS)
def test_bad_arguments(message) -> None:
    name, arguments = BAD_ARGUMENTS[message]
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(kernels, name)(*arguments)


def test_a_plan_is_for_decodes_or_prefills_only() -> None:
    with pytest.raises(ValueError, match="plan: expected decodes or prefills only"):
        attention_with(num_decodes=1, plan=object())
