"""Every op's case takes what is right, on three kinds of cache, and refuses an implementation that is wrong or does nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo import kernels
from octavo.bench.attention_problem import AttentionShape, WrongResult
from octavo.bench.batch_specs import BatchSpec
from octavo.bench.kernel_cases import OPS, KernelCase, make_case, sampling
from octavo.bench.timing import TimedCall

CPU = torch.device("cpu")
SHAPES = {
    "fp32": AttentionShape(4, 2, 16, 8, torch.float32),
    "bf16": AttentionShape(4, 2, 16, 8, torch.bfloat16),
    "fp8": AttentionShape(4, 2, 16, 8, torch.bfloat16, torch.float8_e4m3fn),
    "e5m2": AttentionShape(4, 2, 16, 8, torch.float32, torch.float8_e5m2),
}
BATCH = BatchSpec.parse("2q1s40_q5s37")


@pytest.fixture(autouse=True)
def small_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "VOCAB_SIZE", 1000)


def case_of(
    op: str, shape: AttentionShape = SHAPES["fp32"], batch: BatchSpec = BATCH
) -> KernelCase:
    return make_case(op, batch, shape, CPU)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("op", OPS)
def test_all_that_is_timed_is_right(op: str, shape: AttentionShape) -> None:
    case = case_of(op, shape)
    assert case.op == op
    assert next(iter(case.calls)) == "octavo"
    assert case.bytes_moved > 0 and case.flops >= 0
    for _ in range(2):  # what a call left behind does no harm to the next
        for timed in case.calls.values():
            assert 0 <= case.verify(timed) < 0.13


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "shape",
    [AttentionShape(7, 1, 6, 1), AttentionShape(5, 5, 80, 7), AttentionShape(16, 1, 32, 256)],
    ids=str,
)
def test_odd_shapes(op: str, shape: AttentionShape) -> None:
    """Of heads, GQA ratios and blocks; a batch whose prefix is long enough for two blocks of 256 where they are shared."""
    batch = BatchSpec.parse("2q1s600" if op == "cascade_attention" else "q1s9_q3s5")
    case = case_of(op, replace(shape, dtype=torch.float32), batch)
    for timed in case.calls.values():
        case.verify(timed)


@pytest.mark.parametrize("text", ["q1", "300q1s3", "q40"])
@pytest.mark.parametrize("op", [op for op in OPS if op != "cascade_attention"])
def test_one_sequence_and_hundreds(op: str, text: str) -> None:
    case = case_of(op, batch=BatchSpec.parse(text))
    case.verify(case.calls["octavo"])


# ---------------------------------------------------------------- what is wrong


def _names(op: str) -> str:
    """Of `octavo.kernels`, the function that the case calls last."""
    return "lora_expand" if op == "lora" else op


def _changed(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(map(_changed, result))
    return result * 1.2 if result.is_floating_point() else result * 0 - 1


IN_PLACE = {
    "lora", "reshape_and_cache", "rope_and_cache", "rotary_embedding", "copy_blocks", "swap_blocks",
    "apply_penalties", "apply_top_k_top_p_min_p",
}  # fmt: skip


@pytest.mark.parametrize("shape", [SHAPES["fp32"], SHAPES["fp8"]], ids=["fp32", "fp8"])
@pytest.mark.parametrize("op", OPS)
def test_a_changed_result_is_refused(op: str, shape: AttentionShape, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """What an op returns grows by a fifth; what it writes in place is not written."""
    name = _names(op)
    real = getattr(kernels, name)
    wrong = (lambda *a, **k: None) if op in IN_PLACE else (lambda *a, **k: _changed(real(*a, **k)))
    if op == "paged_attention":
        monkeypatch.setattr("octavo.bench.attention_problem.paged_attention", wrong)
    monkeypatch.setattr(kernels, name, wrong)
    case = case_of(op, shape)
    with pytest.raises(WrongResult):
        case.verify(case.calls["octavo"])


@pytest.mark.parametrize("op", OPS)
def test_nothing_done_is_refused_after_it_was_done(op: str) -> None:
    """Another implementation has left the right result in the very memory that this one hands out."""
    case = case_of(op)
    real = next(iter(case.calls.values()))
    case.verify(real)
    with torch.inference_mode():
        kept = real.call()
    with pytest.raises((WrongResult, AttributeError, TypeError)):
        case.verify(TimedCall(lambda: kept, real.reset))


def _spoilt(op: str, fault: Callable[[dict[str, Any]], None], shape: AttentionShape = SHAPES["fp32"]) -> None:  # fmt: skip
    """The case of an op whose real call is followed by a fault in what its closure holds."""
    case = case_of(op, shape)
    real = case.calls["octavo"]
    held = dict(
        zip(real.call.__code__.co_freevars, (c.cell_contents for c in real.call.__closure__), strict=True)
    )  # fmt: skip

    def call() -> Any:
        result = real.call()
        fault(held)
        return result

    case.verify(real)
    with pytest.raises(WrongResult):
        case.verify(TimedCall(call, real.reset))


def _free_slot(held: dict[str, Any]) -> None:
    """Slots of the null block are nobody's."""
    held["caches"][0][0, 3, 0, 0] = 1.0


@pytest.mark.parametrize("op", ["reshape_and_cache", "rope_and_cache"])
def test_a_slot_of_nobody_written(op: str) -> None:
    _spoilt(op, _free_slot)


def _slot_of(held: dict[str, Any], which: int) -> torch.Tensor:
    return held["caches"][which].view(-1, 2, 16)[held["slots"][-1]]


@pytest.mark.parametrize("shape", [SHAPES["fp32"], SHAPES["fp8"]], ids=["fp32", "fp8"])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("op", ["reshape_and_cache", "rope_and_cache"])
def test_one_vector_of_the_cache_wrong(op: str, which: int, shape: AttentionShape) -> None:
    _spoilt(op, lambda held: _slot_of(held, which).copy_(_slot_of(held, which).float() * -1), shape)


def test_a_block_too_many_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernels.copy_blocks

    def more(pool: torch.Tensor, pairs: torch.Tensor) -> None:
        real(pool, pairs)
        pool[0] += 1

    monkeypatch.setattr(kernels, "copy_blocks", more)
    case = case_of("copy_blocks")
    with pytest.raises(WrongResult, match="same bytes"):
        case.verify(case.calls["octavo"])


def test_a_block_too_many_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernels.swap_blocks

    def more(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
        real(source, target, pairs)
        target[0] = 1

    monkeypatch.setattr(kernels, "swap_blocks", more)
    case = case_of("swap_blocks")
    with pytest.raises(WrongResult, match="same bytes"):
        case.verify(case.calls["octavo"])


@pytest.mark.parametrize("edge", [-1, 0])
def test_a_cascade_that_loses_a_token_at_the_seam(
    edge: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of the shared prefix, or the first after it: among thousands of tokens, in bf16."""
    batch, shape = BatchSpec.parse("2q1s4k"), SHAPES["bf16"]
    case = case_of("cascade_attention", shape, batch)
    case.verify(case.calls["octavo"])
    problem = case.calls["paged_attention"].call.__self__
    seam = 4095 // 2 // 8 * 8 + edge
    kept = torch.arange(4096) != seam

    def lossy() -> torch.Tensor:
        rows = []
        for seq in range(2):
            keys, values = (x[kept].repeat_interleave(2, 1).double() for x in problem.gathered(seq))
            scores = torch.einsum("hd,khd->hk", problem.q[seq].double(), keys) * problem.scale
            rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values))
        return torch.stack(rows).to(torch.bfloat16)

    with pytest.raises(WrongResult):
        case.verify(TimedCall(lossy))


# ---------------------------------------------------------------- figures


def test_bytes_and_flops_by_hand() -> None:
    """8 decodes, 4 query and 2 KV heads of 16 floats: 7 tokens, of which 5 are one prompt's."""
    tokens, hidden, kv = 7, 64, 32
    figures = {op: (case_of(op).bytes_moved, case_of(op).flops) for op in OPS}
    assert figures["rms_norm"] == (4 * (2 * tokens * hidden + hidden), 4 * tokens * hidden)
    assert figures["fused_add_rms_norm"] == (
        4 * (4 * tokens * hidden + hidden),
        5 * tokens * hidden,
    )
    assert figures["silu_and_mul"] == (4 * 3 * tokens * 224, 5 * tokens * 224)
    assert figures["gelu_and_mul"] == figures["silu_and_mul"]
    angle = tokens * 4 * 16
    rotated = tokens * (hidden + kv)
    assert figures["rotary_embedding"] == (4 * 2 * rotated + angle + 8 * tokens, 3 * rotated)
    assert figures["reshape_and_cache"] == (4 * 4 * tokens * kv + 8 * tokens, 0)
    written = 4 * (2 * tokens * hidden + 4 * tokens * kv) + angle + 16 * tokens
    assert figures["rope_and_cache"] == (written, 3 * rotated)
    block = 2 * 8 * 8 * kv * 4  # K and V, layers, tokens
    assert figures["copy_blocks"] == (2 * 3 * block, 0)
    assert figures["swap_blocks"] == (2 * 15 * block, 0)
    assert figures["merge_attention_states"] == (3 * 4 * (tokens * hidden + tokens * 4), 3 * tokens * hidden)  # fmt: skip
    adapters = 2 * 4 * 16 * hidden
    assert figures["lora"] == (4 * (3 * tokens * hidden + adapters), 4 * tokens * 16 * hidden)
    logits = 3 * 1000
    assert figures["apply_penalties"] == ((2 * 4 + 1 + 4) * logits, 5 * logits)
    assert figures["apply_top_k_top_p_min_p"] == (2 * 4 * logits, 3 * logits)
    assert figures["sample"] == (4 * logits, 4 * logits)


def test_bytes_of_a_shared_prefix() -> None:
    """Two decodes of 64 tokens, 31 // 8 = 3 shared blocks: 24 + 2 * 40 slots; 16 entries. A window that ends behind the
    prefix reads nothing of it."""
    batch = BatchSpec.parse("2q1s64")
    case = case_of("cascade_attention", batch=batch)
    fed = 2 * 2 * 64 * 4
    assert case.bytes_moved == (24 + 2 * 40) * 2 * 32 * 4 + fed + 4 * 16
    windowed = case_of("cascade_attention", replace(SHAPES["fp32"], window=10), batch)
    assert windowed.bytes_moved == 2 * 10 * 2 * 32 * 4 + fed + 4 * 4
    for timed in windowed.calls.values():
        windowed.verify(timed)


# ---------------------------------------------------------------- refusals


def test_unknown_ops_and_batches_without_a_prefix() -> None:
    with pytest.raises(ValueError, match=r"op: expected one of paged_attention, .*, got 'softmax'"):
        case_of("softmax")
    for text in ("q512", "q1s4k", "8q1s8"):
        with pytest.raises(ValueError, match="batch: expected two sequences or more"):
            case_of("cascade_attention", batch=BatchSpec.parse(text))
