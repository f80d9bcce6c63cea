"""A recording run again: every step goes through a runner, and its tokens are compared with those recorded. Torch-free.

Each step is fed what was recorded, not what came out of the step before, so one difference does not bring about others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..metadata import MetadataError, SamplerOutput, SequenceGroupMetadata
from .decoder import Pairs, RecordedStep
from .frames import RecordingError
from .reader import Recording


class Executes(Protocol):
    """What runs a step and waits for it: `ModelRunner`, say."""

    def execute(
        self,
        seq_group_metadata_list: Sequence[SequenceGroupMetadata],
        *,
        blocks_to_swap_out: Pairs,
        blocks_to_swap_in: Pairs,
        blocks_to_copy: Pairs,
        generation_of: Callable[[str], int | None],
    ) -> SamplerOutput: ...


@dataclass(frozen=True)
class Difference:
    """Where a run and its recording part. `row` counts the tokens of the step, in row order."""

    step: int
    row: int
    request_id: str
    field: str
    expected: float
    got: float

    def __str__(self) -> str:
        return (
            f"step {self.step}, row {self.row}, request {self.request_id!r}: {self.field}: "
            f"recorded {self.expected}, now {self.got}"
        )


@dataclass
class Comparison:
    """What came of running a recording again.

    num_token_differences, num_logprob_differences  of `num_tokens`; a log probability of another token does not count
    largest_error   of a log probability, where the tokens are equal
    first           the first difference of either kind
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_token_differences: int = 0
    num_logprob_differences: int = 0
    largest_error: float = 0.0
    first: Difference | None = None

    @property
    def is_equal(self) -> bool:
        return self.first is None


def replay(
    recording: Recording,
    runner: Executes,
    *,
    tolerance: float = 1e-3,
    most_steps: int | None = None,
    progress: Callable[[int], None] = lambda step: None,
) -> Comparison:
    """Run the recorded steps through `runner`, whose pools are new, and compare.

    tolerance  of log probabilities, absolute
    progress   called with the number of each step that is done
    Raises RecordingError where the file is damaged, or a snapshot is older than one before it.
    """
    result = Comparison()
    generations: dict[str, tuple[int, frozenset[int]]] = {}
    for number, step in enumerate(recording):
        if most_steps is not None and number >= most_steps:
            break
        _check_current(recording, number, step, generations)
        current = {metadata.request_id: metadata.generation_id for metadata in step.snapshots}
        try:
            output = runner.execute(
                step.snapshots,
                blocks_to_swap_out=step.blocks_to_swap_out,
                blocks_to_swap_in=step.blocks_to_swap_in,
                blocks_to_copy=step.blocks_to_copy,
                generation_of=current.get,
            )
        except MetadataError as error:
            raise RecordingError(recording.path, number + 1, f"cannot be run: {error}") from error
        _compare(result, number, step, output, tolerance)
        progress(number + 1)
    return result


def _check_current(
    recording: Recording,
    number: int,
    step: RecordedStep,
    generations: dict[str, tuple[int, frozenset[int]]],
) -> None:
    """What was executed was current then, and generations only rise. An id may be taken again, by other sequences."""
    for metadata in step.snapshots:
        seq_ids = frozenset(metadata.seq_data)
        before, seqs_before = generations.get(metadata.request_id, (0, frozenset()))
        if seq_ids & seqs_before and metadata.generation_id < before:
            raise RecordingError(
                recording.path,
                number + 1,
                f"request {metadata.request_id!r}: expected generation {before} or later, got {metadata.generation_id}",
            )
        generations[metadata.request_id] = metadata.generation_id, seq_ids


def _compare(
    result: Comparison, number: int, step: RecordedStep, output: SamplerOutput, tolerance: float
) -> None:
    recorded = step.output
    result.num_steps += 1
    if len(output.token_ids) != len(recorded.token_ids):
        raise ValueError(
            f"runner: expected {len(recorded.token_ids)} tokens in step {number}, got {len(output.token_ids)}"
        )
    result.num_tokens += len(recorded.token_ids)
    same = output.token_ids == recorded.token_ids
    # rows that are not finite have no log probability to speak of
    counts = same & (recorded.token_ids >= 0) & ~(output.logprobs == recorded.logprobs)
    with np.errstate(invalid="ignore"):
        error = np.abs(output.logprobs.astype(np.float64) - recorded.logprobs)
    off = counts & ~(error <= tolerance)
    result.num_token_differences += int((~same).sum())
    result.num_logprob_differences += int(off.sum())
    result.largest_error = max(result.largest_error, float(error[counts].max(initial=0.0)))
    places = np.flatnonzero(~same | off)
    if result.first is None and len(places):
        row = int(places[0])
        field = "logprob" if same[row] else "token"
        a, b = (
            (recorded.logprobs, output.logprobs)
            if same[row]
            else (recorded.token_ids, output.token_ids)
        )
        owner = _owners(step.snapshots)[row]
        result.first = Difference(number, row, owner, field, a[row].item(), b[row].item())


def _owners(snapshots: list[SequenceGroupMetadata]) -> list[str]:
    """The request of each token of a step."""
    return [metadata.request_id for metadata in snapshots for _ in range(metadata.num_samples)]
