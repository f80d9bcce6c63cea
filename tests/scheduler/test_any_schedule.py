"""Whatever the schedule does to a request, its tokens equal those of its solo run, and every block comes back."""

from __future__ import annotations

import random

import pytest

from octavo.runtime.params import SamplingParams
from octavo.scheduler import Engine, Scheduler, SchedulerConfig
from octavo.scheduler.engine import Request
from octavo.tests.scheduler.shadow import VOCAB, ShadowRunner, solo

MAX_LEN = 80
MAX_STEPS = 5000


def random_requests(rng: random.Random, block_size: int) -> list[tuple[list[int], SamplingParams]]:
    shared = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 9, 33]))]
    requests = []
    for _ in range(rng.randint(1, 14)):
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        prompt = shared[: rng.randint(0, len(shared))] + own
        params = SamplingParams(n=rng.choice([1, 1, 1, 2, 3]), max_tokens=rng.randint(1, 24))
        requests.append((prompt, params))
    return requests


def blocks_alone(prompt: list[int], params: SamplingParams, block_size: int) -> int:
    """Blocks that hold the whole request at its end, so that its solo run is all of its answer."""
    assert params.max_tokens is not None
    shared = len(prompt) // block_size
    return shared + params.n * (-(-(len(prompt) + params.max_tokens) // block_size) - shared)


def drain(engine: Engine, pending: list, rng: random.Random) -> tuple[dict[str, Request], int]:
    """Requests arrive while others run; returns the finished ones by id and the number of preemptions."""
    finished: dict[str, Request] = {}
    for _ in range(MAX_STEPS):
        if pending and rng.random() < 0.8:
            engine.add_request(*pending.pop(0))
        if engine.has_unfinished():
            for request in engine.step():
                if request.finished:
                    assert request.group.request_id not in finished, "one terminal event each"
                    finished[request.group.request_id] = request
        elif not pending:
            return finished, sum(r.group.metrics.num_preemptions for r in finished.values())
    raise AssertionError("the engine did not drain")


@pytest.mark.parametrize("seeds", [range(i, i + 25) for i in range(0, 300, 25)], ids=str)
def test_tokens_equal_solo_run(seeds):
    preemptions = 0
    for seed in seeds:
        rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4, 8, 16])
        requests = random_requests(rng, block_size)
        largest = max(blocks_alone(*request, block_size) for request in requests)
        config = SchedulerConfig(
            num_gpu_blocks=largest + rng.randint(0, 6),  # little more than the largest needs alone
            block_size=block_size,
            max_num_seqs=rng.choice([3, 5, 16]),
            max_num_batched_tokens=rng.choice([3, 7, 16, 64]),
            max_model_len=MAX_LEN,
            vocab_size=VOCAB,
            enable_prefix_caching=rng.random() < 0.7,
            watermark=rng.choice([0.0, 0.01, 0.2]),
        )
        engine = Engine(Scheduler(config), ShadowRunner(block_size), check=True)
        pending = [(f"r{i}", prompt, params) for i, (prompt, params) in enumerate(requests)]
        expected = {
            name: [solo(prompt, params.max_tokens, index) for index in range(params.n)]
            for name, prompt, params in pending
        }
        finished, preempted = drain(engine, pending, rng)
        preemptions += preempted
        got = {
            name: [seq.output_token_ids.tolist() for seq in request.group.seqs]
            for name, request in finished.items()
        }
        assert got == expected, f"seed {seed}"
        assert engine.scheduler.blocks.num_free_blocks == config.num_gpu_blocks
    assert preemptions > 10, "the pools are meant to be too small"
