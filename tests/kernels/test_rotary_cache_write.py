"""The fused rotation and cache write, against the oracle and against the two ops it joins."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import cache_write, cpu, reference, rotary, rotary_cache_write
from octavo.tests.kernels.cases import QUANTISED, assert_close, error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["cpu", "triton"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


class Case:
    """Tokens in one QKV buffer, and one layer of a pool of NaN."""

    def __init__(self, sizes, slots: list[int], num_tokens: int, block_size: int, hnd: bool, dtype):
        self.num_q_heads, self.num_kv_heads, head_size, head_size_v, rotary_size = sizes
        angles = torch.randn(40, rotary_size // 2)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
        self.positions = torch.randint(0, 40, (num_tokens,))
        self.slots = torch.tensor(slots, dtype=torch.int64)
        heads = self.num_q_heads + 2 * self.num_kv_heads
        self.qkv = torch.randn(num_tokens, heads, head_size).to(dtype)
        num_blocks = max([*slots, 0]) // block_size + 2
        inner = (block_size, self.num_kv_heads)
        inner = inner[::-1] if hnd else inner
        self.pool = torch.full((num_blocks, 2, *inner, head_size), float("nan")).to(dtype)
        self.hnd, self.head_size_v = hnd, head_size_v

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = qkv.split([self.num_q_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return q, k, v[..., : self.head_size_v]

    def caches(self, pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k_cache, v_cache = pool[:, 0], pool[:, 1]
        if self.hnd:
            k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        return k_cache, v_cache[..., : self.head_size_v]

    def run(self, function, device: str, is_neox: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(QKV buffer, pool) after the op."""
        qkv, pool = self.qkv.to(device).clone(), self.pool.to(device).clone()
        positions, cos_sin, slots = (
            x.to(device) for x in (self.positions, self.cos_sin, self.slots)
        )
        function(positions, *self.split(qkv), cos_sin, *self.caches(pool), slots, is_neox)
        return qkv.cpu(), pool.cpu()


def chosen(implementation: str):
    if implementation == "cpu":
        return cpu.rope_and_cache, "cpu"
    return rotary_cache_write.rope_and_cache, DEVICE


# query heads, KV heads, head size, head size of V, rotary size
SIZES = [(9, 3, 64, 64, 64), (2, 1, 80, 48, 80), (4, 4, 64, 64, 16), (3, 1, 96, 96, 24)]


@IMPLEMENTATIONS
@DTYPES
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
def test_rope_and_cache(implementation, dtype, sizes, is_neox) -> None:
    """Slots that are negative, or not there, write nothing; queries of those tokens rotate all the same."""
    case = Case(sizes, [7, -1, 0, 14], num_tokens=6, block_size=5, hnd=is_neox, dtype=dtype)
    qkv, pool = case.run(*chosen(implementation), is_neox)
    exact_pool = case.pool.double()
    exact_q = reference.rope_and_cache(
        case.positions,
        *case.split(case.qkv),
        case.cos_sin,
        *case.caches(exact_pool),
        case.slots,
        is_neox,
    )
    q, k, v = case.split(qkv)
    assert_close(q, exact_q, exact_q.to(dtype))
    assert torch.equal(k, case.split(case.qkv)[1]) and torch.equal(v, case.split(case.qkv)[2])
    written = ~exact_pool.isnan()
    assert torch.equal(~pool.isnan(), written)
    assert_close(pool[written], exact_pool[written], exact_pool[written].to(dtype))
    moved = case.caches(exact_pool)[1]  # values are moved, not computed
    assert torch.equal(case.caches(pool)[1].double().nan_to_num(), moved.nan_to_num())


@IMPLEMENTATIONS
@DTYPES
@pytest.mark.parametrize("name", QUANTISED)
def test_a_quantised_cache_is_rounded_once(implementation, dtype, name) -> None:
    """What is stored is the nearest number to the exact rotation, but where fp32 cannot tell two apart."""
    cache_dtype = QUANTISED[name]
    case = Case((4, 2, 64, 32, 48), [7, -1, 0, 14], 6, block_size=5, hnd=True, dtype=dtype)
    scales = torch.tensor([0.5, 0.03]), torch.tensor(0.03125)
    q, k, v = case.split(case.qkv)
    results = []
    function, device = chosen(implementation)
    for write, place in ((reference.rope_and_cache, "cpu"), (function, device)):
        caches = [torch.zeros(4, 5, 2, d, dtype=torch.uint8, device=place) for d in (64, 32)]
        write(
            *(x.to(place) for x in (case.positions, q.clone(), k, v, case.cos_sin)),
            *(cache.view(cache_dtype) for cache in caches),
            case.slots.to(place),
            True,
            *(scale.to(place) for scale in scales),
        )
        results.append([cache.cpu() for cache in caches])
    (exact_k, exact_v), (stored_k, stored_v) = results
    assert torch.equal(stored_v, exact_v)
    assert (stored_k != exact_k).float().mean() < 0.01
    assert (stored_k.int() - exact_k.int()).abs().max() <= 1  # the next code


@IMPLEMENTATIONS
@DTYPES
@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("rotary_size", [64, 48], ids=["whole heads", "with a rest"])
def test_scales_of_every_token_and_head(implementation, dtype, name, rotary_size) -> None:
    """Scales are of the rotated key, its dims that do not rotate included, and of the value as it is."""
    cache_dtype = QUANTISED[name]
    case = Case((4, 2, 64, 32, rotary_size), [7, -1, 0, 14, 3], 6, 5, hnd=True, dtype=dtype)
    q, k, v = case.split(case.qkv)
    k[0, 1, 60], k[2], v[2, 0], k[4, 0, 3] = 9.0, 0.0, 0.0, float("inf")
    results = []
    function, device = chosen(implementation)
    for write, place in ((reference.rope_and_cache, "cpu"), (function, device)):
        caches = [torch.zeros(4, 5, 2, d, dtype=torch.uint8, device=place) for d in (64, 32)]
        # no two strides of the scales of K and of V are alike
        beside, beside_v = (
            torch.full((4, 2, *inner), 7.0, device=place) for inner in ((6, 2), (5, 3))
        )
        write(
            *(x.to(place) for x in (case.positions, q.clone(), k, v, case.cos_sin)),
            *(cache.view(cache_dtype) for cache in caches),
            case.slots.to(place),
            True,
            beside[:, 0, 1:],
            beside_v[..., 1].transpose(1, 2),
        )
        results.append([x.cpu() for x in (*caches, beside, beside_v)])
    (exact_k, exact_v, exact_scales, exact_of_v), (stored_k, stored_v, scales, of_v) = results
    torch.testing.assert_close(scales, exact_scales, rtol=1e-6, atol=0, equal_nan=True)
    assert torch.equal(of_v, exact_of_v)
    assert scales[0, 0, 4].isnan().tolist() == [True, False]  # of the infinity
    finite = scales[:, 0, 1:].isfinite()
    stored_k, exact_k = stored_k[finite], exact_k[finite]
    assert (stored_k != exact_k).float().mean() < 0.01
    assert (stored_k.int() - exact_k.int()).abs().max() <= 1  # the next code
    assert (stored_v != exact_v).float().mean() < 0.01
    assert (stored_v.int() - exact_v.int()).abs().max() <= 1


@IMPLEMENTATIONS
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_it_is_the_two_ops_in_one(implementation, block_size, num_tokens) -> None:
    slots = torch.randperm(40)[:num_tokens].tolist()
    case = Case((3, 2, 32, 32, 32), slots, num_tokens, block_size, False, torch.bfloat16)

    def both(positions, q, k, v, cos_sin, k_cache, v_cache, slots, is_neox):
        rotated = k.clone()
        ops = (cpu, cpu) if implementation == "cpu" else (rotary, cache_write)
        ops[0].rotary_embedding(positions, q, rotated, cos_sin, is_neox)
        ops[1].reshape_and_cache(rotated, v, k_cache, v_cache, slots)

    function, device = chosen(implementation)
    for actual, expected in zip(
        case.run(function, device, True), case.run(both, device, True), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@IMPLEMENTATIONS
def test_without_rotary_dims_it_only_writes(implementation) -> None:
    case = Case((2, 2, 16, 16, 0), [3, 1], 2, 4, False, torch.float32)
    qkv, pool = case.run(*chosen(implementation), True)
    assert torch.equal(qkv, case.qkv)
    for cache, x in zip(case.caches(pool), case.split(case.qkv)[1:], strict=True):
        assert torch.equal(cache[0, 3], x[0]) and torch.equal(cache[0, 1], x[1])
        assert cache.isnan().sum() == cache.numel() - 2 * x[0].numel()


@pytest.mark.skipif(DEVICE == "cuda", reason="the memory guard watches the interpreter")
def test_padding_rows_of_k_and_v_are_not_read(watch) -> None:
    case = Case((2, 1, 16, 16, 8), [5, -1], 4, 4, False, torch.float32)
    qkv, pool = case.qkv.clone(), case.pool.clone()
    q, k, v = case.split(qkv)
    padding = torch.tensor([False, True, True, True])[:, None, None]
    for x in (k, v):
        watch.poison(x, padding.expand(x.shape))
    rotary_cache_write.rope_and_cache(
        case.positions, q, k, v, case.cos_sin, *case.caches(pool), case.slots
    )
    exact, _ = reference.rotary_embedding(
        case.positions, *case.split(case.qkv)[:2], case.cos_sin, True
    )
    assert error(q, exact) < 1e-6
