"""Grouped low-rank adapters against the oracle: mixed ranks, tokens without one, NaN in all that must not be read."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from octavo.kernels import cpu, lora, reference
from octavo.tests.kernels.cases import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["cpu", "triton"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
RANKS = [16, 0, 3, 40, 8]
MAX_RANK, IN, OUT, SCALE = 40, 200, 150, 0.75
BATCHES = {
    "one token": [2],
    "one token without": [-1],
    "decodes of all kinds": [4, -1, 0, 3, 1, 0, -1, 2, 0],
    "a prefill beside decodes": [3] * 19 + [0, -1, 3] + [0] * 17,
    "nobody has one": [-1, -1, -1],
    "no tokens": [],
}


class Case:
    """Adapters whose parts past their rank are NaN, and the groups of a batch."""

    def __init__(self, adapter_ids: list[int], dtype: torch.dtype, in_features: int = IN):
        num_tokens, num_adapters = len(adapter_ids), len(RANKS)
        self.dtype, self.ids = dtype, torch.tensor(adapter_ids, dtype=torch.int32)
        self.ranks = torch.tensor(RANKS, dtype=torch.int32)
        self.x = torch.randn(num_tokens, in_features + 3).to(dtype)[:, :in_features]
        self.a = (torch.randn(num_adapters, MAX_RANK, in_features) / in_features**0.5).to(dtype)
        self.b = torch.randn(num_adapters, OUT, MAX_RANK).to(dtype)
        self.past_rank = torch.arange(MAX_RANK) >= self.ranks[:, None]
        self.a[self.past_rank] = float("nan")
        self.b.transpose(1, 2)[self.past_rank] = float("nan")
        self.qkv = torch.randn(num_tokens, 2 * OUT).to(dtype)
        self.groups = cpu.group_by_adapter(self.ids, num_adapters)
        self.known = (~self.past_rank)[self.ids] & (self.ids >= 0)[:, None]  # [T, MAX_RANK]

    def run(self, ops, device: str, **plan) -> tuple[torch.Tensor, torch.Tensor]:
        index = [x.to(device) for x in (self.ranks, *self.groups)]
        y = ops.lora_shrink(self.x.to(device), self.a.to(device), *index, SCALE, **plan)
        qkv = self.qkv.to(device).clone()
        ops.lora_expand(y, self.b.to(device), *index, qkv[:, OUT:], **plan)
        return y.cpu(), qkv.cpu()

    def check(self, y: torch.Tensor, qkv: torch.Tensor) -> None:
        exact_y = reference.lora_shrink(self.x, self.a, self.ranks, *self.groups, SCALE)
        assert y.dtype == torch.float32 and torch.equal(~exact_y.isnan(), self.known)
        naive = torch.zeros(y.shape)
        added = torch.zeros(len(self.ids), OUT, dtype=self.dtype)
        for token, adapter in enumerate(self.ids.tolist()):
            rank = RANKS[adapter] if adapter >= 0 else 0
            row = self.x[token] @ self.a[adapter, :rank].t()
            naive[token, :rank] = row.float() * SCALE
            added[token] = naive[token, :rank].to(self.dtype) @ self.b[adapter, :, :rank].t()
        assert_close(y[self.known], exact_y[self.known], naive[self.known])

        exact_out = reference.lora_expand(
            exact_y, self.b, self.ranks, *self.groups, self.qkv[:, OUT:]
        )
        assert_close(qkv[:, OUT:], exact_out, self.qkv[:, OUT:] + added)
        without = ~self.known.any(dim=1)  # no adapter, or one of rank 0
        assert torch.equal(qkv[without], self.qkv[without])
        assert torch.equal(qkv[:, :OUT], self.qkv[:, :OUT])


@IMPLEMENTATIONS
@DTYPES
@pytest.mark.parametrize("batch", BATCHES)
def test_shrink_and_expand(implementation, dtype, batch) -> None:
    case = Case(BATCHES[batch], dtype)
    ops, device = (cpu, "cpu") if implementation == "cpu" else (lora, DEVICE)
    case.check(*case.run(ops, device))


@pytest.mark.parametrize(
    "changes", [{"num_splits": 3}, {"tokens": 64}, {"tile_rank": 64, "tile_out": 32}], ids=str
)
def test_every_plan_gives_the_same(changes) -> None:
    case = Case(BATCHES["a prefill beside decodes"], torch.bfloat16, in_features=700)
    plan = lora.plan_lora(num_tokens=1, in_features=700, element_size=2)
    case.check(*case.run(lora, DEVICE, plan=dataclasses.replace(plan, **changes)))


@pytest.mark.skipif(DEVICE == "cuda", reason="the memory guard watches the interpreter")
def test_what_no_token_needs_is_not_read(watch) -> None:
    """Adapters without tokens, parts past a rank, tokens without an adapter."""
    case = Case([2, -1, 0, 2], torch.float32)
    idle = torch.tensor([1, 3, 4])
    for factor, unused in (
        (case.a, case.past_rank[:, :, None]),
        (case.b, case.past_rank[:, None, :]),
    ):
        unused = unused.expand(factor.shape).clone()
        unused[idle] = True
        watch.poison(factor, unused)
    watch.poison(case.x, (case.ids < 0)[:, None].expand(case.x.shape))
    case.check(*case.run(lora, DEVICE))
    assert watch.launches == 2


@pytest.mark.parametrize(
    "ids", [[], [-1], [0, 0], [3, -1, 0, 3, 1, -7, 3], [2, 1, 0, 2, 1, 0]], ids=str
)
def test_group_by_adapter(ids) -> None:
    ids = torch.tensor(ids, dtype=torch.int32)
    order, starts = cpu.group_by_adapter(ids, 4)
    expected_order, expected_starts = reference.group_by_adapter(ids, 4)
    assert order.dtype == starts.dtype == torch.int32
    assert torch.equal(starts, expected_starts)
    first = starts[0]
    assert torch.equal(order[first:], expected_order[first:])
    assert set(order.tolist()) == set(range(len(ids)))


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("num_adapters", [1, 3, 50])
def test_the_grid_is_large_enough_and_no_larger(num_tokens, num_adapters) -> None:
    """The worst grouping: one token for as many adapters as there are, the rest for the last."""
    worst = 0
    for lonely in range(min(num_tokens, num_adapters)):
        worst = max(worst, lonely + -(-(num_tokens - lonely) // 16))
    tiles = lora._num_tiles(num_tokens, num_adapters, 16)
    assert worst <= tiles <= min(num_tokens, num_tokens // 16 + num_adapters)
