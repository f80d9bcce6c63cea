"""Times of calls that take turns: by a GPU's own events, cold and once more as a graph; by the clock where there is no GPU.

Machines are shared and drift, so all that is compared is timed in one loop, call by call, and medians are laid beside each
other. On a GPU the L2 cache is overwritten before every sample: a layer of a model does not find its KV there either. The
overwriting also hides what the host needs to launch, which has a column of its own.
"""

from __future__ import annotations

import math
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
    on_error: Callable[[str, Exception], object] | None = None,
) -> dict[str, Timing]:
    """Time every call, one sample of each after the other, until each had about so many seconds.

    A call that raises has no timing: `on_error` is told, and the others go on; without it the error is raised.
    Raises ValueError for a bound that makes no sense.
    """
    if not 1 <= min_samples <= max_samples:
        raise ValueError(f"min_samples: expected 1 to max_samples {max_samples}, got {min_samples}")
    check_seconds(seconds)
    turns = _Turns(dict(calls), on_error)
    place = torch.device(device)
    with torch.inference_mode():
        return (_on_gpu if place.type == "cuda" else _on_cpu)(
            turns, place, partial(_num_samples, seconds, min_samples, max_samples)
        )


def check_seconds(seconds: float) -> None:
    """Raises ValueError."""
    if not 0 <= seconds < math.inf:
        raise ValueError(f"seconds: expected a number from 0, got {seconds}")


class _Turns:
    """Calls that take turns; one that raises is out."""

    def __init__(
        self, calls: dict[str, TimedCall], on_error: Callable[[str, Exception], object] | None
    ) -> None:
        self.calls = calls
        self._on_error = on_error

    def each(self, turn: Callable[[str, TimedCall], object]) -> None:
        for name, timed in list(self.calls.items()):
            try:
                turn(name, timed)
            except Exception as error:
                if self._on_error is None:
                    raise
                del self.calls[name]
                self._on_error(name, error)


def overwrite(result: object) -> None:
    """What a call returned, with NaN or -1."""
    for tensor in _tensors(result):
        tensor.fill_(_mark(tensor))


def _mark(tensor: torch.Tensor) -> float | int:
    return math.nan if tensor.is_floating_point() else -1


def _tensors(result: object) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    parts = result if isinstance(result, (tuple, list)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _num_samples(seconds: float, least: int, most: int, round_us: float) -> int:
    return max(least, min(most, int(seconds * 1e6 / max(round_us, 1e-3))))


def _summary(samples: list[float], **more: float | None) -> Timing:
    """Of microseconds."""
    ordered = sorted(samples)
    at = [ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8)]
    return Timing(statistics.median(ordered), at[0], at[1], len(ordered), **more)


# ---------------------------------------------------------------- CPU


def _on_cpu(
    turns: _Turns, device: torch.device, num_samples: Callable[[float], int]
) -> dict[str, Timing]:
    repeats: dict[str, int] = {}
    times: dict[str, float] = {}
    samples: dict[str, list[float]] = {name: [] for name in turns.calls}

    def warm(name: str, timed: TimedCall) -> None:
        _cpu_sample(timed, 1)  # compiles, allocates, finds its threads
        once = _cpu_sample(timed, 1)
        repeats[name] = 1 if timed.reset else max(1, round(_SAMPLE_US / max(once, 1e-3)))
        times[name] = once * repeats[name]

    def sample(name: str, timed: TimedCall) -> None:
        samples[name].append(_cpu_sample(timed, repeats[name]))

    turns.each(warm)
    for _ in range(num_samples(max(times.values(), default=0.0))):
        turns.each(sample)
    return {name: _summary(samples[name]) for name in turns.calls}


def _cpu_sample(timed: TimedCall, repeats: int) -> float:
    if timed.reset:
        timed.reset()
    started = perf_counter()
    for _ in range(repeats):
        timed.call()
    return (perf_counter() - started) * 1e6 / repeats


# ---------------------------------------------------------------- GPU


def _on_gpu(
    turns: _Turns, device: torch.device, num_samples: Callable[[float], int]
) -> dict[str, Timing]:
    flush = _l2_flush(device)
    graphs: dict[str, TimedCall | None] = {}
    times: dict[str, float] = {}
    eager: dict[str, list[tuple[float, float]]] = {name: [] for name in turns.calls}
    replayed: dict[str, list[float]] = {name: [] for name in turns.calls}

    def warm(name: str, timed: TimedCall) -> None:
        for _ in range(3):
            times[name], _ = _gpu_sample(timed, flush)
        graphs[name] = _captured(timed)

    def sample(name: str, timed: TimedCall) -> None:
        eager[name].append(_gpu_sample(timed, flush))
        if (graph := graphs[name]) is not None:
            replayed[name].append(_gpu_sample(graph, flush)[0])

    turns.each(warm)
    for _ in range(num_samples(max(times.values(), default=0.0))):
        turns.each(sample)
    return {
        name: _summary(
            [device_us for device_us, _ in eager[name]],
            graph_us=statistics.median(replayed[name]) if replayed[name] else None,
            host_us=statistics.median(host_us for _, host_us in eager[name]),
        )
        for name in turns.calls
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
    """The call as a CUDA graph; None where the call waits for the device, which no graph can, and where a replay does not
    write what the call returns."""
    if _waits(timed):  # so that no capture has to fail, which would leave much behind
        return None
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            result = timed.call()
    except Exception:
        # torch stays in the stream of the capture, and its generator believes it is still captured
        torch.cuda.set_stream(stream)
        torch.cuda.synchronize()
        fresh = torch.Generator(stream.device)
        torch.cuda.default_generators[stream.device_index].graphsafe_set_state(
            fresh.graphsafe_get_state()
        )
        return None
    overwrite(result)
    if timed.reset:
        timed.reset()
    graph.replay()
    if any(bool((x != x).any() if x.is_floating_point() else (x == -1).any()) for x in _tensors(result)):  # fmt: skip
        return None
    return TimedCall(graph.replay, timed.reset)


def _waits(timed: TimedCall) -> bool:
    """Whether torch sees the call wait for the device, or move memory in a way that does."""
    if timed.reset:
        timed.reset()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        timed.call()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False
