"""Calls take turns, what `reset` does is not in the time, one that fails is out, and a graph that cannot be is none."""

from __future__ import annotations

import contextlib
import math
import time
from types import SimpleNamespace

import pytest
import torch

from octavo.bench import timing
from octavo.bench.timing import TimedCall, overwrite, time_in_turns


def test_calls_take_turns() -> None:
    """One sample of each after the other; a call with a reset is run once a sample."""
    log: list[str] = []
    calls = {name: TimedCall(lambda name=name: log.append(name), lambda: None) for name in "abc"}
    timings = time_in_turns(calls, seconds=0, min_samples=4)
    assert list(timings) == list("abc")
    assert "".join(log) == "aa" + "bb" + "cc" + 4 * "abc"
    assert all(each.num_samples == 4 for each in timings.values())


def test_reset_comes_before_each_call_and_is_not_timed() -> None:
    log: list[str] = []

    def reset() -> None:
        log.append("r")
        time.sleep(0.02)

    timings = time_in_turns({"a": TimedCall(lambda: log.append("c"), reset)}, seconds=0)
    assert "".join(log) == "rc" * 7
    assert timings["a"].median_us < 10_000


def test_what_is_slower_takes_longer() -> None:
    calls = {
        "fast": TimedCall(lambda: None),
        "slow": TimedCall(lambda: time.sleep(0.004)),
    }
    timings = time_in_turns(calls, seconds=0)
    assert timings["fast"].median_us < 100 < 4000 <= timings["slow"].median_us
    for each in timings.values():
        assert 0 <= each.low_us <= each.median_us <= each.high_us
        assert each.graph_us is None and each.host_us is None


def test_quick_calls_are_repeated_and_divided() -> None:
    count = 0

    def call() -> None:
        nonlocal count
        count += 1

    timings = time_in_turns({"a": TimedCall(call)}, seconds=0, min_samples=3)
    assert count > 100
    assert timings["a"].median_us < 50


@pytest.mark.parametrize(("seconds", "samples"), [(0.0, 5), (0.05, 10), (1000.0, 12)])
def test_how_many_samples(seconds: float, samples: int) -> None:
    """At least so many, at most so many, in between what the seconds are enough for."""
    calls = {"a": TimedCall(lambda: time.sleep(0.004))}
    found = time_in_turns(calls, seconds=seconds, max_samples=12)["a"].num_samples
    assert found == samples if seconds != 0.05 else 6 <= found <= 12


def test_the_median_and_its_neighbours() -> None:
    summary = timing._summary([float(x) for x in (9, 1, 2, 3, 4, 5, 6, 7, 8, 10, 1000)])
    assert (summary.median_us, summary.low_us, summary.high_us, summary.num_samples) == (
        6,
        3,
        9,
        11,
    )


def test_nothing_to_time() -> None:
    assert time_in_turns({}) == {}


def test_there_is_no_gradient() -> None:
    seen = []
    time_in_turns({"a": TimedCall(lambda: seen.append(torch.is_inference_mode_enabled()))})
    assert all(seen)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seconds": -1}, "seconds"),
        ({"seconds": math.nan}, "seconds"),
        ({"seconds": math.inf}, "seconds"),
        ({"min_samples": 0}, "min_samples"),
        ({"min_samples": 9, "max_samples": 8}, "min_samples"),
    ],
)
def test_bounds_that_make_no_sense(options: dict, named: str) -> None:
    called = []
    with pytest.raises(ValueError, match=f"{named}: expected .*, got"):
        time_in_turns({"a": TimedCall(lambda: called.append(1))}, **options)
    assert not called


class _FailsAt:
    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self) -> None:
        self.left -= 1
        if self.left <= 0:
            raise RuntimeError("out of luck")


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_one_that_fails_is_out_and_the_others_go_on(number: int) -> None:
    told: list[tuple[str, str]] = []
    calls = {
        "a": TimedCall(lambda: None),
        "bad": TimedCall(_FailsAt(number), lambda: None),
        "b": TimedCall(lambda: None),
    }
    timings = time_in_turns(calls, seconds=0, on_error=lambda name, error: told.append((name, str(error))))  # fmt: skip
    assert list(timings) == ["a", "b"]
    assert told == [("bad", "out of luck")]
    assert timings["a"].num_samples == 5
    assert list(calls) == ["a", "bad", "b"]
    with pytest.raises(RuntimeError, match="out of luck"):
        time_in_turns({"bad": TimedCall(_FailsAt(number), lambda: None)}, seconds=0)


def test_an_interrupt_is_no_failure() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        time_in_turns({"a": TimedCall(interrupted)}, on_error=lambda *_: None)


def test_overwriting_reaches_all_that_was_returned() -> None:
    floats, ids, half = torch.ones(3), torch.ones(2, dtype=torch.int64), torch.ones(2).bfloat16()
    overwrite((floats, [ids, (half,)], None, "text"))
    assert floats.isnan().all() and half.isnan().all() and ids.tolist() == [-1, -1]


# ---------------------------------------------------------------- a GPU's part, with the device played by lists


class _Device:
    """Keeps what is asked of it: modes, streams, captures, resets of the generator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.mode = 0
        self.stream = SimpleNamespace(device="cpu", device_index=0, name="default")
        self.replayed = lambda: None
        device = self

        class Graph:
            def replay(self) -> None:
                device.log.append("replay")
                device.replayed()

        @contextlib.contextmanager
        def capture(graph: Graph, stream: object):
            device.log.append("capture")
            device.stream = stream
            yield  # an error leaves the stream as it is, as torch does
            device.stream = default

        default = self.stream

        def set_mode(mode: object) -> None:
            device.mode = mode

        generator = SimpleNamespace(graphsafe_set_state=lambda state: device.log.append("generator"))  # fmt: skip
        fakes = {
            "CUDAGraph": Graph,
            "graph": capture,
            "Stream": lambda: SimpleNamespace(name="side"),
            "current_stream": lambda: device.stream,
            "set_stream": lambda stream: setattr(device, "stream", stream),
            "synchronize": lambda: device.log.append("synchronize"),
            "get_sync_debug_mode": lambda: device.mode,
            "set_sync_debug_mode": set_mode,
            "default_generators": (generator,),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch, "Generator", lambda _: SimpleNamespace(graphsafe_get_state=lambda: 1))  # fmt: skip


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> _Device:
    return _Device(monkeypatch)


def test_a_call_that_waits_is_not_captured(device: _Device) -> None:
    def waits() -> None:
        if device.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    assert timing._captured(TimedCall(waits)) is None
    assert device.log == []
    assert device.mode == 0


def test_after_a_failed_capture_stream_and_generator_are_as_before(device: _Device) -> None:
    def fails() -> None:
        if device.stream.name == "side":
            raise TypeError("not in a capture")

    assert timing._captured(TimedCall(fails)) is None
    assert device.stream.name == "default"
    assert device.log == ["capture", "synchronize", "generator"]


def test_a_graph_that_writes_nothing_is_none(device: _Device) -> None:
    """What ran in another stream was not captured; to replay it takes no time at all."""
    out = torch.zeros(3)
    assert timing._captured(TimedCall(lambda: out)) is None
    device.replayed = lambda: out.fill_(1)
    graph = timing._captured(TimedCall(lambda: out))
    assert graph is not None
    out.zero_()
    graph.call()
    assert out.tolist() == [1, 1, 1]


def test_a_graph_is_reset_like_the_call(device: _Device) -> None:
    log: list[str] = []
    graph = timing._captured(TimedCall(lambda: log.append("c"), lambda: log.append("r")))
    assert graph is not None and graph.reset is not None
    assert "".join(log) == "rc" + "c" + "r"  # looked at, captured, replayed


def test_turns_on_a_gpu(device: _Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each sample what was used up is brought back and the cache is overwritten; both are outside of the events. Eager
    and as a graph take turns; what cannot be captured has no graph, and what fails is out."""
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("|")
            self.place = len(log)

        def synchronize(self) -> None:
            log.append("s")

        def elapsed_time(self, stop: Event) -> float:
            return (stop.place - self.place) / 1000  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(timing, "_l2_flush", lambda _: lambda: log.append("f"))
    device.replayed = lambda: log.append("g")

    def waits() -> None:
        if device.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        log.append("w")

    calls = {
        "a": TimedCall(lambda: log.append("a"), lambda: log.append("r")),
        "waits": TimedCall(waits),
        "bad": TimedCall(_FailsAt(6)),
    }
    failed: list[str] = []
    timings = time_in_turns(
        calls, "cuda", seconds=0, min_samples=2, on_error=lambda name, _: failed.append(name)
    )
    assert "".join(log).startswith("rf|a|s" * 3 + "ra" + "a" + "r" + "g" + "f|w|s" * 3 + "f||s" * 3)
    first, second = ("rf|a|s" + "rf|g|s" + "f|w|s" + rest for rest in ("f|", ""))
    assert "".join(log).endswith(first + second)
    assert failed == ["bad"] and list(timings) == ["a", "waits"]
    assert timings["a"].graph_us == 2 and timings["a"].median_us == 2
    assert timings["waits"].graph_us is None
    assert all(each.host_us is not None and each.num_samples == 2 for each in timings.values())


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Eager, as a graph and the host's part; a call that waits has no graph and harms neither the next capture nor random
    numbers."""
    x = torch.randn(1 << 20, device="cuda")
    calls = {
        "waits": TimedCall(lambda: x.sum().item()),
        "draws and waits": TimedCall(lambda: torch.multinomial(x[:1000].softmax(0), 1).item()),
        "add": TimedCall(lambda: x + 1),
        "in place": TimedCall(lambda: x.mul_(2), lambda: x.fill_(1)),
    }
    timings = time_in_turns(calls, "cuda", seconds=0.01)
    assert timings["waits"].graph_us is None and timings["draws and waits"].graph_us is None
    for name in ("add", "in place"):
        each = timings[name]
        assert each.graph_us is not None and 0 < each.graph_us < 1000
        assert each.host_us is not None and each.host_us > 0
    torch.randn(10, device="cuda")
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
