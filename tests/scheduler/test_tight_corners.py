"""Corners of the scheduler: pools, windows, encoders and spans that barely fit, results that cannot be written back."""

from __future__ import annotations

import random

import numpy as np
import pytest

from octavo.runtime.metadata import SamplerOutput
from octavo.runtime.params import LoRARequest, MultiModalSpan, SamplingParams
from octavo.scheduler import SchedulerConfig, SequenceStatus, beam_search
from octavo.tests.scheduler.harness import Harness
from octavo.tests.scheduler.shadow import solo


def prompt(length: int, start: int = 1) -> list[int]:
    return list(range(start, start + length))


def test_without_chunking_a_step_holds_prompt_and_encoder():
    """Else the prompt could never come in, and blocks all behind it (B31, B45)."""
    with pytest.raises(ValueError, match="max_model_len \\+ max_encoder_len = 28"):
        SchedulerConfig(
            num_gpu_blocks=40,
            enable_chunked_prefill=False,
            max_model_len=20,
            max_num_batched_tokens=20,
            max_encoder_len=8,
        )


def test_samples_catch_up_bit_by_bit_within_a_window():
    """B09, I12: what two samples had generated does not fit at once, but their windows do."""
    h = Harness(num_blocks=8, sliding_window=5, preemption_mode="recompute")
    h.add("a", prompt(6), max_tokens=40, n=2)
    for _ in range(30):
        h.step()
    assert h.scheduler.preempt("a")
    h.drain()
    for index in range(2):
        assert h.tokens("a", index) == solo(prompt(6), 40, index)


def test_a_swapped_group_leaves_what_its_window_has_passed_behind():
    """I12: it fits into the pool again, as it did before."""
    h = Harness(num_blocks=5, sliding_window=16, preemption_mode="swap", num_cpu_blocks=20)
    h.add("a", prompt(6), max_tokens=60)
    while h.engine.has_unfinished():
        h.step()
        h.scheduler.preempt("a")
    assert h.tokens("a") == solo(prompt(6), 60)


@pytest.mark.parametrize("window", [16, None])
def test_beside_an_encoder_a_window_may_not_fit(window):
    """B45, B84: a window that does not fit beside the encoder's blocks bounds the length as no window does."""
    h = Harness(num_blocks=6, sliding_window=window, max_encoder_len=12)
    with pytest.raises(ValueError, match="3 of them for the encoder"):
        h.add("a", prompt(20), max_tokens=2, encoder_token_ids=prompt(12))
    h.add("a", prompt(8), max_tokens=None, encoder_token_ids=prompt(12))
    for _ in range(4):
        h.step()
    h.scheduler.preempt("a")
    h.drain()
    assert h.tokens("a") == solo(prompt(8), 4, encoder=prompt(12))


def test_a_preempted_decoder_whose_prefix_and_encoder_fill_the_pool():
    """B31: preempted when it had outgrown the pool, it could not come in any more, and nobody behind it."""
    h = Harness(num_blocks=6, block_size=2, max_encoder_len=8, max_num_batched_tokens=9)
    h.add("a", prompt(2), max_tokens=20, encoder_token_ids=prompt(7))
    while h.engine.has_unfinished():
        h.step()
        h.scheduler.preempt("a")
    assert h.tokens("a") == solo(prompt(2), 2, encoder=prompt(7))


def test_samples_that_outgrew_the_pool_together_come_back_to_end():
    """B31: what they hold at their present length is more than there is, so they cannot wait for that."""
    h = Harness(num_blocks=6, block_size=2, enable_prefix_caching=False)
    group = h.add("a", prompt(2), max_tokens=9, n=3).group
    h.step_until(lambda: group.seqs[0].num_output_tokens == 3)
    h.scheduler.preempt("a")
    h.add("behind", prompt(3, 50), max_tokens=2)
    h.drain(max_steps=30)
    assert [h.tokens("a", i) for i in range(3)] == [solo(prompt(2), 3, i) for i in range(3)]
    assert group.state is SequenceStatus.FINISHED_LENGTH
    assert h.tokens("behind") == solo(prompt(3, 50), 2)


@pytest.mark.parametrize("offset", [0, 5])
def test_a_span_that_must_stay_whole_and_exceeds_the_pool_is_refused(offset):
    """B54, B62: with a window the prompt may be longer than the pool, a span that must stay whole may not."""
    h = Harness(num_blocks=6, sliding_window=8, is_multi_modal=True)
    span = MultiModalSpan(offset, 40, b"x" * 16, is_whole=True)
    with pytest.raises(ValueError, match="multi_modal_spans: expected spans that fit into 6 bl"):
        h.add("a", [1] * 50, multi_modal_spans=[span])
    h.add("a", [1] * 50, multi_modal_spans=[MultiModalSpan(offset, 13, b"x" * 16, is_whole=True)])
    h.drain()
    assert h.finished["a"].group.seqs[0].num_output_tokens == 8


@pytest.mark.parametrize("penalty", [400.0, -400.0, 33, float("nan")])
def test_a_length_penalty_beyond_every_float_is_refused(penalty):
    with pytest.raises(ValueError, match="length_penalty: expected a number in"):
        SamplingParams(use_beam_search=True, best_of=2, temperature=0, length_penalty=penalty)


@pytest.mark.parametrize("penalty", [32.0, -32.0])
def test_the_largest_length_penalties_work(penalty):
    h = Harness()
    params = SamplingParams(
        use_beam_search=True, best_of=2, temperature=0, length_penalty=penalty, max_tokens=200
    )
    h.add("a", prompt(6), params=params)
    h.drain()
    assert h.finished["a"].group.seqs[0].status is SequenceStatus.FINISHED_LENGTH


def test_an_adapter_name_that_cannot_be_encoded_is_refused():
    """It would fail in the middle of a step, for everyone."""
    with pytest.raises(ValueError, match="lora_name: expected a printable name"):
        LoRARequest("\ud800", 1)


def test_results_without_all_log_probabilities_are_refused_before_anything_changes():
    h = Harness()
    execute = h.runner.execute

    def cut(*args, **kwargs):
        out = execute(*args, **kwargs)
        return SamplerOutput(out.token_ids, out.logprobs[:-1])

    h.runner.execute = cut
    h.add("a", prompt(5))
    h.add("b", prompt(6))
    with pytest.raises(ValueError, match="outputs: expected 2 tokens and log probabilities"):
        h.step()
    h.runner.execute = execute
    h.drain()
    assert h.tokens("a") == solo(prompt(5), 8) and h.tokens("b") == solo(prompt(6), 8)


@pytest.mark.parametrize("first_steps", [0, 1, 3], ids=["prefill", "decode", "decodes"])
def test_a_write_back_that_fails_half_way_loses_nothing(monkeypatch, first_steps):
    """After a prefill, or after the tokens of plain decodes have been written."""
    from octavo.scheduler import write_back
    from octavo.scheduler.decode_batch import DecodeBatch

    h = Harness()
    h.add("a", prompt(5))
    h.add("b", prompt(6))
    for _ in range(first_steps):
        h.step()
    write, append = write_back._write_samples, DecodeBatch.append

    def fail_for_b(scheduler, row, *drawn):
        if row.group.request_id == "b":
            raise OSError("interrupted")
        write(scheduler, row, *drawn)

    def fail_after(batch, *drawn):
        append(batch, *drawn)
        raise OSError("interrupted")

    monkeypatch.setattr(write_back, "_write_samples", fail_for_b)
    monkeypatch.setattr(DecodeBatch, "append", fail_after)
    with pytest.raises(OSError, match="interrupted"):
        h.step()
    monkeypatch.undo()
    h.drain()
    assert h.tokens("a") == solo(prompt(5), 8) and h.tokens("b") == solo(prompt(6), 8)


def test_who_ends_in_a_write_back_that_fails_half_way_is_told_so(monkeypatch):
    from octavo.scheduler import write_back

    h = Harness()
    h.add("a", prompt(5), max_tokens=1)
    h.add("b", prompt(6))
    write = write_back._write_samples

    def fail_for_b(scheduler, row, *drawn):
        if row.group.request_id == "b":
            raise OSError("interrupted")
        write(scheduler, row, *drawn)

    monkeypatch.setattr(write_back, "_write_samples", fail_for_b)
    with pytest.raises(OSError, match="interrupted"):
        h.step()
    monkeypatch.undo()
    h.drain()
    assert h.tokens("a") == solo(prompt(5), 1) and h.tokens("b") == solo(prompt(6), 8)


def test_lists_of_several_lengths_are_refused_by_name():
    with pytest.raises(ValueError, match="prompt_token_ids: expected a flat list"):
        Harness().add("a", [[1], [1, 2]])


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_reserve_preempts_nobody_after_a_preemption_that_was_asked_for(mode):
    """Who comes back is told apart from who fits now: the others must not run out of blocks later."""
    for seed in range(400):
        rng = random.Random(seed)
        h = Harness(
            num_blocks=rng.randint(14, 26),
            block_size=1,
            admission="reserve",
            max_num_seqs=4,
            max_num_batched_tokens=rng.choice([5, 6, 12]),
            preemption_mode=mode,
            num_cpu_blocks=60,
            enable_prefix_caching=False,
        )
        for number in range(6):
            length, n = rng.randint(1, 5), rng.choice([1, 1, 2])
            longest = rng.randint(1, 9 if n == 1 else 4)
            h.add(str(number), prompt(length, number * 50 + 1), max_tokens=longest, n=n)
        asked = 0
        while h.engine.has_unfinished():
            h.step()
            if h.scheduler.running and rng.random() < 0.15:
                h.scheduler.preempt(rng.choice(h.scheduler.running).request_id)
                asked += 1
        assert sum(r.group.metrics.num_preemptions for r in h.finished.values()) == asked, seed


def test_reserve_counts_what_a_window_holds():
    h = Harness(num_blocks=6, sliding_window=5, admission="reserve", max_num_batched_tokens=8)
    h.add("a", prompt(6), max_tokens=60)
    h.drain()
    assert h.tokens("a") == solo(prompt(6), 60)


def test_prompts_first_do_not_keep_a_decode_waiting_for_ever():
    h = Harness(order="prefill-first", max_num_batched_tokens=8, max_num_seqs=8)
    h.add("old", prompt(4), max_tokens=6)
    h.step()
    for number in range(20):
        h.add(str(number), prompt(8, 10 + number), max_tokens=1)
        h.step()
    assert h.tokens("old") == solo(prompt(4), 6)
    h.drain()


def test_nobody_makes_way_when_the_prefix_they_hold_is_what_is_wanted():
    """Blocks that the urgent request would take from the victim's prefix are not room for the rest of it."""
    h = Harness(policy="priority", num_blocks=10)
    h.add("keep", prompt(14, 200), max_tokens=3, priority=-9)
    h.add("victim", prompt(20), max_tokens=4, priority=5)
    h.step()
    h.add("urgent", prompt(20) + prompt(12, 500), max_tokens=2)
    h.step()
    assert [group.request_id for group in h.scheduler.running] == ["keep", "victim"]
    h.drain()
    assert all(r.group.metrics.num_preemptions == 0 for r in h.finished.values())
    assert h.tokens("urgent") == solo(prompt(20) + prompt(12, 500), 2)


def test_beams_that_change_places_raise_the_generation():
    """A snapshot made before must not be launched any more, whether or not a block is copied."""
    h = Harness(block_size=1)
    params = SamplingParams(use_beam_search=True, best_of=3, temperature=0, max_tokens=8)
    group = h.add("a", prompt(5), params=params).group
    h.step()
    for _ in range(5):
        before = group.generation_id
        h.step()
        assert group.generation_id > before


def test_enough_continuations_remain_when_all_the_best_ones_end():
    """Two end tokens: the best two of each beam may end, and `width` have to be left."""
    logprobs = np.array([[-0.1, -0.2, -1.0, -2.0, -3.0, -4.0], [-0.3, -0.4, -1.5, -2.5, -3.5, -9]])
    tokens = np.array([[7, 8, 1, 2, 3, 4], [8, 7, 1, 2, 3, 4]])
    going, ending = beam_search.choose([0.0, 0.0], tokens, logprobs, frozenset({7, 8}), False, 2)
    assert [(step.parent, step.token_id) for step in ending] == [(0, 7), (0, 8)]
    assert [(step.parent, step.token_id) for step in going] == [(0, 1), (1, 1)]


def test_a_preempted_request_comes_back_for_good():
    """B42: it waits until all it had computed fits, instead of being preempted chunk by chunk."""
    h = Harness(
        num_blocks=10, max_num_batched_tokens=5, enable_prefix_caching=False, max_num_seqs=4
    )
    h.add("first", prompt(6), max_tokens=28)
    h.add("second", prompt(14, 50), max_tokens=16)
    h.drain()
    assert h.finished["second"].group.metrics.num_preemptions == 1


def test_the_watermark_stays_free_while_others_run():
    h = Harness(num_blocks=20, watermark=0.25)
    h.add("first", prompt(6), max_tokens=4)
    h.step()
    h.add("second", prompt(56, 50), max_tokens=2)
    h.step()
    assert [group.request_id for group in h.scheduler.running] == ["first"]
    h.step_until(lambda: "first" in h.finished)
    h.step()
    assert h.scheduler.running[0].request_id == "second"
    h.drain()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"request_id": 3}, "request_id: expected text"),
        ({"encoder_token_ids": [0.5]}, "encoder_token_ids: expected a flat list"),
        ({"encoder_token_ids": [2**40]}, "encoder_token_ids: expected 32-bit"),
        ({"prompt": [2**40]}, "prompt_token_ids: expected 32-bit"),
    ],
)
def test_bad_arguments_are_refused_by_their_own_name(arguments, message):
    h = Harness(max_encoder_len=8)
    with pytest.raises(ValueError, match=message):
        h.add(**({"request_id": "r", "prompt": [1, 2]} | arguments))
    assert not h.engine.has_unfinished()


@pytest.mark.parametrize("field", ["enable_prefix_caching", "is_multi_modal", "sliding_window"])
def test_flags_are_flags_and_numbers_are_numbers(field):
    value = True if field == "sliding_window" else 1
    with pytest.raises(ValueError, match=field):
        SchedulerConfig(num_gpu_blocks=8, **{field: value})
