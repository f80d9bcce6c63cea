"""Each row is drawn from its own distribution, by its own seed, whatever stands beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.runtime import cpu_draw
from octavo.runtime.cpu_draw import Draws
from octavo.runtime.params import SamplingParams
from octavo.runtime.sampler import _choose_by_ops, sample, sample_on_device
from octavo.runtime.sampling_rows import SamplingRows, uniform


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


def sorted_draw(logits: torch.Tensor, params: SamplingParams, at: float) -> int:
    """The same inversion by one full sort in float64."""
    order = torch.argsort(logits, descending=True, stable=True)
    weights = ((logits[order].double() - logits.max()) / params.temperature).exp().numpy()
    if 0 < params.top_k < len(weights):
        weights[params.top_k :] = 0
    before = weights.cumsum() - weights
    weights[before >= params.top_p * weights.sum()] = 0
    weights[weights < params.min_p] = 0
    cdf = weights.cumsum()
    return int(order[np.searchsorted(cdf, at * cdf[-1], side="right")])


FILTERS = [
    {"top_k": 20}, {"top_k": 600}, {"top_k": 9000}, {"top_p": 0.5}, {"top_p": 0.99}, {"min_p": 0.3}, {"min_p": 1e-5},
    {"top_k": 700, "top_p": 0.9}, {"top_k": 9000, "top_p": 0.97}, {"top_k": 9000, "min_p": 0.01},
    {"top_p": 0.999, "min_p": 1e-3},
]  # fmt: skip


@pytest.mark.parametrize("spread", [0.3, 3.0, 9.0])
@pytest.mark.parametrize("changes", FILTERS, ids=str)
def test_however_far_a_row_has_to_be_sorted_the_draw_is_that_of_a_full_sort(changes, spread):
    """Nuclei of a few tokens, of hundreds and of thousands; vocabulary 12,345; values tie often."""
    params = SamplingParams(temperature=0.9, **changes)
    generator = torch.Generator().manual_seed(4)
    logits = (torch.randn(24, 12_345, generator=generator) * spread * 64).round() / 64
    at = torch.rand(24, generator=generator, dtype=torch.float64).numpy()
    p = params
    draws = Draws(*(np.full(24, v) for v in (p.temperature, p.top_k, p.top_p, p.min_p)), at)
    got = cpu_draw.draw(logits, *cpu_draw.most_likely(logits), draws)
    assert got.tolist() == [sorted_draw(row, params, u) for row, u in zip(logits, at, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000])
def test_draws_without_filters_invert_the_distribution(vocab, temperature):
    """In order of ids, found in two steps; tokens that are impossible are never drawn, not even at the very ends."""
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    logits[0, vocab // 2 + 1 :: 2] = float("-inf")
    at = np.concatenate(([1e-300, 1 - 2**-53], np.random.default_rng(0).random(400)))
    off = np.full(len(at), -1), np.ones(len(at)), np.zeros(len(at))
    draws = Draws(np.full(len(at), temperature), *off, at)
    many = logits.expand(len(at), -1).contiguous()
    best, peak = cpu_draw.most_likely(many)
    weights = cpu_draw.weigh(many, peak)
    cdf = ((logits[0].double() - logits.max()) / temperature).exp().cumsum(0).numpy()
    expected = np.searchsorted(cdf, at * cdf[-1], side="right")
    for known in (weights, None):
        got = cpu_draw.draw(many, best, peak, draws, known)
        assert np.isfinite(logits[0].numpy()[got]).all()
        # a number within rounding of an edge may fall to either side
        near = np.abs(cdf[np.minimum(got, expected)] / cdf[-1] - at) < 1e-6
        assert ((got == expected) | near).all() and (got == expected).mean() > 0.99


def test_launching_and_fetching_are_apart():
    logits = torch.randn(3, 30)
    rows = columns([SamplingParams(seed=i) for i in range(3)])
    samples = sample_on_device(logits, rows)
    assert isinstance(samples.token_ids, torch.Tensor) and samples.token_ids.dtype == torch.int64
    out = samples.fetch()
    assert (
        out.token_ids.tolist()
        == samples.token_ids.tolist()
        == sample(logits, rows).token_ids.tolist()
    )
    none = sample_on_device(logits[:0], columns([])).fetch()
    assert len(none.token_ids) == len(none.logprobs) == 0


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.6, "top_k": 9, "top_p": 0.9}, {"min_p": 0.1}], ids=str
)
def test_the_ops_of_a_gpu_draw_from_the_same_distribution(changes):
    """The way of CUDA tensors, taken on a CPU. Chi-square over 2000 draws, bound as above."""
    params = SamplingParams(seed=1, **changes)
    logits = torch.randn(24, generator=torch.Generator().manual_seed(3)) * 2
    draws = 2000
    rows = columns([params] * draws, steps=list(range(draws)))
    chosen = _choose_by_ops(logits.expand(draws, -1).contiguous(), rows, None)
    counts = np.bincount(chosen.token_ids, minlength=24)
    expected = allowed(logits, params) * draws
    assert counts[expected == 0].sum() == 0
    seen = expected > 0
    assert ((counts[seen] - expected[seen]) ** 2 / expected[seen]).sum() < 73.0


def test_the_ops_of_a_gpu_agree_on_what_is_not_drawn():
    params = [SamplingParams(temperature=0)] * 4 + [
        SamplingParams(seed=1, top_k=1),
        SamplingParams(seed=1),
    ]
    logits = torch.randn(6, 50).mul(4).round()
    logits[1, 4] = float("nan")
    logits[2, 4] = float("inf")
    logits[3] = float("-inf")
    rows, before = columns(params), logits.clone()
    chosen, out = _choose_by_ops(logits, rows, None), sample(logits, rows)
    assert torch.equal(before.nan_to_num(), logits.nan_to_num())
    assert (
        chosen.is_valid.tolist()
        == (out.token_ids >= 0).tolist()
        == [True, False, False, False, True, True]
    )
    assert [chosen.token_ids[i].item() for i in (0, 4)] == [out.token_ids[i] for i in (0, 4)]
    torch.testing.assert_close(
        chosen.normaliser[[0, 4, 5]], logits[[0, 4, 5]].logsumexp(-1), rtol=1e-6, atol=1e-6
    )


def test_greedy_ties_go_to_the_lowest_id():
    """B67: the same token whatever stands beside the row, also where several logits are equal."""
    logits = torch.zeros(3, 200)
    logits[1, [5, 77, 199]] = 2.0
    logits[2, 100:] = -1.0
    params = [SamplingParams(temperature=0)] * 3
    assert sample(logits, columns(params)).token_ids.tolist() == [0, 5, 0]
    assert _choose_by_ops(logits, columns(params), None).token_ids.tolist() == [0, 5, 0]


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


@pytest.mark.parametrize("choose", [None, _choose_by_ops], ids=["cpu", "ops"])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 50}], ids=str)
def test_a_temperature_beyond_float32_draws_evenly_of_what_is_left(filters, choose):
    """-inf divided by an infinite temperature would be no number, and forbidden tokens would be drawn."""
    logits = torch.full((400, 100), -torch.inf)
    logits[:, [3, 30, 70]] = torch.tensor([1.0, -5.0, 9.0])
    rows = columns(
        [SamplingParams(temperature=1e39, seed=seed, **filters) for seed in range(len(logits))]
    )
    drawn = sample(logits, rows) if choose is None else choose(logits, rows, None)
    counts = np.bincount(np.asarray(drawn.token_ids), minlength=100)
    kept = [3, 30] if "top_p" in filters and choose is None else [3, 30, 70]
    assert counts[[3, 30, 70]].sum() == len(logits) and (counts[kept] > 90).all(), counts


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


def test_what_the_edges_of_the_ranges_mean():
    """B56: top_k beyond the vocabulary is off and changes no draw; a small temperature is used as it is; 0 is greedy."""
    logits = torch.randn(50, 30) * 2
    seeds = [SamplingParams(seed=i) for i in range(50)]
    beyond = [SamplingParams(seed=i, top_k=30 + i % 2) for i in range(50)]
    assert (
        sample(logits, columns(seeds)).token_ids == sample(logits, columns(beyond)).token_ids
    ).all()
    chances = torch.tensor([1.0, 1.002], dtype=torch.float64).div(0.005).softmax(0)
    many = [SamplingParams(seed=i, temperature=0.005) for i in range(4000)]
    drawn = sample(torch.tensor([[1.0, 1.002]]).expand(4000, -1), columns(many)).token_ids.mean()
    assert abs(drawn - chances[1].item()) < 0.04  # 0.599; at 0.01 it would be 0.550
    greedy = [SamplingParams(temperature=0)] * 50
    assert (sample(logits, columns(greedy)).token_ids == logits.argmax(-1).numpy()).all()
