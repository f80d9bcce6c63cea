"""Requests that decode one sequence and need nothing else: a step of them is a few operations on columns.

The sequences stay the truth about themselves. The batch keeps what a step asks of all of them side by side, and moves it
along with them; `Scheduler.check_invariants` compares the two. What is out of the ordinary leaves the batch and goes the
general way: groups of several sequences, beams, encoders, prefills, and everybody while blocks are short.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from ..runtime.snapshots import DecodeRows
from .admission import most_output_tokens
from .block_manager import BlockManager
from .config import SchedulerConfig
from .sequence import Sequence, SequenceGroup, SequenceStatus

_COLUMNS = {
    "num_tokens": np.int64,
    "num_prompt_tokens": np.int64,
    "last_token_ids": np.int64,
    "cumulative_logprobs": np.float64,
    "limit": np.int64,  # tokens at which the sequence ends by length
    "capacity": np.int64,  # tokens its buffers have room for
    "temperature": np.float64,
    "top_k": np.int64,
    "top_p": np.float64,
    "min_p": np.float64,
    "seed": np.uint64,
    "is_plain": np.bool_,
}


@dataclass(frozen=True)
class DecodePlace:
    """The batch's place in a step."""

    rows: DecodeRows
    groups: list[SequenceGroup]
    seqs: list[Sequence]
    row_of: dict[SequenceGroup, int]
    published: list[tuple[int, int]] = field(default_factory=list)  # (row, block)


def _with(values: list[np.ndarray], fresh: dict[int, np.ndarray]) -> list[np.ndarray]:
    """A new list: snapshots keep the one there was."""
    replaced = values.copy()
    for row, value in fresh.items():
        replaced[row] = value
    return replaced


class DecodeBatch:
    """Groups join and leave between steps (`refresh`); lists are replaced when they change, snapshots keep the old ones."""

    def __init__(self, blocks: BlockManager, config: SchedulerConfig) -> None:
        self._blocks = blocks
        self._config = config
        self.row_of: dict[SequenceGroup, int] = {}
        self._joining: list[SequenceGroup] = []
        self._leaving: set[SequenceGroup] = set()
        self.groups: list[SequenceGroup] = []
        self.seqs: list[Sequence] = []
        self._column = {name: np.zeros(0, dtype) for name, dtype in _COLUMNS.items()}
        self._ends = np.zeros((0, 1), np.int64)  # tokens that end the sequence, padded with -1
        self._tokens: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._buffers: list[tuple[memoryview, memoryview]] = []  # the same, writable
        self._tables: list[np.ndarray] = []
        self._fixed: dict[str, list] = {}
        self._first = (
            1 % config.block_size
        )  # length, modulo the block size, whose newest token opens a block

    def __len__(self) -> int:
        return len(self.groups)

    # -- who is in it

    @property
    def has_newcomers(self) -> bool:
        """Somebody has joined and had no step yet."""
        return bool(self._joining)

    @staticmethod
    def takes(group: SequenceGroup) -> bool:
        """Whether a group's decodes are plain ones."""
        params = group.sampling_params
        return (
            params.width == 1
            and not params.use_beam_search
            and group.encoder_seq is None
            and group.state is SequenceStatus.RUNNING
        )

    def join(self, group: SequenceGroup) -> None:
        """The group's next step is a plain decode."""
        self._joining.append(group)

    def leave(self, group: SequenceGroup) -> None:
        """The group ends, or loses its blocks. No effect if it is not in the batch."""
        if group in self.row_of:
            self._leaving.add(group)
        elif group in self._joining:
            self._joining.remove(group)

    def clear(self) -> None:
        """Everybody goes the general way for a step, and joins again after it."""
        self._leaving.update(self.groups)
        self._joining.clear()
        self.refresh()

    def refresh(self, fence: list[int] | None = None) -> None:
        """Let those go who left, and take in those who joined."""
        if self._leaving:
            self._drop([i for i, group in enumerate(self.groups) if group not in self._leaving])
            self._leaving.clear()
        if self._joining:
            self._take_in(self._joining, fence)
            self._joining = []

    def _drop(self, kept: list[int]) -> None:
        for name in ("groups", "seqs", "_tokens", "_logprobs", "_buffers", "_tables"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in kept])
        for name, column in self._column.items():
            self._column[name] = column[kept]
        self._ends = self._ends[kept]
        self._number()

    def _take_in(self, groups: list[SequenceGroup], fence: list[int] | None) -> None:
        seqs = [group.live[0] for group in groups]
        for seq in seqs:
            self._blocks.drop_out_of_window(seq, fence)
        self.groups = [*self.groups, *groups]
        self.seqs = [*self.seqs, *seqs]
        self._tokens = [*self._tokens, *(seq.token_buffer for seq in seqs)]
        self._logprobs = [*self._logprobs, *(seq.logprob_buffer for seq in seqs)]
        self._buffers = [*self._buffers, *(seq.buffers for seq in seqs)]
        self._tables = [*self._tables, *(self._blocks.table_buffer(seq.seq_id) for seq in seqs)]
        new = zip(*(self._values(g, seq) for g, seq in zip(groups, seqs, strict=True)), strict=True)
        for (name, column), values in zip(self._column.items(), new, strict=True):
            self._column[name] = np.concatenate((column, np.array(values, column.dtype)))
        ends = [(*group.eos_token_ids, *group.sampling_params.stop_token_ids) for group in groups]
        width = max(self._ends.shape[1], *(len(tokens) for tokens in ends))
        padded = np.full((len(self.groups), width), -1, np.int64)
        padded[: len(self._ends), : self._ends.shape[1]] = self._ends
        for row, tokens in enumerate(ends, len(self._ends)):
            padded[row, : len(tokens)] = tokens
        self._ends = padded
        self._number()

    def _values(self, group: SequenceGroup, seq: Sequence) -> tuple:
        """In the order of `_COLUMNS`."""
        longest = seq.num_prompt_tokens + most_output_tokens(group, self._config)
        return (
            seq.num_tokens,
            seq.num_prompt_tokens,
            int(seq.token_ids[-1]),
            seq.cumulative_logprob,
            longest,
            seq.capacity,
            *group.sampling_params.draw(seq.index),
            group.sampling_params.is_plain,
        )

    def _number(self) -> None:
        self.row_of = {group: row for row, group in enumerate(self.groups)}
        self._fixed = {
            "request_ids": [group.request_id for group in self.groups],
            "generation_ids": [group.generation_id for group in self.groups],
            "seq_ids": [seq.seq_id for seq in self.seqs],
            "sampling_params": [group.sampling_params for group in self.groups],
            "lora_requests": [group.lora_request for group in self.groups],
            "eos_token_ids": [group.eos_token_ids for group in self.groups],
        }

    # -- one step

    def going_on(self, ahead: int) -> np.ndarray:
        """Rows that will not have ended by length once the tokens are drawn that `ahead` steps in flight draw."""
        column = self._column
        return np.flatnonzero(column["num_tokens"] + ahead < column["limit"])

    def opening(self, ahead: int = 0) -> list[int]:
        """Rows that need a new block before they can be fed their newest token."""
        num_tokens = self._column["num_tokens"] + ahead
        return (num_tokens % self._config.block_size == self._first).nonzero()[0].tolist()

    def place(
        self, opening: list[int], ahead: int = 0, fence: list[int] | None = None
    ) -> DecodePlace:
        """Feed every sequence its newest token: blocks first, for the `opening` rows, then the snapshot, then progress.

        ahead   1 when the newest token is the one that a step in flight draws; those whose last one that is are left out
        fence   takes blocks that have left the window
        """
        num_tokens, size = self._column["num_tokens"] + ahead, self._config.block_size
        chosen = self.going_on(ahead).tolist() if ahead else None
        if chosen is not None and len(chosen) == len(self):
            chosen = None
        if chosen is not None:
            opening = sorted(set(opening).intersection(chosen))
        window = self._config.sliding_window
        if window is not None:
            passed = num_tokens - window  # tokens before all that the newest can see
            leaving = np.flatnonzero((passed > 0) & (passed % size == 0)).tolist()
            for row in leaving:
                self._blocks.drop_out_of_window(self.seqs[row], fence)
            self._refresh_tables(
                {row: self._blocks.table_buffer(self.seqs[row].seq_id) for row in leaving}
            )
        self._refresh_tables({row: self._blocks.grow_by_one(self.seqs[row]) for row in opening})
        rows = self._freeze(num_tokens, bool(ahead))
        if chosen is None:
            place = DecodePlace(rows, self.groups, self.seqs, self.row_of)
        else:
            groups, seqs = [self.groups[i] for i in chosen], [self.seqs[i] for i in chosen]
            numbers = {group: row for row, group in enumerate(groups)}
            place = DecodePlace(rows.take(chosen), groups, seqs, numbers)
        for seq in place.seqs:
            seq.num_computed_tokens += 1
        if not ahead:
            self.publish_filled(place)
        return place

    def publish_filled(self, place: DecodePlace) -> None:
        """Make known the blocks that the newest tokens fill, which a step in flight feeds."""
        if not self._config.enable_prefix_caching:
            return
        filled = self._column["num_tokens"] % self._config.block_size == 0
        for row in filled.nonzero()[0].tolist():
            group = self.groups[row]
            at = row if place.groups is self.groups else place.row_of.get(group)
            if at is not None and group not in self._leaving:
                for block in self._blocks.publish_last(self.seqs[row], group.namespace):
                    place.published.append((at, block))

    def _refresh_tables(self, tables: dict[int, np.ndarray]) -> None:
        """By row. Those that have outgrown their arrays, or dropped blocks, have new ones."""
        fresh = {row: table for row, table in tables.items() if table is not self._tables[row]}
        if fresh:
            self._tables = _with(self._tables, fresh)

    def _freeze(self, num_tokens: np.ndarray, awaits_draw: bool) -> DecodeRows:
        column = self._column
        return DecodeRows(
            num_tokens=num_tokens,
            num_prompt_tokens=column["num_prompt_tokens"],
            last_token_ids=column["last_token_ids"].copy(),
            cumulative_logprobs=column["cumulative_logprobs"].copy(),
            tokens=self._tokens,
            logprobs=self._logprobs,
            tables=self._tables,
            temperature=column["temperature"],
            top_k=column["top_k"],
            top_p=column["top_p"],
            min_p=column["min_p"],
            seed=column["seed"],
            is_plain=column["is_plain"],
            block_size=self._config.block_size,
            sliding_window=self._config.sliding_window,
            awaits_draw=awaits_draw,
            **self._fixed,
        )

    def append(
        self, token_ids: np.ndarray, logprobs: np.ndarray, absent: np.ndarray | None = None
    ) -> list[int]:
        """Give each sequence its token, but for those that end with it, have ended, need larger buffers or are `absent`
        from the step: returns their rows, in order. `reread` brings one that goes on up to date."""
        column = self._column
        num_tokens = column["num_tokens"]
        special = (token_ids < 0) | (num_tokens + 1 >= column["limit"])
        special |= num_tokens >= column["capacity"]
        for ends in self._ends.T:  # one or two, and an `any` over them takes longer
            special |= token_ids == ends
        for group in self._leaving:
            special[self.row_of[group]] = True
        if absent is not None:
            special |= absent
        rows = special.nonzero()[0].tolist()
        totals = column["cumulative_logprobs"] + logprobs
        values = (
            self.seqs,
            self._buffers,
            num_tokens.tolist(),
            (num_tokens - column["num_prompt_tokens"]).tolist(),
            token_ids.tolist(),
            logprobs.tolist(),
            totals.tolist(),
        )
        columns = zip(*values, strict=True)
        if rows:
            columns = compress(columns, (~special).tolist())
        for seq, (tokens, outputs), place, output, token, logprob, total in columns:
            tokens[place], outputs[output] = token, logprob
            seq.num_tokens, seq.cumulative_logprob = place + 1, total
        if rows:
            plain = ~special
            num_tokens += plain
            np.copyto(column["last_token_ids"], token_ids, where=plain)
            np.copyto(column["cumulative_logprobs"], totals, where=plain)
        else:
            num_tokens += 1
            column["last_token_ids"], column["cumulative_logprobs"] = token_ids.copy(), totals
        return rows

    def reread(self, group: SequenceGroup) -> None:
        """Take over what has become of a sequence that goes on."""
        row = self.row_of[group]
        seq = self.seqs[row]
        for name, value in zip(_COLUMNS, self._values(group, seq), strict=True):
            self._column[name][row] = value
        self._tokens = _with(self._tokens, {row: seq.token_buffer})
        self._logprobs = _with(self._logprobs, {row: seq.logprob_buffer})
        self._buffers[row] = seq.buffers

    def is_leaving(self, group: SequenceGroup) -> bool:
        return group in self._leaving

    # -- checking

    def check_integrity(self) -> None:
        """RuntimeError unless every column says of each sequence what it says of itself."""
        for row, (group, seq) in enumerate(zip(self.groups, self.seqs, strict=True)):
            if group in self._leaving:
                continue
            values = self._values(group, seq)
            got = tuple(self._column[name][row].item() for name in _COLUMNS)
            table = self._blocks.table_buffer(seq.seq_id)
            if got != values or self._tables[row] is not table or group.live != [seq]:
                raise RuntimeError(
                    f"request {group.request_id!r}: the decode batch has {got}, the sequence {values}"
                )
