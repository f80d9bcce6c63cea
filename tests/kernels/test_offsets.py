"""B76: rows and blocks that lie more than 2^31 elements into a tensor, by every kernel that moves or changes them.

A product of 32 bits that wrapped is out of bounds to the memory guard, or finds other numbers. The tensors are views of
sparse memory: only the pages in use exist.
"""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import (
    activation,
    block_copy,
    block_swap,
    cache_write,
    lora,
    norm,
    penalties,
    rotary,
    rotary_cache_write,
    sampling,
    top_k_top_p,
)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter runs where there is no GPU"
)

STRIDE = 2**30 + 1040  # a number of 32 bits, twice which is none


def far(near: torch.Tensor) -> torch.Tensor:
    """The same three rows, or blocks, far from each other."""
    assert len(near) == 3
    size = near.element_size()
    view = torch.tensor([], dtype=near.dtype).set_(
        torch.UntypedStorage((2 * STRIDE + near[0].numel()) * size),
        0,
        near.shape,
        (STRIDE, *near.stride()[1:]),
    )
    view.copy_(near)
    return view


X = torch.randn(3, 32).half()
HEADS = torch.randn(3, 2, 16).half()
COLUMN, IDS, INDEX = torch.tensor([0.5, 1.5, 0.7]), torch.arange(3), torch.arange(3).int()
COS_SIN = torch.randn(3, 16)
COUNTS = torch.randint(0, 3, (3, 32)).int()
FACTORS = torch.randn(1, 32, 4).half()
ONE_ADAPTER = (torch.tensor([4]).int(), INDEX, torch.tensor([0, 3]).int())

# each is given tensors of which one after the other is far, and returns what it made, or changes them
OPS = {
    "silu_and_mul": (activation.silu_and_mul, [X]),
    "rms_norm": (lambda x: norm.rms_norm(x, X[0].clone(), 1e-5), [X]),
    "fused_add_rms_norm": (lambda x, y: norm.fused_add_rms_norm(x, y, X[0].clone(), 1e-5), [X, X]),
    "rotary_embedding": (
        lambda q, k, table: rotary.rotary_embedding(IDS, q, k, table),
        [HEADS, HEADS[:, :1].clone(), COS_SIN],
    ),
    "lora_shrink": (
        lambda x: lora.lora_shrink(x, FACTORS.mT.contiguous(), *ONE_ADAPTER, 1.0),
        [X],
    ),
    "lora_expand": (
        lambda y, out: lora.lora_expand(y, FACTORS, *ONE_ADAPTER, out),
        [torch.randn(3, 4), X],
    ),
    "apply_penalties": (
        lambda x, mask, counts: penalties.apply_penalties(x, mask, counts, *[COLUMN] * 3),
        [X, X > 0.5, COUNTS],
    ),
    "apply_top_k_top_p_min_p": (
        lambda x: top_k_top_p.apply_top_k_top_p_min_p(x, INDEX + 5, COLUMN, COLUMN * 0),
        [X],
    ),
    "sample": (lambda x: sampling.sample(x, COLUMN, IDS, IDS), [X]),
    "reshape_and_cache": (
        lambda k, v, *caches: cache_write.reshape_and_cache(k, v, *caches, IDS + 3),
        [HEADS, -HEADS, *(torch.zeros(3, 2, 2, 16).half() for _ in "kv")],
    ),
    "reshape_and_cache, quantised": (
        lambda k, v, k_cache, v_cache, k_scale, v_scale: cache_write.reshape_and_cache(
            k, v, k_cache, v_cache, IDS + 3, k_scale, v_scale
        ),
        [
            *(HEADS, -HEADS),
            *(torch.zeros(3, 2, 2, 16, dtype=torch.int8) for _ in "kv"),
            *(torch.zeros(3, 2, 2) for _ in "kv"),
        ],
    ),
    "rope_and_cache": (
        lambda q, k, v, k_cache, v_cache, k_scale, v_scale: rotary_cache_write.rope_and_cache(
            IDS, q, k, v, COS_SIN, k_cache, v_cache, IDS + 3, True, k_scale, v_scale
        ),
        [
            *(HEADS, HEADS.clone(), -HEADS),
            *(torch.zeros(3, 2, 2, 16, dtype=torch.int8) for _ in "kv"),
            *(torch.zeros(3, 2, 2) for _ in "kv"),
        ],
    ),
    "copy_blocks": (
        lambda pool: block_copy.copy_blocks(pool, torch.tensor([[2, 0]])),
        [torch.arange(63, dtype=torch.uint8).view(3, 21)],
    ),
    "swap_blocks": (
        lambda here, there: block_swap.swap_blocks(
            here, there, torch.tensor([[2, 0], [1, 2]]), plan=block_swap.SwapPlan(by_kernel=True)
        ),
        [torch.arange(63, dtype=torch.uint8).view(3, 21), torch.zeros(3, 21, dtype=torch.uint8)],
    ),
}


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("name", OPS)
def test_offsets_are_64_bits_wide(name) -> None:
    op, arguments = OPS[name]
    near = [x.clone() for x in arguments]
    expected = op(*near)
    for place in range(len(arguments)):
        moved = [far(x) if i == place else x.clone() for i, x in enumerate(arguments)]
        result = op(*moved)
        for actual, wanted in zip(moved, near, strict=True):
            assert torch.equal(actual, wanted), f"argument {place} is far"
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
