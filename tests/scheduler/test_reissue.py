"""Snapshots that go stale between schedule and launch: their rows are left out, and nobody else loses anything."""

from __future__ import annotations

import pytest

from octavo.runtime.metadata import StaleMetadataError
from octavo.runtime.params import SamplingParams
from octavo.scheduler import SequenceStatus
from octavo.tests.scheduler.harness import Harness
from octavo.tests.scheduler.shadow import solo


def prompt(length: int, start: int = 1) -> list[int]:
    return list(range(start, start + length))


class Overtaken:
    """Runs `event` between the snapshot and the launch of one step, and tells what was launched in the end."""

    def __init__(self, h: Harness, at_step: int, event) -> None:
        self.launch, self.at_step, self.event = h.runner.launch, at_step, event
        self.launched: list[list[str]] = []
        self.num_stale = 0
        self.check = h.scheduler.check_invariants
        h.runner.launch = self.run

    def run(self, metadata_list, **kwargs):
        if len(self.launched) == self.at_step and self.event is not None:
            event, self.event = self.event, None
            event()
            self.check()
        for metadata in metadata_list:
            current = kwargs["generation_of"](metadata.request_id)
            if current != metadata.generation_id:
                self.num_stale += 1
                raise StaleMetadataError(metadata.request_id, metadata.generation_id, current)
        self.launched.append([metadata.request_id for metadata in metadata_list])
        return self.launch(metadata_list, **kwargs)


def three(**kwargs) -> Harness:
    """Two plain decodes and one request of two samples, which goes the general way."""
    h = Harness(**kwargs)
    for name in "ab":
        h.add(name, prompt(6, ord(name)), max_tokens=9)
    h.add("n", prompt(7, 300), max_tokens=9, n=2)
    return h


def answers(h: Harness, *names: str) -> None:
    for name in names:
        start, n = (300, 2) if name == "n" else (ord(name), 1)
        got = [seq.output_token_ids.tolist() for seq in h.finished[name].group.seqs]
        length = 7 if name == "n" else 6
        assert got == [solo(prompt(length, start), 9, index) for index in range(n)]


@pytest.mark.parametrize("at_step", [0, 1, 4], ids=["prefills", "first decodes", "decodes"])
@pytest.mark.parametrize("victim", ["a", "b", "n"])
def test_only_the_stale_row_is_left_out(victim, at_step):
    """B85, article 5.2: what is preempted runs again later, the others in this very step and with all their blocks."""
    h = three()
    overtaken = Overtaken(h, at_step, lambda: h.scheduler.preempt(victim))
    h.drain()
    assert overtaken.num_stale == 1
    assert sorted(overtaken.launched[at_step]) == sorted({"a", "b", "n"} - {victim})
    answers(h, "a", "b", "n")
    for name, request in h.finished.items():
        assert request.group.metrics.num_preemptions == (name == victim)


@pytest.mark.parametrize("at_step", [0, 3])
def test_aborts_on_the_way_to_the_launch(at_step):
    h = three()

    def end() -> None:
        h.engine.abort("a")
        h.engine.abort("n")

    overtaken = Overtaken(h, at_step, end)
    h.drain()
    assert overtaken.launched[at_step] == ["b"]
    answers(h, "b")
    for name in ("a", "n"):
        assert h.finished[name].group.state is SequenceStatus.FINISHED_ABORTED


def test_nothing_is_launched_when_nobody_is_left():
    h = Harness()
    h.add("a", prompt(5), max_tokens=5)
    overtaken = Overtaken(h, 2, lambda: h.scheduler.preempt("a"))
    h.drain()
    assert overtaken.num_stale == 1 and h.tokens("a") == solo(prompt(5), 5)


def test_one_of_several_samples_ends_on_the_way():
    """The others of its group go on in this step."""
    h = Harness()
    group = h.add("n", prompt(7), max_tokens=9, n=3).group

    def end() -> None:
        seq = group.seqs[1]
        h.scheduler.finish_sequence(group, seq, SequenceStatus.FINISHED_STOPPED, "enough")

    Overtaken(h, 4, end)
    h.drain()
    got = [seq.output_token_ids.tolist() for seq in group.seqs]
    assert got[0] == solo(prompt(7), 9, 0) and got[2] == solo(prompt(7), 9, 2)
    assert got[1] == solo(prompt(7), 4, 1)


def test_what_a_stale_row_was_to_compute_is_not_found_later():
    """Its full block was published with the step, and is not written by it."""
    h = Harness(block_size=4)
    params = SamplingParams(max_tokens=4)
    h.add("a", prompt(9), params=params)
    h.add("b", prompt(3, 50), params=params)
    Overtaken(h, 0, lambda: h.engine.abort("a"))
    h.step()
    h.add("again", prompt(9), params=params)
    h.drain()
    assert h.finished["again"].group.metrics.num_cached_tokens == 0
    assert h.tokens("again") == solo(prompt(9), 4)


@pytest.mark.parametrize("fails", [False, True], ids=["stale", "failed"])
def test_what_a_decode_was_to_compute_is_not_found_later(fails):
    """The token it feeds fills a block, which is known with the step, and is not written by it."""
    h = Harness(block_size=4)
    h.add("a", prompt(3), max_tokens=4)
    h.add("b", prompt(3, 50), max_tokens=4)
    known = prompt(3) + solo(prompt(3), 1)
    h.step()
    launch = h.runner.launch

    def broken(*args, **kwargs):
        h.runner.launch = launch
        h.engine.abort("a")
        raise OSError("nothing was run")

    if fails:
        h.runner.launch = broken
        with pytest.raises(OSError, match="nothing was run"):
            h.step()
    else:
        Overtaken(h, 0, lambda: h.engine.abort("a"))
        h.step()
        assert h.scheduler.totals.num_batched_tokens == h.runner.num_tokens
    h.add("again", [*known, 9], max_tokens=4)
    h.drain()
    assert h.finished["again"].group.metrics.num_cached_tokens == 0
    assert h.tokens("again") == solo([*known, 9], 4) and h.tokens("b") == solo(prompt(3, 50), 4)


def test_a_step_in_which_nothing_is_stale_is_not_issued_again():
    h = Harness()
    h.add("a", prompt(5))
    h.scheduler.schedule()
    with pytest.raises(RuntimeError, match="expected a stale snapshot"):
        h.scheduler.reissue()
