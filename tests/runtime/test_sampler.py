"""Each row is drawn from its own distribution, by its own seed, whatever stands beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.runtime.params import SamplingParams
from octavo.runtime.sampler import SamplingRows, sample, uniform


def columns(params: list[SamplingParams], steps=None) -> SamplingRows:
    steps = steps or [0] * len(params)
    return SamplingRows(
        np.array([p.temperature for p in params], np.float64),
        np.array([min(p.top_k, 2**31) for p in params], np.int64),
        np.array([p.top_p for p in params], np.float64),
        np.array([p.min_p for p in params], np.float64),
        np.array([p.seed or 0 for p in params], np.uint64),
        np.array(steps, np.uint64),
        np.array([1] * len(params), np.int64),
    )


def allowed(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """Probabilities after the filters, by plain loops."""
    probs = torch.softmax(logits.double() / params.temperature, 0).tolist()
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    kept, mass = [], 0.0
    for rank, i in enumerate(order):
        if params.top_k > 0 and rank >= params.top_k:
            break
        kept.append(i)
    total = sum(probs[i] for i in kept)
    nucleus = []
    for i in kept:
        if mass >= params.top_p * total and nucleus:
            break
        nucleus.append(i)
        mass += probs[i]
    nucleus = [i for i in nucleus if probs[i] >= params.min_p * probs[order[0]]]
    out = np.zeros(len(probs))
    out[nucleus] = [probs[i] for i in nucleus]
    return out / out.sum()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 10_000},
        {"top_k": 2**70},
        {"top_p": 0.5},
        {"top_p": 1e-9},
        {"top_k": 7, "top_p": 0.8},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(changes):
    """Pearson's chi-square over 20,000 draws; the bound is the 1 - 1e-6 quantile for up to 23 degrees of freedom."""
    params = SamplingParams(seed=1, **changes)
    logits = torch.randn(24, generator=torch.Generator().manual_seed(3)) * 2
    draws = 20_000
    rows = columns([params] * draws, steps=list(range(draws)))
    counts = np.bincount(sample(logits.expand(draws, -1), rows).token_ids, minlength=24)
    expected = allowed(logits, params) * draws
    assert counts[expected == 0].sum() == 0
    seen = expected > 0
    chi_square = ((counts[seen] - expected[seen]) ** 2 / expected[seen]).sum()
    assert chi_square < 73.0


def test_greedy_is_the_most_likely_token_and_its_log_probability():
    logits = torch.randn(5, 50)
    out = sample(logits, columns([SamplingParams(temperature=0)] * 5))
    assert out.token_ids.tolist() == logits.argmax(-1).tolist()
    expected = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(out.token_ids)[:, None])[
        :, 0
    ]
    torch.testing.assert_close(torch.from_numpy(out.logprobs), expected)


def test_a_row_does_not_depend_on_its_neighbours():
    """Each row alone and in a shuffled mixed batch draws the same token."""
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, seed=i)
        for i, (t, k, p, m) in enumerate(
            [(0, -1, 1, 0), (1, -1, 1, 0), (1, 3, 1, 0), (0.5, -1, 0.6, 0), (2, 9, 0.9, 0.1)] * 4
        )
    ]
    logits = torch.randn(len(params), 64)
    steps = list(range(len(params)))
    together = sample(logits, columns(params, steps)).token_ids
    order = np.random.default_rng(0).permutation(len(params))
    shuffled = sample(
        logits[order], columns([params[i] for i in order], [steps[i] for i in order])
    ).token_ids
    alone = [
        sample(logits[i : i + 1], columns([params[i]], [steps[i]])).token_ids[0]
        for i in range(len(params))
    ]
    assert together.tolist() == alone
    assert together[order].tolist() == shuffled.tolist()


def test_tiny_temperature_does_not_overflow():
    logits = torch.tensor([[1e4, 1.0, -1e4]])
    out = sample(logits, columns([SamplingParams(temperature=1e-6, seed=1)]))
    assert out.token_ids.tolist() == [0]


@pytest.mark.parametrize("temperature", [1e-46, 1e-300])
def test_a_temperature_below_float32_is_still_a_temperature(temperature):
    out = sample(
        torch.tensor([[1.0, 9.0, 2.0, 3.0, 0.0]]),
        columns([SamplingParams(temperature=temperature, seed=1)]),
    )
    assert out.token_ids.tolist() == [1]


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize(
    "bad",
    [[float("nan")] * 4, [float("-inf")] * 4, [1.0, float("inf"), 0, 0], [1.0, float("nan"), 0, 0]],
)
def test_logits_that_are_not_finite_give_no_token_and_disturb_nobody(temperature, bad):
    params = [SamplingParams(temperature=temperature, seed=i) for i in range(3)]
    good = torch.randn(3, 4)
    logits = good.clone()
    logits[1] = torch.tensor(bad)
    out, clean = sample(logits, columns(params)), sample(good, columns(params))
    assert out.token_ids[1] == -1
    assert out.token_ids[[0, 2]].tolist() == clean.token_ids[[0, 2]].tolist()
    assert out.logprobs[[0, 2]].tolist() == clean.logprobs[[0, 2]].tolist()


def test_masked_tokens_are_no_fault():
    out = sample(
        torch.tensor([[float("-inf"), 2.0, float("-inf")]]), columns([SamplingParams(seed=1)])
    )
    assert out.token_ids.tolist() == [1]


def test_uniform_is_uniform_and_depends_on_seed_and_step():
    steps = np.arange(50_000, dtype=np.uint64)
    u = uniform(np.full(50_000, 7, np.uint64), steps)
    assert u.min() > 0 and u.max() < 1
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 190  # 99 degrees of freedom, 1 - 1e-7 quantile
    assert (
        len(np.unique(uniform(np.arange(1000, dtype=np.uint64), np.zeros(1000, np.uint64)))) == 1000
    )
    # neighbouring seeds and steps are not the same stream shifted
    assert len(np.intersect1d(uniform(np.full(1000, 8, np.uint64), steps[:1000]), u[:2000])) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0), ("n", 1.5), ("n", True), ("temperature", -0.1), ("temperature", float("nan")), ("temperature", "1"),
        ("top_k", 0), ("top_k", -2), ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 2), ("seed", 2**63),
        ("max_tokens", 0), ("max_tokens", -3), ("max_tokens", 2.5), ("stop", [""]), ("stop_token_ids", [-1]),
        ("ignore_eos", 1), ("temperature", 10**400), ("stop", 5), ("stop_token_ids", 5), ("top_k", 1.5),
    ],
)  # fmt: skip
def test_bad_parameters_are_refused_by_name(name, value):
    """B50, B56: ranges are checked at construction."""
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        SamplingParams(**{name: value})


def test_greedy_samples_would_be_equal():
    with pytest.raises(ValueError, match=r"^n: expected 1 with temperature 0"):
        SamplingParams(n=2, temperature=0)
