"""Every feature of paged attention alone, in every pair, and in random combinations, on both implementations.

    pytest tests/kernels/test_feature_matrix.py --count 5000 --seed 7      a long run

Slots that no query sees are NaN (and may not be read, which the guard watches), unused table entries are out of range,
the output starts as NaN, and spikes stand next to the edges of blocks, tiles, splits and windows.
"""

from __future__ import annotations

import random

import pytest
import torch

from octavo.tests.kernels import features
from octavo.tests.kernels.attending import check_batch


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", range(metafunc.config.getoption("--count")))


def run(attend, case: features.Case, seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batch = features.build(case, draw)
    loose = {"max_seq_len": max(batch.seq_lens) + draw.choice([0, 0, 1, 100])}
    check_batch(attend, batch, case["lse"], batch_invariant=case["batch_invariant"], **loose)


SINGLE, PAIRS = features.single(), features.pairwise(seed=0)


@pytest.mark.parametrize("number_of_case", range(len(SINGLE)))
def test_alone(attend, number_of_case) -> None:
    run(attend, SINGLE[number_of_case], seed=number_of_case)


@pytest.mark.parametrize("number_of_case", range(len(PAIRS)))
def test_pairs(attend, number_of_case) -> None:
    run(attend, PAIRS[number_of_case], seed=number_of_case)


def test_random_combinations(attend, number, run_seed) -> None:
    seed = 1_000_003 * run_seed + number
    run(attend, features.random_case(random.Random(seed)), seed)


def test_pairs_are_covered() -> None:
    """The covering of pairs is what it says, and small."""
    missing = [
        (a, x, b, y)
        for a in features.FEATURES
        for b in features.FEATURES
        if a < b
        for x in features.FEATURES[a]
        for y in features.FEATURES[b]
        if features.allowed({a: x, b: y})
        and not any(case[a] == x and case[b] == y for case in PAIRS)
    ]
    assert missing == []
    assert all(map(features.allowed, [*SINGLE, *PAIRS])) and len(PAIRS) < 200
