"""Requests that arrive over time, drawn from a seed. The same arguments give the same requests on every machine.

Arrivals, lengths, kinds and tokens are drawn from generators of their own: another rate leaves the lengths as they were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...runtime.params import SamplingParams
from ...runtime.sampling_params import is_int, require
from ...scheduler import SequenceGroup

_MOST_WIDTH = 1 << 16  # seeds of neighbouring requests are so far apart


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request, its tokens left out.

    prompt_len  tokens of the prompt, of which the first `shared_len` are the system prompt that others begin with, too
    output_len  tokens of each of its `width` completions, drawn one by one or, with `is_beam_search`, beam by beam
    priority    lower is more urgent
    """

    arrival: float = 0.0
    prompt_len: int
    output_len: int
    shared_len: int = 0
    width: int = 1
    is_beam_search: bool = False
    priority: int = 0

    def __post_init__(self) -> None:
        ok = _is_number(self.arrival) and self.arrival >= 0
        require(ok, "arrival", "a number of seconds >= 0", self.arrival)
        for name in ("prompt_len", "output_len"):
            value = getattr(self, name)
            require(is_int(value) and value >= 1, name, "an integer >= 1", value)
        ok = is_int(self.shared_len) and 0 <= self.shared_len <= self.prompt_len
        expected = f"an integer in [0, prompt_len = {self.prompt_len}]"
        require(ok, "shared_len", expected, self.shared_len)
        ok = is_int(self.width) and 1 <= self.width <= _MOST_WIDTH
        require(ok, "width", f"an integer in [1, {_MOST_WIDTH}]", self.width)
        require(is_int(self.priority), "priority", "an integer", self.priority)

    @property
    def num_output_tokens(self) -> int:
        """Of all its completions."""
        return self.width * self.output_len


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival, and what their tokens are drawn from.

    description  what the requests were made from, for reports
    """

    requests: tuple[Request, ...]
    seed: int = 0
    vocab_size: int = 32000
    description: dict[str, float | int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(bool(self.requests), "requests", "at least one", self.requests)
        arrivals = [request.arrival for request in self.requests]
        require(arrivals == sorted(arrivals), "requests", "an order of arrival", "another order")
        require(is_int(self.seed) and self.seed >= 0, "seed", "an integer >= 0", self.seed)
        least = 2 * max(request.width for request in self.requests)  # candidates of a beam
        ok = is_int(self.vocab_size) and self.vocab_size >= least
        require(ok, "vocab_size", f"an integer >= 2 * width = {least}", self.vocab_size)

    def prompt(self, number: int) -> np.ndarray:
        request = self.requests[number]
        own = self._tokens(number + 1, request.prompt_len - request.shared_len)
        return np.concatenate((self._tokens(0, request.shared_len), own))

    def _tokens(self, stream: int, length: int) -> np.ndarray:
        generator = np.random.default_rng((self.seed, stream))
        return generator.integers(0, self.vocab_size, length, dtype=np.int32)

    def group(self, number: int) -> SequenceGroup:
        """The request as the scheduler takes it: it ends at its length, and its seed says which request it is."""
        request = self.requests[number]
        params = SamplingParams(
            n=request.width,
            use_beam_search=request.is_beam_search,
            temperature=0.0 if request.is_beam_search else 1.0,
            seed=number * _MOST_WIDTH,
            max_tokens=request.output_len,
            ignore_eos=True,
        )
        return SequenceGroup(
            f"r{number}",
            self.prompt(number),
            params,
            request.arrival,
            priority=request.priority,
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(request.prompt_len + request.output_len for request in self.requests)


def make_workload(
    num_requests: int,
    *,
    rate: float | None = None,
    prompt_len: int = 512,
    output_len: int = 128,
    spread: float = 0.6,
    shared_prefix: int = 0,
    shared_share: float = 1.0,
    beam_share: float = 0.0,
    sample_share: float = 0.0,
    width: int = 4,
    urgent_share: float = 0.0,
    seed: int = 0,
    vocab_size: int = 32000,
) -> Workload:
    """Draw requests. Raises ValueError naming the argument.

    rate           requests a second, arriving as a Poisson process; None for all at once
    prompt_len, output_len  means of log-normal lengths, cut off at 8 times the mean
    spread         standard deviation of the lengths' logarithms; 0 for equal lengths
    shared_prefix  tokens of a system prompt that `shared_share` of the requests have before their own prompt
    beam_share, sample_share  of the requests are beam searches, or have several samples, `width` of them
    urgent_share   of the requests have priority 0, the others 1
    """
    given = {name: value for name, value in locals().items() if name not in ("seed", "vocab_size")}
    _check(given)
    require(is_int(seed) and seed >= 0, "seed", "an integer >= 0", seed)
    streams = [np.random.default_rng((seed, 0, stream)) for stream in range(6)]
    arrivals = np.zeros(num_requests)
    if rate is not None:
        arrivals = np.cumsum(streams[0].exponential(1 / rate, num_requests))
    prompts = _lengths(streams[1], num_requests, prompt_len, spread)
    outputs = _lengths(streams[2], num_requests, output_len, spread)
    is_shared = streams[3].random(num_requests) < shared_share
    kinds = streams[4].random(num_requests)
    is_urgent = streams[5].random(num_requests) < urgent_share
    requests = []
    for i in range(num_requests):
        shared = shared_prefix if is_shared[i] else 0
        is_wide = kinds[i] < beam_share + sample_share
        requests.append(
            Request(
                arrival=float(arrivals[i]),
                prompt_len=shared + prompts[i],
                output_len=outputs[i],
                shared_len=shared,
                width=width if is_wide else 1,
                is_beam_search=bool(kinds[i] < beam_share),
                priority=0 if is_urgent[i] or not urgent_share else 1,
            )
        )
    return Workload(tuple(requests), seed, vocab_size, {**given, "seed": seed})


def _lengths(generator: np.random.Generator, count: int, mean: int, spread: float) -> Seq[int]:
    drawn = generator.lognormal(math.log(mean) - spread**2 / 2, spread, count)
    return np.clip(np.rint(drawn), 1, 8 * mean).astype(int).tolist()


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _check(given: dict) -> None:
    for name in ("num_requests", "prompt_len", "output_len"):
        value = given[name]
        require(is_int(value) and value >= 1, name, "an integer >= 1", value)
    rate, spread, prefix = given["rate"], given["spread"], given["shared_prefix"]
    require(rate is None or (_is_number(rate) and rate > 0), "rate", "None or a number > 0", rate)
    require(_is_number(spread) and 0 <= spread <= 3, "spread", "a number in [0, 3]", spread)
    require(is_int(prefix) and prefix >= 0, "shared_prefix", "an integer >= 0", prefix)
    for name in ("shared_share", "beam_share", "sample_share", "urgent_share"):
        value = given[name]
        require(_is_number(value) and 0 <= value <= 1, name, "a number in [0, 1]", value)
    both = given["beam_share"] + given["sample_share"]
    require(
        both <= 1, "sample_share", f"at most 1 - beam_share = {1 - given['beam_share']:g}", both
    )
    width = given["width"]
    ok = is_int(width) and 2 <= width <= _MOST_WIDTH
    require(ok, "width", f"an integer in [2, {_MOST_WIDTH}]", width)
