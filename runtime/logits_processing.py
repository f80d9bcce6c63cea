"""What a request wants done to its logits before a token is drawn, on many rows at once, none of which sees another.

In this order, which is that of vLLM's first engine:

    logits_processors -> allowed_token_ids -> logit_bias -> bad_words -> min_tokens -> penalties -> (temperature, filters)

Processors come first, so whatever they return, forbidden tokens stay forbidden. They see the model's own logits.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from .sampling_params import SamplingParams
from .token_counts import DenseCounts, RowExtras, SparseCounts, counts_for

_FORBIDDEN = float("-inf")


class _Fixed:
    """What the parameters of a request say about tokens, as arrays."""

    __slots__ = (
        "allowed",
        "bad_tokens",
        "bad_words",
        "bias",
        "biased",
        "params",
        "processors",
        "vocab",
    )

    def __init__(self, params: SamplingParams, vocab: int) -> None:
        self.params = params
        self.vocab = vocab
        allowed = params.allowed_token_ids
        self.allowed = None if allowed is None else np.unique(np.array(allowed, np.int64))
        bias = params.logit_bias or {}
        self.biased = np.array(list(bias.keys()), np.int64)
        self.bias = np.array(list(bias.values()), np.float32)
        words = [tuple(word) for word in params.bad_words_token_ids]
        self.bad_tokens = [word[0] for word in words if len(word) == 1]
        # (tokens before, last token)
        self.bad_words = [(list(word[:-1]), word[-1]) for word in words if len(word) > 1]
        self.processors = [(fn, _takes_prompt(fn)) for fn in params.logits_processors]

    def forbidden(self, extras: RowExtras) -> list[int]:
        """Tokens that would complete a bad word, or end the sequence too early."""
        found = self.bad_tokens
        if self.bad_words:
            longest = max(len(before) for before, _ in self.bad_words)
            output = extras.output_from(max(0, extras.num_output_tokens - longest)).tolist()
            found = found + [
                last for before, last in self.bad_words if output[-len(before) :] == before
            ]
        if extras.num_output_tokens < self.params.min_tokens:
            ends = (*extras.eos_token_ids, *self.params.stop_token_ids)
            found = [*found, *(token for token in ends if token < self.vocab)]
        return found


def _takes_prompt(processor: Any) -> bool:
    """Whether it is a function of (prompt, output, logits) rather than (output, logits)."""
    try:
        names = inspect.signature(processor).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [p for p in names if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len([p for p in needed if p.default is p.empty]) == 3


class LogitsProcessing:
    """Keeps what does not change from step to step; a pure function of its arguments all the same."""

    def __init__(self) -> None:
        self._fixed: dict[int, _Fixed] = {}  # by id of the parameters, which are kept with it
        self._counts: SparseCounts | DenseCounts | None = None

    @property
    def num_counted(self) -> int:
        """Sequences whose tokens are counted."""
        return 0 if self._counts is None else len(self._counts)

    def begin_step(self) -> None:
        """A call of the sampler, before its rows are processed; forgets what has not been used for long."""
        if self._counts is not None:
            self._counts.begin_step()
            if not len(self._counts):
                self._counts = None
        if len(self._fixed) > 1024:
            self._fixed.clear()

    def apply(self, logits: torch.Tensor, rows: list[RowExtras]) -> dict[int, str]:
        """Process logits [n, vocab], float32 and contiguous, in place; `rows[i]` belongs to row i and has `row` = i.

        Returns row -> error for those with a processor that failed.
        """
        fixed = [self._of(extras.params, logits.shape[1]) for extras in rows]
        errors: dict[int, str] = {}
        for extras, each in zip(rows, fixed, strict=True):
            if each.processors:
                error = _run_processors(logits[extras.row], extras, each)
                if error is not None:
                    errors[extras.row] = error
        self._keep_allowed(logits, fixed)
        places, values = [], []
        for row, each in enumerate(fixed):
            if len(each.biased):
                places.append(each.biased + row * logits.shape[1])
                values.append(each.bias)
        flat = logits.view(-1)
        if places:
            at = _on_device(np.concatenate(places), logits)
            flat[at] = flat[at] + _on_device(np.concatenate(values), logits)
        forbidden = [
            row * logits.shape[1] + token
            for row, (extras, each) in enumerate(zip(rows, fixed, strict=True))
            for token in each.forbidden(extras)
        ]
        if forbidden:
            flat[_on_device(np.array(forbidden, np.int64), logits)] = _FORBIDDEN
        penalised = [extras for extras in rows if extras.params.has_penalties]
        if penalised:
            if self._counts is None:
                self._counts = counts_for(logits)
            self._counts.apply_penalties(logits, penalised)
        return errors

    @staticmethod
    def _keep_allowed(logits: torch.Tensor, fixed: list[_Fixed]) -> None:
        rows, places, flat = [], [], logits.view(-1)
        for row, each in enumerate(fixed):
            if each.allowed is not None:
                rows.append(row)
                places.append(each.allowed + row * logits.shape[1])
        if not rows:
            return
        at = _on_device(np.concatenate(places), logits)
        kept = flat[at]
        logits.index_fill_(0, _on_device(np.array(rows, np.int64), logits), _FORBIDDEN)
        flat[at] = kept

    def _of(self, params: SamplingParams, vocab: int) -> _Fixed:
        fixed = self._fixed.get(id(params))
        if fixed is None:
            _check_vocabulary(params, vocab)
            fixed = self._fixed[id(params)] = _Fixed(params, vocab)
        return fixed


def _check_vocabulary(params: SamplingParams, vocab: int) -> None:
    """A token past the end of a row would be another row's."""
    for name, token_ids in params.token_id_lists():
        if token_ids and max(token_ids) >= vocab:
            raise ValueError(f"{name}: expected ids in [0, {vocab}), got {max(token_ids)}")


def _on_device(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(array).to(like.device)


def _run_processors(logits: torch.Tensor, extras: RowExtras, fixed: _Fixed) -> str | None:
    """Run a request's processors on its row, in place. Returns what went wrong, if anything."""
    output = extras.output_from(0)
    output.flags.writeable = False
    for processor, takes_prompt in fixed.processors:
        name = getattr(processor, "__name__", type(processor).__name__)
        tokens = (extras.prompt_token_ids, output) if takes_prompt else (output,)
        given = logits.view(-1)  # its own shape, whatever is done to that of the processor's
        try:
            result = processor(*tokens, given)
            if not isinstance(result, torch.Tensor) or result.shape != logits.shape:
                is_tensor = isinstance(result, torch.Tensor)
                shape = list(result.shape) if is_tensor else type(result).__name__
                return f"logits processor {name}: expected logits {list(logits.shape)}, got {shape}"
            if result is not given:
                logits.copy_(result)
        except KeyboardInterrupt:  # the user's
            raise
        except BaseException as error:  # also what would end a thread or a task
            return f"logits processor {name} raised {type(error).__name__}: {error}"
    return None
