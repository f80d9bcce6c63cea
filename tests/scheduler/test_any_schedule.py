"""Whatever the schedule does to a request, its tokens equal those of its solo run, and every block comes back.

Requests of all kinds arrive while others run, in pools little larger than the largest of them needs, under every policy;
they are aborted, preempted between steps and while a step is in flight, and steps fail before and after their moves.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from octavo.runtime.metadata import StaleMetadataError
from octavo.runtime.params import LoRARequest, MultiModalSpan, SamplingParams
from octavo.scheduler import Engine, Scheduler, SchedulerConfig
from octavo.scheduler.engine import Request
from octavo.tests.scheduler.shadow import VOCAB, Launched, ShadowRunner, solo, solo_beams

EOS = 7
MAX_LEN = 80
MAX_STEPS = 6000
EVENTS = ["preempt", "abort", "fail before", "fail in flight", "fail after", "late"]


@dataclass
class Ask:
    """A request to be made, and what its solo run answers."""

    name: str
    prompt: list[int]
    params: SamplingParams
    kwargs: dict = field(default_factory=dict)

    @property
    def encoder(self) -> list[int] | None:
        return self.kwargs.get("encoder_token_ids")

    @property
    def spans(self) -> tuple[MultiModalSpan, ...]:
        return self.kwargs.get("multi_modal_spans", ())

    def blocks_alone(self, block_size: int) -> int:
        """Blocks that hold the whole request at its end, so that its solo run is all of its answer."""
        assert self.params.max_tokens is not None
        shared, width = len(self.prompt) // block_size, self.params.width
        longest = len(self.prompt) + self.params.max_tokens
        cross = -(-len(self.encoder or ()) // block_size)
        return cross + shared + width * (-(-longest // block_size) - shared)

    def answer(self) -> list[list[int]]:
        params = self.params
        assert params.max_tokens is not None
        if params.use_beam_search:
            eos = None if params.ignore_eos else EOS
            beams = solo_beams(self.prompt, params, params.max_tokens, eos, self.encoder)
            return [tokens for tokens, _ in beams]
        outputs = []
        for index in range(params.n):
            lora = self.kwargs.get("lora_request")
            tokens = solo(self.prompt, params.max_tokens, index, self.encoder, lora, self.spans)
            if not params.ignore_eos and EOS in tokens:
                tokens = tokens[: tokens.index(EOS) + 1]
            outputs.append(tokens)
        return outputs


def random_asks(rng: random.Random, config: SchedulerConfig) -> list[Ask]:
    shared = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 9, 33]))]
    most_seats = config.num_seats
    asks = []
    for number in range(rng.randint(1, 14)):
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        prompt = shared[: rng.randint(0, len(shared))] + own
        width = min(rng.choice([1, 1, 1, 2, 3]), most_seats)
        common = {
            "max_tokens": rng.randint(1, 24),
            "n": rng.randint(1, width) if rng.random() < 0.3 else width,
            "ignore_eos": rng.random() < 0.5,
        }
        kwargs: dict = {"priority": rng.choice([0, 0, 1, -5])}
        if config.max_encoder_len and rng.random() < 0.6:
            kwargs["encoder_token_ids"] = [
                rng.randrange(VOCAB) for _ in range(rng.randint(1, config.max_encoder_len))
            ]
        if config.max_loras and rng.random() < 0.6:
            number_of = rng.randint(1, 4)
            kwargs["lora_request"] = LoRARequest(f"adapter-{number_of}", number_of)
        if config.is_multi_modal and rng.random() < 0.6:
            budget = config.max_num_batched_tokens - len(kwargs.get("encoder_token_ids", ()))
            kwargs["multi_modal_spans"] = random_spans(rng, prompt, budget)
        if rng.random() < 0.3 and "lora_request" not in kwargs and not config.is_multi_modal:
            params = SamplingParams(
                use_beam_search=True,
                best_of=width,
                temperature=0,
                length_penalty=rng.choice([0.0, 1.0, -0.5, 2.0]),
                early_stopping=rng.choice([True, False, "never"]),
                **{**common, "n": min(common["n"], width)},
            )
        else:
            params = SamplingParams(**{**common, "n": width})
        asks.append(Ask(f"r{number}", prompt, params, kwargs))
    return asks


def random_spans(rng: random.Random, prompt: list[int], budget: int) -> tuple[MultiModalSpan, ...]:
    """Images in the prompt, whose placeholders are all one token; few kinds, so that prefixes are shared."""
    spans, offset = [], 0
    while True:
        offset += rng.randint(0, 6)
        length = rng.randint(1, 7)
        if offset + length > len(prompt):
            return tuple(spans)
        whole = rng.random() < 0.4 and length <= budget
        digest = bytes([rng.randint(1, 2)]) * 16
        spans.append(MultiModalSpan(offset, length, digest, is_whole=whole))
        prompt[offset : offset + length] = [1] * length
        offset += length


def random_config(rng: random.Random) -> SchedulerConfig:
    order = rng.choice(["decode-first", "decode-first", "prefill-first"])
    tokens = rng.choice([3, 7, 16, 64])
    return SchedulerConfig(
        num_gpu_blocks=1,
        num_cpu_blocks=rng.choice([0, 3, 12, 60]),
        block_size=rng.choice([1, 2, 4, 8, 16]),
        max_num_seqs=rng.choice([3, 5, 16]),
        max_num_batched_tokens=tokens,
        max_model_len=MAX_LEN,
        max_encoder_len=rng.choice([0, 0, tokens - 1]),
        max_loras=rng.choice([0, 0, 1, 2]),
        is_multi_modal=rng.random() < 0.25,
        vocab_size=VOCAB,
        enable_prefix_caching=rng.random() < 0.7,
        watermark=rng.choice([0.0, 0.01, 0.2]),
        sliding_window=rng.choice([None, None, 1, 5, 16]),
        policy=rng.choice(["fcfs", "priority"]),
        order=order,
        admission=rng.choice(["optimistic", "reserve"])
        if order == "decode-first"
        else "optimistic",
        preemption_mode=rng.choice(["auto", "recompute", "swap"]),
    )


class Disturber:
    """A runner in the way of another: steps fail before or after they are run, and requests end or lose their blocks while
    a step is in flight."""

    def __init__(self, runner: ShadowRunner, scheduler: Scheduler, rng: random.Random) -> None:
        self.runner, self.scheduler, self.rng = runner, scheduler, rng
        self.aborted: set[str] = set()
        self.rate = rng.choice([0.0, 0.0, 0.1, 0.3])
        self.engine: Engine
        self.counts: Counter[str] = Counter()

    def launch(self, seq_group_metadata_list, **kwargs):
        event = "none"
        if self.rng.random() < self.rate:
            event = self.rng.choice(EVENTS)
        self.counts[event] += 1
        running = [group.request_id for group in self.scheduler.running]
        if event == "fail before":
            raise OSError("the step failed before anything moved")
        if (
            event == "preempt" and running
        ):  # between snapshot and launch: the launch must not happen
            self.scheduler.preempt(self.rng.choice(running))
        if event == "abort" and running:
            self.abort(self.rng.choice(running))
        if event in ("preempt", "abort"):
            for metadata in seq_group_metadata_list:
                current = kwargs["generation_of"](metadata.request_id)
                if current != metadata.generation_id:
                    raise StaleMetadataError(metadata.request_id, metadata.generation_id, current)
        if event == "fail in flight":
            return Launched(None, OSError("the step failed on the device"))
        launched = self.runner.launch(seq_group_metadata_list, **kwargs)
        if event == "fail after":
            return Launched(None, OSError("the step failed after it was run"))
        if event == "late" and running:  # between launch and write-back
            if self.rng.random() < 0.5:
                self.scheduler.preempt(self.rng.choice(running))
            else:
                self.abort(self.rng.choice(running))
            self.scheduler.check_invariants()
        return launched

    def abort(self, name: str) -> None:
        if self.engine.abort(name):
            self.aborted.add(name)


def drain(engine: Engine, pending: list[Ask], disturber: Disturber) -> dict[str, Request]:
    """Requests arrive while others run; returns the finished ones by id."""
    finished: dict[str, Request] = {}
    rng, scheduler = disturber.rng, disturber.scheduler
    for _ in range(MAX_STEPS):
        if pending and rng.random() < 0.8:
            ask = pending.pop(0)
            disturber.runner.spans[ask.name] = ask.spans
            engine.add_request(ask.name, ask.prompt, ask.params, **ask.kwargs)
        if engine.has_unfinished():
            while scheduler.groups and rng.random() < disturber.rate:
                victim = rng.choice(scheduler.groups).request_id
                if rng.random() < 0.15:
                    disturber.abort(victim)
                else:
                    scheduler.preempt(victim)
            try:
                changed = engine.step()
            except OSError:
                continue
            for request in changed:
                if request.finished:
                    assert request.group.request_id not in finished, "one terminal event each"
                    finished[request.group.request_id] = request
        elif not pending:
            return finished
    raise AssertionError("the engine did not drain")


def play(seed: int) -> Counter[str]:
    """One random schedule; returns what happened in it."""
    rng = random.Random(seed)
    config = random_config(rng)
    asks = random_asks(rng, config)
    largest = max(ask.blocks_alone(config.block_size) for ask in asks)
    config = dataclasses.replace(config, num_gpu_blocks=largest + rng.randint(0, 6))
    ahead = rng.random() < 0.5
    if ahead and rng.random() < 0.5:  # where blocks are short no step runs ahead
        config = dataclasses.replace(config, num_gpu_blocks=config.num_gpu_blocks + 60)
    scheduler = Scheduler(config)
    runner = ShadowRunner(config.block_size, config.sliding_window)
    disturber = Disturber(runner, scheduler, rng)
    engine = Engine(
        scheduler,
        disturber,
        check=True,
        eos_token_ids=frozenset([EOS]),
        async_scheduling=ahead,
    )
    disturber.engine = engine
    finished = drain(engine, asks.copy(), disturber)
    assert set(finished) == {ask.name for ask in asks}
    for ask in asks:
        request = finished[ask.name]
        if ask.name in disturber.aborted:
            continue
        got = [seq.output_token_ids.tolist() for seq in request.group.seqs]
        assert got == ask.answer(), f"seed {seed}, request {ask.name}"
    assert scheduler.blocks.num_free_blocks == config.num_gpu_blocks
    assert scheduler.blocks.host.num_free == config.num_cpu_blocks
    stats = scheduler.stats()
    happened = disturber.counts
    happened["swap"] = stats.num_swapped_out
    happened["recompute"] = stats.num_recomputed
    happened["hits"] = stats.num_cached_tokens
    happened["copies"] = runner.num_moves["copy"]
    happened["ahead"] = runner.num_ahead
    if config.admission == "reserve" and not disturber.rate:
        assert stats.num_recomputed == stats.num_swapped_out == 0, "reserve never preempts"
        happened["reserve"] = 1
    return happened


@pytest.mark.parametrize("part", range(4))
def test_tokens_equal_solo_run(part, pytestconfig):
    """B08-B10, B28, B31, B33, B63, B85, B87, I9, I10, I12. Twice as many as `--schedules` says."""
    number = max(150, pytestconfig.getoption("--schedules") // 2)
    happened: Counter[str] = Counter()
    for seed in range(part * number, (part + 1) * number):
        happened += play(seed)
    for event in (*EVENTS, "swap", "recompute"):
        assert happened[event] > 10, f"{event}: too rare to tell anything, {happened}"
    assert happened["ahead"] > 300, happened
    assert happened["hits"] > 100 and happened["copies"] > 100 and happened["reserve"] > 5
