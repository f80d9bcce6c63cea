"""Policies differ in the direction, and where it can be counted by the amount, that they should; and what is refused."""

from __future__ import annotations

import itertools
import json

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from octavo.bench.simulation import (
    DEVICES,
    MODELS,
    Device,
    Request,
    Workload,
    comparison_table,
    make_configs,
    make_workload,
    plot_simulation,
    pool_tokens,
    simulate,
    step_table,
)
from octavo.bench.simulation.policies import fields_of
from octavo.commands.simulate import simulate as command
from octavo.scheduler import SchedulerConfig

MODEL, DEVICE = MODELS["smollm2-135m"], DEVICES["a100"]


def compare(workload: Workload, model=MODEL, **configs: dict):
    base = {"num_gpu_blocks": 1000, "max_model_len": 2048, "watermark": 0.0}
    made = {name: SchedulerConfig(**{**base, **values}) for name, values in configs.items()}
    return simulate(workload, made, model=model, device=DEVICE)


def of(*requests: Request) -> Workload:
    return Workload(tuple(requests))


# -- the prefix cache


def test_prefix_cache_saves_the_full_shared_blocks():
    # 50 shared tokens are 3 full blocks of 16: the first request computes them, the others find them
    requests = [
        Request(arrival=i * 10.0, prompt_len=60 + i, output_len=4, shared_len=50) for i in range(6)
    ]
    results = compare(of(*requests), on={}, off={"enable_prefix_caching": False})
    on, off = results["on"], results["off"]
    assert [times.num_cached_tokens for times in on.requests] == [0, 48, 48, 48, 48, 48]
    assert off.num_fed_tokens - on.num_fed_tokens == on.num_cached_tokens == 5 * 48
    assert on.hit_rate == pytest.approx(240 / (60 + 61 + 62 + 63 + 64 + 65))
    assert off.hit_rate == off.num_cached_tokens == 0
    assert on.requests[0].time_to_first_token == off.requests[0].time_to_first_token
    for mine, other in zip(on.requests[1:], off.requests[1:], strict=True):
        assert mine.time_to_first_token < other.time_to_first_token


def test_a_prompt_that_is_known_whole_feeds_its_last_block():
    requests = [
        Request(arrival=i * 10.0, prompt_len=48, output_len=1, shared_len=48) for i in (0, 1)
    ]
    result = compare(of(*requests), on={})["on"]
    assert [times.num_cached_tokens for times in result.requests] == [0, 32]


def test_prefixes_of_another_seed_are_other_tokens():
    request = Request(prompt_len=40, output_len=1, shared_len=20)
    one, other = Workload((request, request)), Workload((request, request), seed=1)
    assert (
        one.prompt(0)[:20].tolist() == one.prompt(1)[:20].tolist() != other.prompt(0)[:20].tolist()
    )
    assert one.prompt(0)[20:].tolist() != one.prompt(1)[20:].tolist()


# -- too little of something


def test_starved_pool_preempts_and_reserve_does_not():
    workload = make_workload(60, prompt_len=100, output_len=100, seed=2)
    results = compare(
        workload,
        plenty={"num_gpu_blocks": 5000},
        recompute={"num_gpu_blocks": 100, "preemption_mode": "recompute"},
        swap={"num_gpu_blocks": 100, "preemption_mode": "swap", "num_cpu_blocks": 1000},
        full={"num_gpu_blocks": 100, "preemption_mode": "swap", "num_cpu_blocks": 0},
        reserve={"num_gpu_blocks": 100, "admission": "reserve"},
    )
    assert results["plenty"].num_recomputed == results["plenty"].num_swapped_out == 0
    assert results["recompute"].num_recomputed > 0 == results["recompute"].num_swapped_out
    assert results["swap"].num_swapped_out > 0 == results["swap"].num_recomputed
    assert results["swap"].num_blocks_swapped_out > 0 < results["swap"].step_seconds.swaps
    assert results["full"].num_recomputed > 0 == results["full"].num_swapped_out
    assert results["reserve"].num_recomputed == results["reserve"].num_swapped_out == 0
    undisturbed = results["plenty"].num_fed_tokens
    assert results["swap"].num_fed_tokens == results["reserve"].num_fed_tokens == undisturbed
    assert results["recompute"].num_fed_tokens > undisturbed
    assert results["plenty"].seconds < min(r.seconds for n, r in results.items() if n != "plenty")
    assert results["recompute"].peak_used_blocks >= 99
    preempted = sum(times.num_preemptions for times in results["recompute"].requests)
    assert preempted == results["recompute"].num_recomputed


def test_a_request_that_outgrows_the_pool_is_cut_short():
    result = compare(of(Request(prompt_len=30, output_len=100)), one={"num_gpu_blocks": 4})["one"]
    # 64 tokens have room; the last token drawn needs none
    assert result.num_cut_short == 1
    assert result.requests[0].output_lens[0] < 100
    assert result.num_output_tokens == result.requests[0].output_lens[0]


def test_priority_serves_the_urgent_first_under_overload():
    workload = make_workload(
        150, rate=2000, prompt_len=100, output_len=60, urgent_share=0.2, seed=4
    )
    seats = {"max_num_seqs": 8}
    results = compare(workload, fcfs=seats, priority={**seats, "policy": "priority"})
    urgent, others = (
        {name: result.ttft_by_priority[p] for name, result in results.items()} for p in (0, 1)
    )
    assert urgent["priority"].p50 < urgent["fcfs"].p50 / 3
    assert others["priority"].mean > others["fcfs"].mean


def test_chunks_shorten_the_pauses_of_who_decodes():
    requests = [Request(prompt_len=10, output_len=200)]
    requests += [Request(arrival=0.1 + i * 0.5, prompt_len=1900, output_len=2) for i in range(3)]
    results = compare(
        of(*requests),
        MODELS["llama-3-8b"],
        chunks={"max_num_batched_tokens": 128},
        whole={"enable_chunked_prefill": False},
    )
    most = {name: max(result.series.batched_tokens) for name, result in results.items()}
    assert most == {"chunks": 128, "whole": 1901}
    pauses = {
        name: max(b - a for a, b in itertools.pairwise(result.series.time))
        for name, result in results.items()
    }
    assert pauses["chunks"] < pauses["whole"] / 5
    first = {name: result.requests[1].time_to_first_token for name, result in results.items()}
    assert first["chunks"] > first["whole"]


def test_larger_blocks_waste_more_of_the_same_memory():
    workload = make_workload(40, prompt_len=40, output_len=20, seed=1)
    configs = make_configs(
        ["block_size=1", "block_size=64"], pool_tokens=6400, max_model_len=workload.longest
    )
    assert [config.num_gpu_blocks for config in configs.values()] == [6400, 100]
    small, large = simulate(workload, configs, model=MODEL, device=DEVICE).values()
    assert small.peak_used_blocks / 6400 < large.peak_used_blocks / 100


def test_slower_device_takes_longer():
    workload = make_workload(20, prompt_len=500, output_len=50)
    configs = {"one": SchedulerConfig(num_gpu_blocks=2000, max_model_len=8000)}
    fast, slow = (
        simulate(workload, configs, model=MODELS["llama-3-8b"], device=DEVICES[name])["one"]
        for name in ("h200", "a100")
    )
    # between the ratios of the memory rates and of the arithmetic, launches being alike
    assert 1.5 * fast.seconds < slow.seconds < 989 / 312 * fast.seconds


# -- workloads


def test_lengths_and_arrivals_have_the_means_asked_for():
    given = {"prompt_len": 300, "output_len": 50, "seed": 7}
    workload = make_workload(4000, rate=10, **given, shared_prefix=64, shared_share=0.25)
    requests = workload.requests
    own = [request.prompt_len - request.shared_len for request in requests]
    assert sum(own) / 4000 == pytest.approx(300, rel=0.05)
    assert sum(r.output_len for r in requests) / 4000 == pytest.approx(50, rel=0.05)
    assert requests[-1].arrival == pytest.approx(400, rel=0.05)
    assert sum(r.shared_len == 64 for r in requests) == pytest.approx(1000, rel=0.1)
    faster = make_workload(4000, rate=20, **given).requests
    assert [r.output_len for r in faster] == [r.output_len for r in requests]
    equal = make_workload(5, spread=0, prompt_len=30, output_len=7).requests
    assert {(r.prompt_len, r.output_len, r.arrival) for r in equal} == {(30, 7, 0.0)}


def test_kinds_are_shared_out():
    asked = {"beam_share": 0.2, "sample_share": 0.3, "width": 5, "urgent_share": 0.4}
    requests = make_workload(3000, **asked).requests
    assert sum(r.is_beam_search for r in requests) / 3000 == pytest.approx(0.2, abs=0.03)
    assert sum(r.width == 5 for r in requests) / 3000 == pytest.approx(0.5, abs=0.03)
    assert sum(r.priority == 0 for r in requests) / 3000 == pytest.approx(0.4, abs=0.03)
    assert {r.priority for r in make_workload(50).requests} == {0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_requests", 0),
        ("rate", 0),
        ("rate", float("nan")),
        ("prompt_len", 0),
        ("output_len", 1.5),
        ("spread", -1),
        ("shared_prefix", -1),
        ("shared_share", 1.1),
        ("beam_share", True),
        ("sample_share", -0.1),
        ("width", 1),
        ("urgent_share", "half"),
        ("seed", -1),
        ("vocab_size", 1),
    ],
)
def test_bad_workloads_name_the_argument(name, value):
    with pytest.raises(ValueError, match=f"^{name}: expected .* got "):
        make_workload(**{"num_requests": 3, **{name: value}})


def test_other_bad_input_names_the_argument():
    good = {"prompt_len": 4, "output_len": 2}
    for name, value in (
        ("arrival", -1),
        ("prompt_len", 0),
        ("output_len", 0),
        ("shared_len", 5),
        ("width", 0),
        ("priority", 0.5),
    ):
        with pytest.raises(ValueError, match=f"^{name}: "):
            Request(**{**good, name: value})
    with pytest.raises(ValueError, match=r"^requests: "):
        of()
    with pytest.raises(ValueError, match=r"^requests: "):
        of(Request(arrival=1, **good), Request(**good))
    with pytest.raises(ValueError, match=r"^sample_share: "):
        make_workload(3, beam_share=0.6, sample_share=0.6)
    with pytest.raises(ValueError, match=r"^memory_efficiency: "):
        Device(
            name="d",
            memory_bytes=1,
            memory_bytes_per_s=1,
            flops_per_s=1,
            link_bytes_per_s=1,
            peer_bytes_per_s=1,
            memory_efficiency=1.5,
        )
    with pytest.raises(ValueError, match=r"^utilization: "):
        pool_tokens(MODEL, DEVICE, 2)
    with pytest.raises(ValueError, match=r"^model: .*A100"):
        pool_tokens(MODELS["llama-3-8b"], DEVICE, 0.1)
    with pytest.raises(ValueError, match=r"^configs: "):
        compare(of(Request(**good)))
    with pytest.raises(ValueError, match=r"^max_model_len: expected at least 6, .*'one'"):
        compare(of(Request(**good)), one={"max_model_len": 5})
    with pytest.raises(ValueError, match=r"^config 'one', request 1: n: "):
        compare(of(Request(**good), Request(**good, width=3)), one={"max_num_seqs": 2})


# -- policies by name


def test_policies_by_name():
    names = ["default", "no-chunks", "swap,block_size=8,watermark=0.1,enable_prefix_caching=False"]
    configs = make_configs(names, pool_tokens=1000, host_tokens=90, max_model_len=3000)
    assert list(configs) == names
    assert configs["default"] == SchedulerConfig(
        num_gpu_blocks=62, num_cpu_blocks=5, max_model_len=3000
    )
    assert configs["no-chunks"].max_num_batched_tokens == 3000
    third = configs[names[2]]
    assert (third.num_gpu_blocks, third.num_cpu_blocks, third.block_size) == (125, 11, 8)
    assert (third.preemption_mode, third.watermark) == ("swap", 0.1)
    assert third.enable_prefix_caching is False
    assert fields_of("sliding_window=None") == {"sliding_window": None}


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("fastest", "policy: expected one of default, .* got 'fastest'"),
        ("num_gpu_blocks=4", "policy: expected a field among .* got 'num_gpu_blocks'"),
        ("block_size=big", "block_size: expected a number, got 'big'"),
        ("block_size=0", "block_size: expected an integer >= 1, got 0"),
        ("enable_prefix_caching=yes", "enable_prefix_caching: expected True or False, got 'yes'"),
        ("policy=random", "policy: expected one of fcfs, priority, got 'random'"),
    ],
)
def test_bad_policies_are_named(policy, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make_configs([policy], pool_tokens=1000, max_model_len=100)


# -- what is shown


def invoke(*arguments: str):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, arguments)


def test_command_compares_and_writes(tmp_path):
    path = tmp_path / "out.json"
    arguments = (
        "--requests 12 --model smollm2-135m --device a100 --prompt 40 --output 10 --rate 50 "
        "--policy default --policy block_size=32 --urgent 0.5 --json"
    )
    result = invoke(*arguments.split(), str(path))
    assert result.exit_code == 0, result.output
    assert "simulated: 12 requests, SmolLM2-135M on A100" in result.output
    assert "of priority 1, p99" in result.output
    written = json.loads(path.read_text())
    assert list(written["results"]) == ["default", "block_size=32"]
    assert len(written["results"]["default"]["requests"]) == 12
    again = invoke("--requests", "12", "--async")
    assert "async scheduling" in again.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--device tpu", "error: device: expected one of h200, a100, got 'tpu'"),
        ("--model gpt", "error: model: expected one of llama-3-8b"),
        ("--prompt 0", "error: prompt_len: expected an integer >= 1, got 0"),
        ("--policy fast", "error: policy: expected one of"),
        ("--pool-tokens 50", "error: config 'default', request 0: prompt_token_ids:"),
        ("--swap-space-gib -1", "error: swap_space_gib: "),
        ("--requests 2 --output 2 --json /no/such/folder/a.json", "error: json: "),
    ],
)
def test_command_refuses(arguments, message):
    result = invoke(*arguments.split())
    assert result.exit_code == 2
    assert message in result.output


def test_tables_and_plot(tmp_path):
    results = compare(make_workload(20, prompt_len=30, output_len=8), a={}, b={"block_size": 32})
    console = Console(width=120, record=True, file=(tmp_path / "shown").open("w"))
    console.print(comparison_table(results), step_table(results))
    text = console.export_text()
    assert text.count("simulated: ") == 2
    assert f"{results['a'].output_tokens_per_s:.0f}" in text
    for part in ("host", "launch", "linear", "attention"):
        assert part in text
    assert "swaps" not in text  # nothing was
    pytest.importorskip("matplotlib")
    plot_simulation(results, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"^plot: .*cannot be written"):
        plot_simulation(results, tmp_path / "none" / "a.png")
