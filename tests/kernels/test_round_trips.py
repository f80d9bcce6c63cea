"""Blocks through everything that moves them, byte for byte: written, copied, swapped out, overwritten, swapped in."""

from __future__ import annotations

import random

import pytest
import torch

from octavo.kernels import block_copy, block_swap, cache_write, cpu, reference
from octavo.runtime.kv_pool import KVLayout, KVPool, LayerKV
from octavo.tests.kernels.attending import DEVICE

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
]
NUM_BLOCKS, NUM_HOST_BLOCKS, NUM_LAYERS = 9, 5, 2


class Run:
    """A pool and its host pool under the ops, and the same two under the oracle."""

    def __init__(self, implementation: str, draw: random.Random) -> None:
        self.draw, self.implementation = draw, implementation
        self.device = "cpu" if implementation == "cpu" else DEVICE
        layout, size = draw.choice(list(KVLayout)), draw.choice([1, 4, 5])
        layers = [self._any_layer() for _ in range(NUM_LAYERS)]
        pinned = self.device == "cuda"
        self.pool = KVPool(NUM_BLOCKS, layers, size, self.device, layout)
        self.host = KVPool(NUM_HOST_BLOCKS, layers, size, "cpu", layout, pin_memory=pinned)
        self.mirror = KVPool(NUM_BLOCKS, layers, size, "cpu", layout)
        self.mirror_host = KVPool(NUM_HOST_BLOCKS, layers, size, "cpu", layout)

    def _any_layer(self) -> LayerKV:
        dtype = self.draw.choice(DTYPES)
        scales = dtype.itemsize == 1 and self.draw.random() < 0.5
        return LayerKV(
            self.draw.choice([1, 3]), self.draw.choice([8, 10]), dtype, scale_per_token_head=scales
        )

    def write(self) -> None:
        """New tokens to random slots of a layer, padding among them, and new scales if it keeps any."""
        layer = self.draw.randrange(NUM_LAYERS)
        dtype, (num_blocks, block_size, heads, head_size) = (
            self.pool.layer(layer)[0].dtype,
            self.pool.layer(layer)[0].shape,
        )
        tokens = self.draw.randint(1, 6)
        slots = torch.randperm(num_blocks * block_size)[:tokens]
        slots[torch.rand(len(slots)) < 0.2] = -1
        plain = dtype if dtype.itemsize > 1 else torch.float32
        k, v = (torch.randn(len(slots), heads, head_size).mul(20).to(plain) for _ in range(2))
        written = slots[slots >= 0]
        scales = torch.rand(len(written), heads)
        for pool in (self.pool, self.mirror):
            for scale in pool.scales(layer):
                if scale is not None:
                    place = written.to(scale.device)
                    scale[place // block_size, place % block_size] = scales.to(scale.device)
        op = cpu if self.implementation == "cpu" else cache_write
        op.reshape_and_cache(
            k.to(self.device), v.to(self.device), *self.pool.layer(layer), slots.to(self.device)
        )
        reference.reshape_and_cache(k, v, *self.mirror.layer(layer), slots)

    def copy(self) -> None:
        ids = self.draw.sample(range(NUM_BLOCKS), 5)
        pairs = torch.tensor([[ids[0], ids[1]], [ids[0], ids[2]], [ids[3], ids[4]]])
        pairs = pairs[: self.draw.randint(1, 3)]
        op = cpu if self.implementation == "cpu" else block_copy
        op.copy_blocks(self.pool.data, pairs)
        reference.copy_blocks(self.mirror.data, pairs)

    def _swap(self, source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> None:
        if self.implementation == "cpu":
            cpu.swap_blocks(source, destination, pairs)
        else:
            plan = block_swap.SwapPlan(by_kernel=self.draw.random() < 0.5)
            block_swap.swap_blocks(source, destination, pairs, plan=plan)
            if DEVICE == "cuda":
                torch.cuda.synchronize()

    def swap_out_overwrite_and_in(self) -> None:
        """What a preempted group's blocks go through; they come back to other places."""
        count = self.draw.randint(1, 3)
        there = self.draw.sample(range(NUM_HOST_BLOCKS), count)
        before, after = (self.draw.sample(range(NUM_BLOCKS), count) for _ in range(2))
        out = torch.tensor([before, there]).t()
        back = torch.tensor([there, after]).t()
        self._swap(self.pool.data, self.host.data, out)
        reference.swap_blocks(self.mirror.data, self.mirror_host.data, out)
        for pool in (self.pool, self.mirror):
            pool.data[before] = 0x5A  # somebody else's, meanwhile
        self._swap(self.host.data, self.pool.data, back)
        reference.swap_blocks(self.mirror_host.data, self.mirror.data, back)

    def check(self) -> None:
        for actual, expected in ((self.pool, self.mirror), (self.host, self.mirror_host)):
            assert torch.equal(actual.data.cpu(), expected.data)


@pytest.mark.parametrize("implementation", ["cpu", "triton"])
@pytest.mark.parametrize("block_of_runs", range(8))
def test_round_trips(implementation, block_of_runs) -> None:
    """200 random schedules over all dtypes and both layouts, 25 at a time."""
    for number in range(25):
        seed = 25 * block_of_runs + number
        draw = random.Random(seed)
        torch.manual_seed(seed)
        run = Run(implementation, draw)
        for _ in range(draw.randint(4, 8)):
            draw.choice([run.write, run.write, run.copy, run.swap_out_overwrite_and_in])()
            run.check()
