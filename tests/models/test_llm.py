"""The whole engine on real weights, against transformers and against itself under every disturbance."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams, SwapCosts
from octavo.kernels.swap_costs import Crossover

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a printer who",
    "1, 2, 3, 4, 5,",
    "def fibonacci(n):\n",
    "The three primary colours are",
    "Water boils at a temperature of",
    "In the beginning of the 20th century,",
    "A paged KV cache stores",
    "Dear Sir or Madam,\n\nI am writing",
    "The chemical symbol of gold is",
    "Über den Wolken muss die Freiheit",
    "Question: What is the largest planet?\nAnswer:",
]
NEAR_TIE = 1e-3


@pytest.fixture(scope="module")
def model_name(smollm2) -> str:
    return smollm2.name


@pytest.fixture(scope="module")
def llm(model_name) -> LLM:
    return LLM(model_name, max_model_len=1024)


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def token_ids(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_same_but_for_ties(
    reference, prompts: list[list[int]], got: list[list[int]], want: list[list[int]], tie: float
) -> int:
    """Tokens are equal, or part where the reference's two best logits are closer than `tie`; returns how many parted."""
    ties = 0
    for prompt, a, b in zip(prompts, got, want, strict=True):
        assert len(a) == len(b)
        part = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if part is not None:
            with torch.inference_mode():
                best = reference(torch.tensor([prompt + b[:part]])).logits[0, -1].topk(2).values
            assert best[0] - best[1] < tie, (
                f"token {part}: {a[part]} against {b[part]}, best logits {best.tolist()}"
            )
            ties += 1
    return ties


@torch.inference_mode()
def transformers_greedy(model, prompt: list[int], tokens: int) -> list[int]:
    """Greedy tokens through transformers' own KV cache, going on after an end-of-sequence token."""
    output, cache, ids = [], None, prompt
    for _ in range(tokens):
        step = model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
        cache, ids = step.past_key_values, [int(step.logits[0, -1].argmax())]
        output += ids
    return output


def test_greedy_tokens_equal_transformers(llm, hf_smollm2):
    """12 prompts x 48 tokens, the same dequantised weights, read by transformers' own GGUF loader."""
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    ours = token_ids(llm.generate(PROMPTS, greedy(48)))
    theirs = [transformers_greedy(hf_smollm2, prompt, 48) for prompt in prompts]
    ties = assert_same_but_for_ties(hf_smollm2, prompts, ours, theirs, NEAR_TIE)
    print(f"{ties} of {len(prompts)} comparisons ended by a near-tie")


def mixed_prompts(llm: LLM, count: int, prefix: int = 0) -> list[list[int]]:
    text = " ".join(PROMPTS) * 6
    ids = llm.tokenizer.encode(text)
    return [ids[:prefix] + ids[7 * i : 7 * i + 3 + (29 * i) % 60] for i in range(count)]


def solo_runs(llm: LLM, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    return [token_ids(llm.generate([prompt], greedy(tokens)))[0] for prompt in prompts]


def test_32_requests_in_a_pool_that_forces_preemption_equal_their_solo_runs(
    llm, model_name, hf_smollm2
):
    prompts = mixed_prompts(llm, 32)
    small = LLM(
        model_name,
        max_num_batched_tokens=64,
        num_gpu_blocks=40,
        max_model_len=512,
        enable_prefix_caching=False,
    )
    outputs = small.generate(prompts, greedy(16))
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert small.stats().num_used_blocks == 0
    assert_same_but_for_ties(
        hf_smollm2, prompts, token_ids(outputs), solo_runs(llm, prompts, 16), 1e-4
    )


def test_shared_prefix_is_not_recomputed_and_changes_nothing(llm, model_name, hf_smollm2):
    prompts = mixed_prompts(llm, 32, prefix=200)
    small = LLM(model_name, max_num_batched_tokens=64, num_gpu_blocks=60, max_model_len=512)
    outputs = small.generate(prompts, greedy(8))
    cached = sum(output.num_cached_tokens for output in outputs)
    fed = small.stats().num_batched_tokens
    total = sum(len(prompt) + 7 for prompt in prompts)
    print(
        f"{cached} of {sum(map(len, prompts))} prompt tokens came from the cache; {fed} of {total} tokens were fed"
    )
    assert cached > 4000
    assert fed < total - 4000
    solo = LLM(model_name, max_model_len=512, enable_prefix_caching=False)
    assert_same_but_for_ties(
        hf_smollm2, prompts, token_ids(outputs), solo_runs(solo, prompts, 8), 1e-4
    )


def test_seeded_samples_do_not_depend_on_company(llm):
    """n = 3 with one stored prompt: each sample equals the solo run with seed + i (B25)."""
    params = SamplingParams(n=3, seed=11, max_tokens=8, temperature=0.9, top_p=0.95)
    prompt = PROMPTS[1]
    [together, *_] = llm.generate(
        [prompt, *PROMPTS[2:5]], [params, greedy(8), greedy(5), SamplingParams(max_tokens=9)]
    )
    for index, completion in enumerate(together.outputs):
        alone = llm.generate(
            [prompt], SamplingParams(seed=11 + index, max_tokens=8, temperature=0.9, top_p=0.95)
        )
        assert completion.index == index
        assert completion.token_ids == alone[0].outputs[0].token_ids
        assert completion.text == alone[0].outputs[0].text
    assert len({tuple(completion.token_ids) for completion in together.outputs}) == 3


def test_log_probabilities_are_those_of_the_model(llm, hf_smollm2):
    [output] = llm.generate([PROMPTS[0]], greedy(6))
    ids = output.prompt_token_ids + output.outputs[0].token_ids
    with torch.inference_mode():
        logprobs = hf_smollm2(torch.tensor([ids])).logits[0].log_softmax(-1)
    start = len(output.prompt_token_ids)
    expected = sum(float(logprobs[i - 1, ids[i]]) for i in range(start, len(ids)))
    assert output.outputs[0].cumulative_logprob == pytest.approx(expected, abs=1e-3)


def test_stream_grows_to_what_generate_returns(llm):
    params = SamplingParams(max_tokens=20, temperature=0, stop=["Paris and"])
    final = llm.generate(PROMPTS[:3], params)
    texts = ["", "", ""]
    for place, output in llm.stream(PROMPTS[:3], params):
        assert output.outputs[0].text.startswith(texts[place])
        texts[place] = output.outputs[0].text
    assert texts == [output.outputs[0].text for output in final]
    assert [output.prompt for output in final] == PROMPTS[:3]


def test_a_stop_string_in_the_last_token_is_the_reason(llm):
    [output] = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=1, temperature=0, stop=["is"]))
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (
        " Par",
        "stop",
        "is",
    )


def test_text_held_back_for_a_stop_string_is_shown_when_the_pool_ends_the_request(model_name):
    small = LLM(model_name, max_model_len=64, block_size=4, num_gpu_blocks=5)
    options = {"max_tokens": 40, "seed": 1}
    [plain] = small.generate([PROMPTS[0]], SamplingParams(n=3, **options))
    stops = [completion.text[-1] + "#" for completion in plain.outputs]
    [held] = small.generate([PROMPTS[0]], SamplingParams(n=3, stop=stops, **options))
    assert {completion.finish_reason for completion in held.outputs} == {"length"}
    assert [c.text for c in held.outputs] == [c.text for c in plain.outputs]


def test_calls_that_interleave_share_the_steps_and_lose_nothing(llm):
    """Two streams and a generate inside: each sees all of its own outputs."""
    params = greedy(6)
    alone = [output.outputs[0].text for output in llm.generate(PROMPTS[:3], params)]
    first, second = llm.stream(PROMPTS[:1], params), llm.stream(PROMPTS[1:2], params)
    last = {}
    for (_, a), (_, b) in zip(first, second, strict=True):
        last["a"], last["b"] = a, b
        if len(a.outputs[0].token_ids) == 2:
            [inside] = llm.generate(PROMPTS[2:3], params)
            assert inside.outputs[0].text == alone[2]
    assert [last["a"].outputs[0].text, last["b"].outputs[0].text] == alone[:2]
    assert last["a"].finished and last["b"].finished
    assert not llm.engine.has_unfinished() and not llm._changed


def test_arrays_and_tensors_are_prompts_too(llm):
    ids = llm.tokenizer.encode(PROMPTS[0])
    prompts = [ids, tuple(ids), np.array(ids), torch.tensor(ids)]
    outputs = token_ids(llm.generate(prompts, greedy(3)))
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]
    assert token_ids(llm.generate(np.array(ids), greedy(3))) == outputs[:1]
    assert llm.generate([], greedy(3)) == []


@pytest.mark.parametrize(
    "prompts",
    [None, 5, b"abc", [b"abc"], {"prompt": "hi"}, {1, 2}, [None], [[1.5]], [["a"]], "\ud800"],
    ids=repr,
)
def test_what_is_no_prompt_is_refused(llm, prompts):
    with pytest.raises(ValueError, match="prompt"):
        llm.generate(prompts, greedy(2))
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize(
    "params", [5, [SamplingParams(), 5], [SamplingParams(), None], "ab"], ids=repr
)
def test_what_are_no_parameters_is_refused(llm, params):
    with pytest.raises(ValueError, match="sampling_params"):
        llm.generate(["a", "b"], params)
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize("messages", ["hi", {}, [], [{"x": 1}], [["hi"]]], ids=repr)
def test_what_are_no_messages_is_refused(llm, messages):
    with pytest.raises(ValueError, match="messages"):
        llm.chat(messages)


def test_overlapped_and_replayed_steps_give_the_same_tokens(llm, model_name):
    prompts = ["The capital of France is", "Once upon a time", "One two three four"]
    params = [
        SamplingParams(temperature=0, max_tokens=9),
        SamplingParams(seed=3, max_tokens=6),
        SamplingParams(seed=5, n=2, max_tokens=5),
    ]
    fast = LLM(
        model_name,
        num_gpu_blocks=40,
        max_num_seqs=4,
        max_model_len=64,
        max_num_batched_tokens=64,
        async_scheduling=True,
        decode_graphs=True,
    )
    tokens = [
        [[out.token_ids for out in result.outputs] for result in engine.generate(prompts, params)]
        for engine in (llm, fast)
    ]
    assert tokens[0] == tokens[1]
    assert fast.engine.scheduler.blocks.num_used_blocks == 0 and not fast.engine.has_unfinished()


def test_closing_a_stream_aborts_what_is_left(llm):
    stream = llm.stream(PROMPTS[:2], greedy(400))
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished()
    assert llm.stats().num_used_blocks == 0


def test_a_closed_stream_leaves_nothing_behind_in_the_calls_of_others(llm):
    stream = llm.stream(["One", "Two"], SamplingParams(max_tokens=30, temperature=0))
    next(stream)
    llm.generate(["Three"], SamplingParams(max_tokens=3, temperature=0))
    assert llm._changed
    stream.close()
    assert not llm._changed and not llm.engine.has_unfinished()


def test_a_stop_token_is_no_part_of_the_text(llm):
    """Whatever token it is, unless special tokens are shown."""
    prompt, asked = "The capital of France is", {"max_tokens": 6, "temperature": 0}
    ids = llm.generate(prompt, SamplingParams(**asked))[0].outputs[0].token_ids
    for skip, shown in ((True, 1), (False, 2)):
        params = SamplingParams(stop_token_ids=[ids[1]], skip_special_tokens=skip, **asked)
        [completion] = llm.generate(prompt, params)[0].outputs
        assert completion.token_ids == ids[:2] and completion.stop_reason == ids[1]
        assert completion.text == llm.tokenizer.decode(ids[:shown])


def test_a_request_of_a_stream_can_be_aborted(llm):
    """Its output so far comes once more, as its last; the others go on."""
    [expected] = llm.generate(
        ["The capital of France is"], SamplingParams(max_tokens=6, temperature=0)
    )
    asked = SamplingParams(max_tokens=6, temperature=0)
    last, finished = {}, []
    for place, output in llm.stream(["The capital of France is", "1, 2, 3,"], asked):
        last[place] = output
        finished += [place] * output.finished
        if place == 1 and len(output.outputs[0].token_ids) == 2 and not output.finished:
            assert llm.abort(output.request_id) and not llm.abort(output.request_id)
    assert finished == [1, 0] and not llm.abort(last[0].request_id)
    [aborted] = last[1].outputs
    assert aborted.finish_reason == "abort" and len(aborted.token_ids) == 2
    assert last[0].outputs[0].token_ids == expected.outputs[0].token_ids


def test_end_of_sequence_ends_a_chat(llm):
    [output] = llm.chat(
        [{"role": "user", "content": "Say hi."}], SamplingParams(max_tokens=120, temperature=0)
    )
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids[-1] in llm.tokenizer.eos_token_ids
    assert "<|" not in output.outputs[0].text
    assert output.outputs[0].text


def test_one_bad_prompt_stops_the_call_before_anything_runs(llm):
    steps = llm.stats().num_steps
    with pytest.raises(ValueError, match=r"prompt 1: .*empty"):
        llm.generate(["fine", [], "also fine"], greedy(4))
    with pytest.raises(ValueError, match=r"prompt 0: .*2000 tokens and one to generate"):
        llm.generate([[5] * 2000], greedy(4))
    with pytest.raises(ValueError, match="sampling_params: expected one, or one for each of 2"):
        llm.generate(["a", "b"], [greedy(1)] * 3)
    assert llm.stats().num_steps == steps
    assert not llm.engine.has_unfinished()


def test_swap_space_is_handed_to_what_moves_blocks(model_name):
    costs = SwapCosts(Crossover(4096, 8), Crossover(0, 1))
    swapping = LLM(
        model_name, num_gpu_blocks=8, max_model_len=64, swap_space_gib=0.05, swap_costs=costs
    )
    mover = swapping.engine._runner.mover
    assert mover.host_pool is swapping.host_pool and mover._costs is costs
    assert swapping.host_pool.num_blocks == int(0.05 * 2**30) // swapping.pool.block_bytes > 50
    (out,) = swapping.generate(["The capital of France is"], greedy(3))
    assert len(out.outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "tpu"}, "device"),
        ({"dtype": "int4"}, "dtype"),
        ({"max_model_len": 9000}, r"max_model_len: expected 1 to 8192"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
        ({"num_gpu_blocks": 0}, "num_gpu_blocks"),
        ({"num_gpu_blocks": 10**12}, "num_gpu_blocks: expected a pool that fits"),
        ({"swap_space_gib": -1}, "swap_space_gib: expected a number >= 0"),
        ({"swap_space_gib": 1e-9}, "swap_space_gib: expected 0 or room for two blocks"),
        ({"swap_costs": "costs.json"}, "swap_costs: expected SwapCosts"),
        ({"block_size": 0}, "block_size"),
        ({"max_num_seqs": "4"}, "max_num_seqs"),
        ({"max_model_len": "256"}, "max_model_len"),
        ({"device": None}, "device"),
        ({"model_class": 3}, "model_class"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_bad_arguments_are_refused_by_name(model_name, changes, message):
    with pytest.raises(ValueError, match=message):
        LLM(model_name, **changes)


_TWO_PROMPTS = """
import sys
from octavo import LLM, SamplingParams, SwapCosts
from octavo.kernels.swap_costs import Crossover
llm = LLM("smollm2-135m", max_model_len=256, dtype=sys.argv[1])
for output in llm.generate(["The capital of France is", "1, 2, 3,"], SamplingParams(max_tokens=4, temperature=0)):
    print(output.outputs[0].token_ids)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_interpreted_kernels_give_the_same_tokens(model_name, dtype):
    """The Triton kernels themselves run, interpreted, on the real weights; bf16 is right there too."""

    def run(backend: str) -> str:
        env = {**os.environ, "OCTAVO_BACKEND": backend}
        env.pop("TRITON_INTERPRET", None)
        done = subprocess.run(
            [sys.executable, "-c", _TWO_PROMPTS, dtype], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("interpret") == run("auto")


@pytest.mark.parametrize(
    "kv_cache_dtype", ["fp8", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head"]
)
def test_a_quantised_cache(llm, model_name, kv_cache_dtype) -> None:
    """A quarter of fp32's memory, and a scale for each 64 numbers where they have their own; the text stays sensible, and
    a batch gives what each prompt gives alone."""
    quantised = LLM(
        model_name, kv_cache_dtype=kv_cache_dtype, max_model_len=256, num_gpu_blocks=200
    )
    of_256 = 68 if kv_cache_dtype.endswith("per_token_head") else 64
    assert quantised.stats().block_bytes * 256 == llm.stats().block_bytes * of_256
    prompts = PROMPTS[:5]
    together = token_ids(quantised.generate(prompts, greedy(4)))
    alone = [token_ids(quantised.generate(prompt, greedy(4)))[0] for prompt in prompts]
    assert together == alone
    exact = token_ids(llm.generate(prompts, greedy(1)))
    agreeing = sum(a[0] == b[0] for a, b in zip(together, exact, strict=True))
    assert agreeing >= 3, f"only {agreeing} of 5 first tokens are those of the plain cache"


def test_an_unknown_cache_dtype_is_refused(model_name) -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype: expected one of auto, fp8, fp8_e5m2"):
        LLM(model_name, kv_cache_dtype="int3")


def test_a_checked_run_passes(model_name, monkeypatch) -> None:
    """OCTAVO_CHECK=1 with shared prefixes, forks, chunks and preemption: every read is of the row's own tokens."""
    monkeypatch.setenv("OCTAVO_CHECK", "1")
    checked = LLM(model_name, num_gpu_blocks=16, max_num_batched_tokens=48, max_model_len=128)
    prompts = ["The history of printing began long ago. " * 3 + word for word in ("A", "B", "Then")]
    params = [SamplingParams(max_tokens=20, seed=i, n=1 + i % 2) for i in range(3)]
    outputs = checked.generate([*prompts, *PROMPTS[:3]], [*params, *params])
    assert all(len(c.token_ids) > 0 for output in outputs for c in output.outputs)
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0


def test_logprobs_have_texts_and_bad_words_do_not_come_up(llm):
    params = SamplingParams(
        max_tokens=12, temperature=0, ignore_eos=True, logprobs=2, prompt_logprobs=0
    )
    (plain,) = llm.generate("The capital of France is", params)
    (completion,) = plain.outputs
    chosen = [
        entry[token] for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)
    ]
    assert "".join(entry.decoded_token for entry in chosen) == completion.text
    assert all(entry.rank == 1 for entry in chosen)
    prompt = [next(iter(entry.values())) for entry in plain.prompt_logprobs[1:]]
    assert "".join(entry.decoded_token for entry in prompt).endswith(" capital of France is")
    word = completion.text.split()[0]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, bad_words=word)
    (without,) = llm.generate("The capital of France is", params)
    assert word not in without.outputs[0].text.split()
    with pytest.raises(ValueError, match="allowed_token_ids: expected ids in"):
        llm.generate("a", SamplingParams(allowed_token_ids=[10**6]))
