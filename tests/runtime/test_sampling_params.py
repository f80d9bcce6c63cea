"""What may be asked for, and what is refused at construction, by name."""

from __future__ import annotations

import copy
import pickle

import msgspec
import pytest

from octavo.runtime.params import SamplingParams
from octavo.runtime.sampling_params import Guided


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0), ("n", 1.5), ("n", True), ("temperature", -0.1), ("temperature", float("nan")), ("temperature", "1"),
        ("top_k", 0), ("top_k", -2), ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 2), ("seed", 2**63),
        ("max_tokens", 0), ("max_tokens", -3), ("max_tokens", 2.5), ("stop", [""]), ("stop_token_ids", [-1]),
        ("ignore_eos", 1), ("temperature", 10**400), ("stop", 5), ("stop_token_ids", 5), ("top_k", 1.5),
        ("stop", ["\ud800"]), ("bad_words", ["a", "b\udfff"]),
    ],
)  # fmt: skip
def test_bad_parameters_are_refused_by_name(name, value):
    """B50, B56: ranges are checked at construction."""
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        SamplingParams(**{name: value})


def test_a_guided_text_has_to_end():
    with pytest.raises(ValueError, match=r"^ignore_eos: expected False with guided"):
        SamplingParams(guided=Guided(regex="a"), ignore_eos=True)


def test_greedy_samples_would_be_equal():
    with pytest.raises(ValueError, match=r"^n: expected 1 with temperature 0"):
        SamplingParams(n=2, temperature=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("presence_penalty", "1"), ("presence_penalty", True),
        ("frequency_penalty", 2.01), ("frequency_penalty", float("nan")), ("frequency_penalty", None),
        ("repetition_penalty", 0), ("repetition_penalty", 2.5), ("repetition_penalty", -1), ("repetition_penalty", float("inf")),
        ("min_tokens", -1), ("min_tokens", 1.0), ("min_tokens", 17), ("min_tokens", True), ("min_tokens", None),
        ("logprobs", -2), ("logprobs", 1.5), ("logprobs", True), ("prompt_logprobs", -2), ("prompt_logprobs", "3"),
        ("logit_bias", [1, 2]), ("logit_bias", {"1": 1.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: float("nan")}), ("logit_bias", {1: "1"}), ("logit_bias", {True: 1.0}),
        ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("allowed_token_ids", [1.0]), ("allowed_token_ids", 5),
        ("allowed_token_ids", "ab"), ("bad_words", [""]), ("bad_words", [5]), ("bad_words", 5), ("bad_words_token_ids", [[]]),
        ("bad_words_token_ids", [1, 2]), ("bad_words_token_ids", [[-1]]), ("bad_words_token_ids", ["ab"]),
        ("logits_processors", [1]), ("logits_processors", 3), ("logits_processors", ["f"]),
    ],
)  # fmt: skip
def test_ranges_of_what_changes_logits(name, value):
    with pytest.raises(ValueError, match=f"^{name}: expected .* got"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 2), ("presence_penalty", -2.0), ("frequency_penalty", 2.0), ("repetition_penalty", 2),
        ("repetition_penalty", 1e-6), ("min_tokens", 16), ("min_tokens", 0), ("logprobs", 0), ("logprobs", -1),
        ("prompt_logprobs", 0), ("logit_bias", {0: -100, 1: 100}), ("logit_bias", {}), ("allowed_token_ids", [0]),
        ("bad_words", "word"), ("bad_words", []), ("bad_words_token_ids", [[1], (2, 3)]), ("logits_processors", [max]),
    ],
)  # fmt: skip
def test_edges_of_the_ranges_are_allowed(name, value):
    SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 1), ("frequency_penalty", 0.5), ("repetition_penalty", 1.1), ("logit_bias", {1: 1}),
        ("logits_processors", [max]), ("top_k", 5), ("temperature", 1), ("stop", ["x"]),
    ],
)  # fmt: skip
def test_a_beam_search_refuses_what_would_change_its_scores(name, value):
    kind = {"use_beam_search": True, "best_of": 2, "temperature": 0}
    with pytest.raises(ValueError, match=f"^{name}: expected .* with use_beam_search"):
        SamplingParams(**(kind | {name: value}))
    allowed = {"allowed_token_ids": [1], "bad_words": ["a"], "min_tokens": 3, "logprobs": 1}
    SamplingParams(**(kind | allowed))


def test_the_caller_keeps_no_hold_of_what_is_inside():
    bias, words, allowed = {1: 2.0}, [[1, 2]], [4, 5]
    params = SamplingParams(logit_bias=bias, bad_words_token_ids=words, allowed_token_ids=allowed)
    bias[3] = 1.0
    words[0].append(9)
    allowed.append(6)
    assert params.logit_bias == {1: 2.0} and params.bad_words_token_ids == ((1, 2),)
    assert params.allowed_token_ids == (4, 5)


FULL = SamplingParams(
    n=2,
    seed=1,
    presence_penalty=0.5,
    logit_bias={7: -3.5},
    allowed_token_ids=[1, 7],
    bad_words=["a"],
    bad_words_token_ids=[[1], [2, 3]],
    min_tokens=2,
    logprobs=3,
    prompt_logprobs=0,
)


def test_parameters_survive_being_written_down():
    """msgpack, pickle and copies give equal ones."""
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(FULL), type=SamplingParams)
    assert decoded == FULL == pickle.loads(pickle.dumps(FULL)) == copy.deepcopy(FULL)


@pytest.mark.parametrize(
    ("changes", "changes_logits", "is_plain"),
    [
        ({}, False, True),
        ({"temperature": 0, "prompt_logprobs": 1}, False, True),
        ({"top_k": 4, "top_p": 0.5, "min_p": 0.1}, False, True),
        ({"logprobs": 0}, False, False),
        ({"min_tokens": 1}, True, False),
        ({"logit_bias": {1: 1}}, True, False),
        ({"allowed_token_ids": [1]}, True, False),
        ({"bad_words": "a"}, True, False),
        ({"bad_words_token_ids": [[1]]}, True, False),
        ({"presence_penalty": 1}, True, False),
        ({"frequency_penalty": -1}, True, False),
        ({"repetition_penalty": 0.5}, True, False),
        ({"logits_processors": [max]}, True, False),
        ({"guided": Guided(regex="a")}, True, False),
    ],
    ids=str,
)
def test_what_an_executor_asks(changes, changes_logits, is_plain):
    params = SamplingParams(**changes)
    assert params.changes_logits is changes_logits and params.is_plain is is_plain
