"""Norms, rotary embedding, gated activation and the merge of attention states, against the oracle."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.kernels import activation, cpu, merge_states, norm, reference, rotary
from octavo.tests.kernels.cases import assert_close, error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["cpu", "triton"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def device_of(implementation: str) -> str:
    return "cpu" if implementation == "cpu" else DEVICE


@IMPLEMENTATIONS
@DTYPES
@pytest.mark.parametrize("shape", [(1, 576), (5, 64), (3, 2, 80), (2, 3000), (0, 8)], ids=str)
def test_norms(implementation, dtype, shape) -> None:
    device, ops = device_of(implementation), cpu if implementation == "cpu" else norm
    wide = (3 * torch.randn(*shape[:-1], shape[-1] + 8)).to(dtype)
    x = wide[..., : shape[-1]]  # rows are not adjacent
    residual, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    normed = ops.rms_norm(x.to(device), weight.to(device), 1e-5)
    assert normed.is_contiguous() and normed.dtype == dtype and normed.shape == x.shape
    assert_close(
        normed.cpu(), reference.rms_norm(x, weight, 1e-5), F.rms_norm(x, weight.shape, weight, 1e-5)
    )

    normed, total = ops.fused_add_rms_norm(
        x.to(device), residual.to(device), weight.to(device), 1e-5
    )
    exact_normed, exact_total = reference.fused_add_rms_norm(x, residual, weight, 1e-5)
    naive_total = x + residual
    assert_close(total.cpu(), exact_total, naive_total)
    assert_close(normed.cpu(), exact_normed, F.rms_norm(naive_total, weight.shape, weight, 1e-5))


@IMPLEMENTATIONS
@pytest.mark.parametrize("unit_offset", [False, True])
def test_eps_bounds_the_norm_of_small_rows(implementation, unit_offset) -> None:
    """A row of zeros stays one, and one far below eps is only scaled."""
    device, ops = device_of(implementation), cpu if implementation == "cpu" else norm
    x, weight = torch.randn(4, 80) * torch.tensor([0.0, 1e-6, 1e-3, 1.0])[:, None], torch.randn(80)
    exact = reference.rms_norm(x, weight, 1e-5, unit_offset)
    args = x.to(device), weight.to(device)
    for normed in (
        ops.rms_norm(*args, 1e-5, unit_offset),
        ops.fused_add_rms_norm(args[0] / 2, args[0] / 2, args[1], 1e-5, unit_offset)[0],
    ):
        torch.testing.assert_close(normed.cpu().double(), exact, rtol=1e-5, atol=0)


@IMPLEMENTATIONS
@DTYPES
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 576)], ids=str)
def test_norms_with_unit_offset(implementation, dtype, shape) -> None:
    """Weights too small to show beside 1 in 16 bits: adding them before widening would lose them."""
    device, ops = device_of(implementation), cpu if implementation == "cpu" else norm
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = (2e-3 * torch.randn(shape[-1])).to(dtype)
    args = [t.to(device) for t in (x, residual, weight)]
    normed = ops.rms_norm(args[0], args[2], 1e-6, True)
    exact = reference.rms_norm(x, weight, 1e-6, True)
    assert normed.dtype == dtype and error(normed.cpu(), exact) <= error(exact.to(dtype), exact) + (
        2e-6 if dtype == torch.float32 else 0
    )
    normed, total = ops.fused_add_rms_norm(*args, 1e-6, True)
    assert torch.equal(total.cpu(), x + residual)
    exact = reference.rms_norm(x + residual, weight, 1e-6, True)
    assert error(normed.cpu(), exact) <= error(exact.to(dtype), exact) + 2e-6


@IMPLEMENTATIONS
@DTYPES
@pytest.mark.parametrize(
    "sizes", [(9, 3, 64, 64), (2, 1, 80, 80), (4, 4, 64, 16), (1, 1, 96, 96)], ids=str
)
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
def test_rotary_embedding(implementation, dtype, sizes, is_neox) -> None:
    num_q_heads, num_kv_heads, head_size, rotary_size = sizes
    device, ops = device_of(implementation), cpu if implementation == "cpu" else rotary
    qkv = torch.randn(5, num_q_heads + 2 * num_kv_heads, head_size).to(dtype)
    angles = torch.randn(40, rotary_size // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.tensor([0, 39, 7, 7, 12])
    rotated = qkv.to(device).clone()
    q, k, v = rotated.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    ops.rotary_embedding(positions.to(device), q, k, cos_sin.to(device), is_neox)
    parts = qkv.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    exact = reference.rotary_embedding(positions, *parts[:2], cos_sin, is_neox)
    for actual, expected in zip((q, k), exact, strict=True):
        assert_close(actual.cpu(), expected, expected.to(dtype))
    assert torch.equal(v.cpu(), parts[2])  # the values, in the same memory, stay as they are


@IMPLEMENTATIONS
def test_rotating_keys_or_queries_alone(implementation) -> None:
    """A layer that reads the keys of an earlier one has none of its own."""
    device, ops = device_of(implementation), cpu if implementation == "cpu" else rotary
    x, cos_sin = torch.randn(3, 2, 8), torch.randn(9, 8)
    positions = torch.tensor([4, 0, 8])
    exact, _ = reference.rotary_embedding(positions, x, x, cos_sin)
    for place in (0, 1):
        heads = [x[:, :0].to(device), x[:, :0].to(device)]
        heads[place] = x.to(device).clone()
        ops.rotary_embedding(positions.to(device), *heads, cos_sin.to(device), True)
        assert error(heads[place].cpu(), exact) < 1e-6


@IMPLEMENTATIONS
@DTYPES
@pytest.mark.parametrize("shape", [(1, 8), (3, 3072), (2, 2, 5000), (0, 4)], ids=str)
def test_silu_and_mul(implementation, dtype, shape) -> None:
    x = (4 * torch.randn(shape)).to(dtype)
    ops = cpu if implementation == "cpu" else activation
    out = ops.silu_and_mul(x.to(device_of(implementation)))
    gate, up = x.chunk(2, dim=-1)
    assert out.is_contiguous() and out.dtype == dtype
    assert_close(out.cpu(), reference.silu_and_mul(x), F.silu(gate) * up)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of large gates, rightly
@IMPLEMENTATIONS
@DTYPES
@pytest.mark.parametrize("shape", [(1, 8), (3, 3072), (2, 2, 5000), (0, 4)], ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_and_mul(implementation, dtype, shape, approximate) -> None:
    wide = (4 * torch.randn(*shape[:-1], shape[-1] + 8)).to(dtype)
    x = wide[..., : shape[-1]]  # rows are not adjacent
    ops = cpu if implementation == "cpu" else activation
    out = ops.gelu_and_mul(x.to(device_of(implementation)), approximate)
    gate, up = x.chunk(2, dim=-1)
    assert out.is_contiguous() and out.dtype == dtype and out.shape == gate.shape
    naive = F.gelu(gate, approximate=approximate) * up
    assert_close(out.cpu(), reference.gelu_and_mul(x, approximate), naive)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # exp(200) is inf, rightly
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_large_gates_is_finite(approximate) -> None:
    """1e15 cubed is beyond fp32."""
    x = torch.tensor([[-200.0, 200.0, -1e15, 1e15, 1.0, 1.0, 1.0, 1.0]])
    expected = torch.tensor([[0.0, 200.0, 0.0, 1e15]])
    for gelu_and_mul in (cpu.gelu_and_mul, activation.gelu_and_mul):
        out = gelu_and_mul(x.to(DEVICE), approximate).cpu()
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # exp(200) is inf, rightly
def test_silu_of_large_gates_is_finite() -> None:
    x = torch.tensor([[-200.0, 200.0, 1.0, 1.0]])
    for silu_and_mul in (cpu.silu_and_mul, activation.silu_and_mul):
        out = silu_and_mul(x.to(DEVICE)).cpu()
        torch.testing.assert_close(out, torch.tensor([[0.0, 200.0]]), rtol=0, atol=1e-6)


@IMPLEMENTATIONS
@DTYPES
@pytest.mark.parametrize("shape", [(1, 1, 16), (7, 3, 80), (5, 4, 128)], ids=str)
def test_merge_attention_states(implementation, dtype, shape) -> None:
    """States with a side, or both, that saw no key; the output of such a side is NaN and must not be read."""
    device, ops = device_of(implementation), cpu if implementation == "cpu" else merge_states
    out_a, out_b = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    lse_a, lse_b = 30 * torch.randn(shape[:2]), 30 * torch.randn(shape[:2])
    lse_a[::2, 0] = lse_b[1::2, 0] = lse_a[0] = lse_b[0, -1] = float("-inf")
    out_a[lse_a == float("-inf")] = float("nan")
    out_b[lse_b == float("-inf")] = float("nan")
    states = (out_a, lse_a, out_b, lse_b)
    out, lse = ops.merge_attention_states(*(x.to(device) for x in states))
    exact_out, exact_lse = reference.merge_attention_states(*states)
    naive_lse = torch.logaddexp(lse_a, lse_b)
    naive = sum(
        (side.float().nan_to_num() * (side_lse - naive_lse).exp().nan_to_num()[..., None]).to(dtype)
        for side, side_lse in ((out_a, lse_a), (out_b, lse_b))
    )
    assert_close(out.cpu(), exact_out, naive)
    assert error(lse.cpu(), exact_lse) < 1e-5


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter runs where there is no GPU")
def test_merge_into_one_of_its_sides() -> None:
    states = torch.randn(5, 2, 16), torch.randn(5, 2), torch.randn(5, 2, 16), torch.randn(5, 2)
    exact_out, exact_lse = reference.merge_attention_states(*states)
    out, lse = merge_states.merge_attention_states(*states, out=states[0], lse=states[1])
    assert out is states[0] and lse is states[1]
    assert error(out, exact_out) < 1e-6 and error(lse, exact_lse) < 1e-6
