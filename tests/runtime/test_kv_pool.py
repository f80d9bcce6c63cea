"""Layers are views of one block-major tensor; block operations move whole blocks of all layers."""

from __future__ import annotations

import pytest
import torch

from octavo import kernels
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_layers_read_what_they_wrote_in_either_layout(dtype):
    """B83: order of heads, tokens, K and V is the pool's alone, so self- and cross-attention cannot read it otherwise."""
    results = []
    k, v, q = torch.randn(10, 2, 8), torch.randn(10, 2, 8), torch.randn(1, 4, 8)
    for layout in KVLayout:
        pool = KVPool(5, 2, 4, 2, 8, dtype, layout=layout)
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
        assert pool.data[[0, 2]].float().count_nonzero() == 0, "blocks that nobody wrote"
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
