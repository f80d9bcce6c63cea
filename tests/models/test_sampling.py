"""Sampling parameters and log probabilities through the whole engine, on a tiny model with transformers as the oracle."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
import torch

from octavo.runtime import top_logprobs
from octavo.runtime.metadata import SamplerOutput, SequenceGroupMetadata, _encode
from octavo.runtime.params import SamplingParams
from octavo.scheduler import RequestOutput
from octavo.tests.models.tiny import EOS, VOCAB, TinyModel, run


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    return TinyModel(seed=4, eos_scale=2.0)


def prompt_of(seed: int, size: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, VOCAB) for _ in range(size)]


@torch.inference_mode()
def raw_logprobs(tiny: TinyModel, token_ids: list[int]) -> torch.Tensor:
    """[len, vocab]; row i is about token i + 1."""
    return torch.log_softmax(tiny.reference(torch.tensor([token_ids])).logits[0].double(), -1)


def check_detail(found: dict, token: int, expected: torch.Tensor, count: int) -> None:
    """One place: the token first, then the `count` most likely, with log probabilities and ranks."""
    order = expected.argsort(descending=True, stable=True).tolist()
    wanted = list(dict.fromkeys([token, *order[:count]]))
    assert list(found) == wanted
    for each, entry in found.items():
        assert entry.logprob == pytest.approx(expected[each].item(), abs=2e-4)
        assert entry.rank == 1 + order.index(each)
        assert entry.decoded_token is None  # there is no tokenizer


def check_prompt(tiny: TinyModel, output: RequestOutput, count: int) -> None:
    prompt, found = output.prompt_token_ids, output.prompt_logprobs
    assert found is not None and found[0] is None and len(found) == len(prompt)
    expected = raw_logprobs(tiny, prompt)
    for place in range(1, len(prompt)):
        check_detail(found[place], prompt[place], expected[place - 1], count)


def finish(engine) -> dict[str, RequestOutput]:
    return {request.group.request_id: request.output() for request in run(engine)}


@pytest.mark.parametrize("budget", [4, 7, 64])
@pytest.mark.parametrize("caching", [True, False])
def test_prompt_logprobs_do_not_depend_on_chunks_and_cached_prefixes(
    tiny, budget, caching, monkeypatch
):
    """B03, B57: one None at the front only, as many entries as tokens, each at its own position; also with a prefix in the
    cache, of which nothing is taken. In pieces of two rows of logits."""
    monkeypatch.setattr(top_logprobs, "PIECE_ELEMENTS", 2 * VOCAB)
    engine = tiny.engine(max_num_batched_tokens=budget, enable_prefix_caching=caching)
    prompts = [prompt_of(0, 10), prompt_of(1, 33), prompt_of(2, 1), prompt_of(3, 2)]
    for turn in range(2):
        for number, prompt in enumerate(prompts):
            plain = SamplingParams(temperature=0, max_tokens=3)
            engine.add_request(f"{turn} plain {number}", prompt, plain)
            asks = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=number)
            engine.add_request(f"{turn} {number}", prompt, asks)
        outputs = finish(engine)
        for number in range(len(prompts)):
            output, plain = outputs[f"{turn} {number}"], outputs[f"{turn} plain {number}"]
            check_prompt(tiny, output, number)
            assert output.num_cached_tokens == 0 and plain.prompt_logprobs is None
            assert output.outputs[0].token_ids == plain.outputs[0].token_ids
            if turn and caching and number == 1:
                assert plain.num_cached_tokens == 32


def test_a_chunk_in_the_middle_of_a_prompt_draws_nothing(tiny):
    """B57: prompt 10 in chunks of 4, 4 and 2; log probabilities grow with them, no token comes before the last."""
    engine = tiny.engine(max_num_batched_tokens=4)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    request = engine.add_request("r", prompt_of(0, 10), params)
    seen = []
    for _ in range(3):
        engine.step()
        output = request.output()
        seen.append((len(output.prompt_logprobs), len(output.outputs[0].token_ids)))
    assert seen == [(5, 0), (9, 0), (10, 1)]
    check_prompt(tiny, finish(engine)["r"], 1)


@pytest.mark.parametrize("when", range(1, 7))
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_prompt_logprobs_survive_a_preemption(tiny, when, mode):
    """What is known is not asked for again, so cached blocks serve as far as it goes."""
    engine = tiny.engine(max_num_batched_tokens=6, preemption_mode=mode, num_cpu_blocks=40)
    request = engine.add_request(
        "r",
        prompt_of(5, 29),
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=2),
    )
    for _ in range(when):
        engine.step()
    known = len(request.group.prompt_logprobs)
    assert known == min(6 * when, 28)
    engine.scheduler.preempt("r")
    engine.step()
    (seq,) = request.group.seqs
    if mode == "recompute":
        assert seq.num_computed_tokens == min(known // 4 * 4 + 6, 29 + seq.num_output_tokens - 1)
    run(engine)
    output = request.output()
    check_prompt(tiny, output, 2)
    plain = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine.add_request("solo", prompt_of(5, 29), plain)
    assert output.outputs[0].token_ids == finish(engine)["solo"].outputs[0].token_ids


KINDS = [
    {"temperature": 0},
    {"temperature": 1.2, "seed": 3, "top_p": 0.9},
    {"n": 3, "seed": 5},
    {"n": 2, "best_of": 4, "seed": 6, "repetition_penalty": 1.3},
    {"n": 2, "best_of": 3, "temperature": 0, "use_beam_search": True},
    {"n": 3, "best_of": 3, "temperature": 0, "use_beam_search": True, "bad_words_token_ids": [[7]]},
    {
        "seed": 8,
        "frequency_penalty": 1.0,
        "logit_bias": {9: 4.0},
        "allowed_token_ids": list(range(3, 40)),
    },
]


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("blocks", [19, 200])
def test_logprobs_of_every_kind_of_request(tiny, blocks, overlapped):
    """Each token's own and the most likely ones are those of a plain forward pass over what it made, and add up; also when
    requests preempt one another."""
    engine = tiny.engine(
        blocks, max_num_batched_tokens=16, num_cpu_blocks=20, async_scheduling=overlapped
    )
    for number, kind in enumerate(KINDS):
        params = SamplingParams(
            max_tokens=9, logprobs=number % 4, prompt_logprobs=number % 2, **kind
        )
        engine.add_request(f"{number}", prompt_of(number, 5 + number), params)
        engine.add_request(f"plain {number}", prompt_of(9, 3), SamplingParams(seed=1))
    outputs = finish(engine)
    assert (engine.scheduler.stats().num_recomputed > 0) == (blocks == 19)
    for number, kind in enumerate(KINDS):
        output = outputs[f"{number}"]
        assert len(output.outputs) == kind.get("n", 1)
        check_prompt(tiny, output, number % 2)
        for completion in output.outputs:
            ids = completion.token_ids
            assert completion.logprobs is not None and len(completion.logprobs) == len(ids) > 0
            raw = raw_logprobs(tiny, output.prompt_token_ids + ids)[
                len(output.prompt_token_ids) - 1 :
            ]
            for place, token in enumerate(ids):
                check_detail(completion.logprobs[place], token, raw[place], number % 4)
            total = sum(
                entry[token].logprob for entry, token in zip(completion.logprobs, ids, strict=True)
            )
            assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)
        assert outputs[f"plain {number}"].outputs[0].logprobs is None
    ranked = [c.cumulative_logprob for c in outputs["3"].outputs]
    assert ranked == sorted(ranked, reverse=True)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_overlapped_steps_give_the_same(tiny, kind):
    """B65: a history that lags behind the device by a token counts it all the same. Many decodes, so steps do overlap."""
    outputs, ahead = [], []
    for overlapped in (False, True):
        engine = tiny.engine(max_num_seqs=64, async_scheduling=overlapped)
        schedule_ahead = engine.scheduler.schedule_ahead

        def noted(schedule_ahead=schedule_ahead):
            found = schedule_ahead()
            ahead.append(found is not None and not found.is_empty)
            return found

        engine.scheduler.schedule_ahead = noted
        common = {"max_tokens": 16, "ignore_eos": True, "logprobs": 1, "min_tokens": 3}
        for number in range(4):
            params = SamplingParams(**(common | kind), stop_token_ids=[number + 30])
            engine.add_request(f"{number}", prompt_of(number, 5 + number), params)
        outputs.append(finish(engine))
    serial, overlapped = outputs
    assert any(ahead) == (kind.get("n", 1) == 1)
    for name, output in serial.items():
        for ours, theirs in zip(output.outputs, overlapped[name].outputs, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert [list(d) for d in ours.logprobs] == [list(d) for d in theirs.logprobs]


def test_samples_of_two_requests_are_their_own(tiny):
    """B25: three completions each, indices 0 to 2, sample i equal to the solo run with seed + i."""
    engine = tiny.engine()
    asked = {"a": (prompt_of(0, 8), 100), "b": (prompt_of(1, 6), 200)}
    common = {"max_tokens": 8, "presence_penalty": 0.8, "logprobs": 1}
    for name, (prompt, seed) in asked.items():
        engine.add_request(name, prompt, SamplingParams(n=3, seed=seed, **common))
    outputs = finish(engine)
    for name, (prompt, seed) in asked.items():
        completions = outputs[name].outputs
        assert [c.index for c in completions] == [0, 1, 2]
        assert len({tuple(c.token_ids) for c in completions}) > 1
        for i, completion in enumerate(completions):
            engine.add_request("solo", prompt, SamplingParams(seed=seed + i, **common))
            (solo,) = finish(engine)["solo"].outputs
            assert completion.token_ids == solo.token_ids
            assert [list(d) for d in completion.logprobs] == [list(d) for d in solo.logprobs]


@torch.inference_mode()
def test_requests_without_a_seed_get_one_of_their_own(tiny):
    """By the engine's seed and their place in line: not the same for all, and the same in every run."""

    def drawn(engine_seed: int) -> list[list[int]]:
        engine = tiny.engine()
        engine._seed = engine_seed
        for name in "abc":
            params = SamplingParams(max_tokens=8, temperature=2.0, ignore_eos=True)
            engine.add_request(name, prompt_of(4, 8), params)
        outputs = finish(engine)
        return [outputs[name].outputs[0].token_ids for name in "abc"]

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert first == again
    assert len({tuple(ids) for ids in first + other}) == 6


def test_the_best_of_several_are_those_of_the_highest_log_probability(tiny):
    """Of the same samples that n = best_of gives."""
    engine, common = tiny.engine(), {"max_tokens": 7, "seed": 31, "temperature": 1.5}
    engine.add_request("all", prompt_of(4, 8), SamplingParams(n=6, **common))
    engine.add_request("best", prompt_of(4, 8), SamplingParams(n=2, best_of=6, **common))
    outputs = finish(engine)
    every = sorted(outputs["all"].outputs, key=lambda c: -c.cumulative_logprob)
    assert every[1].cumulative_logprob > every[2].cumulative_logprob
    best = outputs["best"].outputs
    assert [c.token_ids for c in best] == [c.token_ids for c in every[:2]]
    assert [c.index for c in best] == [0, 1]


def generated_by_transformers(tiny: TinyModel, prompt: list[int], **kwargs) -> list[list[int]]:
    out = tiny.reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        **kwargs,
    )
    rows = out[:, len(prompt) :].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


GREEDY = [
    ({"repetition_penalty": 1.8}, {"repetition_penalty": 1.8}),
    ({"min_tokens": 12}, {"min_new_tokens": 12}),
    ({"bad_words_token_ids": [[5], [9, 12]]}, {"bad_words_ids": [[5], [9, 12]]}),
    (
        {"repetition_penalty": 0.7, "min_tokens": 5, "logit_bias": {8: 2.0, 11: -3.0}},
        {"repetition_penalty": 0.7, "min_new_tokens": 5, "sequence_bias": {(8,): 2.0, (11,): -3.0}},
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), GREEDY, ids=str)
def test_greedy_generation_equals_transformers(tiny, ours, theirs):
    """B65: the history a penalty sees includes the token of the step before, preempted or not. Where bias meets a penalty
    transformers adds it last, so there the penalty looks at other tokens than the biased ones."""
    for seed in range(6):
        prompt = prompt_of(seed, 7)
        if "logit_bias" in ours:
            prompt = [t for t in prompt if t not in (8, 11)]
        expected = generated_by_transformers(tiny, prompt, max_new_tokens=20, **theirs)[0]
        if "logit_bias" in ours and {8, 11} & set(expected):
            continue
        engine = tiny.engine()
        params = SamplingParams(temperature=0, max_tokens=20, **ours)
        request = engine.add_request("r", prompt, params)
        for _ in range(6):
            engine.step()
        if seed % 2:
            engine.scheduler.preempt("r")
        run(engine)
        assert request.output().outputs[0].token_ids == expected


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"min_tokens": 9}, {"min_new_tokens": 9}),
        ({"bad_words_token_ids": [[5], [9, 12]]}, {"bad_words_ids": [[5], [9, 12]]}),
        (
            {"allowed_token_ids": list(range(2, 50))},
            {"prefix_allowed_tokens_fn": lambda *_: list(range(2, 50))},
        ),
        (
            {"min_tokens": 4, "bad_words_token_ids": [[20], [21], [22, 8]]},
            {"min_new_tokens": 4, "bad_words_ids": [[20], [21], [22, 8]]},
        ),
    ],
    ids=["min_tokens", "bad_words", "allowed", "both"],
)  # fmt: skip
def test_beam_search_with_forbidden_tokens_equals_transformers(tiny, ours, theirs):
    width = 3
    engine = tiny.engine(num_gpu_blocks=40, num_cpu_blocks=40)
    prompts = [prompt_of(seed, 6) for seed in range(5)]
    for number, prompt in enumerate(prompts):
        params = SamplingParams(
            n=width, best_of=width, use_beam_search=True, temperature=0, max_tokens=14, **ours
        )
        engine.add_request(f"{number}", prompt, params)
    outputs = finish(engine)
    for number, prompt in enumerate(prompts):
        expected = generated_by_transformers(
            tiny, prompt, max_new_tokens=14, num_beams=width, num_return_sequences=width, **theirs
        )
        assert [c.token_ids for c in outputs[f"{number}"].outputs] == expected


def test_a_request_whose_processor_fails_ends_alone(tiny):
    """NaN, an exception, nothing left: each ends its own request with an error; the others are equal to a run without it."""
    calls = []

    def third_time(output, logits):
        calls.append(len(output))
        if len(output) == 2:
            raise RuntimeError("enough")
        return logits

    good = {f"g{i}": SamplingParams(seed=i, max_tokens=10, logprobs=1) for i in range(4)}
    bad = {
        "raises": SamplingParams(seed=1, logits_processors=[third_time]),
        "nan": SamplingParams(
            seed=1, logits_processors=[lambda o, x: x / (0 if len(o) else 1) * 0]
        ),
        "nothing": SamplingParams(temperature=0, allowed_token_ids=[EOS], min_tokens=3),
        "beams": SamplingParams(
            temperature=0, use_beam_search=True, n=2, allowed_token_ids=[EOS], min_tokens=1
        ),
        "samples": SamplingParams(n=2, seed=1, logits_processors=[third_time]),
    }
    outputs = []
    for batch in (good, good | bad):
        engine = tiny.engine()
        for name, params in batch.items():
            engine.add_request(name, prompt_of(1, 6), params)
        outputs.append(finish(engine))
    alone, together = outputs
    for name in good:
        assert together[name].outputs == alone[name].outputs
    reasons = {name: together[name].outputs[0] for name in bad}
    assert {c.finish_reason for c in reasons.values()} == {"abort"}
    assert (
        reasons["raises"].stop_reason == "logits processor third_time raised RuntimeError: enough"
    )
    assert len(reasons["raises"].token_ids) == 2 and calls[:2] == [0, 0]
    for name in ("nan", "nothing", "beams"):
        assert reasons[name].stop_reason.startswith("no token is left to choose")
    assert [len(c.token_ids) for c in together["samples"].outputs] == [2, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, rf"logit_bias: expected ids in \[0, {VOCAB}\), got {VOCAB}"),
        ({"allowed_token_ids": [3, 99]}, "allowed_token_ids: expected ids in .*got 99"),
        ({"bad_words_token_ids": [[3, 61]]}, "bad_words_token_ids: expected ids in .*got 61"),
        ({"logprobs": VOCAB + 1}, rf"logprobs: expected at most {VOCAB} \(the vocabulary\), got 62"),
        ({"prompt_logprobs": 1000}, r"prompt_logprobs: expected at most .*, got 1000"),
        ({"bad_words": ["x"]}, r"bad_words: expected none without a tokenizer, got \('x',\)"),
    ],
)  # fmt: skip
def test_what_the_vocabulary_does_not_have_is_refused(tiny, changes, message):
    engine = tiny.engine()
    with pytest.raises(ValueError, match=f"^{message}"):
        engine.add_request("r", [5, 6], SamplingParams(**changes))
    assert not engine.has_unfinished()
    engine.add_request("r", [5, 6], SamplingParams(logprobs=-1, prompt_logprobs=-1, seed=1))
    output = finish(engine)["r"]
    assert len(output.outputs[0].logprobs[0]) == len(output.prompt_logprobs[1]) == VOCAB


def test_snapshots_and_outputs_can_be_written_down(tiny):
    """But for processors, which are refused by name."""
    engine = tiny.engine(max_num_batched_tokens=5)
    params = SamplingParams(
        n=2,
        seed=1,
        logprobs=2,
        prompt_logprobs=1,
        logit_bias={3: 1.0},
        bad_words_token_ids=[[1, 2]],
    )
    engine.add_request("r", prompt_of(0, 9), params)
    runner, outputs, snapshots = engine._runner, [], []

    class Keeping:
        def launch(self, seq_group_metadata_list, **kwargs):
            snapshots.extend(seq_group_metadata_list)
            launch = runner.launch(seq_group_metadata_list, **kwargs)
            outputs.append(launch.result())
            return launch

    engine._runner = Keeping()
    finish(engine)
    assert [s.num_prompt_logprobs for s in snapshots[:3]] == [0, 5, 8]
    for snapshot in snapshots:
        again = SequenceGroupMetadata.from_bytes(snapshot.to_bytes())
        assert again.sampling_params == snapshot.sampling_params
        assert again.prompt_logprobs_range == snapshot.prompt_logprobs_range
    encode = msgspec.msgpack.Encoder(enc_hook=_encode).encode

    def array(kind, value):
        return np.frombuffer(value[1], dtype=value[0])

    decoder = msgspec.msgpack.Decoder(SamplerOutput, dec_hook=array)
    for output in outputs:
        again = decoder.decode(encode(output))
        assert np.array_equal(again.token_ids, output.token_ids) and again.errors == output.errors
        assert [p.start for p in again.prompts] == [p.start for p in output.prompts]
        for a, b in zip(again.details, output.details, strict=True):
            assert np.array_equal(a.tokens.ranks, b.tokens.ranks.ravel())
    refused = msgspec.structs.replace(
        snapshots[0], sampling_params=SamplingParams(logits_processors=[max])
    )
    with pytest.raises(ValueError, match=r"request 'r': logits_processors: expected none"):
        refused.to_bytes()
