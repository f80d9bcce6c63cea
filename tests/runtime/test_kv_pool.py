"""Layers are aligned views of one block-major tensor of bytes, whatever their geometry."""

from __future__ import annotations

import random

import pytest
import torch

from octavo.runtime.kv_pool import KVLayout, KVPool, LayerKV, block_bytes

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
]


@pytest.mark.parametrize("layout", list(KVLayout))
def test_uniform_layers_fill_a_block_without_a_gap(layout):
    layers = [LayerKV(2, 8, torch.float16)] * 3
    pool = KVPool(5, layers, block_size=4, layout=layout)
    assert pool.num_blocks == 5
    assert pool.block_bytes == block_bytes(layers, 4) == 3 * 2 * 4 * 2 * 8 * 2
    for index in range(3):
        k_cache, v_cache = pool.layer(index)
        assert k_cache.shape == v_cache.shape == (5, 4, 2, 8)
        k_cache[2, 3, 1, 7] = 10 + index
        v_cache[2, 3, 1, 7] = 20 + index
    inner = (4, 2, 8) if layout is KVLayout.NHD else (2, 4, 8)
    block = pool.data[2].view(torch.float16).view(3, 2, *inner)
    slot = block if layout is KVLayout.NHD else block.transpose(2, 3)
    assert slot[:, 0, 3, 1, 7].tolist() == [10, 11, 12]
    assert slot[:, 1, 3, 1, 7].tolist() == [20, 21, 22]
    assert pool.data.view(torch.float16).count_nonzero() == 6


def test_a_block_by_hand():
    """K of 192 and V of 128, then 8-bit layers with scales, one of them reading what the layer before it keeps."""
    layers = [
        LayerKV(1, 192, torch.bfloat16, head_size_v=128),
        LayerKV(3, 5, torch.int8, scale_per_token_head=True),
        1,
    ]
    pool = KVPool(2, layers, block_size=2)
    #  K 0: 768 bytes, V 0: 512; K 1 and V 1: 30 of 32 each; scales: 24 of 32 each; padding to 1408
    assert pool.block_bytes == block_bytes(layers, 2) == 1408
    k_scale, v_scale = pool.scales(1)
    parts = [*pool.layer(0), *pool.layer(1), k_scale, v_scale]
    assert [part.data_ptr() - pool.data.data_ptr() for part in parts] == [
        0, 768, 1280, 1312, 1344, 1376
    ]  # fmt: skip
    assert [list(part.shape) for part in parts] == [
        [2, 2, 1, 192], [2, 2, 1, 128], [2, 2, 3, 5], [2, 2, 3, 5], [2, 2, 3], [2, 2, 3]
    ]  # fmt: skip
    assert pool.scales(0) == (None, None)
    pool.layer(1)[0].fill_(7)
    assert pool.layer(2)[0].unique().tolist() == [7]
    assert pool.layer(2)[0].data_ptr() == pool.layer(1)[0].data_ptr()


def random_layers(draw: random.Random) -> list[LayerKV | int]:
    layers: list[LayerKV | int] = []
    for index in range(draw.randint(1, 5)):
        if index and draw.random() < 0.2:
            layers.append(draw.randrange(index))
            continue
        dtype = draw.choice(DTYPES)
        layers.append(
            LayerKV(
                draw.choice([1, 2, 3, 8]),
                draw.choice([1, 33, 64, 80, 96, 128, 192]),
                dtype,
                draw.choice([None, 1, 80, 128]),
                dtype.itemsize == 1 and draw.random() < 0.5,
            )
        )
    return layers


@pytest.mark.parametrize("seed", range(60))
def test_any_geometry(seed):
    """Parts are disjoint and aligned, strides are whole elements, and the size is known before it is allocated."""
    draw = random.Random(seed)
    layers, block_size = random_layers(draw), draw.choice([1, 5, 16, 256])
    pool = KVPool(3, layers, block_size, layout=draw.choice(list(KVLayout)))
    assert pool.data.shape == (3, block_bytes(layers, block_size)) and pool.data.is_contiguous()
    assert pool.block_bytes % 128 == 0
    used = 0
    for index, layer in enumerate(layers):
        own = layers[layer] if isinstance(layer, int) else layer
        while isinstance(own, int):
            own = layers[own]
        k, v = pool.layer(index)
        assert k.dtype == v.dtype == own.dtype
        assert k.shape == (3, block_size, own.num_kv_heads, own.head_size)
        assert v.shape == (*k.shape[:3], own.head_size_v or own.head_size)
        scales = [scale for scale in pool.scales(index) if scale is not None]
        assert len(scales) == 2 * own.scale_per_token_head
        assert all(scale.shape == k.shape[:3] for scale in scales)
        assert k.stride(-1) == v.stride(-1) == 1
        assert all(scale.stride()[1:] == (1, block_size) for scale in scales)
        for part in (k, v, *scales):
            assert part.stride(0) * part.element_size() == pool.block_bytes
            assert part.stride(0) % 16 == 0
            for block in range(3):
                assert (part[block].data_ptr() - pool.data.data_ptr()) % 16 == 0
            if layer is own:
                before = pool.data[1].clone()
                size = part[1].numel() * part.element_size()
                ones = torch.full((size,), 0xFF, dtype=torch.uint8).view(part.dtype)
                part[1] = ones.view(part[1].shape)
                changed = (pool.data[1] != before).sum()
                assert changed == size, "nobody else's bytes"
                used += int(changed)
    assert pool.data[[0, 2]].count_nonzero() == 0
    assert pool.data[1].count_nonzero() == used <= pool.block_bytes
    assert pool.block_bytes - used < 128 + 15 * 4 * len(layers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, [LayerKV(1, 8, torch.float32)], 4), "num_blocks: expected the null block"),
        ((2, [], 4), "layers: expected at least one"),
        ((2, [LayerKV(1, 8, torch.float32)], 0), "block_size: expected 1 or more, got 0"),
        ((2, [LayerKV(1, 8, torch.float32), 1], 4), "layers: .* got 1 for layer 1"),
        ((2, [-1, LayerKV(1, 8, torch.float32)], 4), "layers: .* got -1 for layer 0"),
        ((2, [LayerKV(1, 8, torch.float32), False], 4), "layers: .* got False for layer 1"),
        ((2, [None], 4), "layers: .* got None for layer 0"),
        ((2.0, [LayerKV(1, 8, torch.float32)], 4), r"num_blocks: expected an integer, got 2\.0"),
        ((2, [LayerKV(1, 8, torch.float32)], True), "block_size: expected an integer, got True"),
        ((2, [LayerKV(1, 8, torch.float32)], 4, "cpu", "HND"), "layout: .* KVLayout, got 'HND'"),
    ],
)
def test_impossible_pools_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        KVPool(*arguments)


@pytest.mark.parametrize("name", ["num_kv_heads", "head_size", "head_size_v"])
def test_impossible_layers_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}: expected 1 or more, got 0"):
        LayerKV(**(dict(num_kv_heads=1, head_size=8, dtype=torch.float32) | {name: 0}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": True}, "num_kv_heads: expected an integer, got True"),
        ({"head_size": 8.0}, r"head_size: expected an integer, got 8\.0"),
        ({"head_size": None}, "head_size: expected an integer, got None"),
        ({"dtype": "float16"}, "dtype: expected one that the kernels read, .* got 'float16'"),
        ({"dtype": torch.float64}, r"dtype: expected one .* got torch\.float64"),
        ({"dtype": torch.bool, "scale_per_token_head": True}, "dtype: expected one"),
    ],
)
def test_layers_that_no_kernel_reads_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LayerKV(**(dict(num_kv_heads=1, head_size=8, dtype=torch.float32) | changes))


def test_only_quantised_layers_have_scales():
    with pytest.raises(ValueError, match=r"scale_per_token_head: .*float16"):
        LayerKV(1, 8, torch.float16, scale_per_token_head=True)
