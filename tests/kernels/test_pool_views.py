"""Writes and attention through the views of a pool whose layers differ in everything, against the oracle."""

from __future__ import annotations

import pytest
import torch

from octavo import kernels
from octavo.kernels import cache_write, cpu, reference
from octavo.runtime.kv_pool import KVLayout, KVPool, LayerKV
from octavo.tests.kernels.attending import check_batch
from octavo.tests.kernels.cases import Batch

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
E4M3, INT8 = torch.float8_e4m3fn, torch.int8

# (queries' dtype, layer); what stands beside a layer in the block is the others, so no offset is a round one
LAYERS = {
    "f32-h3-d80": (F32, LayerKV(3, 80, F32)),
    "bf16-h1-d96": (BF16, LayerKV(1, 96, BF16)),
    "f16-h2-d192-v128": (F16, LayerKV(2, 192, F16, head_size_v=128)),
    "e4m3-h3-d33-scales": (F32, LayerKV(3, 33, E4M3, scale_per_token_head=True)),
    "int8-h1-d40-v24": (BF16, LayerKV(1, 40, INT8, head_size_v=24)),
}
GEOMETRY = [layer for _, layer in LAYERS.values()]


def batch_in(pool: KVPool, name: str, write, query_lens=(1, 7, 1, 3)) -> Batch:
    """A batch whose keys and values lie in a layer of the pool, put there by `write`; all other bytes are ones."""
    dtype, layer = LAYERS[name]
    size = pool.block_size
    batch = Batch(
        seq_lens=[size + 1, 7, 13, 3] if size > 16 else [3 * size + 1, 7, size, 2 * size + 3],
        query_lens=list(query_lens),
        num_q_heads=2 * layer.num_kv_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        head_size_v=layer.head_size_v,
        block_size=size,
        dtype=dtype,
        cache_dtype=layer.dtype if layer.dtype.itemsize == 1 else None,
    )
    pool.data.fill_(0xFF)
    slots = batch.used.flatten().nonzero().flatten()
    slots = slots[torch.randperm(len(slots))]
    k_cache, v_cache = pool.layer(list(LAYERS).index(name))
    shape = (len(slots), layer.num_kv_heads)
    k = torch.randn(*shape, layer.head_size).to(dtype)
    v = torch.randn(*shape, layer.head_size_v or layer.head_size).to(dtype)
    scale = torch.tensor(1 / 32) if layer.dtype == INT8 else None
    if scale is not None:
        batch.options |= {"k_scale": scale, "v_scale": scale}
    before = pool.data.clone()
    write(k, v, k_cache, v_cache, slots, scale, scale)
    written, pool.data[:] = pool.data.clone(), before
    reference.reshape_and_cache(k, v, k_cache, v_cache, slots, scale, scale)
    assert torch.equal(pool.data, written), "the bytes that the oracle writes, and no others"
    batch.k_cache, batch.v_cache = (cache[: batch.used.shape[0]] for cache in (k_cache, v_cache))
    return batch


@pytest.mark.parametrize("layout", list(KVLayout), ids=lambda layout: layout.value)
@pytest.mark.parametrize(
    ("name", "block_size"),
    [
        (name, size)
        for name, (_, layer) in LAYERS.items()
        for size in (1, 5, 16, 256)
        if size < 256 or layer.dtype.itemsize > 1  # the oracle rounds number by number
    ],
)
def test_on_a_cpu(name, block_size, layout, monkeypatch) -> None:
    from octavo.tests.kernels.attending import attend_with

    pool = KVPool(24, GEOMETRY, block_size, layout=layout)
    batch = batch_in(pool, name, cpu.reshape_and_cache)
    check_batch(attend_with("cpu", monkeypatch), batch)


@pytest.mark.parametrize(
    ("name", "block_size", "layout"),
    [
        ("f32-h3-d80", 5, KVLayout.HND),
        ("bf16-h1-d96", 16, KVLayout.NHD),
        ("f16-h2-d192-v128", 1, KVLayout.NHD),
        ("e4m3-h3-d33-scales", 16, KVLayout.HND),
        ("int8-h1-d40-v24", 5, KVLayout.NHD),
    ],
)
def test_by_the_triton_kernels(name, block_size, layout, attend) -> None:
    pool = KVPool(24, GEOMETRY, block_size, layout=layout)
    batch = batch_in(pool, name, _write_by_triton)
    check_batch(attend, batch)


def _write_by_triton(*arguments) -> None:
    """In place, on the CPU's tensors, whichever device the kernel ran on."""
    *_, k_cache, v_cache, _, _, _ = arguments
    moved = [x.cuda() if torch.cuda.is_available() and x is not None else x for x in arguments]
    cache_write.reshape_and_cache(*moved)
    for cache, after in ((k_cache, moved[2]), (v_cache, moved[3])):
        if after is not cache:
            cache.view(torch.uint8).copy_(after.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_layers_read_what_they_wrote_in_either_layout(dtype):
    """B83: order of heads, tokens, K and V is the pool's alone, so self- and cross-attention cannot read it otherwise."""
    results = []
    k, v, q = torch.randn(10, 2, 8), torch.randn(10, 2, 8), torch.randn(1, 4, 8)
    for layout in KVLayout:
        pool = KVPool(5, [LayerKV(2, 8, dtype)] * 2, 4, layout=layout)
        slots = torch.tensor([12, 13, 14, 15, 4, 5, 6, 7, 16, 17])  # blocks 3, 1, 4
        for layer, sign in ((0, 1), (1, -1)):
            kernels.reshape_and_cache(sign * k, v, *pool.layer(layer), slots)
        results.append(
            [
                kernels.paged_attention(
                    q,
                    *pool.layer(layer),
                    query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
                    seq_lens=torch.tensor([10], dtype=torch.int32),
                    block_tables=torch.tensor([[3, 1, 4]], dtype=torch.int32),
                    max_query_len=1,
                    max_seq_len=10,
                    causal=layer == 0,
                )
                for layer in (0, 1)
            ]
        )
        assert pool.data[[0, 2]].count_nonzero() == 0, "blocks that nobody wrote"
    (nhd_self, nhd_cross), (hnd_self, hnd_cross) = results
    assert torch.equal(nhd_self, hnd_self) and torch.equal(nhd_cross, hnd_cross)
    rounded_k, rounded_v = k.to(dtype).float(), v.to(dtype).float()
    for out, keys in ((nhd_self, rounded_k), (nhd_cross, -rounded_k)):
        exact = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            rounded_v.transpose(0, 1)[None],
            enable_gqa=True,
        )
        torch.testing.assert_close(out, exact[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "shape",
    [
        # a decoder over encoders shorter and longer than its chunk, and rows without one
        dict(seq_lens=[9, 0, 3, 2, 0, 21], query_lens=[1, 1, 1, 5, 3, 4], num_decodes=3),
        # an encoder over its own packed tokens
        dict(seq_lens=[11, 1, 18], query_lens=[11, 1, 18], block_size=1),
    ],
    ids=["cross", "encoder"],
)
def test_what_an_encoder_needs_of_attention(shape, attend) -> None:
    batch = Batch(**(dict(block_size=4, num_q_heads=2) | shape), options={"causal": False})
    check_batch(attend, batch)
    out, lse = attend(batch)
    assert lse is not None
    for length, rows in zip(
        shape["seq_lens"], torch.arange(len(out)).split(shape["query_lens"]), strict=True
    ):
        if length == 0:
            assert out[rows].count_nonzero() == 0 and (lse[rows] == -float("inf")).all()
