"""Completions that follow a schema, an expression or a choice, whatever the schedule does to them."""

from __future__ import annotations

import json
import re
import reprlib

import pytest

from octavo import LLM, Guided, SamplingParams
from octavo.models.guided import Guides

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASKS = {
    "regex": Guided(regex=r"[0-9]{3}-[a-f]{2,4}"),
    "choice": Guided(choice=["red", "green", 'bl"ue']),
    "schema": Guided(json_schema=SCHEMA),
}


def follows(kind: str, text: str) -> bool:
    if kind == "regex":
        return re.fullmatch(r"[0-9]{3}-[a-f]{2,4}", text) is not None
    if kind == "choice":
        return text in ASKS["choice"].choice
    value = json.loads(text)
    return set(value) == {"name", "age"} and len(value["name"]) <= 6 and 0 <= value["age"] <= 99


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2-135m", num_gpu_blocks=40, max_num_seqs=8, enable_prefix_caching=False)


def params(kind: str, **more) -> SamplingParams:
    return SamplingParams(guided=ASKS[kind], **{"max_tokens": 40, "temperature": 0, **more})


PROMPTS = {"regex": "My code is ", "choice": "The sky is ", "schema": "A person as JSON: "}


def test_texts_follow_alone_and_together_and_end(llm):
    """The tokens of each are those of its solo run; a neighbour without a grammar is not touched."""
    asked = [params(kind) for kind in ASKS]
    asked += [params(kind, temperature=1.2, seed=4, n=2) for kind in ASKS]
    prompts = [PROMPTS[kind] for kind in ASKS] * 2
    plain = SamplingParams(max_tokens=6, temperature=0)
    together = llm.generate([*prompts, "One two three"], [*asked, plain])
    for kind, result in zip([*ASKS, *ASKS], together, strict=False):
        for completion in result.outputs:
            assert follows(kind, completion.text), (kind, completion.text)
            assert completion.finish_reason == "stop"
    alone = [llm.generate([p], a)[0] for p, a in zip(prompts[2:4], asked[2:4], strict=True)]
    alone += llm.generate(["One two three"], plain)
    for one, many in zip(alone, [*together[2:4], together[-1]], strict=True):
        assert [c.token_ids for c in one.outputs] == [c.token_ids for c in many.outputs]


def test_a_preempted_request_goes_on_where_it_was(llm):
    [expected] = llm.generate([PROMPTS["schema"]], params("schema"))
    stream = llm.stream([PROMPTS["schema"]], params("schema"))
    for count, (_, output) in enumerate(stream):
        if count % 3 == 1 and not output.finished:
            llm.engine.scheduler.preempt(output.request_id)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_the_processor_knows_a_text_from_its_tokens_alone(llm):
    """Out of order, from the middle, and long after: the same tokens are allowed."""
    import numpy as np
    import torch

    guides = Guides(llm.tokenizer, llm.config.vocab_size)
    [guide] = guides.with_processor(params("regex")).logits_processors
    tokens = np.array(llm.tokenizer.encode("123-ab"), np.int32)

    def allowed(output) -> set[int]:
        logits = guide(output, torch.zeros(llm.config.vocab_size))
        return set(torch.isfinite(logits).nonzero().flatten().tolist())

    in_order = [allowed(tokens[:stop]) for stop in range(len(tokens) + 1)]
    guide._states.clear()
    backwards = [allowed(tokens[:stop]) for stop in range(len(tokens), -1, -1)]
    assert in_order == backwards[::-1]
    assert in_order[0] != in_order[-1] and llm.tokenizer.eos_token_ids <= in_order[-1]
    with pytest.raises(ValueError, match="does not follow"):
        allowed(np.array(llm.tokenizer.encode("xyz"), np.int32))


def test_a_dead_end_is_told_and_not_taken_for_an_end(llm):
    """An end-of-sequence token ends only a complete text, be it forced elsewhere or spelt like a part of it."""
    end = llm.tokenizer.decode(sorted(llm.tokenizer.eos_token_ids), skip_special_tokens=False)
    asks = [
        SamplingParams(guided=Guided(regex=r"[^\s\S]"), max_tokens=5, temperature=0),
        SamplingParams(guided=Guided(choice=[f"{end}b"]), max_tokens=20, temperature=0),
        SamplingParams(guided=Guided(choice=["red"]), max_tokens=20, min_tokens=9, temperature=0),
    ]
    for result in llm.generate(["The sky is "] * len(asks), asks):
        [completion] = result.outputs
        if completion.finish_reason == "abort":
            assert completion.stop_reason.startswith("no token is left to choose")
        else:
            assert completion.text == f"{end}b"


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({}, "guided: expected one of"),
        ({"regex": "a", "choice": ["b"]}, "guided: expected one of"),
        ({"choice": [""]}, "choice: expected non-empty texts"),
        ({"json_schema": "{"}, "json_schema: expected a JSON schema"),
        ({"json_schema": "[1]"}, "json_schema: expected a JSON schema"),
        ({"regex": 3}, "regex: expected"),
        ({"regex": "\ud800"}, "regex: expected .* UTF-8"),
        ({"choice": ["a", "\ud800"]}, "choice: expected .* UTF-8"),
        ({"json_schema": {"const": float("nan")}}, "json_schema: expected a JSON schema"),
        ({"json_schema": nested(5000)}, "json_schema: expected a JSON schema"),
        ({"json_schema": '{"not":' * 5000}, "json_schema: expected a JSON schema"),
    ],
    ids=lambda value: reprlib.repr(value),
)
def test_bad_grammars_are_refused_at_construction(fields, match):
    with pytest.raises(ValueError, match=match):
        Guided(**fields)


def test_what_the_library_cannot_follow_is_refused_before_anything_runs(llm):
    for bad in (Guided(regex="(a"), Guided(json_schema={"type": "nonsense"})):
        with pytest.raises(ValueError, match="guided: expected"):
            llm.generate(["hi"], SamplingParams(guided=bad))
    with pytest.raises(ValueError, match="guided: expected None or a Guided"):
        SamplingParams(guided="json")
    with pytest.raises(ValueError, match="guided: expected none with use_beam_search"):
        SamplingParams(guided=ASKS["regex"], use_beam_search=True, n=2, temperature=0)
    assert not llm.engine.has_unfinished()
