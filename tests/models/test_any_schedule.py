"""The real engine on a tiny model: whatever the schedule does to a request, its tokens equal those of its solo run.

The shadow cache watches every launch. Requests are drawn from a set whose solo runs are made once.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import pytest

from octavo.runtime.metadata import StaleMetadataError
from octavo.runtime.params import SamplingParams
from octavo.scheduler import Engine
from octavo.tests.models.tiny import VOCAB, TinyModel, run

BLOCK_SIZE = 4
NUM_ASKS = 64
MOST_STEPS = 1500


@cache
def tiny(window: int | None) -> TinyModel:
    return TinyModel(seed=2, eos_scale=2.5, window=window)


@cache
def asks() -> list[tuple[list[int], SamplingParams]]:
    """Prompts over three shared beginnings; greedy, sampled, several samples, beams; half of them with more to ask: penalties,
    bias, forbidden tokens, least lengths, processors, log probabilities of output and prompt."""
    rng = random.Random(11)
    shared = [[rng.randrange(4, VOCAB) for _ in range(n)] for n in (0, 13, 26)]
    found = []
    for number in range(NUM_ASKS):
        prompt = rng.choice(shared) + [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 20))]
        common: dict = {"max_tokens": rng.randint(1, 14), "ignore_eos": rng.random() < 0.5}
        kind = number % 4
        if number % 8 >= 4:
            common |= more_to_ask(rng, common["max_tokens"], is_search=kind == 3)
        if kind == 0:
            params = SamplingParams(temperature=0, **common)
        elif kind == 1:
            params = SamplingParams(seed=number, top_k=rng.choice([-1, 7]), top_p=0.9, **common)
        elif kind == 2:
            n = rng.randint(2, 4)
            params = SamplingParams(n=n, seed=number, best_of=rng.choice([None, n + 1]), **common)
        else:
            width = rng.randint(2, 4)
            params = SamplingParams(
                n=rng.randint(1, width),
                best_of=width,
                use_beam_search=True,
                temperature=0,
                length_penalty=rng.choice([0.0, 1.0]),
                early_stopping=rng.choice([True, False, "never"]),
                **common,
            )
        found.append((prompt, params))
    return found


def more_to_ask(rng: random.Random, max_tokens: int, is_search: bool) -> dict:
    forbidding = [
        {"bad_words_token_ids": [[rng.randrange(VOCAB)], [7, 9], [rng.randrange(VOCAB), 8]]},
        {"min_tokens": rng.randint(1, max_tokens)},
        {"allowed_token_ids": rng.sample(range(VOCAB), 40)},
        {"logprobs": rng.choice([0, 2]), "prompt_logprobs": rng.choice([None, 0, 1])},
    ]
    changing = [
        {"repetition_penalty": rng.choice([0.7, 1.5])},
        {"frequency_penalty": rng.uniform(-1, 1), "presence_penalty": rng.uniform(-1, 1)},
        {"logit_bias": {rng.randrange(VOCAB): 3.0, 11: -2.0}},
        {"logits_processors": [prefers_rising]},
    ]
    kinds = forbidding if is_search else forbidding + changing
    found: dict = {}
    for each in rng.sample(kinds, rng.randint(1, 3)):
        found |= each
    return found


def prefers_rising(prompt, output, logits):
    """Depends on the newest token alone, and on the prompt when there is none."""
    last = int((output if len(output) else prompt)[-1])
    logits[last:] += 1.5
    return logits


def completions(request) -> list[tuple]:
    """Tokens, and which tokens are told about at each place; how likely they are is compared elsewhere, it differs by
    rounding."""
    output = request.output()
    prompt = output.prompt_logprobs
    told = None if prompt is None else [None if e is None else next(iter(e)) for e in prompt]
    return [
        (c.token_ids, c.logprobs and [next(iter(e)) for e in c.logprobs], told)
        for c in output.outputs
    ]


@cache
def solo(window: int | None, number: int) -> list[tuple]:
    engine = tiny(window).engine(400, BLOCK_SIZE, enable_prefix_caching=False)
    engine.add_request("solo", *asks()[number])
    (request,) = run(engine)
    return completions(request)


def blocks_alone(number: int) -> int:
    prompt, params = asks()[number]
    shared = len(prompt) // BLOCK_SIZE
    longest = -(-(len(prompt) + params.max_tokens) // BLOCK_SIZE)
    return shared + params.width * (longest - shared)


class Disturbed:
    """The engine's runner, in whose steps requests end and lose their blocks."""

    def __init__(self, engine: Engine, rng: random.Random, rate: float) -> None:
        self.engine, self.rng, self.rate = engine, rng, rate
        self.runner, engine._runner = engine._runner, self
        self.aborted: set[str] = set()

    def disturb(self) -> bool:
        groups = self.engine.scheduler.groups
        if not groups or self.rng.random() >= self.rate:
            return False
        name = self.rng.choice(groups).request_id
        if self.rng.random() < 0.15:
            self.aborted.add(name)
            self.engine.abort(name)
        else:
            self.engine.scheduler.preempt(name)
        return True

    def launch(self, seq_group_metadata_list, **kwargs):
        before = self.disturb()
        try:
            launch = self.runner.launch(seq_group_metadata_list, **kwargs)
        except StaleMetadataError:
            assert before, "only a request that was disturbed can be stale"
            raise
        self.disturb()
        return launch


def play(seed: int) -> Counter[str]:
    rng = random.Random(seed)
    window = rng.choice([None, None, 6])
    num_blocks = rng.randint(6, 64)
    engine = tiny(window).engine(
        num_blocks,
        BLOCK_SIZE,
        num_cpu_blocks=rng.choice([0, 8, 64]),
        max_num_seqs=rng.choice([5, 16]),
        max_num_batched_tokens=rng.choice([5, 8, 16, 64]),
        enable_prefix_caching=rng.random() < 0.75,
        watermark=rng.choice([0.0, 0.1]),
        policy=rng.choice(["fcfs", "priority"]),
        preemption_mode=rng.choice(["auto", "recompute", "swap"]),
        async_scheduling=seed % 2 == 1,
        graph_sizes=(1, 2, 4, 8, 16) if seed % 3 == 1 else (),
    )
    possible = [number for number in range(NUM_ASKS) if blocks_alone(number) <= num_blocks]
    pending = rng.sample(possible, min(len(possible), rng.randint(2, 8)))
    chosen = {f"r{number}": number for number in pending}
    disturbed = Disturbed(engine, rng, rng.choice([0.0, 0.05, 0.2]))
    finished = {}
    for _ in range(MOST_STEPS):
        if pending and rng.random() < 0.5:
            number = pending.pop()
            priority = rng.choice([0, 0, -1, 2])
            engine.add_request(f"r{number}", *asks()[number], priority=priority)
        disturbed.disturb()
        if engine.has_unfinished():
            finished |= {r.group.request_id: r for r in engine.step() if r.finished}
        elif not pending:
            break
    assert set(finished) == set(chosen), f"seed {seed}: not drained"
    for name, number in chosen.items():
        if name not in disturbed.aborted:
            assert completions(finished[name]) == solo(window, number), f"seed {seed}, {name}"
    blocks = engine.scheduler.blocks
    assert blocks.num_used_blocks == 0 and blocks.host.num_used == 0
    stats = engine.scheduler.stats()
    return Counter(
        swapped=stats.num_swapped_out,
        recomputed=stats.num_recomputed,
        hits=stats.num_cached_tokens,
        aborted=len(disturbed.aborted),
    )


@pytest.mark.parametrize("part", range(4))
def test_real_tokens_equal_solo_run(part, pytestconfig):
    """I12, with B08-B10, B28, B31, B33, B85 on real keys and values. `--schedules 1000` plays more of them."""
    number = max(80, pytestconfig.getoption("--schedules") // 4)
    happened: Counter[str] = Counter()
    for seed in range(part * number, (part + 1) * number):
        happened += play(seed)
    assert min(happened[e] for e in ("swapped", "recomputed", "hits", "aborted")) > 5, happened
