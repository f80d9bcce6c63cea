"""Times of calls that take turns: by a GPU's own events, cold and once more as a graph; by the clock where there is no GPU.

Machines are shared and drift, so all that is compared is timed in one loop, call by call, and medians are laid beside each
other. On a GPU the L2 cache is overwritten before every sample: a layer of a model does not find its KV there either. The
overwriting also hides what the host needs to launch, which has a column of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

Call = Callable[[], object]
_SAMPLE_US = 200.0  # on a CPU a sample repeats a call until it takes so long: the clock and the loop then weigh nothing


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median of its samples, and what 20 and 80 % of them stayed below."""

    median_us: float
    low_us: float
    high_us: float
    num_samples: int
    graph_us: float | None = (
        None  # replayed as a CUDA graph; None without a GPU, or where it cannot be captured
    )
    host_us: float | None = None  # the host's part of an eager call; None without a GPU


@dataclass(frozen=True)
class TimedCall:
    """What is timed. `reset` brings back, outside the time, what a call used up; such a call is not repeated in a sample."""

    call: Call
    reset: Call | None = None


def time_in_turns(
    calls: Mapping[str, TimedCall],
    device: torch.device | str = "cpu",
    *,
    seconds: float = 0.5,
    min_samples: int = 5,
    max_samples: int = 200,
) -> dict[str, Timing]:
    """Time every call, one sample of each after the other, until each had about so many seconds.

    Raises ValueError for a bound that makes no sense.
    """
    if not 1 <= min_samples <= max_samples:
        raise ValueError(f"min_samples: expected 1 to max_samples {max_samples}, got {min_samples}")
    if not seconds >= 0:
        raise ValueError(f"seconds: expected at least 0, got {seconds}")
    place = torch.device(device)
    with torch.inference_mode():
        return (_on_gpu if place.type == "cuda" else _on_cpu)(
            calls, place, partial(_num_samples, seconds, min_samples, max_samples)
        )


def _num_samples(seconds: float, least: int, most: int, round_us: float) -> int:
    return max(least, min(most, int(seconds * 1e6 / max(round_us, 1e-3))))


def _summary(samples: list[float], **more: float | None) -> Timing:
    """Of microseconds."""
    ordered = sorted(samples)
    at = [ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8)]
    return Timing(statistics.median(ordered), at[0], at[1], len(ordered), **more)


# ---------------------------------------------------------------- CPU


def _on_cpu(
    calls: Mapping[str, TimedCall], device: torch.device, num_samples: Callable[[float], int]
) -> dict[str, Timing]:
    repeats, slowest = {}, 0.0
    for name, timed in calls.items():
        _cpu_sample(timed, 1)  # compiles, allocates, finds its threads
        once = _cpu_sample(timed, 1)
        repeats[name] = 1 if timed.reset else max(1, round(_SAMPLE_US / max(once, 1e-3)))
        slowest = max(slowest, once * repeats[name])
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_samples(slowest)):
        for name, timed in calls.items():
            samples[name].append(_cpu_sample(timed, repeats[name]))
    return {name: _summary(times) for name, times in samples.items()}


def _cpu_sample(timed: TimedCall, repeats: int) -> float:
    if timed.reset:
        timed.reset()
    started = perf_counter()
    for _ in range(repeats):
        timed.call()
    return (perf_counter() - started) * 1e6 / repeats


# ---------------------------------------------------------------- GPU


def _on_gpu(
    calls: Mapping[str, TimedCall], device: torch.device, num_samples: Callable[[float], int]
) -> dict[str, Timing]:
    flush = _l2_flush(device)
    graphs: dict[str, TimedCall | None] = {}
    slowest = 0.0
    for name, timed in calls.items():
        for _ in range(3):
            first_us, _ = _gpu_sample(timed, flush)
        slowest = max(slowest, first_us)
        graphs[name] = _captured(timed)
    eager: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    replayed: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_samples(slowest)):
        for name, timed in calls.items():
            eager[name].append(_gpu_sample(timed, flush))
            if (graph := graphs[name]) is not None:
                replayed[name].append(_gpu_sample(graph, flush)[0])
    return {
        name: _summary(
            [device_us for device_us, _ in times],
            graph_us=statistics.median(replayed[name]) if replayed[name] else None,
            host_us=statistics.median(host_us for _, host_us in times),
        )
        for name, times in eager.items()
    }


def _l2_flush(device: torch.device) -> Call:
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    buffer = torch.empty(max(4 * l2_bytes, 1 << 26), dtype=torch.uint8, device=device)
    return buffer.zero_


def _gpu_sample(timed: TimedCall, flush: Call) -> tuple[float, float]:
    """(microseconds on the device, of the host)."""
    if timed.reset:
        timed.reset()
    flush()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    began = perf_counter()
    timed.call()
    host_us = (perf_counter() - began) * 1e6
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3, host_us


def _captured(timed: TimedCall) -> TimedCall | None:
    """The call as a CUDA graph, or None where the call waits for the device, which no graph can."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    try:
        with torch.cuda.graph(graph, stream=side):
            timed.call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return TimedCall(graph.replay, timed.reset)
