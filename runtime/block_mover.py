"""Moves KV blocks between the device pool, the pinned host pool and each other, beside the running model.

Order of a step, whatever the caller's: swap-outs, swap-ins, copies, then the step's own keys and values. Hence

* a device block that a swap-out vacates may be filled in the same step, by a swap-in, a copy or the model;
* a host block that a swap-in vacates may not: it is filled in a later step. A step that names a host block on both sides
  is refused.

Swaps run in a side stream, in the order of the steps, so a swap-in finds what the swap-out before it left in the host
block. Copies and the model run in the compute stream. Between the two only what must wait waits:

* a swap waits for all work the compute stream was given before: it may still write what the swap reads, or read what it
  overwrites;
* the compute stream waits for a swap-in at once: the step is about to read the blocks;
* the compute stream waits for a swap-out only before it writes to a block that the swap-out reads, in this step or a later
  one. Until then the swap-out runs beside the model.

The host never waits. Pairs cross to the device from pinned buffers, each used again when the copy that read it is done.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence

import torch

from .. import kernels
from ..kernels._checks import check_block_pairs
from ..kernels.swap_costs import PUBLIC_FIGURES, SwapCosts
from .kv_pool import KVPool
from .streams import Event, Stream, compute_and_side_stream

Pairs = Sequence[tuple[int, int]]  # (source, destination)


class BlockMover:
    """Carries out the block moves of each step.

    streams   the model's and the one beside it; by default the current stream of the pool's device and a new one
    """

    def __init__(
        self,
        pool: KVPool,
        host_pool: KVPool | None = None,
        costs: SwapCosts = PUBLIC_FIGURES,
        streams: tuple[Stream, Stream] | None = None,
    ) -> None:
        if host_pool is not None and _block_geometry(host_pool) != _block_geometry(pool):
            raise ValueError(
                f"host_pool: expected blocks of the pool's {_block_geometry(pool)}, got {_block_geometry(host_pool)}"
            )
        self.pool = pool
        self.host_pool = host_pool
        self._costs = costs
        self._compute, self._side = streams or compute_and_side_stream(pool.data)
        self._staging = Staging(pin_memory=pool.data.is_cuda)
        # swap-outs that the compute stream was not told to wait for, oldest first, with the device blocks they read
        self._departing: list[tuple[Event, frozenset[int]]] = []

    def move(
        self,
        swap_out: Pairs = (),
        swap_in: Pairs = (),
        copies: Pairs = (),
        written: Iterable[int] = (),
    ) -> None:
        """Enqueue the moves of one step, and have the compute stream wait for what the step depends on.

        written   device blocks to which the step itself will write; not looked at when nobody depends on it
        Raises ValueError naming the argument, what was expected and what came, before anything moves.
        """
        if not (len(swap_out) or len(swap_in) or len(copies) or self._departing):
            return  # most steps
        out, in_, copied = self.check(swap_out, swap_in, copies)
        if len(out):
            self._swap_out(out)
        if len(in_):
            self._swap_in(in_)
        if self._departing:
            self._await_departures({*copied[:, 1].tolist(), *written})
        if len(copied):
            self._copy(copied)

    def synchronize(self) -> None:
        """Let the host wait until every move is done; for those who look at a pool from outside."""
        self._side.record().synchronize()
        self._compute.record().synchronize()

    def check(
        self, swap_out: Pairs = (), swap_in: Pairs = (), copies: Pairs = ()
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The moves as int64 [n, 2] each. Raises what `move` would, and moves nothing."""
        out, in_, copied = (
            _as_tensor(name, pairs)
            for name, pairs in (("swap_out", swap_out), ("swap_in", swap_in), ("copies", copies))
        )
        for name, swapped in (("swap_out", out), ("swap_in", in_)):
            if self.host_pool is None and len(swapped):
                raise ValueError(
                    f"{name}: expected none without a host pool, got {swapped.tolist()}"
                )
        if self.host_pool is not None:
            check_block_pairs(self.pool.data, self.host_pool.data, out, "swap_out")
            check_block_pairs(self.host_pool.data, self.pool.data, in_, "swap_in")
            if both := set(out[:, 1].tolist()).intersection(in_[:, 0].tolist()):
                raise ValueError(
                    f"swap_out: expected no host block that a swap-in of the same step reads, got {sorted(both)}"
                )
        check_block_pairs(self.pool.data, self.pool.data, copied, "copies")
        return out, in_, copied

    def _swap_out(self, pairs: torch.Tensor) -> None:
        assert self.host_pool is not None
        done = self._swap(self.pool.data, self.host_pool.data, pairs)
        self._departing.append((done, frozenset(pairs[:, 0].tolist())))

    def _swap_in(self, pairs: torch.Tensor) -> None:
        assert self.host_pool is not None
        self._await_arrivals(self._swap(self.host_pool.data, self.pool.data, pairs))

    def _swap(self, source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> Event:
        self._side.wait(self._compute.record())
        return self._run(
            self._side, lambda staged: self._swap_blocks(source, destination, staged), pairs
        )

    def _swap_blocks(
        self, source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor
    ) -> None:
        plan = None
        if self.pool.data.is_cuda:
            from ..kernels.block_swap import plan_swap

            plan = plan_swap(source, destination, pairs, self._costs)
        kernels.swap_blocks(source, destination, pairs, plan=plan)

    def _copy(self, pairs: torch.Tensor) -> None:
        self._run(self._compute, lambda staged: kernels.copy_blocks(self.pool.data, staged), pairs)

    def _run(
        self, stream: Stream, work: Callable[[torch.Tensor], None], pairs: torch.Tensor
    ) -> Event:
        """Enqueue work on pairs, which it reads from a buffer that lasts until it is done."""
        buffer = self._staging.take(len(pairs))
        buffer.numpy()[: len(pairs)] = pairs
        stream.run(lambda: work(buffer[: len(pairs)]))
        done = stream.record()
        self._staging.give_back(buffer, done)
        return done

    def _await_arrivals(self, done: Event) -> None:
        self._compute.wait(done)
        self._departing.clear()  # the side stream left them behind before the swap-in began

    def _await_departures(self, written: set[int]) -> None:
        """Wait for the latest swap-out that reads a block of `written`, and so for all before it."""
        while self._departing and self._departing[0][0].query():
            del self._departing[0]
        for last in reversed(range(len(self._departing))):
            done, read = self._departing[last]
            if not written.isdisjoint(read):
                self._compute.wait(done)
                del self._departing[: last + 1]
                return


def _block_geometry(pool: KVPool) -> str:
    """What a block's bytes mean."""
    return f"{pool.block_bytes} bytes, {pool.block_size} tokens, {pool.layout.value}, layers {pool.layers}"


def _as_tensor(name: str, pairs: Pairs) -> torch.Tensor:
    """int64 [n, 2]. What is not a pair of integers would become one without a word."""
    try:
        ids = [(operator.index(source), operator.index(target)) for source, target in pairs]
        return torch.tensor(ids, dtype=torch.int64).view(-1, 2)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name}: expected (source, destination) block ids, got {pairs!r:.80}"
        ) from error


class Staging:
    """Host buffers of pairs on their way to the device."""

    _LEAST = 64  # pairs a buffer holds

    def __init__(self, pin_memory: bool) -> None:
        self._pin_memory = pin_memory
        self._idle: list[torch.Tensor] = []
        self._lent: list[tuple[Event, torch.Tensor]] = []

    @property
    def num_buffers(self) -> int:
        return len(self._idle) + len(self._lent)

    def take(self, num_pairs: int) -> torch.Tensor:
        """A buffer [num_pairs or more, 2] that nobody reads."""
        lent: list[tuple[Event, torch.Tensor]] = []
        for done, buffer in self._lent:
            if self._has_passed(done):
                self._idle.append(buffer)
            else:
                lent.append((done, buffer))
        self._lent = lent
        if self._idle and len(buffer := self._idle.pop()) >= num_pairs:
            return buffer
        # one too small makes way for a larger one
        size = max(self._LEAST, 1 << (num_pairs - 1).bit_length())
        return torch.empty(size, 2, dtype=torch.int64, pin_memory=self._pin_memory)

    def give_back(self, buffer: torch.Tensor, done: Event) -> None:
        """`buffer` is read until `done`."""
        self._lent.append((done, buffer))

    def _has_passed(self, done: Event) -> bool:
        return done.query()
