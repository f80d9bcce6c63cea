"""The simulation against arithmetic done by hand, against queues whose waiting times are known, and against itself."""

from __future__ import annotations

import dataclasses
import itertools
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.bench.simulation import (
    DEVICES,
    MODELS,
    Device,
    ModelShape,
    Request,
    StepTime,
    StepWork,
    Workload,
    as_json,
    make_workload,
    pool_tokens,
    simulate,
    step_time,
)
from octavo.bench.simulation import simulator as simulator_module
from octavo.bench.simulation.costs import visible
from octavo.scheduler import Scheduler, SchedulerConfig

DEVICE = Device(
    name="tiny",
    memory_bytes=1000,
    memory_bytes_per_s=1000,
    flops_per_s=10000,
    link_bytes_per_s=100,
    peer_bytes_per_s=100,
    memory_efficiency=0.5,
    linear_efficiency=0.5,
    attention_efficiency=0.25,
    link_efficiency=0.5,
    peer_efficiency=0.5,
    exchange_seconds=0.01,
    launch_seconds=0.01,
    host_seconds=0.1,
    host_seconds_per_row=0.02,
)
# Q and the output 4x4, K and V 4x2, three matrices 4x3: 16 + 16 + 8 + 8 + 36 = 84 parameters; the head 4x5: 20
MODEL = ModelShape(
    name="tiny",
    num_layers=1,
    hidden_size=4,
    num_heads=2,
    num_kv_heads=1,
    head_size=2,
    intermediate_size=3,
    vocab_size=5,
)


def config(**values) -> SchedulerConfig:
    return SchedulerConfig(
        **{"num_gpu_blocks": 200, "block_size": 4, "max_model_len": 400, "watermark": 0.0, **values}
    )


def run(workload: Workload, *, async_scheduling: bool = False, **values):
    configs = {"only": config(**values)}
    return simulate(
        workload, configs, model=MODEL, device=DEVICE, async_scheduling=async_scheduling
    )["only"]


def of(*requests: Request) -> Workload:
    return Workload(tuple(requests))


@pytest.fixture
def groups(monkeypatch) -> list:
    """All groups that are given to a scheduler, in order, and a look at the schedulers' pools at the end."""
    seen, schedulers = [], []

    class Watched(Scheduler):
        def __init__(self, config) -> None:
            super().__init__(config)
            schedulers.append(self)

        def add_seq_group(self, group) -> None:
            super().add_seq_group(group)
            seen.append(group)

    monkeypatch.setattr(simulator_module, "Scheduler", Watched)
    yield seen
    for scheduler in schedulers:
        assert not scheduler.has_unfinished() and not scheduler.flight
        assert scheduler.blocks.num_free_blocks == scheduler.config.num_gpu_blocks
        assert scheduler.blocks.host.num_used == 0


# -- the cost model


def test_counts_of_models():
    assert (MODEL.layer_parameters, MODEL.head_parameters) == (84, 20)
    assert MODEL.weight_bytes == 2 * (84 + 20 + 20)
    assert MODEL.kv_bytes_per_token == 2 * 2 * 2  # K and V, one head of 2, two bytes each
    assert MODEL.attention_flops_per_pair == 2 * (2 * 2 + 2 * 2)  # two heads, two products of 2
    assert MODEL.num_launches == 14
    llama = MODELS["llama-3-8b"]
    assert llama.weight_bytes == pytest.approx(2 * 8.03e9, rel=1e-3)  # as published: 8.03 B
    assert llama.kv_bytes_per_token == 128 * 1024
    large = MODELS["llama-3-70b-tp8"]
    assert 8 * large.weight_bytes == pytest.approx(2 * 70.55e9, rel=1e-3)
    assert large.kv_bytes_per_token == 320 * 1024 // 8
    small = MODELS["smollm2-135m"]
    assert small.weight_bytes == pytest.approx(2 * 134.5e6, rel=1e-3)
    # 0.9 * 141 GB - 16.06 GB over 128 KiB
    assert pool_tokens(llama, DEVICES["h200"]) == (126_900_000_000 - llama.weight_bytes) // 131072


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        # 104 parameters are 208 bytes at 500 bytes/s; 2 * (84 * 6 + 20) = 1048 FLOPs at 5000 take less
        # KV of 6 tokens read and written: 8 * 12 bytes; 21 pairs of 16 FLOPs at 2500 take less
        (
            StepWork(1, 6, 1, 6, 21),
            StepTime(host=0.12, launch=0.14, linear=0.416, attention=0.192),
        ),
        # 30 tokens: 5080 FLOPs at 5000; 465 * 16 FLOPs at 2500
        (
            StepWork(1, 30, 1, 30, 465),
            StepTime(host=0.12, launch=0.14, linear=1.016, attention=2.976),
        ),
        # no logits: the head is not read, 168 bytes. KV of 100 tokens read and 2 written: 816 bytes
        (
            StepWork(2, 2, 0, 100, 100),
            StepTime(host=0.14, launch=0.14, linear=0.336, attention=1.632),
        ),
        # blocks of 32 bytes: 2 copied, read and written, at 500; 3 in and 2 out at 50
        (
            StepWork(1, 1, 1, 1, 1, 2, 3, 2),
            StepTime(
                host=0.12, launch=0.14, linear=0.416, attention=0.032, copies=0.256, swaps=3.2
            ),
        ),
        (StepWork(num_blocks_in=5), StepTime(host=0.1, swaps=3.2)),  # nothing is fed
    ],
)
def test_step_time_by_hand(work, expected):
    got = step_time(work, MODEL, DEVICE, 4)
    assert dataclasses.astuple(got) == pytest.approx(dataclasses.astuple(expected))
    assert got.total == pytest.approx(sum(dataclasses.astuple(expected)))
    assert got.on_device == pytest.approx(got.total - expected.host)


def test_tensor_parallel_divides_and_exchanges():
    whole = dataclasses.replace(MODEL, num_kv_heads=2, intermediate_size=4, vocab_size=6)
    half = dataclasses.replace(whole, tensor_parallel=2)
    assert (whole.layer_parameters, half.layer_parameters) == (112, 56)
    assert (whole.kv_bytes_per_token, half.kv_bytes_per_token) == (16, 8)
    assert half.weight_bytes * 2 == whole.weight_bytes
    assert half.attention_flops_per_pair * 2 == whole.attention_flops_per_pair
    # two all-reduces of 5 * 4 * 2 bytes, of which each device sends 2 * 1/2, at 50 bytes/s
    took = step_time(StepWork(5, 5, 5, 5, 5), half, DEVICE, 4)
    assert took.exchange == pytest.approx(2 * (0.01 + 40 / 50))
    assert step_time(StepWork(5, 5, 5, 5, 5), whole, DEVICE, 4).exchange == 0


@pytest.mark.parametrize("window", [None, 1, 3, 7])
def test_visible_pairs(window):
    for context, query in itertools.product(range(9), range(1, 9)):
        seen = [
            set(range(0 if window is None else max(0, p + 1 - window), p + 1))
            for p in range(context, context + query)
        ]
        expected = len(set().union(*seen)), sum(map(len, seen))
        assert visible(context, query, window) == expected


# -- known in closed form


def alone(prompt_len: int, output_len: int, budget: int) -> tuple[float, float]:
    """(time to the first token, seconds from it to the last one) of a request nobody disturbs, from the tiny numbers."""
    first = 0.0
    for start in range(0, prompt_len, budget):
        chunk = min(budget, prompt_len - start)
        last = start + chunk == prompt_len
        linear = max((208 if last else 168) / 500, 2 * (84 * chunk + 20 * last) / 5000)
        pairs = sum(range(start + 1, start + chunk + 1))
        attention = max(8 * (start + 2 * chunk) / 500, 16 * pairs / 2500)
        first += 0.12 + 0.14 + linear + attention
    decodes = (
        0.12 + 0.14 + 0.416 + 8 * (length + 1) / 500
        for length in range(prompt_len + 1, prompt_len + output_len)
    )
    return first, sum(decodes)


@pytest.mark.parametrize("budget", [10, 16, 64])
def test_one_request_alone(budget):
    result = run(
        of(Request(arrival=2.0, prompt_len=25, output_len=9)), max_num_batched_tokens=budget
    )
    first, rest = alone(25, 9, budget)
    [times] = result.requests
    assert times.queue_time == 0
    assert times.time_to_first_token == pytest.approx(first)
    assert times.time_per_output_token == pytest.approx(rest / 8)
    assert result.seconds == times.latency == pytest.approx(first + rest)
    assert result.num_steps == math.ceil(25 / budget) + 8
    assert result.num_fed_tokens == 25 + 8


def test_blocks_used_on_average_are_weighted_by_time():
    """Four tokens to a block: the prompt of three and the fourth token in one block, the fifth in a second."""
    assert run(
        of(Request(arrival=0.0, prompt_len=1, output_len=3))
    ).mean_used_blocks == pytest.approx(1)
    first, second = (seconds - 0.12 for seconds in alone(3, 2, 64))  # without the host's part
    third = alone(3, 3, 64)[1] - alone(3, 2, 64)[1] - 0.12
    mean = (first + second + 2 * third) / (first + second + third)
    result = run(of(Request(arrival=0.0, prompt_len=3, output_len=3)))
    assert result.mean_used_blocks == pytest.approx(mean)


def test_async_scheduling_hides_the_host():
    [serial] = run(of(Request(prompt_len=25, output_len=9))).requests
    [ahead] = run(of(Request(prompt_len=25, output_len=9)), async_scheduling=True).requests
    assert ahead.time_to_first_token == pytest.approx(serial.time_to_first_token)
    # from then on the device never waits: its eight steps follow one another
    assert ahead.finished - ahead.first_token == pytest.approx(alone(25, 9, 64)[1] - 8 * 0.12)


def test_far_apart_nobody_waits():
    lengths = [(7, 3), (30, 1), (12, 5), (1, 2)]
    requests = [
        Request(arrival=1000.0 * i, prompt_len=p, output_len=o) for i, (p, o) in enumerate(lengths)
    ]
    for times, (prompt, output) in zip(run(of(*requests)).requests, lengths, strict=True):
        assert times.queue_time == 0
        first, rest = alone(prompt, output, 2048)
        assert times.time_to_first_token == pytest.approx(first)
        assert times.latency == pytest.approx(first + rest)


def test_one_server_with_equal_service_is_an_m_d_1_queue():
    service = alone(20, 1, 64)[0]
    load = 0.6
    workload = make_workload(
        1500, rate=load / service, prompt_len=20, output_len=1, spread=0, seed=3
    )
    result = run(workload, max_num_seqs=1)
    free = 0.0  # Lindley: each begins when it is there and the one before has gone
    for times in result.requests:
        begin = max(times.arrival, free)
        assert times.first_scheduled == pytest.approx(begin)
        free = begin + service
        assert times.finished == pytest.approx(free)
    # Pollaczek and Khinchine; 1500 arrivals are a sample
    assert result.queue.mean == pytest.approx(load * service / (2 * (1 - load)), rel=0.15)


def test_all_at_once_the_device_is_never_idle():
    result = run(make_workload(30, prompt_len=20, output_len=10), num_gpu_blocks=60)
    assert result.seconds == pytest.approx(result.step_seconds.total)
    assert result.output_tokens_per_s == pytest.approx(result.num_output_tokens / result.seconds)
    series = result.series
    assert series.time == sorted(series.time) and len(series.time) == min(result.num_steps, 500)
    assert max(series.used_blocks) <= result.peak_used_blocks <= 60
    assert sum(series.batched_tokens) == result.num_fed_tokens
    assert series.running[0] + series.waiting[0] == 30


# -- conservation and determinism

MIXED = {
    "prompt_len": 24,
    "output_len": 12,
    "shared_prefix": 10,
    "shared_share": 0.5,
    "beam_share": 0.25,
    "sample_share": 0.25,
    "width": 3,
    "urgent_share": 0.3,
}


def check_conserved(result, workload: Workload) -> None:
    """Every request ends once, at its length, and its times are in order."""
    assert [t.request_id for t in result.requests] == [f"r{i}" for i in range(result.num_requests)]
    for times, request in zip(result.requests, workload.requests, strict=True):
        assert times.output_lens == [request.output_len] * request.width
        assert set(times.finish_reasons) == {"length"}
        assert times.arrival == request.arrival
        assert times.arrival <= times.first_scheduled < times.first_token <= times.finished
    assert result.num_cut_short == 0
    assert result.num_output_tokens == sum(r.num_output_tokens for r in workload.requests)
    assert result.num_prompt_tokens == sum(r.prompt_len for r in workload.requests)
    assert result.num_blocks_swapped_in == result.num_blocks_swapped_out


def test_undisturbed_every_token_is_fed_once(groups):
    workload = make_workload(40, rate=0.5, seed=1, **MIXED)
    result = run(workload, num_gpu_blocks=5000, enable_prefix_caching=False)
    check_conserved(result, workload)
    fed = sum(r.prompt_len + r.width * (r.output_len - 1) for r in workload.requests)
    assert result.num_fed_tokens == fed
    assert result.num_recomputed == result.num_swapped_out == 0
    assert result.num_blocks_copied > 0  # samples and beams branch


def test_tokens_are_the_same_whatever_the_policy(groups):
    workload = make_workload(40, rate=0.5, seed=1, **MIXED)
    outputs = []
    for values in (
        {"num_gpu_blocks": 5000},
        {"preemption_mode": "recompute", "policy": "priority"},
        {"preemption_mode": "swap", "num_cpu_blocks": 300},
        {"num_cpu_blocks": 10, "enable_prefix_caching": False, "max_num_batched_tokens": 24},
        {"num_gpu_blocks": 5000, "async_scheduling": True},
    ):
        groups.clear()
        result = run(workload, **{"num_gpu_blocks": 48, **values})
        check_conserved(result, workload)
        assert (result.num_recomputed + result.num_swapped_out > 0) == (
            values.get("num_gpu_blocks") != 5000
        )
        outputs.append([[s.output_token_ids.tolist() for s in g.seqs] for g in groups])
    assert all(other == outputs[0] for other in outputs[1:])
    for request, drawn in zip(workload.requests, outputs[0], strict=True):
        if request.output_len > 3:  # each of several completions goes its own way
            assert len({tuple(tokens[-2:]) for tokens in drawn}) == request.width


def test_same_seed_same_json():
    def once(seed: int) -> bytes:
        workload = make_workload(25, rate=1.0, seed=seed, **MIXED)
        return as_json({"only": run(workload, num_gpu_blocks=48)})

    assert once(5) == once(5) != once(6)
    assert b"not a measurement" in once(5)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.builds(
            Request,
            arrival=st.floats(0, 20),
            prompt_len=st.integers(1, 40),
            output_len=st.integers(1, 20),
            width=st.integers(1, 3),
            is_beam_search=st.booleans(),
            priority=st.integers(0, 1),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(36, 90),
    st.fixed_dictionaries(
        {
            "policy": st.sampled_from(["fcfs", "priority"]),
            "admission": st.sampled_from(["optimistic", "reserve"]),
            "preemption_mode": st.sampled_from(["auto", "recompute", "swap"]),
            "enable_prefix_caching": st.booleans(),
            "num_cpu_blocks": st.sampled_from([0, 12, 100]),
            "max_num_batched_tokens": st.integers(3, 80),
            "max_num_seqs": st.integers(3, 12),
            "async_scheduling": st.booleans(),
        }
    ),
)
def test_any_small_workload_is_conserved(requests, num_blocks, values):
    # no request needs more than 3 * 15 + 1 blocks of 4 tokens, so none is cut short in 48
    workload = of(*sorted(requests, key=lambda request: request.arrival))
    result = run(workload, num_gpu_blocks=max(num_blocks, 48), max_model_len=60, **values)
    check_conserved(result, workload)
    assert result.peak_used_blocks <= max(num_blocks, 48)
    if values["admission"] == "reserve" and values["policy"] == "fcfs":
        assert result.num_recomputed == result.num_swapped_out == 0


def test_needs_no_torch():
    code = "import sys, octavo.bench.simulation; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["False", "False"]
