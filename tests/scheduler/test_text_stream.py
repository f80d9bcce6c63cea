"""Streamed text: whole characters, no stop string ever shown, deltas that add up to the final text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from octavo.scheduler.text_stream import TextStream


def byte_tokenizer(words: tuple[str, ...] = ()) -> Tokenizer:
    """Byte-level: 256 single bytes, the given ASCII words as further tokens, and one special token <end>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate([*alphabet, *words])}, merges=[])
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


BYTES = byte_tokenizer()


def byte_ids(data: bytes) -> list[int]:
    return [BYTES.token_to_id(_byte_char(b)) for b in data]


def _byte_char(byte: int) -> str:
    """The printable stand-in of a byte in byte-level vocabularies (GPT-2's table)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in kept:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in kept].index(byte))


def run(stream: TextStream, token_ids: list[int]) -> tuple[list[str], str | None]:
    """Visible text after each token and at the end, and the stop string found."""
    seen, stop = [], None
    for token_id in token_ids:
        stop = stop or stream.push(token_id)
        seen.append(stream.visible)
    stop = stream.close() or stop
    seen.append(stream.visible)
    return seen, stop


def assert_only_grows(seen: list[str]) -> None:
    """B74: what was sent is never taken back, so the deltas add up to the final text."""
    for earlier, later in pairwise(seen):
        assert later.startswith(earlier)


def test_characters_of_several_tokens_appear_whole():
    text = "naïve 世界 🎉 end"
    seen, _ = run(TextStream(BYTES, []), byte_ids(text.encode()))
    assert seen[-1] == text
    assert_only_grows(seen)
    assert not any("\ufffd" in s for s in seen)


def test_text_that_ends_inside_a_character_is_flushed_at_the_end():
    seen, _ = run(TextStream(BYTES, []), byte_ids("ab世".encode()[:-1]))
    assert seen[-2] == "ab"
    assert seen[-1].startswith("ab") and len(seen[-1]) > 2


@pytest.mark.parametrize(("include", "expected"), [(False, "ABC"), (True, "ABCDEFGHIJ")])
def test_stop_string_over_token_edges(include, expected):
    """B71: stop "DEFGHIJ" over tokens ABC DEF G HI JK: nothing of it leaks, and the text ends before D (or after J)."""
    tokenizer = byte_tokenizer(("ABC", "DEF", "HI", "JK"))
    ids = [tokenizer.token_to_id(t) for t in ("ABC", "DEF", "G", "HI", "JK")]
    seen, stop = run(TextStream(tokenizer, [], ("DEFGHIJ",), include_stop=include), ids)
    assert stop == "DEFGHIJ"
    assert seen[:4] == ["ABC"] * 4
    assert seen[-1] == expected


def test_only_a_suffix_that_can_still_match_is_held_back():
    """B72: a long stop string must not delay text that cannot become part of it."""
    seen, stop = run(
        TextStream(BYTES, [], ("<|long_stop_marker|>",)), byte_ids(b"plain text < and <| more")
    )
    assert stop is None
    assert seen[8] == "plain tex"[:9]
    assert seen[11] == "plain text "
    assert seen[12] == "plain text < "
    assert seen[-1] == "plain text < and <| more"
    assert_only_grows(seen)


def test_earliest_of_several_stop_strings_wins():
    seen, stop = run(TextStream(BYTES, [], ("world", "o w")), byte_ids(b"hello world"))
    assert (seen[-1], stop) == ("hell", "o w")


def test_special_tokens_are_left_out_or_shown():
    ids = [*byte_ids(b"ok"), BYTES.token_to_id("<end>")]
    assert run(TextStream(BYTES, []), ids)[0][-1] == "ok"
    assert run(TextStream(BYTES, [], skip_special_tokens=False), ids)[0][-1] == "ok<end>"


@settings(max_examples=300, deadline=None)
@given(
    data=st.binary(min_size=1, max_size=40),
    stops=st.lists(st.text(alphabet="ab \u4e16", min_size=1, max_size=3), max_size=3),
    prompt=st.binary(max_size=6),
)
def test_any_bytes_and_stop_sets(data, stops, prompt):
    """Deltas add up, and the final text is the plain decoding cut at the first stop string."""
    stream = TextStream(BYTES, byte_ids(prompt), tuple(stops))
    seen, stop = run(stream, byte_ids(data))
    assert_only_grows(seen)
    whole = stream_free_text(prompt, data)
    cuts = [whole.find(s) for s in stops if s in whole]
    if cuts:
        assert stop is not None
        assert seen[-1] == whole[: min(cuts)]
    else:
        assert stop is None
        assert seen[-1] == whole


def stream_free_text(prompt: bytes, data: bytes) -> str:
    """The whole output decoded at once, after the part of the prompt that the stream starts from."""
    context = byte_ids(prompt)[-4:]
    if BYTES.decode(context).endswith("\ufffd"):
        context = []
    before = BYTES.decode(context)
    return BYTES.decode(context + byte_ids(data))[len(before) :]


@pytest.mark.parametrize("min_tokens", range(8))
def test_a_stop_string_within_the_least_tokens_is_text(min_tokens):
    """It ends the text when a later token completes it again, also one that is longer than another that was passed over."""
    stream = TextStream(BYTES, [], ("ab", "abxx"), min_tokens=min_tokens)
    text = b"abcabxxabd"
    pushed = ((number, stream.push(token)) for number, token in enumerate(byte_ids(text), start=1))
    number, found = next(place for place in pushed if place[1] is not None)
    ends = [(2, "ab"), (5, "ab"), (7, "abxx"), (9, "ab")]
    wanted = next((end, stop) for end, stop in ends if end > min_tokens)
    assert (number, found) == wanted
    assert stream.text == text[: wanted[0] - len(wanted[1])].decode()
