"""What a simulation comes to: distributions over requests, totals over steps, and how full the pool was over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from .costs import StepTime


@dataclass(frozen=True)
class Distribution:
    """Of seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Distribution | None:
        """None if there is no value; values that are None are left out."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        p50, p90, p99 = np.percentile(known, (50, 90, 99)).tolist()
        return cls(float(np.mean(known)), p50, p90, p99)


@dataclass
class RequestTimes:
    """Where one request's simulated seconds went."""

    request_id: str
    arrival: float
    priority: int
    num_prompt_tokens: int
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_cached_tokens: int = 0  # found in the prefix cache when it first came in
    num_preemptions: int = 0
    output_lens: list[int] = field(default_factory=list)  # of each of its completions
    finish_reasons: list[str] = field(default_factory=list)

    @property
    def num_output_tokens(self) -> int:
        """Of all its completions."""
        return sum(self.output_lens)

    @property
    def queue_time(self) -> float | None:
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def time_per_output_token(self) -> float | None:
        """Between the tokens of a completion, from the first one on."""
        if self.finished is None or self.first_token is None or max(self.output_lens) < 2:
            return None
        return (self.finished - self.first_token) / (max(self.output_lens) - 1)

    @property
    def latency(self) -> float | None:
        return None if self.finished is None else self.finished - self.arrival


def distributions(requests: list[RequestTimes]) -> dict[str, Any]:
    """Those fields of `SimulationResult` that are distributions over requests."""
    priorities = sorted({times.priority for times in requests})
    return {
        "ttft": Distribution.of(times.time_to_first_token for times in requests),
        "tpot": Distribution.of(times.time_per_output_token for times in requests),
        "queue": Distribution.of(times.queue_time for times in requests),
        "latency": Distribution.of(times.latency for times in requests),
        "ttft_by_priority": {
            priority: Distribution.of(
                times.time_to_first_token for times in requests if times.priority == priority
            )
            for priority in priorities
        },
    }


@dataclass
class Series:
    """The state after each of some steps, evenly chosen, as columns. `time` is when the step's device work begins."""

    time: list[float] = field(default_factory=list)
    used_blocks: list[int] = field(default_factory=list)
    cached_blocks: list[int] = field(default_factory=list)  # nobody's, but with a known prefix
    running: list[int] = field(default_factory=list)
    swapped: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    batched_tokens: list[int] = field(default_factory=list)

    def thinned(self, most: int = 500) -> Series:
        """At most so many points, the first and the last step among them."""
        count = len(self.time)
        chosen = np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()
        columns = vars(self).items()
        return Series(**{name: [values[i] for i in chosen] for name, values in columns})


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """One policy over one workload. Everything is simulated.

    seconds         from the first arrival to the last end
    ttft, tpot, queue, latency  time to the first token, time per further token, time until first scheduled, time in all
    ttft_by_priority  the first of these, by priority
    num_cut_short   requests that ended before their length, for want of blocks
    step_seconds    what the steps took, part by part. With `async_scheduling` the host's part runs beside the others
    """

    policy: str
    model: str
    device: str
    config: dict[str, object]
    async_scheduling: bool
    workload: Mapping[str, object]
    num_requests: int
    seconds: float
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_fed_tokens: int
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft: Distribution | None
    tpot: Distribution | None
    queue: Distribution | None
    latency: Distribution | None
    ttft_by_priority: dict[int, Distribution | None]
    num_recomputed: int
    num_swapped_out: int
    num_blocks_swapped_out: int
    num_blocks_swapped_in: int
    num_blocks_copied: int
    num_cached_tokens: int
    hit_rate: float
    num_cut_short: int
    peak_used_blocks: int
    mean_used_blocks: float
    step_seconds: StepTime
    series: Series
    requests: list[RequestTimes]

    @property
    def num_blocks(self) -> int:
        """Of the pool."""
        value = self.config["num_gpu_blocks"]
        assert isinstance(value, int)
        return value


def as_json(results: Mapping[str, SimulationResult]) -> bytes:
    """By policy, in order; the same results give the same bytes."""
    whole = {"kind": "octavo simulation, not a measurement", "results": dict(results)}
    return msgspec.json.format(msgspec.json.encode(whole))
