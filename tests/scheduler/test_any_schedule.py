"""Whatever the schedule does to a request, its tokens equal those of its solo run, and every block comes back."""

from __future__ import annotations

import random

import pytest

from octavo.runtime.params import SamplingParams
from octavo.scheduler import Engine, Scheduler, SchedulerConfig
from octavo.tests.scheduler.shadow import VOCAB, ShadowRunner, solo


def drain(engine: Engine, max_steps: int = 5000) -> dict[str, object]:
    finished = {}
    for _ in range(max_steps):
        if not engine.has_unfinished():
            return finished
        for request in engine.step():
            if request.finished:
                assert request.group.request_id not in finished, "one terminal event per request"
                finished[request.group.request_id] = request
    raise AssertionError("the engine did not drain")


@pytest.mark.parametrize("seed", range(200))
def test_tokens_equal_solo_run(seed):
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 8, 16])
    num_blocks = rng.randint(max(6, 96 // block_size), 64 + 160 // block_size)
    config = SchedulerConfig(
        num_gpu_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=rng.choice([2, 5, 16]),
        max_num_batched_tokens=rng.choice([1, 2, 7, 16, 64]),
        max_model_len=80,
        vocab_size=VOCAB,
        enable_prefix_caching=rng.random() < 0.7,
    )
    runner = ShadowRunner(block_size)
    engine = Engine(Scheduler(config), runner, check=True)
    shared = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 9, 33]))]
    expected = {}
    pending = []
    for i in range(rng.randint(1, 14)):
        prompt = shared[: rng.randint(0, len(shared))] + [
            rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))
        ]
        n = rng.choice([1, 1, 1, 2, 3]) if config.num_seats >= 3 else 1
        # a request that fits the pool alone at full length, so that its solo run is the whole answer
        max_tokens = rng.randint(1, 24)
        if (
            -(-(len(prompt) + max_tokens) // block_size) * n > num_blocks
            or len(prompt) + max_tokens > 80
        ):
            continue
        pending.append((f"r{i}", prompt, SamplingParams(n=n, max_tokens=max_tokens)))
        expected[f"r{i}"] = [solo(prompt, max_tokens, index) for index in range(n)]
    finished = {}
    steps = 0
    while pending or engine.has_unfinished():
        if pending and rng.random() < 0.5:
            engine.add_request(*pending.pop(0))
        if engine.has_unfinished():
            steps += 1
            assert steps < 5000
            for request in engine.step():
                if request.finished:
                    assert request.group.request_id not in finished
                    finished[request.group.request_id] = request
    got = {
        name: [seq.output_token_ids.tolist() for seq in r.group.seqs]
        for name, r in finished.items()
    }
    assert got == expected
