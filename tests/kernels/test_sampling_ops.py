"""Penalties, filters and the draw, against the oracle; and the draw against the distribution it should follow."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from octavo.kernels import cpu, penalties, reference, sampling, top_k_top_p
from octavo.kernels.cpu.sampling import _exponential, philox_words
from octavo.tests.kernels.cases import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["cpu", "triton"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
TWO_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
INF = float("inf")


def device_of(implementation: str) -> str:
    return "cpu" if implementation == "cpu" else DEVICE


def random_logits(num_rows: int, vocab: int, dtype=torch.float32, scale: float = 3.0):
    """Rows that are not neighbours in memory."""
    return (scale * torch.randn(num_rows, vocab + 5)).to(dtype)[:, :vocab]


# ---------------------------------------------------------------- penalties


@IMPLEMENTATIONS
@DTYPES
@pytest.mark.parametrize("vocab", [1, 50, 5000])
def test_apply_penalties(implementation, dtype, vocab) -> None:
    """Rows: all off, each alone, all on; logits of both signs, and -inf, which stays."""
    ops, device = cpu if implementation == "cpu" else penalties, device_of(implementation)
    logits = random_logits(5, vocab, dtype)
    logits[:, ::7] = -INF
    prompt_mask = torch.rand(5, vocab) < 0.3
    counts = torch.randint(0, 3, (5, vocab), dtype=torch.int32) * torch.randint(0, 2, (5, vocab))
    counts = counts.int()
    repetition = torch.tensor([1.0, 1.3, 1.0, 1.0, 0.8])
    frequency = torch.tensor([0.0, 0.0, 0.4, 0.0, -0.3])
    presence = torch.tensor([0.0, 0.0, 0.0, 0.7, 1.1])
    rest = prompt_mask, counts, repetition, frequency, presence
    penalised = logits.to(device).clone()
    ops.apply_penalties(penalised, *(x.to(device) for x in rest))
    exact = reference.apply_penalties(logits, *rest)
    assert_close(penalised.cpu(), exact, exact.to(dtype))
    untouched = ~prompt_mask & (counts == 0)
    untouched[0] = True
    assert torch.equal(penalised.cpu()[untouched], logits[untouched])


@IMPLEMENTATIONS
def test_penalties_touch_nothing_that_has_not_come_up(implementation) -> None:
    """Neither by 0 * inf, nor by a count below 0."""
    ops, device = cpu if implementation == "cpu" else penalties, device_of(implementation)
    logits, counts = torch.ones(1, 4), torch.tensor([[0, -2, 3, 0]], dtype=torch.int32)
    columns = [torch.tensor([x], device=device) for x in (2.0, INF, 1.0)]
    penalised, mask = logits.to(device).clone(), torch.tensor([[False, False, False, True]])
    ops.apply_penalties(penalised, mask.to(device), counts.to(device), *columns)
    assert penalised.tolist() == [[1.0, 1.0, -INF, 0.5]]


# ---------------------------------------------------------------- filters


def filtered(implementation: str, logits, top_k, top_p, min_p, temperatures=None, **plan):
    """Which tokens of each row are kept; what is kept is as it was."""
    ops, device = cpu if implementation == "cpu" else top_k_top_p, device_of(implementation)
    columns = (
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p, dtype=torch.float32),
        torch.tensor(min_p, dtype=torch.float32),
        None if temperatures is None else torch.tensor(temperatures, dtype=torch.float32),
    )
    masked = logits.to(device).clone()
    ops.apply_top_k_top_p_min_p(
        masked, *(None if x is None else x.to(device) for x in columns), **plan
    )
    masked = masked.cpu()
    kept = ~(masked == -INF) | (logits == -INF)
    assert torch.equal(masked[kept].nan_to_num(), logits[kept].nan_to_num())
    return masked != -INF


def check_filtered(kept: torch.Tensor, logits, top_k, top_p, min_p, temperatures=None) -> None:
    """Exactly the oracle's tokens; where a sum is within 1e-6 of p, a prefix between those of p less and p more."""
    for row in range(len(logits)):
        temperature = 1.0 if temperatures is None else temperatures[row]
        if temperature <= 0:
            assert torch.equal(kept[row], logits[row] != -INF)
            continue
        least, wanted, most = (
            [
                token
                for token in reference.kept_tokens(
                    logits[row], top_k[row], top_p[row] + slack, min_p[row], temperature
                )
                if logits[row, token] > -INF
            ]
            for slack in ((-1e-6, 0.0, 1e-6) if top_p[row] < 1 else (0.0, 0.0, 0.0))
        )
        actual = torch.nonzero(kept[row])[:, 0].tolist()
        assert len(least) <= len(actual) <= len(most)
        assert sorted(most[: len(actual)]) == actual
        if len(least) == len(most):
            assert sorted(wanted) == actual


FILTERS = {
    "top-k": ([1, 2, 17, 999, 1000, 0, -1, 10**6], [1.0] * 8, [0.0] * 8),
    "top-p": ([0] * 8, [0.5, 0.9, 0.99, 0.999999, 1e-6, 0.0, 1.0, 2.0], [0.0] * 8),
    "min-p": ([0] * 8, [1.0] * 8, [0.5, 0.1, 1e-3, 1.0, 0.0, -1.0, 1e-20, 0.9]),
    "all": (
        [1, 5, 50, 50, 500, 3, 0, 999],
        [0.3, 0.8, 0.95, 0.5, 0.99, 1.0, 0.7, 0.999],
        [0.0, 0.05, 0.01, 0.2, 0.001, 0.9, 0.1, 0.0],
    ),
}


@IMPLEMENTATIONS
@TWO_DTYPES
@pytest.mark.parametrize("filters", FILTERS)
def test_filters(implementation, dtype, filters) -> None:
    """16-bit logits are full of ties."""
    logits = random_logits(8, 1000, dtype)
    kept = filtered(implementation, logits, *FILTERS[filters])
    check_filtered(kept, logits, *FILTERS[filters])


@pytest.mark.filterwarnings("ignore:overflow encountered")  # at a tiny temperature, rightly
@IMPLEMENTATIONS
def test_filters_at_temperatures(implementation) -> None:
    """Weights are those of the draw to come; rows of temperature 0 are left alone; tiny ones do not overflow."""
    logits, temperatures = random_logits(8, 300), [0.0, 0.1, 0.7, 1.0, 3.0, 100.0, 1e-3, 0.0]
    columns = [0, 0, 20, 0, 50, 299, 0, 1], [0.9] * 8, [0.0, 0.1, 0.0, 0.0, 0.0, 0.5, 0.0, 0.9]
    kept = filtered(implementation, logits, *columns, temperatures)
    check_filtered(kept, logits, *columns, temperatures)
    kept = filtered(implementation, logits, [0] * 8, [0.9] * 8, [0.0] * 8, [1e-40] * 8)
    assert kept.sum(dim=1).tolist() == [1] * 8


@IMPLEMENTATIONS
def test_ties_go_to_the_lowest_ids(implementation) -> None:
    equal = torch.full((2, 600), -1.5)
    kept = filtered(implementation, equal, [7, 0], [1.0, 0.25], [0.0, 0.0])
    assert torch.nonzero(kept[0])[:, 0].tolist() == list(range(7))
    assert torch.nonzero(kept[1])[:, 0].tolist() == list(range(150))

    zeros = torch.tensor([[-0.0, 0.0, 1.0, -0.0, 0.0, -1.0]])  # both zeros are one value
    assert filtered(implementation, zeros, [3], [1.0], [0.0]).tolist() == [
        [True, True, True, False, False, False]
    ]
    # top-p may end among what top-k left of the ties
    steps = torch.tensor([[0.0, 2.0, 0.0, 0.0, 0.0, 0.0]]).log_softmax(-1)
    for top_p in (0.5, 0.7, 0.9, 0.999):
        kept = filtered(implementation, steps, [4], [top_p], [0.0])
        check_filtered(kept, steps, [4], [top_p], [0.0])


@IMPLEMENTATIONS
def test_filters_of_rows_that_are_masked_already(implementation) -> None:
    logits = random_logits(4, 40)
    logits[0, 3:] = -INF
    logits[1] = -INF
    logits[2, ::2] = -INF
    logits[3, 0] = INF
    columns = [5, 5, 35, 1], [0.9, 0.5, 0.95, 0.9], [0.0, 0.1, 0.0, 0.0]
    kept = filtered(implementation, logits, *columns)
    check_filtered(kept[[0, 2]], logits[[0, 2]], *([column[0], column[2]] for column in columns))
    assert torch.equal(kept[[1, 3]], logits[[1, 3]] != -INF)  # left alone


@IMPLEMENTATIONS
def test_filters_leave_rows_with_a_nan_alone(implementation) -> None:
    """Of either sign, or the draw would not see that the row is bad."""
    logits = random_logits(3, 40)
    nans = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32)
    logits[0, 7], logits[2, 39] = nans
    logits[2, 5] = -INF
    kept = filtered(implementation, logits, [5] * 3, [0.5] * 3, [0.1] * 3)
    assert kept[0].all() and kept[2].sum() == 39 and kept[1].sum() <= 5
    ops, device = cpu if implementation == "cpu" else top_k_top_p, device_of(implementation)
    masked, column = logits.to(device).clone(), torch.full((3,), 0.5, device=device)
    ops.apply_top_k_top_p_min_p(masked, column.int() + 5, column, column, None)
    step = torch.arange(3)
    assert drawn(implementation, masked, column, step, step).tolist()[::2] == [-1, -1]


@pytest.mark.filterwarnings("ignore:invalid value")  # of a NaN
@IMPLEMENTATIONS
def test_temperatures_that_are_no_numbers(implementation) -> None:
    """At an infinite one all that is not -inf is alike; at NaN a row is as at 0."""
    logits = torch.full((2, 40), -INF)
    logits[:, 10:20] = torch.randn(10)
    temperatures = torch.tensor([INF, float("nan")])
    kept = filtered(implementation, logits, [0, 3], [0.45, 0.1], [0.9, 0.9], temperatures.tolist())
    assert torch.nonzero(kept[0])[:, 0].tolist() == logits[0].topk(5).indices.sort().values.tolist()
    assert torch.equal(kept[1], logits[1] != -INF)
    tokens = [
        drawn(implementation, logits, temperatures, torch.tensor([seed, seed]), torch.arange(2))
        for seed in range(20)
    ]
    assert {row[1].item() for row in tokens} == {logits[1].argmax().item()}
    hot = {row[0].item() for row in tokens}
    assert len(hot) > 4 and hot <= set(range(10, 20))
    order = torch.arange(2)
    seeds = order * 0 + 3
    hot_twice = torch.tensor([INF, INF])
    expected = reference.sample(logits, hot_twice, seeds, order)
    assert torch.equal(drawn(implementation, logits, hot_twice, seeds, order), expected)


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 200])
def test_filters_over_several_tiles(vocab) -> None:
    logits = torch.randint(-9, 9, (4, vocab)).float() / 3
    plan = top_k_top_p.FilterPlan(tile=64, num_warps=1)
    columns = [1, vocab // 2, 40, 0], [1.0, 0.9, 0.7, 0.6], [0.0, 0.0, 0.0, 0.0]
    check_filtered(filtered("triton", logits, *columns, plan=plan), logits, *columns)


def test_a_lane_can_count_any_vocabulary() -> None:
    """Three counts of ten bits share a word."""
    for vocab in (1, 50_000, 4_190_208, 4_190_209, 100_000_000):
        plan = top_k_top_p.plan_apply_top_k_top_p_min_p(vocab=vocab)
        assert -(-vocab // plan.tile) < 1024
        assert plan.tile & (plan.tile - 1) == 0 and 1 <= plan.num_warps <= 16


# ---------------------------------------------------------------- the draw


def drawn(implementation: str, logits, temperatures, seeds, steps) -> torch.Tensor:
    ops, device = cpu if implementation == "cpu" else sampling, device_of(implementation)
    tokens = ops.sample(*(x.to(device) for x in (logits, temperatures, seeds, steps))).cpu()
    assert tokens.dtype == torch.int64 and tokens.shape == seeds.shape
    return tokens


def test_philox_gives_the_published_words() -> None:
    """The known answers that Random123 is distributed with."""
    ones, pi = 2**32 - 1, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for counter, key, expected in (
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ones,) * 4, (ones,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (pi, (0xA4093822, 0x299F31D0), "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ):
        words = reference.philox(counter, key)
        assert " ".join(f"{word:08x}" for word in words) == expected


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
@pytest.mark.parametrize("step", [0, 5, 2**32 + 3])
def test_words_of_token_ids(seed, step) -> None:
    words = philox_words(seed, step, 9000).tolist()
    key, halves = (seed % 2**32, (seed >> 32) % 2**32), (step % 2**32, step >> 32)
    for token in (0, 1, 1023, 1024, 4095, 4096, 5000, 8999):
        counter = (1024 * (token // 4096) + token % 1024, 0, *halves)
        assert words[token] == reference.philox(counter, key)[token // 1024 % 4]
    assert philox_words(seed, step, 10).tolist() == words[:10]


@IMPLEMENTATIONS
@TWO_DTYPES
@pytest.mark.parametrize("vocab", [1, 3, 1024, 4200])
def test_sample(implementation, dtype, vocab) -> None:
    """The words of ids past 4096 come from further counters, and all bits of a step count."""
    logits = random_logits(6, vocab, dtype)
    logits[:, 4096:] += 9
    temperatures = torch.tensor([0.0, 1.0, 0.5, 2.0, 1e-3, 50.0])
    seeds, steps = torch.arange(6) * 2**40 - 7, torch.arange(6) * (2**31 + 5)
    tokens = drawn(implementation, logits, temperatures, seeds, steps)
    assert torch.equal(tokens, reference.sample(logits, temperatures, seeds, steps))


def test_the_kernel_draws_what_the_cpu_draws() -> None:
    logits, seeds = random_logits(60, 97), torch.randint(-(2**62), 2**62, (60,))
    arguments = logits, torch.full((60,), 5.0), seeds, torch.randint(0, 1000, (60,))
    assert torch.equal(drawn("triton", *arguments), drawn("cpu", *arguments))


@IMPLEMENTATIONS
def test_a_row_draws_alone_what_it_draws_in_a_batch(implementation) -> None:
    logits, temperatures = random_logits(9, 333), torch.full((9,), 2.0)
    seeds, steps = torch.arange(9), torch.full((9,), 4)
    tokens = drawn(implementation, logits, temperatures, seeds, steps)
    assert len(set(tokens.tolist())) > 3
    for row in range(9):
        alone = (x[row : row + 1] for x in (logits, temperatures, seeds, steps))
        assert drawn(implementation, *alone).item() == tokens[row]
    order = torch.randperm(9)
    shuffled = (x[order] for x in (logits, temperatures, seeds, steps))
    assert torch.equal(drawn(implementation, *shuffled), tokens[order])
    other = drawn(implementation, logits, temperatures, seeds, steps + 1)
    assert not torch.equal(other, tokens)


@pytest.mark.filterwarnings(
    "ignore:overflow encountered"
)  # differences beyond fp32 are infinite, rightly
@IMPLEMENTATIONS
def test_extreme_rows(implementation) -> None:
    """What is -inf is never drawn; equal logits go to the lowest id at temperature 0; bad rows get -1 and spoil no other."""
    logits = torch.full((8, 5000), -INF)
    logits[0, 4321] = -3.0  # the only one
    logits[1, [17, 18, 4113, 4999]] = 7.0  # equal, greedy; 17 and 4113 share a lane
    logits[2, [17, 4999]] = torch.tensor(
        [7.0, 8.0]
    )  # a temperature at which nothing else is likely
    logits[4, 5], logits[5, 5], logits[5, 6] = INF, 1.0, float("nan")
    logits[6, 5], logits[6, 6] = 1.0, float("nan")
    logits[7] = 1e38 * torch.linspace(-3, 3, 5000)
    temperatures = torch.tensor([3.0, 0.0, 1e-40, 1.0, 0.0, 0.0, 1.0, 1.0])
    tokens = drawn(implementation, logits, temperatures, torch.arange(8), torch.arange(8))
    assert tokens.tolist() == [4321, 17, 4999, -1, -1, -1, -1, 4999]


def test_small_exponentials_keep_their_digits() -> None:
    """The winner of a large vocabulary is one of these; -log of a rounded uniform number would be granular there."""
    words = torch.tensor([0, 1, 2, 1000, 2**20 + 1, 2**26, 2**31, 2**32 - 2, 2**32 - 1]).numpy()
    exact = torch.tensor([-math.log1p(-(word + 0.5) / 2**32) for word in words.tolist()])
    torch.testing.assert_close(_exponential(words)[:-2], exact[:-2], rtol=3e-7, atol=0)
    assert _exponential(words).isfinite().all() and (_exponential(words) > 0).all()


@triton.jit
def _exponential_kernel(out_ptr, words_ptr, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT)
    words = tl.load(words_ptr + places).to(tl.uint32, bitcast=True)
    tl.store(out_ptr + places, sampling.exponential(words))


def test_the_kernel_knows_small_exponentials_too() -> None:
    """Over all magnitudes, and on both sides of where the series ends."""
    words = [int(2 ** (bits / 8)) for bits in range(252)] + [2**26 - 1, 2**26]
    words += [2**32 - 2, 2**32 - 1]  # round to 1, whose logarithm is infinite
    out = torch.empty(256, device=DEVICE)
    bits = torch.tensor(words).int().to(DEVICE)
    _exponential_kernel[(1,)](out, bits, COUNT=256)
    exact = torch.tensor([-math.log1p(-(word + 0.5) / 2**32) for word in words])
    torch.testing.assert_close(out.cpu()[:-2], exact[:-2], rtol=4e-6, atol=0)
    assert out.isfinite().all() and (out[-2:] > 15).all()


def surprise(observed: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Standard deviations by which chi-square exceeds its mean."""
    expected = observed.sum() * probabilities
    degrees = len(expected) - 1
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    return (chi_square - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize("varied", ["seeds", "steps"])
def test_draws_follow_the_distribution(varied) -> None:
    num_draws, implementation = 4000, "cpu" if DEVICE == "cpu" else "triton"
    logits, temperature = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, -INF, 0.5]), 1.3
    ids, fixed = torch.arange(num_draws), torch.full((num_draws,), 11)
    seeds, steps = (ids, fixed) if varied == "seeds" else (fixed, ids)
    rows = logits.expand(num_draws, -1).contiguous()
    tokens = drawn(implementation, rows, torch.full((num_draws,), temperature), seeds, steps)
    observed = torch.bincount(tokens, minlength=7).double()
    assert observed[5] == 0
    likely = logits > -INF
    assert surprise(observed[likely], F.softmax(logits / temperature, -1)[likely].double()) < 3
    # draws one after the other know nothing of each other
    first = observed[0] / num_draws
    both = ((tokens[1:] == 0) & (tokens[:-1] == 0)).double().mean()
    assert abs(both - first**2) < 4 * first * (1 - first) / math.sqrt(num_draws)


def test_draws_reach_all_of_a_large_vocabulary_alike() -> None:
    num_draws, vocab = 3000, 8192
    tokens = drawn(
        "cpu",
        torch.zeros(1, vocab).expand(num_draws, -1),
        torch.ones(num_draws),
        torch.full((num_draws,), 3),
        torch.arange(num_draws),
    )
    for bins in (tokens // 512, tokens % 16):
        assert surprise(torch.bincount(bins, minlength=16).double(), torch.full((16,), 1 / 16)) < 3
