"""Beam search against that of transformers: the same token ids and the same scores."""

from __future__ import annotations

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.tests.models.tiny import EOS, VOCAB, TinyModel, run

PENALTIES = [1.0, -0.7, 2.0]
EARLY = [True, False, "never"]


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    return TinyModel(eos_scale=3.0)


@torch.inference_mode()
def transformers_beams(model, prompt, width: int, n: int, length_penalty, early_stopping, tokens):
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width,
        num_return_sequences=n,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    eos = model.generation_config.eos_token_id
    found = []
    for row in out.sequences[:, len(prompt) :].tolist():
        found.append(row[: row.index(eos) + 1] if eos in row else row)
    return found, out.sequences_scores.tolist()


def beam_params(width, n, length_penalty, early_stopping, tokens) -> SamplingParams:
    return SamplingParams(
        n=n,
        best_of=width,
        use_beam_search=True,
        temperature=0,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        max_tokens=tokens,
    )


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    sizes = torch.randint(1, 14, (count,), generator=generator).tolist()
    return [torch.randint(4, VOCAB, (size,), generator=generator).tolist() for size in sizes]


@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("early_stopping", EARLY, ids=str)
@pytest.mark.parametrize("length_penalty", PENALTIES)
def test_tiny_model_equals_transformers(tiny, width, early_stopping, length_penalty):
    """B23: beam requests beside greedy ones, in a pool small enough to preempt."""
    asked = prompts(3)
    engine = tiny.engine(num_gpu_blocks=36, num_cpu_blocks=60, max_num_batched_tokens=24)
    for number, prompt in enumerate(asked):
        params = beam_params(width, width, length_penalty, early_stopping, 18)
        engine.add_request(f"beam-{number}", prompt, params)
        engine.add_request(f"greedy-{number}", prompt, SamplingParams(temperature=0))
    finished = {request.group.request_id: request.output() for request in run(engine)}
    for number, prompt in enumerate(asked):
        tokens, scores = transformers_beams(
            tiny.reference, prompt, width, width, length_penalty, early_stopping, 18
        )
        got = finished[f"beam-{number}"].outputs
        assert [output.token_ids for output in got] == tokens
        assert [output.score for output in got] == pytest.approx(scores, abs=2e-4)
        assert [output.index for output in got] == list(range(width))


def test_the_searches_above_end_in_both_ways(tiny):
    """By a token and by length, else they would tell little."""
    ended = []
    for width, prompt in zip([2, 3, 4, 5], prompts(4), strict=True):
        tokens, _ = transformers_beams(tiny.reference, prompt, width, width, 1.0, False, 18)
        ended += [row[-1] == EOS for row in tokens]
    assert 2 < sum(ended) < len(ended) - 2


def test_a_preempted_search_goes_on_as_if_nothing_had_been(tiny):
    asked = prompts(5)
    params = beam_params(4, 4, 1.0, False, 24)
    runs = []
    for blocks, host in ((400, 0), (22, 100), (22, 0)):
        engine = tiny.engine(num_gpu_blocks=blocks, num_cpu_blocks=host)
        for number, prompt in enumerate(asked):
            engine.add_request(f"r{number}", prompt, params)
        found = {r.group.request_id: [o.token_ids for o in r.output().outputs] for r in run(engine)}
        runs.append((found, engine.scheduler.stats()))
    assert runs[0][0] == runs[1][0] == runs[2][0]
    assert runs[1][1].num_swapped_out > 0 and runs[2][1].num_recomputed > 0


def test_n_of_a_wider_beam_are_returned(tiny):
    prompt = prompts(1)[0]
    engine = tiny.engine()
    engine.add_request("r", prompt, beam_params(5, 2, 1.0, False, 12))
    (request,) = run(engine)
    tokens, _ = transformers_beams(tiny.reference, prompt, 5, 2, 1.0, False, 12)
    assert [output.token_ids for output in request.output().outputs] == tokens


@pytest.fixture(scope="module")
def llm(smollm2) -> LLM:
    return LLM(smollm2.name, max_model_len=512, num_gpu_blocks=400)


@pytest.mark.parametrize(
    "width, length_penalty, early_stopping",
    [(2, 1.0, True), (3, 0.0, False), (4, -0.7, "never"), (5, 2.0, True)],
)
def test_smollm2_equals_transformers(llm, hf_smollm2, width, length_penalty, early_stopping):
    for prompt in ("The capital of France is", "Once upon a time"):
        ids = llm.tokenizer.encode(prompt)
        params = beam_params(width, width, length_penalty, early_stopping, 12)
        (output,) = llm.generate([prompt], params)
        tokens, scores = transformers_beams(
            hf_smollm2, ids, width, width, length_penalty, early_stopping, 12
        )
        assert [completion.token_ids for completion in output.outputs] == tokens
        assert [o.score for o in output.outputs] == pytest.approx(scores, abs=2e-3)
        assert all(completion.text for completion in output.outputs)


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", 0.5),
        ("top_k", 4),
        ("top_p", 0.5),
        ("min_p", 0.1),
        ("stop", "x"),
        ("early_stopping", "always"),
        ("length_penalty", float("nan")),
        ("best_of", 1),
    ],
)
def test_parameters_that_make_no_sense_are_refused(field, value):
    fine = dict(use_beam_search=True, temperature=0, n=2)
    with pytest.raises(ValueError, match=field):
        SamplingParams(**(fine | {field: value}))
