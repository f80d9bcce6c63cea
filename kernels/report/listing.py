"""Disassembled machine code as a list of instructions, and the loops in it, the same for every vendor.

The parsers (`sass`, `amdgcn`) say of each instruction where it may jump and what it counts as; here loops are found from
jumps alone. A listing that is not understood raises `UnreadableCode`: a figure that is wrong because a line was skipped
would look like a good one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class UnreadableCode(ValueError):
    """Machine code or a tool's report that does not look as expected."""


@dataclass(frozen=True)
class Instruction:
    """One instruction and what it counts as."""

    opcode: str
    target: int | None = None  # index of the instruction it may jump to
    falls_through: bool = True  # the next instruction may follow
    mma: str | None = None  # kind of matrix product
    load: str | None = None  # instruction and width of a load from global memory, "LDG.128"
    store: str | None = None  # likewise of a store, "STG.128"
    is_barrier: bool = False  # all warps of the program meet
    is_spill: bool = False  # a register goes to memory or comes back


def find_loops(code: Sequence[Instruction]) -> list[list[Instruction]]:
    """The natural loops: a jump back to a place that every way to the jump has passed.

    Compilers move rarely used parts of a loop (a wait that has to be repeated, say) behind the kernel's end. From there
    a jump leads back into the middle of the loop, which by address alone looks like a loop over half of the kernel.
    """
    blocks, successors = _blocks(code)
    dominators = _dominators(successors)
    bodies: dict[int, set[int]] = {}
    for block, following in enumerate(successors):
        for header in following:
            if dominators[block] >> header & 1:
                bodies.setdefault(header, set()).update(_body(header, block, successors))
    return [
        [instruction for block in sorted(body) for instruction in code[slice(*blocks[block])]]
        for body in bodies.values()
    ]


def main_loop(code: Sequence[Instruction]) -> list[Instruction] | None:
    """The loop over the KV tiles that need no mask, or None where no loop holds a matrix product.

    An attention kernel has two or three loops over tiles: a masked one at the window's start, the unmasked bulk, and a
    masked one at the end. All three do the same matrix products; the masked ones do the masking on top. So of the loops
    with the most products (and no further such loop inside) the bulk is the one with the fewest instructions. Counting
    loads instead would mislead: a masked loop may look up the block of every row it loads.
    """
    loops = [loop for loop in find_loops(code) if any(i.mma for i in loop)]
    members = [{id(instruction) for instruction in loop} for loop in loops]
    innermost = [
        loop
        for loop, own in zip(loops, members, strict=True)
        if not any(other < own for other in members)
    ]
    return min(
        innermost, key=lambda loop: (-sum(i.mma is not None for i in loop), len(loop)), default=None
    )


def _blocks(code: Sequence[Instruction]) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Runs of instructions that are entered only at their start, [start, stop), and which runs may follow each."""
    starts = {0}
    for index, instruction in enumerate(code):
        if instruction.target is not None:
            starts |= {instruction.target, index + 1}
        elif not instruction.falls_through:
            starts.add(index + 1)
    ordered = sorted(start for start in starts if start < len(code))
    number = {start: block for block, start in enumerate(ordered)}
    blocks = list(zip(ordered, [*ordered[1:], len(code)], strict=True))
    successors = []
    for _, stop in blocks:
        last, following = code[stop - 1], []
        if last.target is not None:
            following.append(number[last.target])
        if last.falls_through and stop in number:
            following.append(number[stop])
        successors.append(following)
    return blocks, successors


def _dominators(successors: list[list[int]]) -> list[int]:
    """For each block the blocks that every way from the entry to it passes, as bits; none for unreachable blocks."""
    order, seen, stack = [], {0}, [(0, iter(successors[0]))]
    while stack:  # depth first; the reverse of the order of leaving visits a block before most of its followers
        block, following = stack[-1]
        for successor in following:
            if successor not in seen:
                seen.add(successor)
                stack.append((successor, iter(successors[successor])))
                break
        else:
            order.append(block)
            stack.pop()
    predecessors: list[list[int]] = [[] for _ in successors]
    for block in order:
        for successor in successors[block]:
            predecessors[successor].append(block)
    dominators = [-1 if block in seen else 0 for block in range(len(successors))]
    dominators[0] = 1
    changed = True
    while changed:
        changed = False
        for block in reversed(order):
            if block == 0:
                continue
            bits = -1
            for predecessor in predecessors[block]:
                bits &= dominators[predecessor]
            bits |= 1 << block
            if bits != dominators[block]:
                dominators[block], changed = bits, True
    return dominators


def _body(header: int, latch: int, successors: list[list[int]]) -> set[int]:
    """The blocks from which the latch is reached without passing the header."""
    predecessors: dict[int, list[int]] = {}
    for block, following in enumerate(successors):
        for successor in following:
            predecessors.setdefault(successor, []).append(block)
    body, stack = {header}, [latch]
    while stack:
        block = stack.pop()
        if block not in body:
            body.add(block)
            stack += predecessors.get(block, [])
    return body
