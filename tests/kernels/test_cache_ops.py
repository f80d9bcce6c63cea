"""Writes to the cache and copies of whole blocks: exact, to the right place, and to no other."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.kernels import block_copy, block_swap, cache_write, cpu, reference
from octavo.kernels.swap_costs import Crossover, SwapCosts
from octavo.tests.kernels.cases import QUANTISED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["cpu", "triton"])


def device_of(implementation: str) -> str:
    return "cpu" if implementation == "cpu" else DEVICE


def exactly(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@IMPLEMENTATIONS
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(3, 64, 64, 16), (1, 80, 80, 5), (2, 48, 32, 1), (8, 128, 128, 32)], ids=str
)
def test_reshape_and_cache(implementation, num_tokens, dtype, shape) -> None:
    """B77: padding slots (-1) write nothing; every slot but the named ones is a canary."""
    num_kv_heads, head_size, head_size_v, block_size = shape
    device = device_of(implementation)
    num_blocks = 64 // block_size + 2
    pool = torch.full((num_blocks, 2, 3, num_kv_heads, block_size, head_size), float("nan")).to(
        dtype
    )
    expected_k = pool[:, 0, 1].transpose(1, 2)
    expected_v = pool[:, 1, 2].transpose(1, 2)[..., :head_size_v]
    qkv = torch.randn(num_tokens, 5 * num_kv_heads, head_size).to(dtype)
    k, v = qkv[:, :num_kv_heads], qkv[:, -num_kv_heads:, :head_size_v]
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    slots[2::4] = -1
    moved = pool.to(device).clone()
    k_cache, v_cache = (
        moved[:, 0, 1].transpose(1, 2),
        moved[:, 1, 2].transpose(1, 2)[..., :head_size_v],
    )
    write = cpu.reshape_and_cache if implementation == "cpu" else cache_write.reshape_and_cache
    write(k.to(device), v.to(device), k_cache, v_cache, slots.to(device))
    reference.reshape_and_cache(k, v, expected_k, expected_v, slots)
    exactly(moved, pool)


@IMPLEMENTATIONS
@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scales", ["none", "tensor", "head"])
def test_quantised_cache(implementation, name, dtype, scales) -> None:
    """To the bit what the nearest number of the format is: ties, the ends of the range, subnormals, infinity and NaN.

    Scales are powers of two: other quotients are rounded to fp32 first, which can make a tie of what was none.
    """
    device, cache_dtype = device_of(implementation), QUANTISED[name]
    num_tokens, num_kv_heads, head_size = 24, 3, 16
    k = torch.randn(num_tokens, num_kv_heads, head_size)
    k *= torch.logspace(-7, 4, num_tokens)[:, None, None]
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 448.0, 464.0, 57344.0, 1e38]
    ties = [2.5, 3.5, -0.5, 126.5, 2.0**-10, 3 * 2.0**-10, 1.0625, 1.1875, 2.0**-17, 0.0146484375]
    k[3, 1, :9], k[5, 2, :10] = torch.tensor(special), torch.tensor(ties)
    k, v = k.to(dtype), torch.randn(num_tokens, num_kv_heads, 8).to(dtype) * 30
    scale = {
        "none": {},
        "tensor": {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor([4.0])},
        "head": {
            "k_scale": torch.tensor([1.0, 0.125, 2.0]),
            "v_scale": torch.tensor([8.0, 0.5, 1.0]),
        },
    }[scales]
    slots = torch.randperm(32)[:num_tokens]
    slots[4] = -1
    expected = [torch.full((8, 4, num_kv_heads, d), 33, dtype=torch.uint8) for d in (head_size, 8)]
    caches = [x.to(device).clone().view(cache_dtype) for x in expected]
    write = cpu.reshape_and_cache if implementation == "cpu" else cache_write.reshape_and_cache
    moved = {name: x.to(device) for name, x in scale.items()}
    write(k.to(device), v.to(device), *caches, slots.to(device), **moved)
    reference.reshape_and_cache(k, v, *(x.view(cache_dtype) for x in expected), slots, **scale)
    for cache, want in zip(caches, expected, strict=True):
        exactly(one_nan(cache), one_nan(want.view(cache_dtype)))


def token_scale_case(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of every size: K some of them special, V as a strided view."""
    k = torch.randn(num_tokens, 3, 48) * torch.logspace(-30, 30, num_tokens)[:, None, None]
    k[1], k[2, 0], k[3, 1] = 0.0, -0.0, torch.linspace(-1e-38, 1e-38, 48)
    k[4, 2, 7], k[5, 0, 47], k[6, 1, 0] = float("nan"), float("inf"), -float("inf")
    k[7] = 3.0  # ties throughout: all are the largest
    return k.to(dtype), torch.randn(num_tokens, 9, 20)[:, ::3, 2:18].to(dtype)


@IMPLEMENTATIONS
@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_scales_of_every_token_and_head(implementation, name, dtype) -> None:
    """Scales are the oracle's to the bit; numbers are the nearest to the quotient in fp32. Other slots stay as they are."""
    device, cache_dtype = device_of(implementation), QUANTISED[name]
    k, v = token_scale_case(24, dtype)
    slots = torch.randperm(32)[:23]  # the last row is padding
    slots[8] = -1
    beside = torch.full((8, 2, 5, 3), 7.0)  # a part of each block
    bits = [torch.full((8, 4, 3, d), 33, dtype=torch.uint8) for d in (48, 16)]
    caches = [x.to(device).clone().view(cache_dtype) for x in bits]
    moved = beside.to(device).clone()
    write = cpu.reshape_and_cache if implementation == "cpu" else cache_write.reshape_and_cache
    scales = moved[:, 0, 1:], moved[:, 1, :4]
    write(k.to(device), v.to(device), *caches, slots.to(device), *scales)

    k_scale, v_scale = beside[:, 0, 1:], beside[:, 1, :4]
    ignored = [x.clone().view(cache_dtype) for x in bits]
    reference.reshape_and_cache(k, v, *ignored, slots, k_scale, v_scale)
    exactly(moved, beside)
    quotients = []
    for x, scale in ((k, k_scale), (v, v_scale)):
        of_row = torch.ones(24, 3)
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                of_row[row] = scale[slot // 4, slot % 4]
        quotients.append(x.float() / of_row[..., None])
    reference.reshape_and_cache(*quotients, *(x.view(cache_dtype) for x in bits), slots)
    for cache, want in zip(caches, bits, strict=True):
        exactly(one_nan(cache), one_nan(want.view(cache_dtype)))


@IMPLEMENTATIONS
@pytest.mark.parametrize("name", QUANTISED)
def test_rows_come_back_from_their_scales(implementation, name) -> None:
    """Within half a step of their largest magnitude, zeros as zeros, and rows that are not finite as NaN throughout."""
    cache_dtype = QUANTISED[name]
    device = device_of(implementation)
    k, v = token_scale_case(24, torch.float32)
    caches = [torch.zeros(2, 16, 3, d, device=device).to(cache_dtype) for d in (48, 16)]
    scales = [torch.full((2, 16, 3), torch.nan, device=device) for _ in caches]
    write = cpu.reshape_and_cache if implementation == "cpu" else cache_write.reshape_and_cache
    write(k.to(device), v.to(device), *caches, torch.arange(24, device=device), *scales)
    step = {"e4m3": 2**-4, "e4m3 bits": 2**-4, "e5m2": 2**-3, "int8": 0.5 / 127}[name]
    for x, cache, scale in zip((k, v), caches, scales, strict=True):
        numbers = cache.view(torch.float8_e4m3fn) if name == "e4m3 bits" else cache
        numbers = numbers.cpu().float().flatten(0, 1)[:24]
        back = numbers * scale.cpu().flatten(0, 1)[:24, :, None]
        largest = x.abs().amax(dim=-1, keepdim=True)
        finite = x.isfinite().all(dim=-1)
        assert back[~finite].isnan().all() and back[finite].isfinite().all()
        assert ((back - x).abs() <= step * largest + 2.0**-100)[finite].all()
        assert not back[(x == 0).all(dim=-1)].any()


def one_nan(cache: torch.Tensor) -> torch.Tensor:
    """The bits of a cache with all its NaNs alike: their sign means nothing."""
    stored = torch.float8_e4m3fn if cache.dtype == torch.uint8 else cache.dtype
    bits = cache.view(torch.uint8).clone()
    if stored != torch.int8:
        bits[bits.view(stored).float().isnan()] = 0x7F
    return bits


def test_quantised_values_come_back_as_attention_reads_them() -> None:
    """Written and read with the same scales: within half a step of what was written."""
    k = torch.randn(16, 2, 8)
    scale = torch.tensor([0.02, 0.04])
    cache = torch.zeros(2, 16, 2, 8, dtype=torch.int8)
    cpu.reshape_and_cache(k, k, cache, cache.clone(), torch.arange(16, 32), scale, scale)
    back = cache[1].float() * scale[:, None]
    assert ((back - k).abs() <= scale[:, None] / 2 + 1e-7)[k.abs() < 2.5].all()


def test_bad_scales_are_refused() -> None:
    k, cache = torch.randn(2, 3, 8), torch.zeros(2, 4, 3, 8)
    slots = torch.arange(2)
    with pytest.raises(ValueError, match="k_scale: expected None with a cache that is not"):
        cpu.reshape_and_cache(k, k, cache, cache, slots, torch.ones(3))
    with pytest.raises(ValueError, match=r"v_scale: expected float32 \[3\], got float32 \[2\]"):
        cpu.reshape_and_cache(k, k, cache.char(), cache.char(), slots, None, torch.ones(2))


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("k_scale", "v_scale", "message"),
    [
        ((2, 4, 3), None, r"v_scale: expected float32 \[2, 4, 3\] like the other scale, got None"),
        (None, (2, 4, 3), r"k_scale: expected float32 \[2, 4, 3\] like the other scale, got None"),
        ((2, 4, 3), (3,), r"v_scale: expected float32 \[2, 4, 3\], got float32 \[3\]"),
        ((), (2, 4, 3), r"k_scale: expected float32 \[2, 4, 3\], got float32 \[\]"),
        ((2, 4, 1), (2, 4, 1), r"k_scale: expected float32 \[2, 4, 3\], got float32 \[2, 4, 1\]"),
    ],
)
def test_bad_scale_caches_are_refused(implementation, k_scale, v_scale, message) -> None:
    """Before anything is written."""
    device = device_of(implementation)
    k, cache = torch.randn(2, 3, 8, device=device), torch.zeros(2, 4, 3, 8, device=device).char()
    scales = [None if s is None else torch.full(s, 5.0, device=device) for s in (k_scale, v_scale)]
    write = cpu.reshape_and_cache if implementation == "cpu" else cache_write.reshape_and_cache
    with pytest.raises(ValueError, match=message):
        write(k, k, cache, cache, torch.arange(2, device=device), *scales)
    assert not cache.any() and all((s == 5).all() for s in scales if s is not None)
    half = torch.ones(2, 4, 3, device=device).half()
    with pytest.raises(ValueError, match=r"k_scale: expected float32 \[2, 4, 3\], got float16"):
        write(k, k, cache, cache, torch.arange(2, device=device), half, half)
    full = torch.ones(2, 4, 3, device=device)
    plain = cache.float()
    with pytest.raises(ValueError, match="k_scale: expected None with a cache that is not"):
        write(k, k, plain, plain, torch.arange(2, device=device), full, full)


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_a_program_that_does_not_fill_its_tile(tokens, dtype) -> None:
    """Between two programs no token is left out, and what lies past the end of the slots is not touched."""
    k, slots = torch.randn(11, 3, 8) * 20, torch.randperm(24)[:11]
    slots[4] = -1
    caches = [torch.zeros(6, 4, 3, 8).to(dtype) for _ in range(4)]
    moved = [cache.to(DEVICE) for cache in caches[:2]]
    plan = cache_write.CacheWritePlan(tile_tokens=8, tokens=tokens, num_warps=1)
    cache_write.reshape_and_cache(k.to(DEVICE), -k.to(DEVICE), *moved, slots.to(DEVICE), plan=plan)
    reference.reshape_and_cache(k, -k, *caches[2:], slots)
    exactly(moved[0], caches[2])
    exactly(moved[1], caches[3])


@IMPLEMENTATIONS
@pytest.mark.parametrize("num_slots", [0, 1, 5])
def test_rows_beyond_the_slot_mapping_are_padding(implementation, num_slots) -> None:
    """B78: the number of rows is that of slot_mapping; rows of k and v past it are ignored."""
    device = device_of(implementation)
    cache = torch.zeros(4, 4, 2, 16)
    k = torch.randn(9, 2, 16)
    slots = torch.arange(num_slots) * 3
    k_cache, v_cache = cache.to(device).clone(), cache.to(device).clone()
    write = cpu.reshape_and_cache if implementation == "cpu" else cache_write.reshape_and_cache
    write(k.to(device), -k.to(device), k_cache, v_cache, slots.to(device))
    expected = cache.clone()
    reference.reshape_and_cache(k, -k, expected, torch.empty_like(cache), slots)
    exactly(k_cache, expected)
    exactly(v_cache, -expected)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("block", [(1,), (3,), (2, 2, 16, 3, 8), (5000,)], ids=str)
def test_copy_blocks(implementation, dtype, block) -> None:
    """B28, B29: one source may go to several blocks; nothing but the destinations changes."""
    device = device_of(implementation)
    pool = torch.randint(0, 100, (9, *block)).to(dtype)
    pairs = torch.tensor([[1, 2], [1, 5], [8, 0], [3, 7]])
    copied = pool.to(device).clone()
    copy = cpu.copy_blocks if implementation == "cpu" else block_copy.copy_blocks
    copy(copied, pairs)
    reference.copy_blocks(pool, pairs)
    exactly(copied, pool)
    copy(copied, pairs[:0])
    exactly(copied, pool)


@pytest.mark.parametrize("part_tiles", [1, 2, 3, 99])
def test_parts_of_several_tiles(part_tiles) -> None:
    """No word is left out between parts, and none past the block is touched."""
    whole = torch.randint(0, 2**40, (6, 1010))
    copied, pairs = whole.to(DEVICE).clone(), torch.tensor([[0, 3], [5, 1], [0, 2]])
    plan = block_copy.CopyPlan(tile_words=64, part_tiles=part_tiles, num_warps=1, num_stages=1)
    block_copy.copy_blocks(copied[:, 3:1003], pairs, plan=plan)
    reference.copy_blocks(whole[:, 3:1003], pairs)
    exactly(copied, whole)


@IMPLEMENTATIONS
def test_copy_blocks_of_one_number(implementation) -> None:
    pool = torch.arange(5.0, device=device_of(implementation))
    copy = cpu.copy_blocks if implementation == "cpu" else block_copy.copy_blocks
    copy(pool, torch.tensor([[1, 2], [1, 4]]))
    assert pool.tolist() == [0, 1, 1, 3, 1]


@IMPLEMENTATIONS
def test_copy_blocks_of_a_strided_pool(implementation) -> None:
    """A pool whose blocks are contiguous but not adjacent, at an odd address."""
    device = device_of(implementation)
    whole = torch.randint(0, 255, (6, 101), dtype=torch.uint8)
    copied = whole.to(device).clone()
    pairs = torch.tensor([[0, 3], [5, 1]])
    copy = cpu.copy_blocks if implementation == "cpu" else block_copy.copy_blocks
    copy(copied[:, 1:90], pairs)
    reference.copy_blocks(whole[:, 1:90], pairs)
    exactly(copied, whole)


@pytest.mark.parametrize("by_kernel", [None, False, True], ids=["cpu", "copies", "kernel"])
def test_swap_blocks(by_kernel) -> None:
    device = "cpu" if by_kernel is None else DEVICE
    host = torch.randn(4, 3, 20)
    host = host.pin_memory() if device == "cuda" else host
    pool = torch.randn(7, 3, 20)
    out_pairs, in_pairs = (
        torch.tensor([[6, 0], [0, 3], [2, 1]]),
        torch.tensor([[3, 5], [0, 6], [3, 1]]),
    )
    moved_pool, moved_host = pool.to(device).clone(), host.clone()
    moved_host = moved_host.pin_memory() if device == "cuda" else moved_host

    def swap(source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> None:
        if by_kernel is None:
            cpu.swap_blocks(source, destination, pairs)
        else:
            plan = block_swap.SwapPlan(by_kernel=by_kernel)
            block_swap.swap_blocks(source, destination, pairs, plan=plan)

    swap(moved_pool, moved_host, out_pairs)
    swap(moved_host, moved_pool, in_pairs)
    if device == "cuda":
        torch.cuda.synchronize()
    reference.swap_blocks(pool, host, out_pairs)
    reference.swap_blocks(host, pool, in_pairs)
    exactly(moved_host, host)
    exactly(moved_pool, pool)


BAD_PAIRS = {
    "source past the end": ([[4, 1]], r"a source block in \[0, 4\), got 4"),
    "source negative": ([[-1, 1]], r"a source block in \[0, 4\), got -1"),
    "source past int32": ([[2**62, 1]], r"a source block in \[0, 4\), got 4611686018427387904"),
    "destination past the end": ([[1, 4]], r"a destination block in \[0, 4\), got 4"),
    "destination negative": ([[1, -1]], r"a destination block in \[0, 4\), got -1"),
    "two writers": ([[1, 2], [0, 2]], r"each destination block once, got \[2\] again"),
    "chain": ([[1, 2], [2, 3]], r"no destination block that is also a source, got \[2\]"),
    "chain, the reader first": (
        [[2, 3], [1, 2]],
        r"no destination block that is also a source, got \[2\]",
    ),
    "cycle": ([[1, 2], [2, 1]], r"no destination block that is also a source, got \[1, 2\]"),
    "itself": ([[1, 1]], r"no destination block that is also a source, got \[1\]"),
}


@IMPLEMENTATIONS
@pytest.mark.parametrize("bad", BAD_PAIRS)
def test_a_bad_copy_is_refused_before_anything_moves(implementation, bad) -> None:
    """B29: a destination that is also read would make the result depend on the order."""
    pairs, message = BAD_PAIRS[bad]
    pool = torch.randn(5, 6, device=device_of(implementation))[:4]
    before = pool.clone()
    copy = cpu.copy_blocks if implementation == "cpu" else block_copy.copy_blocks
    with pytest.raises(ValueError, match="^pairs: expected " + message):
        copy(pool, torch.tensor(pairs if any(3 in pair for pair in pairs) else [[0, 3], *pairs]))
    exactly(pool, before.cpu())


@IMPLEMENTATIONS
def test_pools_in_one_tensor(implementation) -> None:
    """Views of one tensor may be two pools, as long as no destination is memory of a source."""
    whole = torch.randn(9, 6, device=device_of(implementation))
    before = whole.clone()
    swap = cpu.swap_blocks if implementation == "cpu" else block_swap.swap_blocks
    for source, destination, pairs, both in (
        (whole[1:], whole[:5], [[0, 2], [1, 4]], [2]),
        (whole[:, 1:4], whole[:, 3:], [[3, 1], [5, 5]], [5]),
        (whole[:, 3:], whole[:, 1:4], [[3, 1], [5, 5]], [5]),
        (whole, whole[::2], [[1, 0], [8, 4]], [4]),
    ):
        with pytest.raises(ValueError, match=f"that is also a source, got \\[{both[0]}\\]"):
            swap(source, destination, torch.tensor(pairs))
    exactly(whole, before.cpu())
    swap(whole[:, :3], whole[:, 3:], torch.tensor([[0, 0], [1, 2]]))  # side by side
    swap(whole[5:], whole[:5], torch.tensor([[0, 1], [3, 4]]))  # one behind the other
    before[[0, 2], 3:] = before[[0, 1], :3]
    before[[1, 4]] = before[[5, 8]]
    exactly(whole, before.cpu())


@IMPLEMENTATIONS
def test_pools_whose_blocks_are_no_blocks(implementation) -> None:
    """Copies are by whole blocks: of other memory, they would hit their neighbours."""
    device = device_of(implementation)
    ops = (cpu, cpu) if implementation == "cpu" else (block_copy, block_swap)
    good, pairs = torch.zeros(8, 6, device=device), torch.tensor([[0, 1]])
    for bad in (
        torch.zeros(6, 8, device=device).t(),
        torch.zeros(1, 6, device=device).expand(8, 6),
    ):
        for name, call in (
            ("pool", lambda bad=bad: ops[0].copy_blocks(bad, pairs)),
            ("src_pool", lambda bad=bad: ops[1].swap_blocks(bad, good, pairs)),
            ("dst_pool", lambda bad=bad: ops[1].swap_blocks(good, bad, pairs)),
        ):
            with pytest.raises(ValueError, match=f"^{name}: expected contiguous blocks that do"):
                call()


def test_widest_word() -> None:
    pool = torch.zeros(4, 24, dtype=torch.bfloat16)
    assert block_copy.widest_word(pool) == 8
    assert block_copy.widest_word(pool[:, :2]) == 4
    assert block_copy.widest_word(pool, pool[:, 1:9]) == 2
    assert block_copy.widest_word(torch.zeros(4, 10, dtype=torch.bfloat16)[:, :8]) == 4  # apart
    assert block_copy.widest_word(torch.zeros(4, 3, dtype=torch.uint8)) == 1


class Counted(TorchDispatchMode):
    """Counts torch's copies."""

    copies = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.copies += function is torch.ops.aten.copy_.default
        if function is torch.ops.aten._foreach_copy_.default:
            self.copies += len(args[0])
        return function(*args, **(kwargs or {}))


@pytest.mark.skipif(DEVICE == "cuda", reason="the memory guard counts interpreted launches")
@pytest.mark.parametrize("num_layers", [1, 30])
@pytest.mark.parametrize("num_pairs", [1, 3])
def test_launches_and_copies_do_not_grow_with_layers(watch, num_layers, num_pairs) -> None:
    """Copy-on-write of p pairs is one launch; a swap of b scattered blocks is b copies, or one launch."""
    pool = torch.randn(8, num_layers, 2, 4, 1, 8)
    host = torch.zeros(8, num_layers, 2, 4, 1, 8)
    pairs = torch.tensor([[0, 4], [1, 6], [2, 5]])[:num_pairs]
    block_copy.copy_blocks(pool, pairs)
    assert watch.launches == 1
    with Counted() as counted:
        block_swap.swap_blocks(pool, host, pairs, plan=block_swap.SwapPlan(by_kernel=False))
    assert (watch.launches, counted.copies) == (1, num_pairs)
    block_swap.swap_blocks(pool, host, pairs, plan=block_swap.SwapPlan(by_kernel=True))
    assert watch.launches == 2


@pytest.mark.parametrize(
    ("pairs", "num_copies"),
    [
        ([[3, 1], [4, 2], [5, 3]], 1),
        ([[5, 3], [3, 1], [4, 2]], 1),  # in any order
        ([[0, 5], [1, 4], [2, 3]], 3),  # neighbours on one side only
        ([[0, 1], [1, 2], [3, 4], [4, 5], [7, 0]], 3),
        ([[2, 0], [2, 1], [2, 2]], 3),  # one source
        ([[0, 0], [2, 1], [4, 2], [6, 3]], 4),
    ],
)
def test_a_swap_is_one_copy_per_run_of_neighbours(pairs, num_copies) -> None:
    """At most one per block."""
    pool, host, expected = torch.randn(8, 2, 3), torch.zeros(6, 2, 3), torch.zeros(6, 2, 3)
    with Counted() as counted:
        block_swap.swap_blocks(pool, host, torch.tensor(pairs), plan=block_swap.SwapPlan(False))
    assert counted.copies == num_copies <= len(pairs)
    reference.swap_blocks(pool, expected, torch.tensor(pairs))
    exactly(host, expected)


@pytest.mark.parametrize("apart", ["source", "destination"])
def test_blocks_with_gaps_between_them_are_copied_one_by_one(apart) -> None:
    pool, host, expected = torch.randn(8, 2, 5)[:, 1], torch.zeros(6, 5), torch.zeros(6, 5)
    if apart == "destination":
        pool, host = pool.contiguous(), torch.zeros(6, 2, 5)[:, 1]
    pairs = torch.tensor([[1, 0], [2, 1], [3, 2]])
    with Counted() as counted:
        block_swap.swap_blocks(pool, host, pairs, plan=block_swap.SwapPlan(by_kernel=False))
    assert counted.copies == 3
    reference.swap_blocks(pool, expected, pairs)
    exactly(host, expected)


def test_a_swap_is_planned_by_the_costs_of_its_direction() -> None:
    class Cuda(torch.Tensor):
        """Says that it is on a GPU."""

        is_cuda = True  # type: ignore[assignment]

    host = torch.zeros(8, 4, dtype=torch.uint8)
    device, pairs = host.clone().as_subclass(Cuda), torch.tensor([[0, 0], [2, 1]])
    costs = SwapCosts(to_device=Crossover(2**20, 1), to_host=Crossover(0, 1))
    assert block_swap.plan_swap(host, device, pairs, costs).by_kernel
    assert not block_swap.plan_swap(device, host, pairs, costs).by_kernel
