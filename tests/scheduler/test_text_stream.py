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


def fallback_tokenizer() -> Tokenizer:
    """As Llama 2 has it: characters that are no tokens are written as bytes, and a run of bytes that does not fit together
    decodes to nothing but U+FFFD, one for each byte, those that were characters before included."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    vocab |= {token: 257 + place for place, token in enumerate(["▁", "▁the", "a", "x"])}
    model = models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    spaces = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence(
        [spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


FALLBACK = fallback_tokenizer()
THE, A = 258, 259


def fallback_ids(data: bytes) -> list[int]:
    return [1 + byte for byte in data]


@pytest.mark.parametrize(
    ("prompt", "token_ids", "expected"),
    [
        ([A], [*fallback_ids("F世".encode()), THE], "F世 the"),
        ([A], [*fallback_ids(b"F\xff"), THE, A], "F\ufffd thea"),
        ([A], [*fallback_ids("F世\xff".encode() + b"\xe4"), THE, *fallback_ids("世".encode()), A], "F世\xff\ufffd the世a"),
        ([A], fallback_ids(b"F\xff\xfe"), "F\ufffd\ufffd"),
        (fallback_ids("世".encode()), [*fallback_ids(b"\xff"), A], "\ufffda"),
        (fallback_ids("世".encode()), fallback_ids(b"\xff"), "\ufffd"),
        (fallback_ids("世".encode()), fallback_ids(b"F\xff"), "F\ufffd"),
        ([A], [A, *fallback_ids(b"\xe4\xb8")], "a\ufffd\ufffd"),
        ([A], [THE, A], " thea"),
        ([], [THE, A], "thea"),
    ],
    ids=repr,
)  # fmt: skip
def test_bytes_that_do_not_fit_together_take_nothing_back(prompt, token_ids, expected):
    seen, _ = run(TextStream(FALLBACK, prompt), token_ids)
    assert_only_grows(seen)
    assert seen[-1] == expected


@given(
    st.lists(st.sampled_from([*fallback_ids("世F\xff".encode()), *range(257, 261)]), max_size=12)
)
@settings(max_examples=300, deadline=None)
def test_any_run_of_bytes_gives_a_text_that_only_grows(token_ids):
    seen, _ = run(TextStream(FALLBACK, [A]), token_ids)
    assert_only_grows(seen)
    for token in (THE, A):
        assert seen[-1].count("the" if token == THE else "a") == token_ids.count(token)


def test_a_stop_string_that_came_too_early_is_not_held_back():
    stream = TextStream(BYTES, [], ("ab", "abcd"), min_tokens=2)
    seen, stop = run(stream, byte_ids(b"xab!"))
    assert (seen, stop) == (["x"] * 5, "ab")
    seen, stop = run(TextStream(BYTES, [], ("ab",), min_tokens=9), byte_ids(b"xab!"))
    assert (seen, stop) == (["x", "x", "xab", "xab!", "xab!"], None)
