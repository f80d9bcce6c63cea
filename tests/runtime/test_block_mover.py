"""Blocks that move beside a running model: every read sees what it should, in any order that the streams permit."""

from __future__ import annotations

import random

import pytest
import torch

from octavo.kernels.swap_costs import Crossover, SwapCosts
from octavo.runtime.block_mover import BlockMover, Staging
from octavo.runtime.kv_pool import KVLayout, KVPool, LayerKV
from octavo.runtime.streams import HostEvent
from octavo.tests.runtime.simulated_streams import SimulatedEvent, Simulation

NUM_BLOCKS, NUM_HOST_BLOCKS = 10, 6


def pools(device: str = "cpu", head_size: int = 1) -> tuple[KVPool, KVPool]:
    """The numbers in every block tell which it is."""
    pinned = device == "cuda"
    layers = [LayerKV(1, head_size, torch.float32)]
    pool = KVPool(NUM_BLOCKS, layers, 1, device)
    host = KVPool(NUM_HOST_BLOCKS, layers, 1, pin_memory=pinned)
    for some, first in ((pool, 0), (host, 100)):
        words(some)[:] = first + torch.arange(some.num_blocks, device=some.data.device)[:, None]
    return pool, host


def words(pool: KVPool) -> torch.Tensor:
    """float32 [blocks, words of a block]"""
    return pool.data.view(torch.float32)


def number(pool: KVPool, block: int) -> float:
    return words(pool)[block, 0].item()


class Run:
    """Random steps through a mover in simulated streams, and what its blocks hold if all happens in order."""

    def __init__(self, mover: type[BlockMover], seed: int) -> None:
        self.draw = random.Random(seed)
        self.streams = Simulation(self.draw)
        self.pool, self.host = pools()
        self.mover = mover(self.pool, self.host, streams=(self.streams.compute, self.streams.side))
        self.device_model = [float(block) for block in range(NUM_BLOCKS)]
        self.host_model = [100.0 + block for block in range(NUM_HOST_BLOCKS)]
        self.last_written = 1000.0

    def blocks(self, most: int, among=range(NUM_BLOCKS)) -> list[int]:
        among = list(among)
        return self.draw.sample(among, min(len(among), self.draw.randint(0, most)))

    def step(self) -> None:
        draw = self.draw
        there, back = [], []
        if draw.random() < 0.6:
            back = self.blocks(2, range(NUM_HOST_BLOCKS))
        if draw.random() < 0.6:
            there = self.blocks(3, set(range(NUM_HOST_BLOCKS)) - set(back))
        swap_out = list(zip(draw.sample(range(NUM_BLOCKS), len(there)), there, strict=True))
        swap_in = list(zip(back, draw.sample(range(NUM_BLOCKS), len(back)), strict=True))
        copied = draw.sample(range(NUM_BLOCKS), 2 * draw.randint(0, 2))
        copies = list(zip(copied[::2], copied[1::2], strict=True))
        written = self.blocks(2)
        self.mover.move(swap_out, swap_in, copies, iter(written))
        for source, target, pairs in (
            (self.device_model, self.host_model, swap_out),
            (self.host_model, self.device_model, swap_in),
            (self.device_model, self.device_model, copies),
        ):
            for before, after in pairs:
                target[after] = source[before]
        for block in self.blocks(4):  # a layer reads before the next one writes
            self.read(block)
        for block in written:
            self.last_written += 1
            self.device_model[block] = self.last_written
            self.write(block, self.last_written)
        for block in self.blocks(4):
            self.read(block)

    def read(self, block: int) -> None:
        expected = self.device_model[block]

        def work() -> None:
            assert number(self.pool, block) == expected, f"block {block}"

        self.streams.compute.run(work)

    def write(self, block: int, value: float) -> None:
        self.streams.compute.run(lambda: words(self.pool)[block].fill_(value))

    def finish(self) -> None:
        self.streams.advance()
        assert self.streams.is_idle, "the streams wait for one another"
        assert [number(self.pool, i) for i in range(NUM_BLOCKS)] == self.device_model
        assert [number(self.host, i) for i in range(NUM_HOST_BLOCKS)] == self.host_model

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()
            self.streams.advance(self.draw.choice([0, 2, 8, 30]))
            if self.draw.random() < 0.05:
                self.finish()
        self.finish()


@pytest.mark.parametrize("seed", range(40))
def test_every_read_sees_its_own(seed) -> None:
    run = Run(BlockMover, seed)
    run.steps(100)
    # as many as were under way at once, not as many as there were moves
    assert run.mover._staging.num_buffers < 100


class NoWaitBeforeSwapOut(BlockMover):
    def _swap_out(self, pairs):
        self._side.wait, kept = (lambda event: None), self._side.wait
        super()._swap_out(pairs)
        self._side.wait = kept


class NoWaitBeforeSwapIn(BlockMover):
    def _swap_in(self, pairs):
        self._side.wait, kept = (lambda event: None), self._side.wait
        super()._swap_in(pairs)
        self._side.wait = kept


class NoWaitAfterSwapIn(BlockMover):
    def _await_arrivals(self, done):
        self._departing.clear()


class NoWaitBeforeVacatedBlocksAreWritten(BlockMover):
    def _await_departures(self, written):
        pass


class CopiesDoNotCountAsWrites(BlockMover):
    def move(self, swap_out=(), swap_in=(), copies=(), written=()):
        super().move(swap_out, swap_in, (), written)
        if copies:
            self._copy(torch.tensor(copies))


class VacatedBlocksAreForgottenAfterTheStep(BlockMover):
    def move(self, *moves):
        super().move(*moves)
        self._departing.clear()


class WaitsForTheOldestSwapOutOnly(BlockMover):
    def _await_departures(self, written):
        if any(not written.isdisjoint(read) for _, read in self._departing):
            self._compute.wait(self._departing[0][0])
            self._departing.clear()


class CopiesComeFirst(BlockMover):
    def move(self, swap_out=(), swap_in=(), copies=(), written=()):
        written = list(written)
        super().move((), (), copies, written)
        super().move(swap_out, swap_in, (), written)


class SwapInComesFirst(BlockMover):
    def move(self, swap_out=(), swap_in=(), copies=(), written=()):
        written = list(written)
        super().move((), swap_in, (), written)
        super().move(swap_out, (), copies, written)


class StagingIsUsedAgainTooEarly(BlockMover):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)

        class Hasty(Staging):
            def _has_passed(self, done):
                return True

        self._staging = Hasty(pin_memory=False)


@pytest.mark.parametrize(
    "mutant",
    [
        NoWaitBeforeSwapOut,
        NoWaitBeforeSwapIn,
        NoWaitAfterSwapIn,
        NoWaitBeforeVacatedBlocksAreWritten,
        CopiesDoNotCountAsWrites,
        VacatedBlocksAreForgottenAfterTheStep,
        WaitsForTheOldestSwapOutOnly,
        CopiesComeFirst,
        SwapInComesFirst,
        StagingIsUsedAgainTooEarly,
    ],
)
def test_a_mover_that_forgets_something_is_caught(mutant) -> None:
    """By the same steps and seeds that the right one passes."""
    caught = 0
    for seed in range(40):
        try:
            Run(mutant, seed).steps(100)
        except (
            AssertionError,
            ValueError,
        ):  # pairs overwritten while they are read may be no pairs any more
            caught += 1
    assert caught >= 5, f"caught by {caught} of 40 seeds"


def test_a_swap_out_runs_beside_the_model() -> None:
    """Steps that leave the vacated blocks alone go on while it has not even begun; the first write to one waits."""
    run = Run(BlockMover, 0)
    compute = run.streams.compute
    done: list[str] = []
    run.mover.move(swap_out=[(1, 0), (2, 1)], copies=[(1, 5)], written=[3])
    compute.run(lambda: done.append("first step"))
    run.mover.move(written=[3, 4])
    compute.run(lambda: done.append("second step"))
    run.mover.move(written=[3, 2])
    compute.run(lambda: done.append("third step"))
    run.streams.advance(only=compute)
    assert done == ["first step", "second step"]
    assert compute.is_stuck()
    run.streams.advance()
    assert done == ["first step", "second step", "third step"]
    assert [number(run.host, block) for block in range(3)] == [1, 2, 102]


def test_a_step_waits_for_what_is_swapped_in() -> None:
    run = Run(BlockMover, 0)
    run.mover.move(swap_in=[(1, 4)])
    run.streams.compute.run(lambda: None)
    run.streams.advance(only=run.streams.compute)
    assert run.streams.compute.is_stuck()


def test_nothing_is_waited_for_twice() -> None:
    """Nor when the swap-out is known to be done."""
    run = Run(BlockMover, 0)
    run.mover.move(swap_out=[(1, 0)], written=[1])
    run.streams.advance()
    run.mover.move(written=[1])
    assert run.streams.is_idle
    run.mover.move(swap_out=[(1, 0)])
    run.streams.advance()
    run.mover.move(written=[1])
    assert run.streams.is_idle


def test_written_is_looked_at_only_while_a_block_is_leaving() -> None:
    def nobody_asks():
        raise AssertionError
        yield

    run = Run(BlockMover, 0)
    run.mover.move(copies=[(1, 2)], written=nobody_asks())
    run.mover.move(swap_out=[(1, 2)], swap_in=[(1, 3)], written=nobody_asks())


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ({"swap_out": [(1, 6)]}, r"swap_out: .* destination block in \[0, 6\), got 6"),
        ({"swap_in": [(6, 1)]}, r"swap_in: .* source block in \[0, 6\), got 6"),
        ({"swap_in": [(1, 1), (2, 1)]}, r"swap_in: .* each destination block once, got \[1\]"),
        ({"copies": [(1, 2), (2, 3)]}, r"copies: .* that is also a source, got \[2\]"),
        ({"copies": [(0, 10)]}, r"copies: .* destination block in \[0, 10\), got 10"),
        ({"swap_in": [(1, 1)], "swap_out": [(2, 1)]}, r"swap_out: .*no host block .* got \[1\]"),
        # what a cast or a view would make pairs of
        ({"copies": [(1, 2, 3), (4, 5, 7)]}, r"copies: expected \(source, .* got \[\(1, 2, 3\)"),
        ({"copies": [1, 2]}, r"copies: expected \(source, .* got \[1, 2\]"),
        ({"swap_out": [(1.7, 2)]}, r"swap_out: expected \(source, .* got \[\(1\.7, 2\)\]"),
        ({"swap_in": [(1, 2**70)]}, r"swap_in: expected \(source, "),
    ],
)
def test_bad_moves_are_refused_before_anything_moves(moves, message) -> None:
    """Neither the good lists of the same step."""
    pool, host = pools()
    before = pool.data.clone(), host.data.clone()
    good = {"swap_out": [(4, 5)], "swap_in": [(4, 5)], "copies": [(6, 7)]}
    with pytest.raises(ValueError, match=message):
        BlockMover(pool, host).move(**(good | moves))
    assert torch.equal(pool.data, before[0]) and torch.equal(host.data, before[1])


def test_no_swaps_without_a_host_pool() -> None:
    pool, _ = pools()
    mover = BlockMover(pool)
    for name in ("swap_out", "swap_in"):
        with pytest.raises(
            ValueError, match=rf"^{name}: expected none without .* got \[\[1, 2\]\]"
        ):
            mover.move(**{name: [(1, 2)]})
    mover.move(copies=[(1, 2)])


def test_pools_of_other_blocks_are_refused() -> None:
    """Also where the bytes would fit: they mean other things."""
    layers = [LayerKV(2, 8, torch.float16)]
    pool = KVPool(4, layers, 4)
    for other in (
        KVPool(4, layers, 8),
        KVPool(4, layers, 4, layout=KVLayout.HND),
        KVPool(4, [LayerKV(1, 16, torch.float16)], 4),
        KVPool(4, [LayerKV(2, 8, torch.bfloat16)], 4),
    ):
        with pytest.raises(ValueError, match="host_pool: expected blocks of the pool's 256 bytes"):
            BlockMover(pool, other)
    BlockMover(pool, KVPool(9, layers, 4))


def test_on_a_cpu_moves_are_done_when_the_call_returns() -> None:
    pool, host = pools()
    mover = BlockMover(pool, host)
    mover.move([(3, 0)], [(1, 3)], [(3, 4)], [5])
    assert [number(host, 0), number(pool, 3), number(pool, 4)] == [3, 101, 101]
    mover.synchronize()


def test_synchronize_waits_for_both_streams(monkeypatch) -> None:
    """The side stream may be behind: nobody has waited for a swap-out yet."""
    run = Run(BlockMover, 0)
    waited = []
    monkeypatch.setattr(SimulatedEvent, "synchronize", lambda event: waited.append(event))
    run.mover.move(swap_out=[(1, 0)], copies=[(2, 3)])
    run.mover.synchronize()
    assert not any(event.passed for event in waited)
    run.streams.advance(only=run.streams.compute)
    run.streams.advance(only=run.streams.side)
    assert len(waited) == 2 and all(event.passed for event in waited)
    assert waited[0] is not waited[1] and number(run.host, 0) == 1


def test_staging_keeps_what_is_read_and_grows_for_long_lists() -> None:
    staging, slow = Staging(pin_memory=False), SimulatedEvent()
    first = staging.take(3)
    staging.give_back(first, slow)
    second = staging.take(3)
    assert second.data_ptr() != first.data_ptr()
    staging.give_back(second, HostEvent())
    assert staging.take(64).data_ptr() == second.data_ptr()
    assert staging.num_buffers == 1  # `second` is out
    slow.passed = True
    assert len(staging.take(1000)) >= 1000
    assert staging.num_buffers == 0, "the one too small was let go"


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [False, True], ids=["copies", "kernel"])
def test_on_a_gpu_every_read_sees_its_own(kernel) -> None:
    """Large blocks, so that a swap is still under way when the next step is enqueued."""
    crossover = Crossover(2**40, 1) if kernel else Crossover(0, 1)
    pool, host = pools("cuda", head_size=1 << 20)
    mover = BlockMover(pool, host, SwapCosts(crossover, crossover))
    draw = random.Random(0)
    expected = [float(block) for block in range(NUM_BLOCKS)]
    there = [100.0 + block for block in range(NUM_HOST_BLOCKS)]
    wrong = torch.zeros((), device="cuda")
    for step in range(300):
        out = list(zip(draw.sample(range(NUM_BLOCKS), 3), range(3), strict=True))
        back = list(zip((3, 4, 5), draw.sample(range(NUM_BLOCKS), 3), strict=True))
        if step % 2:
            out, back = [(a, b + 3) for a, b in out], [(a - 3, b) for a, b in back]
        written = draw.sample(range(NUM_BLOCKS), 2)
        mover.move(out, back, (), written)
        for a, b in out:
            there[b] = expected[a]
        for a, b in back:
            expected[b] = there[a]
        for block in written:
            expected[block] = 1000.0 + step
            words(pool)[block] = expected[block]
        for block in range(NUM_BLOCKS):
            wrong += (words(pool)[block] != expected[block]).sum()
    mover.synchronize()
    assert wrong.item() == 0
    assert [number(host, block) for block in range(NUM_HOST_BLOCKS)] == there
