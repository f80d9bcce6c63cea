"""Log probabilities and ranks under the raw logits, ties included; a prompt's in pieces."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.runtime import top_logprobs
from octavo.runtime.params import SamplingParams
from octavo.runtime.sampler import sample
from octavo.runtime.top_logprobs import most_likely, token_logprobs
from octavo.tests.runtime.rows import Ask, rows_of


def plain_order(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


@pytest.mark.parametrize("vocab", [7, 64, 700, 5000])
@pytest.mark.parametrize("levels", [2, 5, 40, None], ids=str)
def test_most_likely_has_ties_by_id(vocab, levels):
    """Few levels make ties everywhere: within a chunk, between chunks, at the cut."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab, generator=generator)
    if levels is not None:
        logits = (logits * levels / 4).round()
    logits[1, 1:] = logits[1, 0]
    logits[2, : vocab // 2] = float("-inf")
    for count in (1, 2, 5, min(vocab, 60), vocab):
        ids, values = most_likely(logits, count)
        for row in range(len(logits)):
            assert ids[row].tolist() == plain_order(logits[row].tolist())[:count]
        assert torch.equal(values, logits.gather(1, ids))
        in_order, found = top_logprobs._in_order(logits, count)  # the way of a GPU
        assert torch.equal(top_logprobs._with_lowest_ties(logits, in_order, found), ids)


def test_ranks_count_greater_logits():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 0.0, 3.0]])
    got = token_logprobs(logits, logits.logsumexp(-1), torch.tensor([[3]]), 5).fetch()
    assert got.token_ids.tolist() == [[3, 1, 2, 5, 3, 0]]
    assert got.ranks.tolist() == [[4, 1, 1, 1, 4, 5]]
    expected = torch.log_softmax(logits, -1)[0][[3, 1, 2, 5, 3, 0]]
    np.testing.assert_allclose(got.logprobs[0], expected, rtol=1e-6)


@pytest.mark.parametrize("count", [0, 1, 4, -1, 64])
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_logprobs_are_of_the_raw_logits(count, temperature):
    """Whatever is done to them afterwards; the chosen token comes first."""
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)) * 3
    kinds = [{}, {"repetition_penalty": 2.0}, {"allowed_token_ids": [3, 5, 60]}, {"top_k": 3}, {}]
    asks = [
        Ask(SamplingParams(temperature=temperature, seed=i, logprobs=count, **kind), [3, 7], [9])
        for i, kind in enumerate(kinds)
    ]
    asks[4] = Ask(SamplingParams(temperature=temperature, seed=4))
    out = sample(logits, rows_of(asks))
    (detail,) = out.details
    assert detail.places.tolist() == [0, 1, 2, 3]
    raw = torch.log_softmax(logits.double(), -1)
    width = 64 if count == -1 else count
    for row in range(4):
        order = plain_order(logits[row].tolist())
        ids = detail.tokens.token_ids[row].tolist()
        assert ids == [out.token_ids[row], *order[:width]]
        assert detail.tokens.ranks[row].tolist() == [1 + order.index(i) for i in ids]
        assert detail.tokens.logprobs[row].tolist() == pytest.approx(
            raw[row][ids].tolist(), abs=1e-5
        )
        assert detail.tokens.logprobs[row][0] == out.logprobs[row]


def test_different_counts_and_a_search_stand_side_by_side():
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(2))
    search = SamplingParams(temperature=0, use_beam_search=True, best_of=2, logprobs=2)
    asks = [
        Ask(SamplingParams(temperature=0, logprobs=1)),
        Ask(search, num_candidates=4),
        Ask(SamplingParams(temperature=0, logprobs=3)),
        Ask(SamplingParams(temperature=0)),
    ]
    out = sample(logits, rows_of(asks))
    by_place = {
        int(place): ids.tolist()
        for detail in out.details
        for place, ids in zip(detail.places, detail.tokens.token_ids, strict=True)
    }
    order = [plain_order(row) for row in logits.tolist()]
    assert by_place == {
        0: [order[0][0], order[0][0]],
        **{1 + i: [order[1][i], *order[1][:2]] for i in range(4)},
        5: [order[2][0], *order[2][:3]],
    }
    assert len(out.token_ids) == 7


def test_nobody_asks_and_nothing_is_made(monkeypatch):
    def fail(*args):
        raise AssertionError

    monkeypatch.setattr("octavo.runtime.sampler.token_logprobs", fail)
    monkeypatch.setattr("octavo.runtime.logits_processing.LogitsProcessing.apply", fail)
    monkeypatch.setattr("octavo.runtime.cpu_draw.draw", lambda logits, best, *_: best)
    out = sample(torch.randn(3, 20), rows_of([Ask(SamplingParams(temperature=0))] * 3))
    assert out.details == () and out.errors == {}
