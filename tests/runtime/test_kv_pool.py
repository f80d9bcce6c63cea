"""Layers are views of one block-major tensor; block operations move whole blocks of all layers."""

from __future__ import annotations

import pytest
import torch

from octavo.runtime.kv_pool import KVLayout, KVPool, block_bytes


@pytest.mark.parametrize("layout", list(KVLayout))
def test_layers_are_views_of_contiguous_blocks(layout):
    pool = KVPool(
        5,
        num_layers=3,
        block_size=4,
        num_kv_heads=2,
        head_size=8,
        dtype=torch.float16,
        layout=layout,
    )
    assert pool.num_blocks == 5
    assert pool.block_bytes == block_bytes(3, 4, 2, 8, torch.float16) == 3 * 2 * 4 * 2 * 8 * 2
    assert pool.data[1].is_contiguous()
    for index in range(3):
        k_cache, v_cache = pool.layer(index)
        assert k_cache.shape == v_cache.shape == (5, 4, 2, 8)
        assert k_cache.stride(-1) == 1
        k_cache[2, 3, 1, 7] = 10 + index
        v_cache[2, 3, 1, 7] = 20 + index
    slot = pool.data[2] if layout is KVLayout.NHD else pool.data[2].transpose(2, 3)
    assert slot[:, 0, 3, 1, 7].tolist() == [10, 11, 12]
    assert slot[:, 1, 3, 1, 7].tolist() == [20, 21, 22]
    assert pool.data.count_nonzero() == 6


def test_a_pool_needs_a_block_beside_the_null_block():
    with pytest.raises(ValueError, match="num_blocks"):
        KVPool(1, 1, 4, 1, 8, torch.float32)
