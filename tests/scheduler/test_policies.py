"""Who runs before whom: priorities, the two orders, admission with a reserve, places for adapters."""

from __future__ import annotations

import pytest

from octavo.runtime.params import LoRARequest, SamplingParams
from octavo.scheduler import SchedulerConfig, SequenceStatus
from octavo.tests.scheduler.harness import Harness
from octavo.tests.scheduler.shadow import solo


def prompt(length: int, start: int = 1) -> list[int]:
    return list(range(start, start + length))


def running(h: Harness) -> list[str]:
    return [group.request_id for group in h.scheduler.running]


# -- priority


@pytest.mark.parametrize("scarce", ["seats", "blocks"])
@pytest.mark.parametrize("num_cpu_blocks", [0, 40], ids=["recompute", "swap"])
def test_an_urgent_request_is_served_in_the_next_step(scarce, num_cpu_blocks):
    """B39, B40: be it seats or blocks that are missing; those who made way go on as if nothing had been."""
    limits = dict(max_num_seqs=4) if scarce == "seats" else dict(num_blocks=11)
    mode = "swap" if num_cpu_blocks else "recompute"
    h = Harness(policy="priority", num_cpu_blocks=num_cpu_blocks, preemption_mode=mode, **limits)
    for name in "abcd" if scarce == "seats" else "abc":
        h.add(name, prompt(10, ord(name)), max_tokens=5)
    for _ in range(3):
        h.step()
    h.add("urgent", prompt(9, 300), max_tokens=4, priority=-10)
    h.step()
    assert running(h)[0] == "urgent"
    assert h.scheduler.running[0].seqs[0].num_output_tokens == 1
    h.drain()
    assert h.tokens("urgent") == solo(prompt(9, 300), 4)
    victims = [
        r.group.metrics.num_preemptions for name, r in h.finished.items() if name != "urgent"
    ]
    assert sum(victims) == 1, "just enough make way, once"
    assert (h.runner.num_moves["out"] > 0) == (num_cpu_blocks > 0)
    for name in "abc":
        assert h.tokens(name) == solo(prompt(10, ord(name)), 5)


def test_the_least_urgent_makes_way_and_equals_do_not():
    h = Harness(policy="priority", max_num_seqs=3)
    for name, priority in (("b", 1), ("c", 5), ("a", 0)):
        h.add(name, prompt(5, ord(name)), max_tokens=30, priority=priority)
    h.step()
    assert running(h) == ["a", "b", "c"]
    h.add("equal", prompt(5, 400), max_tokens=3, priority=5)
    h.step()
    assert running(h) == ["a", "b", "c"]
    h.add("urgent", prompt(5, 500), max_tokens=3, priority=1)
    h.step()
    assert running(h) == ["a", "b", "urgent"]
    h.drain()


def test_nobody_makes_way_for_one_that_would_not_fit_all_the_same():
    h = Harness(policy="priority", num_blocks=12, block_size=4)
    h.add("first", prompt(30), max_tokens=16, priority=-1)
    h.add("second", prompt(6, 50), max_tokens=16, priority=1)
    h.step()
    h.add("large", prompt(30, 100), max_tokens=16)
    for _ in range(3):
        h.step()
    assert running(h) == ["first", "second"]
    assert all(group.metrics.num_preemptions == 0 for group in h.scheduler.running)
    h.drain()


@pytest.mark.parametrize(
    ("waiting", "order", "as_columns"),
    [
        (5, "decode-first", True),
        (7, "decode-first", True),
        (4, "decode-first", False),
        (5, "prefill-first", False),
    ],
)
def test_decodes_stay_columns_unless_somebody_more_urgent_waits(waiting, order, as_columns):
    """Without seats for it a queue is long, and lasts: its steps are not to cost more than those without."""
    h = Harness(policy="priority", max_num_seqs=2, order=order)
    for name, priority in (("a", 0), ("b", 5)):
        h.add(name, prompt(5, ord(name)), max_tokens=9, priority=priority)
    for _ in range(2):
        h.step()
    h.add("late", prompt(5, 400), max_tokens=3, priority=waiting)
    outputs = h.scheduler.schedule()
    decodes = outputs.seq_group_metadata_list.decodes
    assert (decodes is not None and decodes.request_ids == ["a", "b"]) == as_columns
    names = {group.request_id for group in outputs.scheduled_seq_groups}
    assert names == ({"a", "late"} if waiting == 4 else {"a", "b"})
    h.scheduler.rollback()
    h.drain()
    for name in "ab":
        assert h.tokens(name) == solo(prompt(5, ord(name)), 9)


def test_priorities_are_without_effect_first_come_first_served():
    h = Harness(max_num_seqs=1)
    h.add("first", prompt(3), max_tokens=2, priority=9)
    h.add("second", prompt(3, 9), max_tokens=2, priority=-9)
    h.drain()
    assert list(h.finished) == ["first", "second"]


@pytest.mark.parametrize("value", [1.5, "high", True, None])
def test_a_priority_is_an_integer(value):
    with pytest.raises(ValueError, match="priority: expected an integer"):
        Harness().add("r", prompt(3), priority=value)


# -- orders


def test_who_takes_from_the_budget_first():
    fed = {}
    for order in ("decode-first", "prefill-first"):
        h = Harness(order=order, max_num_batched_tokens=8, max_num_seqs=8)
        h.add("old", prompt(4), max_tokens=6)
        h.step()
        h.add("new", prompt(20, 50), max_tokens=2)
        h.step()
        fed[order] = [group.seqs[0].num_computed_tokens for group in h.scheduler.running]
        h.drain()
        assert h.tokens("old") == solo(prompt(4), 6)
    assert fed == {"decode-first": [5, 7], "prefill-first": [4, 8]}


# -- admission


def test_reserve_admits_exactly_what_will_fit():
    """Two requests whose blocks never overlap at their largest: one block less and the second waits."""
    for num_blocks, together in ((11, 2), (10, 1)):
        h = Harness(num_blocks=num_blocks, block_size=1, admission="reserve", max_num_seqs=2)
        h.add("short", prompt(4), max_tokens=3)  # at most 6 blocks, after two more steps
        h.add("long", prompt(3, 50), max_tokens=7)  # 3 + 2 then, 9 in the end
        h.step()
        assert len(running(h)) == together, num_blocks
        h.drain()
        assert h.tokens("short") == solo(prompt(4), 3) and h.tokens("long") == solo(
            prompt(3, 50), 7
        )
        assert all(r.group.metrics.num_preemptions == 0 for r in h.finished.values())


def test_reserve_counts_the_token_that_a_step_in_flight_draws():
    """Put together while that step runs, the next one feeds it: the others hold one token more than is known."""
    for num_blocks, together in ((16, 2), (15, 1)):
        h = Harness(
            num_blocks=num_blocks,
            block_size=1,
            admission="reserve",
            async_scheduling=True,
            enable_prefix_caching=False,
        )
        h.add("long", prompt(3, 50), max_tokens=12)
        for _ in range(3):
            h.step()
        # in the steps to come: 7, 8, 9 blocks, and 5, 6, 7
        h.add("short", prompt(5), max_tokens=3)
        h.step()
        assert h.runner.num_ahead >= 3 and len(running(h)) == together, num_blocks
        h.drain()
        assert all(r.group.metrics.num_preemptions == 0 for r in h.finished.values())


def test_reserve_refuses_what_could_never_run():
    h = Harness(num_blocks=8, block_size=4, admission="reserve")
    with pytest.raises(ValueError, match="may come to hold 9 blocks, the KV pool has 8"):
        h.add("r", prompt(5), max_tokens=8, n=4)
    h.add("r", prompt(5), max_tokens=8, n=3)
    h.drain()


def test_reserve_needs_decodes_to_advance():
    with pytest.raises(ValueError, match="order: expected 'decode-first'"):
        SchedulerConfig(num_gpu_blocks=8, admission="reserve", order="prefill-first")


# -- adapters


def lora(number: int) -> LoRARequest:
    return LoRARequest(f"adapter-{number}", number)


def test_no_step_uses_more_adapters_than_there_are_places_for():
    h = Harness(max_loras=2)
    for number in range(1, 6):
        h.add(f"r{number}", prompt(5), max_tokens=3, lora_request=lora(number))
    h.add("plain", prompt(5), max_tokens=3)
    seen = []
    while h.engine.has_unfinished():
        h.step()
        seen.append(running(h))
        used = {group.lora_request for group in h.scheduler.running} - {None}
        assert len(used) <= 2
    assert "plain" in seen[0], "who needs no adapter does not wait for one"
    for number in range(1, 6):
        assert h.tokens(f"r{number}") == solo(prompt(5), 3, lora=lora(number))


def test_an_adapter_in_use_cannot_be_kept_in_use_for_ever():
    """A steady stream for one adapter does not overtake a request for another."""
    h = Harness(max_loras=1, max_num_seqs=4)
    h.add("a0", prompt(5), max_tokens=6, lora_request=lora(1))
    h.step()
    h.add("other", prompt(5), max_tokens=2, lora_request=lora(2))
    for number in range(1, 40):
        h.add(f"a{number}", prompt(5), max_tokens=6, lora_request=lora(1))
        h.step()
        if "other" in h.finished:
            break
    assert "other" in h.finished and number < 12
    h.drain()


def test_an_adapter_is_refused_where_none_is_loaded():
    with pytest.raises(ValueError, match="lora_request: expected None"):
        Harness().add("r", prompt(3), lora_request=lora(1))
    for bad in (dict(lora_name=""), dict(lora_int_id=0), dict(lora_path=3)):
        with pytest.raises(ValueError, match=next(iter(bad))):
            LoRARequest(**(dict(lora_name="a", lora_int_id=1) | bad))


def test_adapters_do_not_share_prefixes():
    """The same adapter loaded again is another one."""
    h = Harness(max_loras=4)
    for name, request in (("a", lora(1)), ("b", LoRARequest("adapter-1", 2)), ("c", None)):
        h.add(name, prompt(12), max_tokens=2, lora_request=request)
        h.drain()
        assert h.finished[name].group.metrics.num_cached_tokens == 0
    h.add("again", prompt(12), max_tokens=2, lora_request=lora(1))
    h.drain()
    assert h.finished["again"].group.metrics.num_cached_tokens == 8


# -- more samples than are returned


def test_the_likeliest_of_more_samples_are_returned():
    h = Harness()
    execute = h.runner.execute
    values = iter([-5.0, -1.0, -3.0] * 10)

    def likely(*args, **kwargs):
        outputs = execute(*args, **kwargs)
        outputs.logprobs[:] = [next(values) for _ in outputs.logprobs]
        return outputs

    h.runner.execute = likely
    request = h.add("r", prompt(5), params=SamplingParams(n=2, best_of=3, max_tokens=2))
    h.drain()
    got = request.output().outputs
    assert [output.cumulative_logprob for output in got] == [-2.0, -6.0]
    assert [output.index for output in got] == [0, 1]
    assert got[0].token_ids == solo(prompt(5), 2, 1)
    assert request.group.state is SequenceStatus.FINISHED_LENGTH
