"""Penalties, bias, allowed and forbidden tokens, processors: against transformers, whatever the batch and the history."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
import torch

from octavo.runtime import sampler, token_counts
from octavo.runtime.cpu_draw import Draws, draw, most_likely
from octavo.runtime.logits_processing import LogitsProcessing
from octavo.runtime.params import SamplingParams
from octavo.runtime.sampler import sample, sample_on_device
from octavo.runtime.token_counts import DenseCounts, RowExtras, SparseCounts
from octavo.tests.runtime.rows import Ask, probabilities, processed_by_transformers, rows_of

VOCAB = 40
GRID = 4000
EACH = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"frequency_penalty": 0.9},
    {"frequency_penalty": -1.5, "presence_penalty": 2.0},
    {"presence_penalty": -2.0},
    {"logit_bias": {3: 5.0, 7: -100, 0: 0.25}},
    {"allowed_token_ids": [5, 1, 9, 9, 30]},
    {"bad_words_token_ids": [[4], [1, 2], [2, 1, 6], [39, 0]]},
    {"min_tokens": 9, "stop_token_ids": [11, 12], "max_tokens": 20},
    {"temperature": 0.4},
    {"top_k": 6},
    {"top_p": 0.7},
    {"min_p": 0.15},
]


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def processed(asks: list[Ask], logits: torch.Tensor) -> torch.Tensor:
    out = logits.clone()
    every = [
        RowExtras(i, a.params, i, np.array(a.prompt, np.int32), np.array(a.output, np.int32), a.eos)
        for i, a in enumerate(asks)
    ]
    assert LogitsProcessing().apply(out, every) == {}
    return out


def check(ask: Ask, logits: torch.Tensor) -> None:
    """Processed logits, what may be drawn, and how likely it is."""
    (got,), expected = processed([ask], logits[None]), processed_by_transformers(ask, logits)
    assert torch.equal(got.isneginf(), expected.isneginf())
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    p = ask.params
    wanted = probabilities(ask, logits).numpy()
    draws = Draws(
        *(np.full(GRID, value) for value in (p.temperature, p.top_k, p.top_p, p.min_p)),
        (np.arange(GRID) + 0.5) / GRID,
    )
    many = got.expand(GRID, -1).contiguous()
    counts = np.bincount(draw(many, *most_likely(many), draws), minlength=VOCAB)
    # evenly spaced numbers hit each token as often as its probability says, to within one at either end
    assert np.abs(counts - wanted * GRID).max() < 1.5
    assert counts[wanted == 0].sum() == 0


@pytest.mark.parametrize("changes", EACH, ids=str)
def test_each_parameter_equals_transformers(changes):
    """B65: repetition looks at prompt and output, presence and frequency at the output alone, the newest token included."""
    rng = random.Random(str(changes))
    for seed in range(8):
        prompt, output = ([rng.randrange(VOCAB) for _ in range(n)] for n in (6, seed * 2))
        output += [1, 2][: seed % 3]  # may begin a bad word
        check(Ask(SamplingParams(**changes), prompt, output, eos=(10,)), logits_of(seed)[0])


def random_ask(rng: random.Random) -> Ask:
    changes: dict = {}
    for each in rng.sample(EACH, rng.randint(2, 7)):
        changes |= each
    for name, low, high in (
        ("temperature", 0.3, 3),
        ("repetition_penalty", 0.5, 2),
        ("frequency_penalty", -2, 2),
        ("top_p", 0.3, 1),
        ("min_p", 0, 0.3),
    ):
        if name in changes:
            changes[name] = rng.uniform(low, high)
    if "top_k" in changes:
        changes["top_k"] = rng.randint(1, VOCAB + 3)
    if "allowed_token_ids" in changes:
        changes["allowed_token_ids"] = rng.sample(range(VOCAB), rng.randint(12, VOCAB))
    if "bad_words_token_ids" in changes:
        words = [[rng.randrange(4) for _ in range(rng.randint(1, 3))] for _ in range(4)]
        changes["bad_words_token_ids"] = words
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
    output = [rng.randrange(rng.choice([4, VOCAB])) for _ in range(rng.randint(0, 14))]
    return Ask(SamplingParams(**changes), prompt, output, eos=(10,))


@pytest.mark.parametrize("part", range(4))
def test_random_combinations_equal_transformers(part):
    """200 in all."""
    for number in range(50):
        seed = part * 50 + number
        check(random_ask(random.Random(seed)), logits_of(seed)[0])


def test_draws_after_processing_follow_the_distribution():
    """Pearson's chi-square over 20,000 draws; 90.4 is the 1 - 1e-6 quantile of 33 degrees of freedom."""
    ask = Ask(
        SamplingParams(
            seed=5,
            temperature=1.3,
            top_k=34,
            repetition_penalty=1.3,
            frequency_penalty=0.5,
            presence_penalty=-0.4,
            logit_bias={3: 1.5},
            bad_words_token_ids=[[4], [7, 8]],
        ),
        [1, 2, 3],
        [5, 6, 6, 7],
    )
    logits, number = logits_of(1)[0], 20_000
    rows = rows_of([ask] * number, steps=list(range(number)))
    drawn = sample(logits.expand(number, -1), rows).token_ids
    counts = np.bincount(drawn, minlength=VOCAB)
    expected = probabilities(ask, logits).numpy() * number
    seen = expected > 0
    assert counts[~seen].sum() == 0 and seen.sum() == 34
    assert ((counts[seen] - expected[seen]) ** 2 / expected[seen]).sum() < 90.4


def mixed_batch(rng: random.Random, number: int) -> list[Ask]:
    asks = []
    for place in range(number):
        ask = random_ask(rng)
        kind = rng.choice([{}, {"temperature": 0, "top_p": 1.0}, {"logprobs": 3}])
        if rng.random() < 0.4:  # a plain one
            ask = Ask(SamplingParams(temperature=rng.choice([0, 1.0]), seed=place))
        changes = {f: getattr(ask.params, f) for f in ask.params.__struct_fields__}
        asks.append(
            Ask(
                SamplingParams(**(changes | kind | {"seed": place})),
                ask.prompt,
                ask.output,
                ask.eos,
                seq_id=place,
            )
        )
    return asks


def test_a_row_does_not_depend_on_its_neighbours():
    """Tokens and log probabilities are bit-equal alone, together, shuffled and in small blocks."""
    asks = mixed_batch(random.Random(3), 48)
    logits = logits_of(9, len(asks))
    together = sample(logits, rows_of(asks))
    order = np.random.default_rng(0).permutation(len(asks))
    shuffled = sample(logits[order], rows_of([asks[i] for i in order]))
    assert together.token_ids[order].tolist() == shuffled.token_ids.tolist()
    assert together.logprobs[order].tolist() == shuffled.logprobs.tolist()
    for i, ask in enumerate(asks):
        alone = sample(logits[i : i + 1], rows_of([ask]))
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0] == together.logprobs[i]


def test_blocks_of_rows_change_nothing(monkeypatch):
    asks = mixed_batch(random.Random(4), 30)
    asks[13] = Ask(SamplingParams(logits_processors=[fails]))
    asks[22] = Ask(SamplingParams(logits_processors=[only()]))
    logits = logits_of(2, len(asks))
    logits[7] = float("nan")
    together = sample(logits, rows_of(asks))
    monkeypatch.setattr("octavo.runtime.sampler._BLOCK_ELEMENTS", 4 * VOCAB)
    apart = sample(logits, rows_of(asks))
    assert together.token_ids.tolist() == apart.token_ids.tolist() and apart.token_ids[7] == -1
    np.testing.assert_array_equal(together.logprobs, apart.logprobs)
    assert together.errors == apart.errors and list(apart.errors) == [13, 22]
    by_place = [
        {
            int(place): row.tolist()
            for detail in out.details
            for place, row in zip(detail.places, detail.tokens.token_ids, strict=True)
        }
        for out in (together, apart)
    ]
    assert by_place[0] == by_place[1] and len(by_place[0]) > 3


# -- counts


class Life:
    """Sequences as the scheduler keeps them: append-only buffers that move when they are full."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.buffers: dict[int, np.ndarray] = {}
        self.lengths: dict[int, tuple[int, int]] = {}  # prompt, all
        self.next_id = 0

    def add(self, tokens: list[int], prompt_len: int) -> None:
        buffer = np.zeros(len(tokens) + 3, np.int32)
        buffer[: len(tokens)] = tokens
        self.buffers[self.next_id], self.lengths[self.next_id] = buffer, (prompt_len, len(tokens))
        self.next_id += 1

    def append(self, seq_id: int, token: int) -> None:
        prompt_len, length = self.lengths[seq_id]
        if length == len(self.buffers[seq_id]):
            self.buffers[seq_id] = np.concatenate((self.buffers[seq_id], np.zeros(7, np.int32)))
        self.buffers[seq_id][length] = token
        self.lengths[seq_id] = prompt_len, length + 1

    def extras(self, row: int, seq_id: int, params: SamplingParams, newest: int = -1) -> RowExtras:
        prompt_len, length = self.lengths[seq_id]
        buffer = self.buffers[seq_id]
        output = buffer[prompt_len:length]
        return RowExtras(row, params, seq_id, buffer[:prompt_len], output, (), newest >= 0, newest)


def penalised(counts: SparseCounts | DenseCounts, rows: list[RowExtras], logits) -> torch.Tensor:
    out = logits.clone()
    counts.begin_step()
    counts.apply_penalties(out, rows)
    return out


@pytest.mark.parametrize("kind", [SparseCounts, lambda v: DenseCounts(v, torch.device("cpu"))])
def test_counts_survive_whatever_happens_to_a_sequence(kind):
    """Appended to, forked, left out, reordered, ended, replaced under the same id, its newest token not written yet, or
    drawn in vain: always what counting anew gives."""
    rng = random.Random(0)
    kept, life = kind(VOCAB), Life(rng)
    params = [
        SamplingParams(repetition_penalty=1.4),
        SamplingParams(frequency_penalty=0.7, presence_penalty=-0.3),
        SamplingParams(repetition_penalty=0.8, frequency_penalty=-1.1),
    ]
    for step in range(160):
        if rng.random() < 0.3 or not life.buffers:
            tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 12))]
            life.add(tokens, rng.randint(1, len(tokens)))
        if rng.random() < 0.1:
            parent = rng.choice(list(life.buffers))
            prompt_len, length = life.lengths[parent]
            life.add(life.buffers[parent][:length].tolist(), prompt_len)
        if rng.random() < 0.1:
            gone = rng.choice(list(life.buffers))
            tokens = [rng.randrange(VOCAB) for _ in range(9)]
            life.buffers[gone], life.lengths[gone] = np.array(tokens, np.int32), (4, 9)
        for seq_id in life.buffers:
            if rng.random() < 0.7:
                life.append(seq_id, rng.randrange(VOCAB))
        chosen = rng.sample(list(life.buffers), rng.randint(1, min(6, len(life.buffers))))
        ahead = {i: rng.randrange(VOCAB) for i in chosen if rng.random() < 0.4}
        rows = [life.extras(r, i, params[i % 3], ahead.get(i, -1)) for r, i in enumerate(chosen)]
        for i, token in ahead.items():
            if rng.random() < 0.8:  # else something else comes in its place
                life.append(i, token)
        logits = logits_of(step, len(rows))
        got = penalised(kept, rows, logits)
        assert torch.equal(got, penalised(kind(VOCAB), rows, logits))
        assert torch.equal(got, penalised(SparseCounts(VOCAB), rows, logits))


def test_a_step_counts_only_new_tokens(monkeypatch):
    """Whatever the length of the history, and when buffers move."""
    counted: list[int] = []
    add, count = SparseCounts._add, SparseCounts._count
    monkeypatch.setattr(
        SparseCounts, "_add", lambda s, r, ids: (counted.append(len(ids)), add(s, r, ids))[1]
    )
    monkeypatch.setattr(SparseCounts, "_count", lambda s, e: (counted.append(-1), count(s, e))[1])
    life, kept = Life(random.Random(0)), SparseCounts(VOCAB)
    params = SamplingParams(presence_penalty=1)
    life.add(list(range(30)), 20)
    for step in range(200):
        penalised(kept, [life.extras(0, 0, params)], logits_of(step))
        life.append(0, step % VOCAB)
    assert counted == [-1] + [1] * 199


@pytest.mark.parametrize("kind", [SparseCounts, lambda v: DenseCounts(v, torch.device("cpu"))])
def test_counts_of_requests_that_left_are_forgotten(kind):
    life, kept = Life(random.Random(0)), kind(VOCAB)
    params = SamplingParams(presence_penalty=1)
    for number in range(400):
        life.add([1, 2, 3], 1)
        penalised(kept, [life.extras(0, number, params)], logits_of(0))
        assert len(kept) <= token_counts.KEPT_CALLS + 1
    if isinstance(kept, DenseCounts):
        assert len(kept._counts) <= 2 * token_counts.KEPT_CALLS
    processing = LogitsProcessing()
    ask = Ask(params, output=[3])
    sample_on_device(logits_of(0), rows_of([ask]), processing)
    assert processing.num_counted == 1
    for _ in range(token_counts.KEPT_CALLS + 1):
        sample_on_device(logits_of(0), rows_of([Ask(SamplingParams())]), processing)
    assert processing.num_counted == 0


def test_placeholders_beyond_the_vocabulary_are_nobodys_tokens():
    ask = Ask(SamplingParams(repetition_penalty=2.0), [1, VOCAB + 5], [2])
    logits = logits_of(0, 2)
    out = processed([ask, Ask(SamplingParams(presence_penalty=1.0))], logits)
    assert (out[0] != logits[0]).nonzero()[:, 0].tolist() == [1, 2]
    assert torch.equal(out[1], logits[1])


def test_the_ops_of_a_gpu_choose_the_same_greedy_tokens(monkeypatch):
    """Dense counts, processed rows beside plain ones, a row that is left with nothing."""
    asks = mixed_batch(random.Random(6), 40)
    for place, ask in enumerate(asks):
        changes = {f: getattr(ask.params, f) for f in ask.params.__struct_fields__}
        greedy = {"temperature": 0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
        asks[place] = Ask(SamplingParams(**(changes | greedy)), *ask_tokens(ask), seq_id=place)
    nothing = SamplingParams(temperature=0, allowed_token_ids=[1], bad_words_token_ids=[[1]])
    asks[5] = Ask(nothing, seq_id=5)
    logits = logits_of(7, len(asks))
    logits[9, 3] = float("nan")
    expected = sample(logits, rows_of(asks))
    dense = lambda x: DenseCounts(x.shape[1], x.device)  # noqa: E731
    monkeypatch.setattr("octavo.runtime.logits_processing.counts_for", dense)
    monkeypatch.setattr("octavo.runtime.sampler._choose_on_cpu", sampler._choose_by_ops)
    got = sample(logits, rows_of(asks))
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    assert got.token_ids[5] == got.token_ids[9] == -1 and got.errors == expected.errors
    np.testing.assert_allclose(got.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)


def ask_tokens(ask: Ask) -> tuple[list[int], list[int], tuple[int, ...]]:
    return ask.prompt, ask.output, ask.eos


# -- processors


def only(*tokens: int):
    def keep(output, logits):
        mask = torch.full_like(logits, float("-inf"))
        mask[list(tokens)] = 0
        return logits + mask

    return keep


def test_processors_see_the_tokens_and_change_their_own_row():
    seen = []

    def note(prompt, output, logits):
        seen.append((prompt.tolist(), output.tolist(), logits.clone()))
        logits[7] = 50.0  # in place, and nothing else to return
        return logits

    asks = [
        Ask(SamplingParams(temperature=0)),
        Ask(SamplingParams(temperature=0, logits_processors=[note]), [1, 2], [3, 4]),
        Ask(SamplingParams(temperature=0, logits_processors=[only(5, 9), only(9, 11)])),
        Ask(SamplingParams(temperature=0, logits_processors=[note], allowed_token_ids=[8]), [6]),
    ]
    logits = logits_of(0, 4)
    out = sample(logits, rows_of(asks))
    assert out.token_ids.tolist() == [int(logits[0].argmax()), 7, 9, 8]
    assert [s[:2] for s in seen] == [([1, 2], [3, 4]), ([6], [])]
    assert torch.equal(seen[0][2], logits[1])
    raw = torch.log_softmax(logits, -1)
    assert out.logprobs == pytest.approx([raw[i, t].item() for i, t in enumerate(out.token_ids)])


def fails(output, logits):
    logits[:] = 3
    raise RuntimeError("no idea")


def leaves(output, logits):
    raise SystemExit(1)


def cancelled(output, logits):
    raise asyncio.CancelledError


def shrinks(output, logits):
    return logits.resize_(3)


def test_a_processor_that_fails_ends_its_own_row_alone():
    nowhere = torch.empty(VOCAB, device="meta")
    bad = [
        ([leaves], "logits processor leaves raised SystemExit: 1"),
        ([cancelled], "logits processor cancelled raised CancelledError"),
        ([lambda o, x: nowhere], "logits processor <lambda> raised NotImplementedError"),
        ([shrinks], "logits processor shrinks: expected logits [40], got [3]"),
        ([fails], "logits processor fails raised RuntimeError: no idea"),
        ([lambda o, x: x[:3]], "logits processor <lambda>: expected logits [40], got [3]"),
        ([lambda o, x: None], "logits processor <lambda>: expected logits [40], got NoneType"),
        ([lambda o, x: x * float("nan")], "no token is left to choose"),
        ([lambda o, x: x + float("inf")], "no token is left to choose"),
        ([only()], "no token is left to choose"),
    ]
    plain = [Ask(p.params, p.prompt, p.output, p.eos) for p in mixed_batch(random.Random(8), 36)]
    logits = logits_of(5, len(plain))
    clean = sample(logits, rows_of(plain))
    asks = list(plain)
    for place, (processors, _) in enumerate(bad):
        for temperature in (0, 1):
            params = SamplingParams(temperature=temperature, logits_processors=processors)
            asks[3 * place + temperature] = Ask(params)
    out = sample(logits, rows_of(asks))
    for row in range(len(asks)):
        place, kind = divmod(row, 3)
        if place < len(bad) and kind < 2:
            assert out.token_ids[row] == -1
            assert out.errors[row].startswith(bad[place][1])
        else:
            assert out.token_ids[row] == clean.token_ids[row]
            assert out.logprobs[row] == clean.logprobs[row] and row not in out.errors


def test_logits_that_are_not_finite_are_told_from_those_that_became_so():
    asks = [Ask(SamplingParams(temperature=0, allowed_token_ids=[4])), Ask(SamplingParams())]
    asks.append(Ask(SamplingParams(allowed_token_ids=[4], bad_words_token_ids=[[4]])))
    logits = logits_of(0, 3)
    logits[0, 20] = float("nan")  # forbidden, and a fault of the model all the same
    logits[1, 20] = float("inf")
    out = sample(logits, rows_of(asks))
    assert out.token_ids.tolist() == [-1, -1, -1]
    assert list(out.errors) == [2] and out.errors[2].startswith("no token is left to choose")


def test_the_ids_a_processor_sees_are_not_its_own():
    def overwrites(output, logits):
        output[0] = 1
        return logits

    ask = Ask(SamplingParams(temperature=0, logits_processors=[overwrites]), output=[7, 8])
    rows = rows_of([ask])
    assert "read-only" in sample(logits_of(0), rows).errors[0]
    assert rows.extras[0].output_token_ids.tolist() == [7, 8]


def test_the_users_own_interrupt_is_no_processors_fault():
    def interrupted(output, logits):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(logits_of(0), rows_of([Ask(SamplingParams(logits_processors=[interrupted]))]))


def test_ids_beyond_the_vocabulary_never_reach_another_row():
    for changes in (
        {"logit_bias": {VOCAB: 1.0}},
        {"allowed_token_ids": [1, VOCAB]},
        {"bad_words_token_ids": [[1, VOCAB]]},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(changes))}: expected ids in"):
            sample(logits_of(0, 2), rows_of([Ask(SamplingParams(**changes))] * 2))
    ask = Ask(SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[VOCAB]), eos=(VOCAB + 1,))
    logits = logits_of(0, 2)
    out = sample(logits, rows_of([ask, Ask(SamplingParams(temperature=0))]))
    assert out.token_ids.tolist() == logits.argmax(-1).tolist()
