"""Preemption by moving a request's blocks to host memory, and back."""

from __future__ import annotations

import pytest

from octavo.runtime.params import SamplingParams
from octavo.scheduler import SequenceGroup, SequenceStatus
from octavo.tests.scheduler.harness import Harness
from octavo.tests.scheduler.shadow import solo

PROMPT = list(range(1, 11))
SWAPPED, WAITING = SequenceStatus.SWAPPED, SequenceStatus.WAITING


def swapping(**config) -> Harness:
    """Blocks of 4; a request of three samples that has computed its prompt of two and a half blocks."""
    h = Harness(num_blocks=32, num_cpu_blocks=16, **config)
    h.add("r", PROMPT, max_tokens=12, n=3)
    for _ in range(3):
        h.step()
    return h


def answers(h: Harness, name: str = "r", n: int = 3, max_tokens: int = 12) -> None:
    got = [seq.output_token_ids.tolist() for seq in h.finished[name].group.seqs]
    assert got == [solo(PROMPT, max_tokens, index) for index in range(n)]


def test_a_group_is_swapped_as_a_whole_and_shared_blocks_once():
    """B89, B36, article 2.3: five blocks, two of them shared by three samples."""
    h = swapping()
    group = h.scheduler.running[0]
    assert h.num_used_blocks == 5
    h.scheduler.preempt("r")
    assert group.state is SWAPPED and all(seq.status is SWAPPED for seq in group.live)
    assert h.num_used_blocks == 0 and h.blocks.host.num_used == 5
    for seq in group.live:
        assert not h.blocks.has_table(seq.seq_id) and h.blocks.has_host_table(seq.seq_id)
    h.step()  # out, and nothing else: no step swaps both ways
    assert h.runner.num_moves["out"] == 5 and h.runner.num_moves["in"] == 0
    h.step()
    assert h.runner.num_moves["in"] == 5
    for seq in group.live:
        assert h.blocks.has_table(seq.seq_id) and not h.blocks.has_host_table(seq.seq_id)
    assert h.blocks.host.num_used == 0
    h.drain()
    answers(h)


def test_swapping_raises_the_generation_both_ways():
    h = swapping()
    group = h.scheduler.running[0]
    before = group.generation_id
    h.scheduler.preempt("r")
    out = group.generation_id
    h.step()
    h.step()
    assert before < out < group.generation_id


@pytest.mark.parametrize(("mode", "swaps"), [("auto", False), ("swap", True), ("recompute", False)])
def test_one_sequence_is_swapped_when_that_is_asked_for(mode, swaps):
    h = Harness(num_blocks=32, num_cpu_blocks=16, preemption_mode=mode)
    h.add("r", PROMPT, max_tokens=6)
    h.step()
    h.scheduler.preempt("r")
    assert h.scheduler.stats().num_swapped_out == swaps
    assert h.scheduler.groups[0].state is (SWAPPED if swaps else WAITING)
    h.drain()
    answers(h, n=1, max_tokens=6)


def test_a_full_host_pool_makes_it_recompute_for_that_group_alone():
    """B32, B33: the second group finds no room on the host; nobody else notices."""
    h = Harness(num_blocks=40, num_cpu_blocks=6)
    for name in "rs":
        h.add(name, PROMPT, max_tokens=12, n=3)
    h.add("alone", PROMPT[:5], max_tokens=20)
    for _ in range(3):
        h.step()
    h.scheduler.preempt("r")
    h.scheduler.preempt("s")
    states = {group.request_id: group.state for group in h.scheduler.groups}
    assert states["r"] is SWAPPED and states["s"] is WAITING
    h.drain()
    answers(h, "r")
    answers(h, "s")
    assert h.tokens("alone") == solo(PROMPT[:5], 20)
    assert h.finished["alone"].group.metrics.num_preemptions == 0
    assert h.blocks.host.num_used == 0


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_abort_of_a_swapped_group_returns_its_blocks(steps):
    """B34, B63: before the blocks have left, when they have, and when they are back."""
    h = swapping()
    h.scheduler.preempt("r")
    for _ in range(steps):
        h.step()
    h.engine.abort("r")
    h.drain()
    assert h.blocks.host.num_used == 0 and h.num_used_blocks == 0
    assert h.runner.num_moves["out"] == (5 if steps else 0)


def test_host_blocks_of_an_aborted_swap_go_to_the_next_one():
    h = swapping()
    h.add("s", PROMPT[:9], max_tokens=12, n=2)
    h.step()
    h.scheduler.preempt("r")
    h.engine.abort("r")
    h.scheduler.preempt("s")
    h.drain()
    got = [seq.output_token_ids.tolist() for seq in h.finished["s"].group.seqs]
    assert got == [solo(PROMPT[:9], 12, index) for index in range(2)]


@pytest.mark.parametrize("moved", [False, True])
def test_a_step_that_fails_makes_its_swaps_worthless(moved):
    """Whether the blocks have moved is not known, so their tokens are computed again."""
    h = swapping()
    execute = h.runner.execute

    def fail(*args, **kwargs):
        if moved:
            execute(*args, **kwargs)
        raise OSError("no luck")

    h.scheduler.preempt("r")
    h.runner.execute = fail
    with pytest.raises(OSError, match="no luck"):
        h.step()
    assert h.scheduler.groups[0].state is WAITING and h.blocks.host.num_used == 0
    h.runner.execute = execute
    h.drain()
    answers(h)


def test_a_swapped_group_that_outgrew_the_pool_ends_with_what_it_has():
    """B31, B34: nothing hangs and no block of it stays anywhere."""
    h = Harness(num_blocks=6, num_cpu_blocks=16, preemption_mode="swap")
    group = h.add("r", PROMPT[:8], max_tokens=100, n=2).group
    h.step_until(lambda: group.seqs[0].num_tokens == 17)
    h.scheduler.preempt("r")
    assert group.state is SWAPPED
    h.drain()
    request = h.finished["r"].group
    assert all(seq.status is SequenceStatus.FINISHED_LENGTH for seq in request.seqs)
    lengths = [seq.num_tokens for seq in request.seqs]
    assert lengths == [17, 17], "2 shared blocks and 2 of each: 16 tokens fed, one more drawn"
    assert h.blocks.host.num_used == 0


def test_a_swapped_group_takes_no_seats():
    """B44: as many as it needs are there, unless its own count against it."""
    h = Harness(num_blocks=32, num_cpu_blocks=16, max_num_seqs=3)
    h.add("r", PROMPT, max_tokens=6, n=3)
    h.step()
    h.scheduler.preempt("r")
    assert h.scheduler.running == []
    h.drain(max_steps=20)
    answers(h, max_tokens=6)


@pytest.mark.parametrize("fails", [False, True])
def test_what_comes_back_is_found_by_others_too(fails):
    """B37: its blocks were evicted while it was away, and are known again, as if it had never left; unless they did not
    come."""
    h = Harness(num_blocks=8, num_cpu_blocks=8, preemption_mode="swap")
    h.add("r", PROMPT[:9], max_tokens=12)
    for _ in range(4):
        h.step()
    h.scheduler.preempt("r")
    h.step()
    h.blocks.reset_prefix_cache()
    if fails:
        execute = h.runner.execute
        h.runner.execute = None
        with pytest.raises(TypeError):
            h.step()
        h.runner.execute = execute
        assert h.blocks.device.num_cached == 0
    h.drain()
    longer = PROMPT[:9] + h.tokens("r")
    h.add("s", longer, max_tokens=1)
    h.drain()
    assert h.finished["s"].group.metrics.num_cached_tokens == 20
    assert h.tokens("s") == solo(longer, 1)


def catching_up(n: int, **config) -> tuple[Harness, SequenceGroup]:
    """`n` samples of 6 + 1 tokens have given up their blocks, which happens while a step is in flight."""
    h = Harness(
        block_size=1,
        num_cpu_blocks=40,
        preemption_mode="swap",
        max_num_batched_tokens=8,
        max_num_seqs=8,
        enable_prefix_caching=False,
        **config,
    )
    if "num_blocks" in config:
        h.add("older", [100], max_tokens=30)
        h.step()
    group = h.add("r", PROMPT[:6], max_tokens=8, n=n).group
    h.step_until(lambda: len(group.seqs) == n)
    launch = h.runner.launch

    def then_preempted(*args, **kwargs):
        launched = launch(*args, **kwargs)
        h.scheduler.preempt("r")
        return launched

    h.runner.launch = then_preempted
    h.step()
    h.runner.launch = launch
    assert group.state is WAITING
    return h, group


@pytest.mark.parametrize("event", ["nothing", "fail", "abort"])
def test_a_group_that_comes_back_and_feeds_nothing_yet(event):
    """The others share all that its leader has computed and brought back, so that all could go on at once, for which the
    step has no tokens left. If the step fails nobody has filled its blocks."""
    h, group = catching_up(3)
    h.add("other", list(range(50, 67)), max_tokens=3)  # in chunks of 2, 8 and 7 tokens
    h.step()
    assert [seq.num_computed_tokens for seq in group.seqs] == [6, 0, 0]
    h.scheduler.preempt("r")
    h.step()
    execute, launch, rows = h.runner.execute, h.runner.launch, []

    def noted(metadata_list, **kwargs):
        rows.extend(metadata.request_id for metadata in metadata_list)
        if event == "fail":
            raise OSError("no luck")
        return execute(metadata_list, **kwargs)

    def aborted(*args, **kwargs):
        launched = launch(*args, **kwargs)
        if event == "abort":
            before = h.num_used_blocks
            h.engine.abort("r")
            assert h.num_used_blocks == before, "the step fills them"
        return launched

    h.runner.execute, h.runner.launch = noted, aborted
    if event == "fail":
        with pytest.raises(OSError, match="no luck"):
            h.step()
        assert group.state is WAITING
    else:
        h.step()
        assert h.runner.num_moves["in"] == 6
    assert rows == ["other"]
    h.runner.execute, h.runner.launch = execute, launch
    h.drain()
    assert h.tokens("other") == solo(list(range(50, 67)), 3)
    if event != "abort":
        got = [seq.output_token_ids.tolist() for seq in group.seqs]
        assert got == [solo(PROMPT[:6], 8, index) for index in range(3)]


def test_a_step_that_brings_a_group_back_and_nothing_else():
    """Its leader's six blocks fit, one more for each of four samples does not: it ends with what it has."""
    h, group = catching_up(4, num_blocks=9)
    h.engine.abort("older")
    h.step_until(lambda: group.seqs[0].num_computed_tokens == 6)
    h.scheduler.preempt("r")
    h.drain(max_steps=6)
    assert h.runner.num_moves["in"] == 6
    got = [seq.output_token_ids.tolist() for seq in group.seqs]
    assert got == [solo(PROMPT[:6], 1, index) for index in range(4)]
    assert group.state is SequenceStatus.FINISHED_LENGTH


def test_swapped_come_back_before_anybody_new_comes_in():
    """FCFS, with those that were preempted ahead of those who have not begun."""
    h = Harness(num_blocks=12, num_cpu_blocks=40, max_num_seqs=4)
    h.add("old", PROMPT, max_tokens=14, n=2)
    h.add("young", PROMPT[::-1], max_tokens=14, n=2)
    h.step_until(lambda: bool(h.scheduler.swapped))
    assert [group.request_id for group in h.scheduler.swapped] == ["young"]
    h.add("new", PROMPT[:3], max_tokens=2)
    h.step_until(lambda: not h.scheduler.swapped)
    assert "old" in h.finished and "new" not in h.finished
    h.drain()
    answers(h, "old", 2, 14)


def test_a_beam_search_is_swapped_with_all_its_beams():
    params = SamplingParams(use_beam_search=True, best_of=3, n=2, temperature=0, max_tokens=10)
    runs = []
    for disturbed in (False, True):
        h = Harness(num_blocks=40, num_cpu_blocks=40)
        h.add("r", PROMPT, params=params)
        for _ in range(4):
            h.step()
        if disturbed:
            h.scheduler.preempt("r")
            assert h.scheduler.groups[0].state is SWAPPED
        h.drain()
        runs.append([seq.output_token_ids.tolist() for seq in h.finished["r"].group.seqs])
    assert runs[0] == runs[1] and len(runs[0]) == 2


def test_swapped_groups_come_back_in_order_of_arrival():
    """Whatever the order in which they left."""
    h = Harness(num_blocks=40, num_cpu_blocks=40)
    for name in ("old", "young"):
        h.add(name, PROMPT, max_tokens=6, n=2)
    h.step()
    h.scheduler.preempt("young")
    h.scheduler.preempt("old")
    assert [group.request_id for group in h.scheduler.swapped] == ["old", "young"]
    h.drain()
    answers(h, "old", 2, 6)
    answers(h, "young", 2, 6)
