"""Admission, chunks, preemption, sharing and endings, one scenario at a time."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.runtime.metadata import SamplerOutput
from octavo.runtime.params import SamplingParams
from octavo.scheduler import SchedulerConfig, SequenceGroup, SequenceStatus
from octavo.tests.scheduler.harness import Harness
from octavo.tests.scheduler.shadow import VOCAB, solo


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * i) % VOCAB for i in range(length)]


# -- admission


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "empty prompt"),
        ([0] * 64, r"64 tokens and one to generate do not fit.*max_model_len is 64"),
        ([VOCAB], rf"ids in \[0, {VOCAB}\), got {VOCAB}"),
        ([-1], "got -1"),
        ([2**40], "32-bit"),
        ([1.5], "flat list of integers"),
        ([[1, 2]], "flat list of integers"),
    ],
)
def test_impossible_requests_are_refused_and_disturb_nobody(token_ids, message):
    """B45, B46, B49: refused with the numbers when added; the queue behind is served."""
    h = Harness(max_model_len=64)
    h.add("before", prompt(5))
    with pytest.raises(ValueError, match=message):
        h.add("bad", token_ids)
    h.add("after", prompt(6))
    h.drain()
    assert h.tokens("before") == solo(prompt(5), 8)
    assert h.tokens("after") == solo(prompt(6), 8)


def test_prompt_larger_than_the_pool_is_refused():
    """B45, B48: 49 blocks of 16, prompt of 1002 tokens; both numbers are named, and later requests run."""
    h = Harness(num_blocks=49, block_size=16, max_model_len=4096)
    with pytest.raises(ValueError, match=r"1002 tokens.*49 blocks of 16"):
        h.add("big", prompt(1002))
    h.add("small", prompt(5))
    h.drain()
    assert h.tokens("small") == solo(prompt(5), 8)


def test_more_samples_than_seats_is_refused():
    """B26."""
    with pytest.raises(ValueError, match="n: expected at most 4"):
        Harness(max_num_seqs=4).add("r", prompt(3), n=5)


def test_duplicate_id_is_refused_and_the_first_is_unharmed():
    """B51; the id can be used again afterwards."""
    h = Harness()
    h.add("r", prompt(5))
    with pytest.raises(ValueError, match="'r', which is in flight"):
        h.add("r", prompt(9))
    h.drain()
    assert h.tokens("r") == solo(prompt(5), 8)
    h.finished.clear()
    h.add("r", prompt(9))
    h.drain()
    assert h.tokens("r") == solo(prompt(9), 8)


@pytest.mark.parametrize(
    "field",
    ["num_gpu_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"],
)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_config_is_checked(field, value):
    with pytest.raises(ValueError, match=f"^{field}: expected"):
        SchedulerConfig(**{"num_gpu_blocks": 8, field: value})


@pytest.mark.parametrize(
    ("field", "value"), [("policy", "lifo"), ("preemption_mode", "x"), ("watermark", 1.0)]
)
def test_config_choices_are_checked(field, value):
    with pytest.raises(ValueError, match=f"^{field}: expected"):
        SchedulerConfig(num_gpu_blocks=8, **{field: value})


# -- chunked prefill


def test_blocks_are_given_chunk_by_chunk_and_nothing_is_sampled_before_the_last():
    """Article 4.4, B57, B13: 10 tokens in chunks of 4, 4, 2."""
    h = Harness(max_num_batched_tokens=4, enable_prefix_caching=False)
    request = h.add("r", prompt(10), max_tokens=3)
    for blocks, computed, outputs in [(1, 4, 0), (2, 8, 0), (3, 10, 1)]:
        changed = h.step()
        assert (h.num_used_blocks, request.group.seqs[0].num_computed_tokens) == (blocks, computed)
        assert request.group.seqs[0].num_output_tokens == outputs
        assert len(changed) == outputs
    h.drain()
    assert h.tokens("r") == solo(prompt(10), 3)
    assert h.runner.num_steps == 5


def test_decodes_go_on_while_a_long_prompt_is_chunked():
    h = Harness(max_num_batched_tokens=8)
    short = h.add("short", prompt(4), max_tokens=20)
    h.step()
    h.add("long", prompt(40, 3), max_tokens=2)
    for _ in range(5):
        before = short.group.seqs[0].num_output_tokens
        h.step()
        assert short.group.seqs[0].num_output_tokens == before + 1
    h.drain()


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_block_count_follows_the_tokens(length):
    """B10: prompts of BS - 1, BS, BS + 1, 2 * BS tokens each generate 2 * BS."""
    h = Harness(enable_prefix_caching=False)
    request = h.add("r", prompt(length), max_tokens=8)
    while h.engine.has_unfinished():
        h.step()
        seq = request.group.seqs[0]
        if not request.finished:
            assert h.num_used_blocks == -(-seq.num_computed_tokens // 4)
    assert h.tokens("r") == solo(prompt(length), 8)


def test_without_chunking_a_prompt_runs_whole_or_waits():
    h = Harness(enable_chunked_prefill=False, max_num_batched_tokens=64, max_model_len=64)
    h.add("a", prompt(40))
    h.add("b", prompt(40, 5))
    assert [r.group.request_id for r in h.step()] == ["a"]
    h.step()
    h.drain()
    assert h.tokens("b") == solo(prompt(40, 5), 8)
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        SchedulerConfig(
            num_gpu_blocks=64,
            max_model_len=65,
            max_num_batched_tokens=64,
            enable_chunked_prefill=False,
        )


# -- prefix cache


def test_full_hit_still_computes_a_token():
    """B01, B02: a block-aligned prompt sent twice, then with 4 more tokens: 4, then 8 tokens come from the cache."""
    h = Harness()
    h.add("one", prompt(8), max_tokens=1)
    h.drain()
    h.add("two", prompt(8), max_tokens=1)
    h.drain()
    h.add("three", prompt(12), max_tokens=1)
    h.drain()
    cached = [h.finished[name].group.metrics.num_cached_tokens for name in ("one", "two", "three")]
    assert cached == [0, 4, 8]
    assert h.tokens("one") == h.tokens("two") == solo(prompt(8), 1)
    assert h.tokens("three") == solo(prompt(12), 1)


def test_prefix_of_generated_tokens_is_found_too():
    h = Harness()
    h.add("one", prompt(6), max_tokens=10)
    h.drain()
    h.add("two", prompt(6) + h.tokens("one"), max_tokens=3)
    h.drain()
    assert h.finished["two"].group.metrics.num_cached_tokens == 12
    assert h.tokens("two") == solo(prompt(6) + h.tokens("one"), 3)


def test_match_is_made_anew_at_admission():
    """B04: matched blocks are evicted while the request waits for blocks; it computes those tokens again."""
    h = Harness(num_blocks=8)
    h.add("seed", prompt(8), max_tokens=1)
    h.drain()
    h.add("other", prompt(20, 300), max_tokens=12)  # takes the whole pool in the end
    h.step()
    h.add("x", prompt(17), max_tokens=2)
    h.step()
    assert h.scheduler.waiting and h.blocks.match(h.scheduler.waiting[0].seqs[0], "", 17)
    h.step_until(lambda: "other" in h.finished)
    assert h.scheduler.waiting[0].request_id == "x"
    h.drain()
    assert h.finished["x"].group.metrics.num_cached_tokens == 0
    assert h.tokens("x") == solo(prompt(17), 2)


def test_an_evicted_block_is_not_found_again():
    """B06: after eviction the old prefix misses, and the maps agree both ways (checked every step)."""
    h = Harness(num_blocks=4)
    h.add("a", prompt(8), max_tokens=1)
    h.drain()
    h.add("b", prompt(14, 100), max_tokens=1)
    h.drain()
    h.add("a2", prompt(8), max_tokens=1)
    h.drain()
    assert h.finished["a2"].group.metrics.num_cached_tokens == 0
    assert h.tokens("a2") == solo(prompt(8), 1)


def test_ends_of_prefixes_are_evicted_first():
    h = Harness(num_blocks=4)
    h.add("a", prompt(12), max_tokens=1)
    h.drain()
    h.add("b", prompt(7, 100), max_tokens=1)  # needs 2 blocks: 1 free, 1 evicted
    h.drain()
    h.add("a2", prompt(12), max_tokens=1)
    h.step()
    assert h.finished["a2"].group.metrics.num_cached_tokens == 8


def test_salt_separates_prefixes():
    h = Harness()
    for name, salt in (("a", ""), ("b", "tenant"), ("c", "tenant")):
        h.add(name, prompt(9), max_tokens=1, cache_salt=salt)
        h.drain()
    assert [h.finished[n].group.metrics.num_cached_tokens for n in "abc"] == [0, 0, 8]


def test_distinct_prompts_have_distinct_blocks():
    """B17: ids with the same low byte, and pairs that cancel in a linear rolling hash."""
    h = Harness(block_size=2)
    a, b = 65, 321
    cancelling = [(a + 31, b - 1), (a + 1, b - 31), (a + 256, b - 1), (a + 1, b - 1)]
    for i, pair in enumerate([(a, b), (b, a), (a, a), (b, b), *cancelling]):
        h.add(f"r{i}", [*pair, 5], max_tokens=1)
        h.drain()
        assert h.finished[f"r{i}"].group.metrics.num_cached_tokens == 0


def test_twins_keep_their_own_blocks():
    """B11: equal prompts prefilled together: nobody's table is re-pointed, nobody reads a freed block."""
    h = Harness()
    first, second = h.add("a", prompt(9), max_tokens=12), h.add("b", prompt(9), max_tokens=12)
    h.step()
    tables = [set(h.blocks.table(r.group.seqs[0].seq_id).tolist()) for r in (first, second)]
    assert not tables[0] & tables[1]
    h.drain()
    assert h.tokens("a") == h.tokens("b") == solo(prompt(9), 12)


def test_resume_finds_the_victims_own_blocks():
    """B08, B09: the chunk is measured after the match, ends within the tokens, and no token is lost or doubled."""
    h = Harness(num_blocks=7, max_num_batched_tokens=64)
    h.add("old", prompt(8), max_tokens=16)
    young = h.add("young", prompt(8, 500), max_tokens=6)
    h.drain()
    assert young.group.metrics.num_preemptions >= 1
    assert h.tokens("old") == solo(prompt(8), 16)
    assert h.tokens("young") == solo(prompt(8, 500), 6)


# -- several samples of one prompt


def test_prompt_is_stored_once_and_tails_are_copied():
    """B30, B28: n = 3, prompt of 10 tokens: 3 blocks, then one copied tail for each extra writer."""
    h = Harness(enable_prefix_caching=False)
    request = h.add("r", prompt(10), max_tokens=5, n=3)
    h.step()
    assert h.num_used_blocks == 3
    outputs = h.scheduler.schedule()
    assert len(outputs.blocks_to_copy) == 2
    (src, dst1), (src2, dst2) = outputs.blocks_to_copy
    assert src == src2 and len({src, dst1, dst2}) == 3
    assert h.num_used_blocks == 5
    h.scheduler.rollback()
    h.drain()
    assert [h.tokens("r", i) for i in range(3)] == [solo(prompt(10), 5, i) for i in range(3)]
    assert [seq.index for seq in request.group.seqs] == [0, 1, 2]


def test_fork_and_append_with_exactly_one_free_block():
    """B29: one pair, source and destination differ, and it is enough."""
    h = Harness(num_blocks=2, enable_prefix_caching=False)
    h.add("r", prompt(2), max_tokens=2, n=2)
    h.step()
    assert h.blocks.num_free_blocks == 1
    outputs = h.scheduler.schedule()
    [(src, dst)] = outputs.blocks_to_copy
    assert src != dst
    h.scheduler.rollback()
    h.drain()
    assert [h.tokens("r", i) for i in range(2)] == [solo(prompt(2), 2, i) for i in range(2)]


def test_a_group_is_preempted_and_resumed_as_a_whole():
    """Article 2.2, 2.3: all sequences give up their blocks together, and the prompt is computed once again, not n times."""
    h = Harness(num_blocks=10, enable_prefix_caching=False)
    h.add("old", prompt(9), max_tokens=18)
    group = h.add("group", prompt(7, 99), max_tokens=7, n=3)
    while not group.group.metrics.num_preemptions:
        h.step()
    assert all(not h.blocks.has_table(seq.seq_id) for seq in group.group.seqs)
    assert {seq.status for seq in group.group.live} == {SequenceStatus.WAITING}
    h.drain()
    assert h.tokens("old") == solo(prompt(9), 18)
    assert [h.tokens("group", i) for i in range(3)] == [solo(prompt(7, 99), 7, i) for i in range(3)]


# -- preemption and progress


def test_the_oldest_always_advances():
    """B31, B42, I10: a pool for one and a half requests; each step feeds a token or ends something."""
    h = Harness(num_blocks=6, max_num_batched_tokens=4)
    for i in range(5):
        h.add(f"r{i}", prompt(12, i * 50), max_tokens=8)
    for _ in range(400):
        if not h.engine.has_unfinished():
            break
        before = h.runner.num_tokens
        changed = h.step()
        assert h.runner.num_tokens > before or changed
    assert [h.tokens(f"r{i}") for i in range(5)] == [solo(prompt(12, i * 50), 8) for i in range(5)]
    assert max(r.group.metrics.num_preemptions for r in h.finished.values()) <= 4


def test_two_partial_prompts_do_not_starve_each_other():
    """The youngest holder of a partial prompt is rolled back when neither could go on."""
    h = Harness(num_blocks=5, max_num_batched_tokens=8)
    h.add("a", prompt(17), max_tokens=2)
    h.add("b", prompt(17, 400), max_tokens=2)
    h.drain(max_steps=60)
    assert h.tokens("a") == solo(prompt(17), 2)
    assert h.tokens("b") == solo(prompt(17, 400), 2)


def test_a_group_that_outgrows_the_pool_ends_with_reason_length():
    h = Harness(num_blocks=4, enable_prefix_caching=False)
    h.add("r", prompt(6), max_tokens=30, n=3)
    h.drain()
    group = h.finished["r"].group
    assert {seq.status for seq in group.seqs} == {SequenceStatus.FINISHED_LENGTH}
    assert all(h.tokens("r", i) == solo(prompt(6), len(h.tokens("r", i)), i) for i in range(3))


def test_first_come_first_served():
    h = Harness(max_num_seqs=1)
    for i in range(4):
        h.add(f"r{i}", prompt(3, i), max_tokens=2)
    h.drain()
    assert list(h.finished) == ["r0", "r1", "r2", "r3"]


def test_failed_admission_leaves_no_trace():
    """B21: counts before and after a refused attempt are equal."""
    h = Harness(num_blocks=6)
    h.add("seed", prompt(8), max_tokens=1)
    h.drain()
    h.add("runs", prompt(13, 300), max_tokens=3)
    h.step()
    h.add("waits", prompt(20), max_tokens=1)
    group = h.scheduler.waiting[0]
    before = (list(h.blocks.ref_count), h.blocks.num_free_blocks)
    step_before = h.scheduler.schedule()
    assert "waits" not in [m.request_id for m in step_before.seq_group_metadata_list]
    assert (list(h.blocks.ref_count), h.blocks.num_free_blocks) == before
    assert not h.blocks.has_table(group.seqs[0].seq_id)
    h.scheduler.rollback()
    h.drain()
    assert h.tokens("waits") == solo(prompt(20), 1)


# -- endings


@pytest.mark.parametrize("steps", range(6))
def test_abort_in_every_state_returns_the_blocks(steps):
    """B63: waiting, mid-chunk, decoding; the neighbour is untouched and one terminal event is given."""
    h = Harness(max_num_batched_tokens=6)
    h.add("stays", prompt(5), max_tokens=9)
    h.add("goes", prompt(16, 200), max_tokens=9, n=2)
    for _ in range(steps):
        h.step()
    assert h.engine.abort("goes")
    assert not h.engine.abort("goes")
    h.drain()
    assert h.finished["goes"].group.state is SequenceStatus.FINISHED_ABORTED
    assert h.tokens("stays") == solo(prompt(5), 9)


def test_abort_of_a_preempted_request():
    h = Harness(num_blocks=5, enable_prefix_caching=False)
    h.add("old", prompt(8), max_tokens=12)
    young = h.add("young", prompt(7, 500), max_tokens=12)
    while (
        young.group.state is not SequenceStatus.WAITING or not young.group.metrics.num_preemptions
    ):
        h.step()
    h.engine.abort("young")
    h.drain()
    assert h.tokens("old") == solo(prompt(8), 12)


def test_abort_while_a_step_is_in_flight():
    """B15, B85, B87: blocks wait for the step, its result is dropped, and a new request may use the id (B52)."""
    h = Harness()
    h.add("r", prompt(8), max_tokens=4)
    outputs = h.scheduler.schedule()
    used = h.num_used_blocks
    assert h.scheduler.abort("r") is not None
    assert h.num_used_blocks == used, "the launched step still names them"
    assert h.scheduler.generation_of("r") is None
    h.scheduler.add_seq_group(SequenceGroup("r", prompt(3), SamplingParams(), 0.0))
    assert h.scheduler.update(SamplerOutput(np.array([5]), np.zeros(1, np.float32))) == []
    assert h.num_used_blocks == 0
    again = h.scheduler.generation_of("r")
    assert again is not None and again != outputs.seq_group_metadata_list[0].generation_id
    assert len(outputs.seq_group_metadata_list) == 1
    h.scheduler.check_invariants()


def test_wrong_number_of_results_is_refused():
    h = Harness()
    h.add("r", prompt(3))
    h.scheduler.schedule()
    with pytest.raises(ValueError, match="expected 1 tokens"):
        h.scheduler.update(SamplerOutput(np.zeros(2, np.int64), np.zeros(2, np.float32)))


def test_a_failing_runner_loses_nothing():
    """The step is rolled back: the same requests run to the same end afterwards, with no stale cache entry."""
    h = Harness()
    h.add("a", prompt(9), max_tokens=6)
    h.step()
    h.add("b", prompt(9), max_tokens=6)
    execute = h.runner.execute

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    h.runner.execute = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        h.engine.step()
    h.runner.execute = execute
    h.scheduler.check_invariants()
    h.drain()
    assert h.tokens("a") == h.tokens("b") == solo(prompt(9), 6)


# -- snapshots


def test_snapshots_do_not_change_whatever_the_scheduler_does():
    """B90, article 3.3: everything is changed after the snapshot, nothing in it moves."""
    h = Harness(num_blocks=16)
    kept = []
    execute = h.runner.execute

    def keep(seq_group_metadata_list, **kwargs):
        kept.extend((metadata, metadata.to_bytes()) for metadata in seq_group_metadata_list)
        return execute(seq_group_metadata_list, **kwargs)

    h.runner.execute = keep
    h.add("r", prompt(10), max_tokens=20, n=2)
    h.add("s", prompt(3, 40), max_tokens=30)
    for _ in range(12):
        h.step()
    h.scheduler.preempt(h.scheduler.running[-1].request_id)
    for _ in range(4):
        h.step()
    h.engine.abort("r")
    h.drain()
    assert len(kept) > 40
    for metadata, before in kept:
        assert metadata.to_bytes() == before


def test_generation_rises_with_every_event_that_moves_blocks():
    h = Harness(num_blocks=64, enable_prefix_caching=False)
    request = h.add("r", prompt(10), max_tokens=9, n=2)
    h.step()
    first = request.group.generation_id
    h.step()  # copy-on-write of the shared tail
    assert request.group.generation_id == first + 1
    h.step()
    assert request.group.generation_id == first + 1
    h.scheduler.preempt(request.group.request_id)
    assert request.group.generation_id == first + 2


def test_computed_blocks_are_those_before_the_step():
    """Article 5.4 and 4.4: prefix hits and earlier chunks, full blocks only."""
    h = Harness(max_num_batched_tokens=6)
    h.add("r", prompt(15), max_tokens=1)
    seen = []
    for _ in range(3):
        [metadata] = h.scheduler.schedule().seq_group_metadata_list
        [(_, data, table)] = list(metadata.rows())
        seen.append((data.num_computed_tokens, len(metadata.computed_block_nums), len(table)))
        assert (
            metadata.computed_block_nums.tolist() == table[: data.num_computed_tokens // 4].tolist()
        )
        h.scheduler.flight.steps.clear()  # as if it had run
    assert seen == [(0, 0, 2), (6, 1, 3), (12, 3, 4)]


# -- one step at a time


def test_one_step_is_in_flight_at_a_time():
    h = Harness()
    h.add("r", prompt(3))
    with pytest.raises(RuntimeError, match="there is none"):
        h.scheduler.update(SamplerOutput(np.zeros(1, np.int64), np.zeros(1, np.float32)))
    with pytest.raises(RuntimeError, match="there is none"):
        h.scheduler.rollback()
    h.scheduler.schedule()
    with pytest.raises(RuntimeError, match="in flight"):
        h.scheduler.schedule()
    h.scheduler.rollback()
    h.drain()


def test_a_resumed_request_found_in_the_cache_is_a_decode_before_the_prefills():
    """Equal block-aligned prompts and a rollback: one comes back with all but its newest token cached."""
    h = Harness(max_num_batched_tokens=64)
    h.add("a", prompt(8), max_tokens=5)
    h.add("b", prompt(8), max_tokens=5)
    h.step()
    h.add("c", prompt(21, 300), max_tokens=3)
    h.scheduler.schedule()
    h.scheduler.rollback()
    outputs = h.scheduler.schedule()
    phases = [metadata.is_prompt for metadata in outputs.seq_group_metadata_list]
    assert phases == sorted(phases) and len(set(phases)) == 2
    h.scheduler.rollback()
    h.drain()
    assert h.tokens("a") == h.tokens("b") == solo(prompt(8), 5)


# -- the engine


def test_an_id_can_be_used_again_right_after_its_abort():
    """B52, B87: the old request gets its terminal event, the new one its tokens."""
    h = Harness()
    h.add("a", prompt(3), max_tokens=8)
    h.step()
    assert h.engine.abort("a")
    new = h.add("a", prompt(4, 9), max_tokens=4)
    ended = []
    for _ in range(10):
        ended += [request for request in h.engine.step() if request.finished]
        if not h.engine.has_unfinished():
            break
    assert [request.group.state.value for request in ended] == ["abort", "length"]
    assert new.group.seqs[0].output_token_ids.tolist() == solo(prompt(4, 9), 4)
    assert h.num_used_blocks == 0


def test_an_id_used_again_inside_a_step():
    h = Harness()
    h.add("a", prompt(3), max_tokens=8)
    execute = h.runner.execute

    def abort_and_add(*args, **kwargs):
        result = execute(*args, **kwargs)
        h.runner.execute = execute
        h.engine.abort("a")
        h.add("a", prompt(5, 7), max_tokens=3)
        return result

    h.runner.execute = abort_and_add
    states = []
    while h.engine.has_unfinished():
        states += [r.group.state.value for r in h.engine.step() if r.finished]
    assert states == ["abort", "length"]
    assert h.num_used_blocks == 0


def test_a_wrong_number_of_results_rolls_the_step_back():
    h = Harness()
    h.add("a", prompt(3), max_tokens=4)
    execute = h.runner.execute
    h.runner.execute = lambda *args, **kwargs: SamplerOutput(np.zeros(0, np.int64), np.zeros(0))
    with pytest.raises(ValueError, match="expected 1 tokens"):
        h.step()
    h.runner.execute = execute
    h.drain()
    assert h.tokens("a") == solo(prompt(3), 4)


def test_a_text_that_cannot_be_made_ends_its_request_alone(monkeypatch):
    h = Harness()
    h.add("good", prompt(3), max_tokens=4)
    bad = h.add("bad", prompt(4), max_tokens=4)
    decode = type(bad).decode

    def broken(self, seq):
        if self is bad:
            raise RuntimeError("no text")
        return decode(self, seq)

    monkeypatch.setattr(type(bad), "decode", broken)
    with pytest.raises(RuntimeError, match="no text"):
        h.step()
    ended = []
    for _ in range(20):
        if not h.engine.has_unfinished():
            break
        try:
            ended += [r.group.request_id for r in h.engine.step() if r.finished]
        except RuntimeError:
            continue
    assert sorted(ended) == ["bad", "good"]
    assert h.num_used_blocks == 0


def test_who_got_a_token_in_a_step_that_raised_and_ends_in_the_next_ends_once(monkeypatch):
    h = Harness()
    h.add("good", prompt(3), max_tokens=2)
    bad = h.add("bad", prompt(4), max_tokens=4)
    decode = type(bad).decode

    def broken(self, seq):
        if self is bad:
            raise RuntimeError("no text")
        return decode(self, seq)

    monkeypatch.setattr(type(bad), "decode", broken)
    with pytest.raises(RuntimeError, match="no text"):
        h.step()
    assert [request.group.request_id for request in h.step()] == ["good", "bad"]


def test_an_interrupted_step_forgets_nobody():
    """One was aborted before the step and would have been taken leave of in it."""
    h = Harness(async_scheduling=True)
    h.add("a", prompt(5))
    h.add("b", prompt(6))
    h.step()
    h.engine.abort("a")
    launched = h.engine._in_flight[0].launch
    result = launched.result

    def interrupted():
        launched.result = result
        raise KeyboardInterrupt

    launched.result = interrupted
    with pytest.raises(KeyboardInterrupt):
        h.step()
    h.drain()
    assert sorted(h.finished) == ["a", "b"] and h.tokens("b") == solo(prompt(6), 8)


def test_logits_that_are_not_finite_end_their_request_alone():
    h = Harness()
    h.add("good", prompt(3), max_tokens=4)
    h.add("bad", prompt(4), max_tokens=4)
    execute = h.runner.execute

    def poisoned(metadata, **kwargs):
        out = execute(metadata, **kwargs)
        tokens = out.token_ids.copy()
        tokens[[m.request_id for m in metadata].index("bad")] = -1
        return SamplerOutput(tokens, out.logprobs)

    h.runner.execute = poisoned
    h.step()
    h.runner.execute = execute
    h.drain()
    seq = h.finished["bad"].group.seqs[0]
    assert (seq.status, seq.num_output_tokens) == (SequenceStatus.FINISHED_ABORTED, 0)
    assert "not finite" in str(seq.stop_reason)
    assert h.tokens("good") == solo(prompt(3), 4)


@pytest.mark.parametrize("salt", [None, 5, "\ud800", "\n"])
def test_bad_salt_is_refused(salt):
    with pytest.raises(ValueError, match="cache_salt"):
        Harness().add("r", prompt(3), cache_salt=salt)


def test_dump_shows_every_table_with_its_reference_counts():
    """Article 5.3: the shared block is seen at a glance."""
    h = Harness()
    h.add("r", prompt(5), n=2, max_tokens=4)
    h.step()
    lines = h.blocks.dump().splitlines()
    assert lines[0].startswith("seq_id=0 blocks: ") and lines[0].count("(x2)") == 2
    assert lines[1].startswith("seq_id=1") and lines[2].startswith("free=")
