"""Which tokens have come up in each sequence, and how often: kept from step to step, for the penalties.

All of it can be derived from a sequence's tokens, so nothing that happens to a request can make it wrong: a sequence is known
by its id, and what has been counted of it by the buffers its tokens lie in, which are append-only. If they are the same, or
begin with the same tokens, only new tokens are counted; else all are.

    SparseCounts   for CPUs: the distinct tokens of each sequence. 16 bytes each, and a place in a dict
    DenseCounts    for GPUs, as `kernels.apply_penalties` takes them: 5 bytes * vocabulary for each sequence

Sequences that were not asked for in `KEPT_CALLS` calls are forgotten, and counted anew if they come back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from .. import kernels
from .sampling_params import SamplingParams

KEPT_CALLS = 64


class RowExtras(NamedTuple):
    """A row of logits whose request asks for more than `SamplingParams.draw` says.

    Buffers of several sequences are never one array, and tokens are never changed in place.
    """

    row: int  # of the logits
    params: SamplingParams
    seq_id: int
    prompt_token_ids: np.ndarray
    output_token_ids: np.ndarray
    eos_token_ids: tuple[int, ...] = ()
    awaits_draw: bool = False  # one more output token is there, which the step before draws
    newest_token: int = -1  # that token, when it is known and is one

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids) + self.awaits_draw

    def output_from(self, start: int) -> np.ndarray:
        """Output tokens from place `start` on, as far as they are known."""
        known = self.output_token_ids[start:]
        if self.newest_token < 0 or start > len(self.output_token_ids):
            return known
        return np.append(known, np.int32(self.newest_token))


class _Counted:
    """How far a sequence has been counted, and the result."""

    __slots__ = ("newest", "output", "params", "prompt", "result", "used")

    def __init__(self, result: Any) -> None:
        self.result = result

    def is_now(self, extras: RowExtras, used: int) -> None:
        self.prompt, self.output = extras.prompt_token_ids, extras.output_token_ids
        self.newest = extras.newest_token
        self.params = extras.params
        self.used = used

    @property
    def num_output_tokens(self) -> int:
        return len(self.output) + (self.newest >= 0)

    def begins(self, extras: RowExtras) -> bool:
        """Whether what has been counted is a beginning of the sequence."""
        output, num_known = extras.output_token_ids, len(self.output)
        if num_known > len(output) or len(self.prompt) != len(extras.prompt_token_ids):
            return False
        if self.newest >= 0 and extras.output_from(num_known)[:1].tolist() != [self.newest]:
            return False
        if self.params is not extras.params and self.params != extras.params:
            return False
        if output.base is not None and output.base is self.output.base:
            return True  # append-only
        same = np.array_equal(self.prompt, extras.prompt_token_ids)
        return same and np.array_equal(self.output, output[:num_known])


class _Counts:
    """What both kinds have in common: who is known, and what is new."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._known: dict[int, _Counted] = {}  # in order of last use
        self._calls = 0

    def __len__(self) -> int:
        """Sequences that are remembered."""
        return len(self._known)

    def begin_step(self) -> None:
        """A call of the sampler: forget who has not been asked for in a while."""
        self._calls += 1
        while self._known:
            seq_id, counted = next(iter(self._known.items()))
            if counted.used >= self._calls - KEPT_CALLS:
                return
            self._forget(self._known.pop(seq_id))

    def _counted(self, extras: RowExtras) -> Any:
        """The up-to-date result for one sequence."""
        counted = self._known.pop(extras.seq_id, None)
        if counted is None or not counted.begins(extras):
            if counted is not None:
                self._forget(counted)
            counted = _Counted(self._count(extras))
        else:
            new = extras.output_from(counted.num_output_tokens)
            if len(new):
                self._add(counted.result, new)
        counted.is_now(extras, self._calls)
        self._known[extras.seq_id] = counted
        return counted.result

    def _prompt(self, extras: RowExtras) -> np.ndarray:
        """Those tokens of the prompt that have a logit; placeholders of images may not."""
        return extras.prompt_token_ids[extras.prompt_token_ids < self._vocab]

    def _count(self, extras: RowExtras) -> Any:
        raise NotImplementedError

    def _add(self, result: Any, token_ids: np.ndarray) -> None:
        raise NotImplementedError

    def _forget(self, counted: _Counted) -> None:
        pass


class _Distinct:
    """Distinct tokens, how often the output has each, and what that takes off its logit."""

    __slots__ = ("_counts", "_place", "_unit", "offsets", "size", "token_ids")

    def __init__(self, prompt: np.ndarray, output: np.ndarray, params: SamplingParams) -> None:
        if params.repetition_penalty == 1:
            prompt = prompt[:0]  # the others look at the output alone
        distinct, place = np.unique(np.concatenate((prompt, output)), return_inverse=True)
        self.size = len(distinct)
        counts = np.bincount(place[len(prompt) :], minlength=self.size).astype(np.float32)
        self._unit = np.float32(params.frequency_penalty), np.float32(params.presence_penalty)
        frequency, presence = self._unit
        room = np.zeros(64, np.float32)
        self.token_ids = np.concatenate((distinct.astype(np.int64), room.astype(np.int64)))
        self.offsets = np.concatenate((frequency * counts + presence * (counts > 0), room))
        self._counts = np.concatenate((counts, room))
        self._place = dict(zip(distinct.tolist(), range(self.size), strict=True))

    def add(self, token: int) -> None:
        place = self._place.setdefault(token, self.size)
        if place == self.size:
            if place == len(self.token_ids):
                for name in ("token_ids", "offsets", "_counts"):
                    array = getattr(self, name)
                    setattr(self, name, np.concatenate((array, np.zeros_like(array))))
            self.token_ids[place] = token
            self.size += 1
        self._counts[place] += 1
        frequency, presence = self._unit
        self.offsets[place] = frequency * self._counts[place] + presence


class SparseCounts(_Counts):
    """A step costs each row its new tokens and a pass over its distinct ones."""

    def apply_penalties(self, logits: torch.Tensor, rows: list[RowExtras]) -> None:
        """Penalise the rows' tokens in place; `extras.row` is the row of `logits` [R, vocab], float32."""
        values = logits.numpy()
        for extras in rows:
            seen: _Distinct = self._counted(extras)
            row, token_ids = values[extras.row], seen.token_ids[: seen.size]
            x = row.take(token_ids)
            factor = np.float32(extras.params.repetition_penalty)
            if factor != 1:
                with np.errstate(over="ignore", invalid="ignore"):  # such a row is told later
                    x = np.where(x > 0, x / factor, x * factor)
            x -= seen.offsets[: seen.size]
            row[token_ids] = x

    def _count(self, extras: RowExtras) -> _Distinct:
        return _Distinct(self._prompt(extras), extras.output_from(0), extras.params)

    def _add(self, result: _Distinct, token_ids: np.ndarray) -> None:
        for token in token_ids.tolist():
            result.add(token)


class DenseCounts(_Counts):
    """A step costs each row its new tokens and a pass over the vocabulary, in one launch."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        super().__init__(vocab)
        self._device = device
        self._in_prompt = torch.zeros(0, vocab, dtype=torch.bool, device=device)
        self._counts = torch.zeros(0, vocab, dtype=torch.int32, device=device)
        self._free: list[int] = []
        # of this step, (slot, token): prompts and outputs
        self._new: tuple[list[tuple[int, np.ndarray]], list[tuple[int, np.ndarray]]] = ([], [])
        self._fresh: list[int] = []  # slots that have to be emptied first

    def apply_penalties(self, logits: torch.Tensor, rows: list[RowExtras]) -> None:
        """As `SparseCounts.apply_penalties`."""
        slots = [self._counted(extras) for extras in rows]
        self._write()
        first = slots[0]
        if slots == list(range(first, first + len(slots))):  # as it is in a run of decodes
            in_prompt = self._in_prompt[first : first + len(slots)]
            counts = self._counts[first : first + len(slots)]
        else:
            index = self._on_device(np.array(slots, np.int64))
            in_prompt, counts = self._in_prompt[index], self._counts[index]
        at = [extras.row for extras in rows]
        whole = at == list(range(len(logits)))
        chosen = logits if whole else logits[self._on_device(np.array(at, np.int64))]
        params = [
            (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
            for p in (extras.params for extras in rows)
        ]
        columns = self._on_device(np.array(params, np.float32).T.copy())
        kernels.apply_penalties(chosen, in_prompt, counts, *columns)
        if not whole:
            logits[self._on_device(np.array(at, np.int64))] = chosen

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _count(self, extras: RowExtras) -> int:
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._fresh.append(slot)
        self._new[0].append((slot, self._prompt(extras)))
        self._new[1].append((slot, extras.output_from(0)))
        return slot

    def _add(self, result: int, token_ids: np.ndarray) -> None:
        self._new[1].append((result, token_ids))

    def _forget(self, counted: _Counted) -> None:
        self._free.append(counted.result)

    def _grow(self) -> None:
        size = len(self._counts)
        more = max(8, size)
        self._in_prompt = torch.cat((self._in_prompt, self._in_prompt.new_zeros(more, self._vocab)))
        self._counts = torch.cat((self._counts, self._counts.new_zeros(more, self._vocab)))
        self._free += range(size + more - 1, size - 1, -1)

    def _write(self) -> None:
        """Bring what is on the device up to date."""
        if self._fresh:
            slots = self._on_device(np.array(self._fresh, np.int64))
            self._in_prompt[slots] = False
            self._counts[slots] = 0
            self._fresh.clear()
        prompts, outputs = map(self._pairs, self._new)
        if len(prompts[0]):
            self._in_prompt[prompts] = True
        if len(outputs[0]):
            ones = torch.ones_like(outputs[0], dtype=torch.int32)
            self._counts.index_put_(outputs, ones, accumulate=True)
        for new in self._new:
            new.clear()

    def _pairs(self, new: list[tuple[int, np.ndarray]]) -> tuple[torch.Tensor, torch.Tensor]:
        if not new:
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        slots = np.repeat([slot for slot, _ in new], [len(ids) for _, ids in new])
        token_ids = np.concatenate([ids for _, ids in new]).astype(np.int64)
        return self._on_device(slots), self._on_device(token_ids)


def counts_for(logits: torch.Tensor) -> SparseCounts | DenseCounts:
    """The kind that suits the device of `logits` [R, vocab]."""
    vocab = logits.shape[1]
    return DenseCounts(vocab, logits.device) if logits.is_cuda else SparseCounts(vocab)
