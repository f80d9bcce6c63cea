"""The numpy floor of a decode step's host work: the arrays that must change, changed by bare numpy and lists.

Three parts: find the rows that need a new block and give it; positions, sequence lengths and slots on persistent arrays;
one sampled token to each sequence, with a length check. No groups, snapshots, prefix cache, sampling parameters or checks:
what is left out is what an engine pays for. The ratio of an engine's step to this number, taken in turns in one run, can be
compared between machines.
"""

from __future__ import annotations

from time import perf_counter_ns

import numpy as np

BLOCK_SIZE = 16


class FloorRow:
    __slots__ = ("blocks", "num_tokens", "tokens")

    def __init__(self, num_tokens: int, blocks: list[int]) -> None:
        self.tokens = [1] * num_tokens
        self.blocks = blocks
        self.num_tokens = num_tokens


class Floor:
    """`step()` runs one decode step for `batch` sequences and returns its nanoseconds."""

    def __init__(self, batch: int, context: int, steps: int) -> None:
        width = (context + steps + 64) // BLOCK_SIZE + 2
        self.free = list(range(1, 1 + batch * width))
        self.rows = []
        for row in range(
            batch
        ):  # lengths differ, so that a sixteenth of the rows needs a block in each step
            num_tokens = context + row % BLOCK_SIZE
            blocks = [self.free.pop() for _ in range(-(-num_tokens // BLOCK_SIZE))]
            self.rows.append(FloorRow(num_tokens, blocks))
        self.tables = np.zeros((batch, width), np.int32)
        for table, row in zip(self.tables, self.rows, strict=True):
            table[: len(row.blocks)] = row.blocks
        self.seq_lens = np.array([row.num_tokens for row in self.rows], np.int32)
        self.index = np.arange(batch)
        self.last, self.positions, self.block, self.slots = np.zeros((4, batch), np.int64)
        self.sampled = [(7 * row + 11) % 30000 for row in range(batch)]

    def step(self) -> int:
        started = perf_counter_ns()
        for index in np.nonzero(self.seq_lens % BLOCK_SIZE == 0)[0].tolist():
            block, row = self.free.pop(), self.rows[index]
            self.tables[index, len(row.blocks)] = block
            row.blocks.append(block)
        self.seq_lens += 1
        np.subtract(self.seq_lens, 1, out=self.positions, casting="unsafe")
        np.floor_divide(self.positions, BLOCK_SIZE, out=self.block)
        blocks = self.tables[self.index, self.block]
        np.multiply(blocks, BLOCK_SIZE, out=self.slots, casting="unsafe")
        self.slots += self.positions % BLOCK_SIZE
        for row, token in zip(self.rows, self.sampled, strict=True):
            row.tokens.append(token)
            row.num_tokens += 1
            if row.num_tokens >= 1 << 30:
                raise RuntimeError("too long")
        self.last[:] = self.sampled
        return perf_counter_ns() - started
