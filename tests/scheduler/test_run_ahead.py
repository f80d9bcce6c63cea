"""Steps that are put together while the last one runs: same tokens, nothing leaks, nothing is given away too early."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest

from octavo.runtime.metadata import SamplerOutput, StaleMetadataError
from octavo.runtime.params import SamplingParams
from octavo.scheduler import Engine
from octavo.tests.scheduler.harness import Harness
from octavo.tests.scheduler.shadow import solo


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * i) % 997 for i in range(length)]


class Journal:
    """Notes when steps are launched and when their results are asked for."""

    def __init__(self, h: Harness) -> None:
        self.events: list[str] = []
        self.rows: list[list[str]] = []
        launch = h.runner.launch

        def noted(metadata_list, **kwargs):
            launched = launch(metadata_list, **kwargs)
            number = len(self.rows)
            self.rows.append([metadata.request_id for metadata in metadata_list])
            self.events.append(f"launch {number}")
            result = launched.result

            def asked() -> SamplerOutput:
                self.events.append(f"result {number}")
                return result()

            launched.result = asked
            return launched

        h.runner.launch = noted


def test_the_next_step_is_launched_before_the_last_ones_result_is_asked_for():
    h = Harness(async_scheduling=True)
    journal = Journal(h)
    h.add("a", prompt(3), max_tokens=4)
    h.drain()
    assert journal.events == [
        "launch 0", "launch 1", "result 0", "launch 2", "result 1", "launch 3", "result 2", "result 3",
    ]  # fmt: skip
    assert h.tokens("a") == solo(prompt(3), 4)


def test_without_it_every_result_is_asked_for_first():
    h = Harness()
    journal = Journal(h)
    h.add("a", prompt(3), max_tokens=2)
    h.drain()
    assert journal.events == ["launch 0", "result 0", "launch 1", "result 1"]


def test_what_is_known_to_end_by_length_is_not_run_in_vain():
    h = Harness(async_scheduling=True)
    journal = Journal(h)
    h.add("a", prompt(3), max_tokens=2)
    h.add("b", prompt(3, 5), max_tokens=5)
    h.drain()
    assert journal.rows == [["a", "b"], ["a", "b"], ["b"], ["b"], ["b"]]
    assert h.tokens("a") == solo(prompt(3), 2) and h.tokens("b") == solo(prompt(3, 5), 5)


def test_a_token_that_ends_a_request_leaves_the_next_step_without_use_for_it():
    """The row after it is computed in vain; its blocks are free when that is over, and not before."""
    answer = solo(prompt(3), 9)
    h = Harness(async_scheduling=True)
    journal = Journal(h)
    h.add("a", prompt(3), params=SamplingParams(max_tokens=9, stop_token_ids=[answer[2]]))
    while "a" not in h.finished:
        h.step()
    assert h.tokens("a") == answer[:3]
    assert len(journal.rows) == 4  # one more than it has tokens
    assert h.num_used_blocks > 0 and h.engine.has_unfinished()
    assert h.step() == []
    assert h.num_used_blocks == 0 and not h.engine.has_unfinished()


@pytest.mark.parametrize("block_size", [1, 4])
def test_blocks_that_generated_tokens_fill_are_known_once_the_tokens_are(block_size):
    """The digest of a block needs the ids that its step only draws: another request finds them all the same."""
    answer = solo(prompt(4), 9)
    for ahead in (False, True):
        h = Harness(async_scheduling=ahead, block_size=block_size)
        h.add("a", prompt(4), max_tokens=9)
        h.drain()
        h.add("b", prompt(4) + answer, max_tokens=3)
        h.drain()
        assert h.finished["b"].group.metrics.num_cached_tokens == 12
        assert h.tokens("b") == solo(prompt(4) + answer, 3)


@pytest.mark.parametrize("event", ["abort", "preempt"])
def test_blocks_named_by_two_steps_wait_for_the_second(event):
    """B85. And what both of them draw for it is dropped."""
    h = Harness(async_scheduling=True, num_blocks=12)
    group = h.add("a", prompt(9), max_tokens=9).group
    other = h.add("b", prompt(9, 400), max_tokens=9).group
    h.step()
    h.step()
    scheduler = h.scheduler
    outputs = scheduler.schedule_ahead()  # what the engine does before it asks for the last result
    assert outputs is not None and len(scheduler.flight) == 2
    first = outputs.seq_group_metadata_list[0]
    assert first.request_id == "a"
    [(_, _, table)] = first.rows()
    named = table.tolist()
    getattr(scheduler, event)("a")
    used = scheduler.blocks.ref_count
    for tokens in ([1, 1], [1, 1]):
        assert all(used[block] for block in named)
        num_tokens = group.seqs[0].num_tokens
        drawn = SamplerOutput(np.array(tokens), np.zeros(2, np.float32))
        assert scheduler.update(drawn) == [other]
        assert group.seqs[0].num_tokens == num_tokens
        scheduler.check_invariants()
    assert not any(used[block] for block in named)


@pytest.mark.parametrize("event", ["abort", "preempt"])
def test_blocks_named_by_the_first_of_two_steps_wait_for_it(event):
    """The second one leaves out who ends by length in the first."""
    h = Harness(async_scheduling=True, enable_prefix_caching=False)
    group = h.add("a", prompt(9), max_tokens=2).group
    h.add("b", prompt(9, 400), max_tokens=9)
    h.scheduler.schedule()
    h.scheduler.update(SamplerOutput(np.array([1, 1]), np.zeros(2, np.float32)))
    h.scheduler.schedule()
    named = h.blocks.table(group.seqs[0].seq_id).tolist()
    outputs = h.scheduler.schedule_ahead()
    assert outputs is not None
    assert [m.request_id for m in outputs.seq_group_metadata_list] == ["b"]
    getattr(h.scheduler, event)("a")
    assert all(h.blocks.ref_count[block] for block in named)
    h.scheduler.update(SamplerOutput(np.array([1, 1]), np.zeros(2, np.float32)))
    h.scheduler.update(SamplerOutput(np.array([1]), np.zeros(1, np.float32)))
    assert group.seqs[0].num_tokens == 10
    assert not any(h.blocks.ref_count[block] for block in named)


def test_what_leaves_the_window_waits_for_the_step_that_sees_it():
    """The step in flight feeds the whole prompt, the one after it sees its end alone."""
    h = Harness(async_scheduling=True, block_size=1, sliding_window=4, enable_prefix_caching=False)
    group = h.add("a", prompt(9), max_tokens=5).group
    h.scheduler.schedule()
    named = h.blocks.table(group.seqs[0].seq_id).tolist()
    assert h.scheduler.schedule_ahead() is not None
    assert all(h.blocks.ref_count[block] for block in named)
    h.scheduler.update(SamplerOutput(np.array([1]), np.zeros(1, np.float32)))
    assert [h.blocks.ref_count[block] for block in named] == [0] * 6 + [1] * 3


def test_a_third_step_is_not_put_together():
    h = Harness(async_scheduling=True)
    h.add("a", prompt(3), max_tokens=9)
    assert h.scheduler.schedule_ahead() is None, "nothing is in flight"
    h.scheduler.schedule()
    assert h.scheduler.schedule_ahead() is not None
    assert h.scheduler.schedule_ahead() is None
    with pytest.raises(RuntimeError, match="in flight"):
        h.scheduler.schedule()
    h.scheduler.rollback()
    h.drain()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=2, max_tokens=6),
        SamplingParams(use_beam_search=True, n=2, temperature=0, max_tokens=6),
    ],
    ids=["samples", "beams"],
)
def test_what_branches_is_waited_for(params):
    h = Harness(async_scheduling=True)
    h.add("a", prompt(5), params=params)
    h.add("b", prompt(5, 300), max_tokens=6)
    h.drain()
    assert h.runner.num_ahead == 0, "somebody always has to see what was drawn"
    assert h.tokens("b") == solo(prompt(5, 300), 6)


def test_prefills_go_on_while_others_decode_ahead():
    h = Harness(async_scheduling=True, max_num_batched_tokens=8)
    h.add("a", prompt(3), max_tokens=30)
    h.add("b", prompt(40, 300), max_tokens=4)
    h.drain()
    assert h.tokens("a") == solo(prompt(3), 30) and h.tokens("b") == solo(prompt(40, 300), 4)
    assert h.runner.num_ahead == 29 + 3


def test_without_a_block_for_everybody_the_last_tokens_are_written_back_first():
    """Two need one in the same step: whom it is taken from may not be in a step in flight."""
    for num_blocks, ahead in ((4, True), (3, False)):
        h = Harness(async_scheduling=True, num_blocks=num_blocks, enable_prefix_caching=False)
        h.add("a", prompt(3), max_tokens=4)
        h.add("b", prompt(3, 400), max_tokens=4)
        h.scheduler.schedule()
        h.scheduler.update(SamplerOutput(np.array([1, 1]), np.zeros(2, np.float32)))
        h.scheduler.schedule()
        assert (h.scheduler.schedule_ahead() is not None) == ahead
        h.scheduler.rollback()
        h.drain()


def test_a_step_in_flight_is_waited_for_before_its_blocks_are_given_up():
    """The one after it cannot be launched; until the first is over it may still write."""
    h = Harness(async_scheduling=True)
    journal = Journal(h)
    h.add("a", prompt(3), max_tokens=6)
    h.step()
    launch, rollback = h.runner.launch, h.scheduler.rollback

    def fails(*args, **kwargs):
        raise OSError("no launch")

    def noted():
        journal.events.append("rollback")
        rollback()

    h.runner.launch, h.scheduler.rollback = fails, noted
    with pytest.raises(OSError, match="no launch"):
        h.step()
    assert journal.events[-2:] == ["result 1", "rollback"]
    h.runner.launch = launch
    h.drain()
    assert h.tokens("a") == solo(prompt(3), 6)


def test_a_step_that_fails_takes_the_one_after_it_along():
    h = Harness(async_scheduling=True)
    h.add("a", prompt(3), max_tokens=6)
    launch, broken = h.runner.launch, [2]

    def fails(metadata_list, **kwargs):
        launched = launch(metadata_list, **kwargs)
        broken[0] -= 1
        if broken[0] == 0:
            launched.failure = OSError("the device is gone")
        return launched

    h.runner.launch = fails
    h.step()
    with pytest.raises(OSError, match="device is gone"):
        h.step()
    assert not h.scheduler.flight and h.num_used_blocks == 0
    h.drain()
    assert h.tokens("a") == solo(prompt(3), 6)


@pytest.mark.parametrize("ahead", [False, True], ids=["serial", "overlapped"])
def test_a_stale_snapshot_is_never_launched(ahead):
    """Another thread preempts somebody between each snapshot and its launch, for 10,000 steps."""
    h = Harness(async_scheduling=ahead, num_blocks=40, max_num_batched_tokens=16)
    h.engine = Engine(h.scheduler, h.runner, async_scheduling=ahead)  # checks are for fewer steps
    jobs: queue.Queue = queue.Queue()
    done: queue.Queue = queue.Queue()

    def preempts() -> None:
        while (victim := jobs.get()) is not None:
            done.put(h.scheduler.preempt(victim))

    thread = threading.Thread(target=preempts)
    thread.start()
    num_steps = num_stale = num_launched = num_added = 0
    launch = h.runner.launch

    def raced(metadata_list, **kwargs):
        nonlocal num_steps, num_stale, num_launched
        num_steps += 1
        if num_steps % 3 == 0:
            names = [metadata.request_id for metadata in metadata_list]
            jobs.put(names[num_steps % len(names)])
            done.get()
        current = kwargs["generation_of"]
        for metadata in metadata_list:
            if current(metadata.request_id) != metadata.generation_id:
                num_stale += 1
                raise StaleMetadataError(metadata.request_id, metadata.generation_id, None)
        num_launched += 1
        return launch(metadata_list, **kwargs)  # reads every row's KV, and asserts its version

    h.runner.launch = raced
    try:
        while num_steps < 10_000 or h.engine.has_unfinished():
            if num_steps < 10_000 and len(h.scheduler.groups) < 3:
                h.add(f"r{num_added}", prompt(4, num_added % 90), max_tokens=5)
                num_added += 1
            h.step()
    finally:
        jobs.put(None)
        thread.join()
    assert num_stale > 2000 and num_launched > 5000
    assert h.num_used_blocks == 0 and len(h.finished) == num_added
    for number in range(num_added):
        assert h.tokens(f"r{number}") == solo(prompt(4, number % 90), 5)
