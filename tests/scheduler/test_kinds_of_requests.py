"""Requests that are more than text: encoders, images, windows; and beam searches step by step."""

from __future__ import annotations

import pytest

from octavo.runtime.metadata import NULL_BLOCK
from octavo.runtime.params import MultiModalSpan, SamplingParams
from octavo.scheduler import SequenceStatus
from octavo.scheduler.block_manager import BlockManager
from octavo.scheduler.sequence import Sequence
from octavo.tests.scheduler.harness import Harness
from octavo.tests.scheduler.shadow import solo, solo_beams


def prompt(length: int, start: int = 1) -> list[int]:
    return list(range(start, start + length))


# -- windows


def test_blocks_before_the_window_are_given_back():
    h = Harness(num_blocks=64, sliding_window=6)
    seq = h.add("r", prompt(20), max_tokens=30).group.seqs[0]
    h.step()
    used, context_len = [], seq.num_computed_tokens
    h.step()
    while "r" not in h.finished:
        table = h.blocks.table(seq.seq_id)
        assert (table == NULL_BLOCK).sum() == (context_len - 6 + 1) // 4
        used.append(h.num_used_blocks)
        context_len = seq.num_computed_tokens
        h.step()
    assert max(used) <= 3, "6 tokens lie in three blocks at most"
    assert h.tokens("r") == solo(prompt(20), 30)
    h.drain()


def test_with_a_window_a_sequence_may_be_longer_than_the_pool():
    """A pool of 6 blocks of 4, a prompt of 100: chunks shrink to what fits."""
    h = Harness(num_blocks=6, sliding_window=8, max_num_batched_tokens=64)
    h.add("r", prompt(100), max_tokens=40)
    h.add("s", prompt(50, 300), max_tokens=10)
    h.drain()
    assert h.tokens("r") == solo(prompt(100), 40) and h.tokens("s") == solo(prompt(50, 300), 10)
    with pytest.raises(ValueError, match="do not fit"):
        Harness(num_blocks=2, sliding_window=8).add("r", prompt(100))


@pytest.mark.parametrize(
    ("window", "known", "expected"),
    [
        (None, "yyyyn", 4),
        (None, "nyyyy", 0),
        (8, "yyyyn", 4),
        (8, "nnyyn", 4),  # 8 tokens: the blocks of positions 9..15 are all that the next token sees
        (8, "nnynn", 0),  # tokens 5..7 of its window are gone
        (8, "yynyn", 2),
        (9, "nnyyn", 4),
        (10, "nnyyn", 0),
        (1, "nnnny", 5),
        (5, "nnnyy", 5),
    ],
)
def test_a_match_needs_the_whole_window_at_its_end(window, known, expected):
    """B19: a hit at the largest boundary whose whole window is still cached."""
    blocks = BlockManager(40, 4, sliding_window=window)
    seq = Sequence(0, prompt(21))
    blocks.allocate(seq, [])
    blocks.grow([seq], 20)
    seq.num_computed_tokens = 20
    published = blocks.publish(seq, "", 0)
    blocks.unpublish(b for b, mark in zip(published, known, strict=True) if mark == "n")
    table = blocks.match(Sequence(1, prompt(21)), "", 21)
    assert len(table) == expected
    if expected:
        first = 0 if window is None else max(0, expected * 4 - window + 1) // 4
        assert table == [NULL_BLOCK] * first + published[first:expected]


# -- encoder and decoder


def test_an_encoder_has_blocks_of_its_own_that_survive_preemption():
    """B84: self and cross blocks are counted; the encoder runs once, and again after its KV is lost."""
    for num_cpu_blocks, mode in ((0, "recompute"), (30, "swap")):
        h = Harness(
            num_blocks=12, num_cpu_blocks=num_cpu_blocks, preemption_mode=mode, max_encoder_len=20
        )
        source = prompt(9, 100)
        h.add("r", prompt(6), max_tokens=9, n=2, encoder_token_ids=source)
        h.step()
        assert h.num_used_blocks == 3 + 2, "the encoder's are shared by both samples"
        h.step()
        h.scheduler.preempt("r")
        assert h.num_used_blocks == 0
        h.drain()
        got = [seq.output_token_ids.tolist() for seq in h.finished["r"].group.seqs]
        assert got == [solo(prompt(6), 9, index, source) for index in range(2)]


def test_admission_counts_both_sides():
    h = Harness(num_blocks=10, max_encoder_len=32)
    with pytest.raises(ValueError, match="10 blocks of 4 tokens, 8 of them for the encoder"):
        h.add("r", prompt(8), encoder_token_ids=prompt(30))
    h.add("r", prompt(7), max_tokens=1, encoder_token_ids=prompt(30))
    h.drain()


@pytest.mark.parametrize(
    ("encoder", "config", "message"),
    [
        (prompt(3), {}, "the model has no encoder"),
        ([], dict(max_encoder_len=8), "expected 1 to 8 tokens"),
        (prompt(9), dict(max_encoder_len=8), "expected 1 to 8 tokens"),
        (prompt(9), dict(max_encoder_len=99, max_num_batched_tokens=9), "expected 1 to 8 tokens"),
        ([5000], dict(max_encoder_len=8), r"encoder_seq: expected ids in \[0, 997\)"),
    ],
)
def test_encoders_that_cannot_run_are_refused(encoder, config, message):
    with pytest.raises(ValueError, match=message):
        Harness(**config).add("r", prompt(3), encoder_token_ids=encoder)


def test_decoders_share_prefixes_under_one_encoder_input_only():
    h = Harness(max_encoder_len=8)
    for name, source, cached in (("a", [7, 8], 0), ("b", [7, 9], 0), ("c", [7, 8], 8)):
        h.add(name, prompt(12), max_tokens=2, encoder_token_ids=source)
        h.drain()
        assert h.finished[name].group.metrics.num_cached_tokens == cached


# -- images and the like


def image(offset: int, length: int, mark: int = 1, is_whole: bool = False) -> MultiModalSpan:
    return MultiModalSpan(offset, length, bytes([mark]) * 16, is_whole=is_whole)


def pictured(length: int, *spans: MultiModalSpan) -> list[int]:
    tokens = prompt(length)
    for span in spans:
        tokens[span.offset : span.stop] = [1] * span.length
    return tokens


def test_a_chunk_carries_exactly_its_part_of_each_image():
    """Article 5.5: visual tokens are tokens; B54: what lies between text is scheduled like text."""
    spans = (image(2, 5), image(9, 3, 2))
    h = Harness(max_num_batched_tokens=4, is_multi_modal=True)
    parts = []
    execute = h.runner.execute

    def keep(metadata_list, **kwargs):
        for metadata in metadata_list:
            parts.append(
                [(p.span.offset, p.start, p.stop, p.offset) for p in metadata.multi_modal_data]
            )
        return execute(metadata_list, **kwargs)

    h.runner.execute = keep
    h.add("r", pictured(14, *spans), max_tokens=2, multi_modal_spans=spans)
    h.drain()
    assert parts == [
        [(2, 0, 2, 2)],
        [(2, 2, 5, 0)],
        [(9, 0, 3, 1)],
        [],
        [],
    ]
    assert h.tokens("r") == solo(pictured(14, *spans), 2, spans=spans)


def test_an_image_that_must_stay_whole_is_never_split():
    """B62: the chunk before it ends early, also when others take part of the budget."""
    span = image(3, 6, is_whole=True)
    h = Harness(max_num_batched_tokens=7, is_multi_modal=True)
    h.add("other", prompt(3, 50), max_tokens=30)
    h.step()
    h.add("r", pictured(12, span), max_tokens=2, multi_modal_spans=[span])
    h.drain()
    assert h.tokens("r") == solo(pictured(12, span), 2, spans=(span,))


@pytest.mark.parametrize(
    ("spans", "config", "message"),
    [
        ([image(0, 2)], dict(is_multi_modal=False), "the model takes text alone"),
        (
            [image(0, 9, is_whole=True)],
            {},
            r"at most 8 tokens where they cannot be split .* got one of 9",
        ),
        ([image(0, 4), image(3, 2)], {}, "in order, apart, and within the prompt's 10 tokens"),
        ([image(8, 4)], {}, "got one from 8 to 12"),
    ],
)
def test_images_that_cannot_run_are_refused(spans, config, message):
    h = Harness(**{"is_multi_modal": True, "max_num_batched_tokens": 8, **config})
    with pytest.raises(ValueError, match=message):
        h.add("r", prompt(10), multi_modal_spans=spans)
    assert not h.engine.has_unfinished()


def test_prefixes_are_shared_only_up_to_another_image():
    """The placeholders are alike, the digests are not."""
    h = Harness(is_multi_modal=True)
    cached = []
    for name, mark in (("a", 1), ("b", 2), ("c", 1)):
        spans = (image(5, 4, mark),)
        h.add(name, pictured(17, *spans), max_tokens=1, multi_modal_spans=spans)
        h.drain()
        cached.append(h.finished[name].group.metrics.num_cached_tokens)
    assert cached == [0, 4, 16]


def test_the_same_image_at_another_place_is_another_prefix():
    """The tokens are all alike, and so is the image."""
    h = Harness(is_multi_modal=True)
    for name, offset in (("a", 1), ("b", 2)):
        spans = (image(offset, 3),)
        h.add(name, [1] * 12, max_tokens=1, multi_modal_spans=spans)
        h.drain()
        assert h.finished[name].group.metrics.num_cached_tokens == 0


def test_a_match_does_not_end_inside_an_image_that_must_stay_whole():
    spans = (image(6, 5, is_whole=True),)
    h = Harness(is_multi_modal=True)
    h.add("a", [*pictured(10, *spans)[:9], 1, 1], max_tokens=1, multi_modal_spans=spans)
    h.drain()
    h.add("b", pictured(14, *spans), max_tokens=1, multi_modal_spans=spans)
    h.drain()
    assert h.finished["b"].group.metrics.num_cached_tokens == 4


# -- beam searches


def beams(**kwargs) -> SamplingParams:
    return SamplingParams(
        **{"use_beam_search": True, "n": 3, "temperature": 0, "max_tokens": 8, **kwargs}
    )


def test_beams_share_the_prompt_and_copy_only_what_they_write():
    """Article 5.3: one stored prompt, a copy for each beam but one that goes on from a shared block."""
    h = Harness(num_blocks=64)
    h.add("r", prompt(10), params=beams())
    h.step()
    assert h.num_used_blocks == 3
    h.step()
    assert h.runner.num_moves["copy"] == 2
    h.drain()
    got = [seq.output_token_ids.tolist() for seq in h.finished["r"].group.seqs]
    assert got == [tokens for tokens, _ in solo_beams(prompt(10), beams(), 8)]


def distinct_prefixes(group) -> int:
    """Of all tokens of the group whose KV is there: blocks it needs, with one token in each."""
    return len(
        {
            seq.token_ids[: stop + 1].tobytes()
            for seq in group.live
            for stop in range(seq.num_computed_tokens)
        }
    )


@pytest.mark.parametrize("caching", [False, True])
def test_a_recomputed_search_shares_all_that_its_beams_have_in_common(caching):
    """Not the prompt alone, and not what all have in common alone: else it might not fit where it did before."""
    params = beams(n=4, max_tokens=24)
    h = Harness(num_blocks=60, block_size=1, enable_prefix_caching=caching)
    group = h.add("r", prompt(4), params=params).group
    num_subsets = 0
    while h.engine.has_unfinished():
        h.step()
        if len(group.live) < 4 or group.metrics.num_preemptions >= 12:
            continue
        assert h.num_used_blocks == distinct_prefixes(group)
        common = [group.closest_before(seq)[1] for seq in group.live[1:]]
        num_subsets += len(set(common)) > 1
        h.scheduler.preempt("r")
        h.step_until(lambda: all(seq.num_uncomputed_tokens == 1 for seq in group.live), 8)
        assert h.num_used_blocks == distinct_prefixes(group)
    assert num_subsets > 3
    h.drain()
    got = [seq.output_token_ids.tolist() for seq in h.finished["r"].group.seqs]
    assert got == [tokens for tokens, _ in solo_beams(prompt(4), params, 24)]


def test_a_search_comes_back_into_a_pool_that_holds_it_by_sharing_alone():
    """What it held before it was preempted suffices after it, too."""
    params = beams(n=4, max_tokens=20)
    answer = [tokens for tokens, _ in solo_beams(prompt(4), params, 20)]
    undisturbed = Harness(num_blocks=200, block_size=1, enable_prefix_caching=False)
    undisturbed.add("r", prompt(4), params=params)
    undisturbed.drain()
    most = undisturbed.engine.peak_used_blocks
    h = Harness(num_blocks=most, block_size=1, enable_prefix_caching=False)
    group = h.add("r", prompt(4), params=params).group
    assert most < 4 * 20, "beams share"
    while h.engine.has_unfinished():
        h.step()
        if len(group.live) == 4 and all(seq.num_uncomputed_tokens == 1 for seq in group.live):
            h.scheduler.preempt("r")
    assert group.metrics.num_preemptions > 10
    assert [seq.output_token_ids.tolist() for seq in group.seqs] == answer


def test_an_aborted_search_returns_its_best_so_far():
    h = Harness()
    request = h.add("r", prompt(10), params=beams(best_of=4, n=2))
    for _ in range(4):
        h.step()
    h.engine.abort("r")
    h.drain()
    outputs = request.output().outputs
    assert [len(output.token_ids) for output in outputs] == [4, 4]
    assert outputs[0].score >= outputs[1].score
    assert {output.finish_reason for output in outputs} == {"abort"}


def test_a_search_ends_alone_when_its_logits_are_not_finite():
    h = Harness()
    request = h.add("r", prompt(10), params=beams())
    h.add("other", prompt(4), max_tokens=8)
    execute, calls = h.runner.execute, []

    def spoil(metadata_list, **kwargs):
        outputs = execute(metadata_list, **kwargs)
        calls.append(1)
        if len(calls) == 4:
            first = 0
            for metadata in metadata_list:
                if metadata.request_id == "r":
                    outputs.token_ids[first] = -1
                first += metadata.num_samples
        return outputs

    h.runner.execute = spoil
    h.drain()
    assert request.group.state is SequenceStatus.FINISHED_ABORTED
    assert h.tokens("other") == solo(prompt(4), 8)


def test_a_search_that_outgrows_the_pool_ends_with_what_it_has():
    h = Harness(num_blocks=7)
    request = h.add("r", prompt(8), params=beams(max_tokens=60))
    h.drain()
    outputs = request.output().outputs
    assert len(outputs) == 3 and all(len(output.token_ids) > 2 for output in outputs)
    assert {output.finish_reason for output in outputs} == {"length"}


def test_blocks_that_have_left_the_window_are_not_published():
    """The null block has no content that anybody could find."""
    blocks = BlockManager(8, 2, sliding_window=3)
    seq = Sequence(0, prompt(9))
    blocks.allocate(seq, [])
    blocks.grow([seq], 8)
    seq.num_computed_tokens = 8
    blocks.drop_out_of_window(seq)
    assert len(blocks.publish(seq, "", 0)) == 1
    blocks.reset_prefix_cache()
    blocks.check_integrity()
