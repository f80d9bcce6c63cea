"""Texts of single tokens, and tokens of forbidden words."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.runtime.params import SamplingParams
from octavo.scheduler.bad_words import with_bad_words
from octavo.scheduler.logprobs import TokenTexts


def byte_level() -> Tokenizer:
    """Spaces belong to the token behind them; a character may take several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["he", "hell", "Ġh", "Ġhe"]
    merges = [("Ġ", "h"), ("Ġh", "e"), ("h", "e")]
    vocab = {token: i for i, token in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def metaspace() -> Tokenizer:
    """As sentencepiece does it: the decoder drops the space at the beginning of a text."""
    vocab = {"▁": 0, "▁the": 1, "re": 2, "<unk>": 3, "▁a": 4}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def test_a_token_reads_as_in_the_middle_of_a_line():
    tokenizer = metaspace()
    assert tokenizer.decode([1]) == "the"
    texts = TokenTexts(tokenizer)
    end = tokenizer.token_to_id("<end>")
    assert [texts(i) for i in (1, 2, 0, end, 1)] == [" the", "re", " ", "<end>", " the"]
    tokenizer = byte_level()
    texts = TokenTexts(tokenizer)
    found = [texts(i) for i in tokenizer.encode("hé he").ids]
    assert found == ["h", "\ufffd", "\ufffd", " he"]
    assert TokenTexts(None)(5) is None


def test_texts_are_made_once(monkeypatch):
    texts, made = TokenTexts(metaspace()), []
    monkeypatch.setattr(texts, "_decode", lambda tokenizer, token: made.append(token) or "text")
    assert [texts(i) for i in (1, 2, 1, 1, 2)] == ["text"] * 5
    assert made == [1, 2]


def test_a_bad_word_is_forbidden_at_the_beginning_of_a_word_and_within_one():
    tokenizer = byte_level()
    ids = {text: tuple(tokenizer.encode(text).ids) for text in ("he", " he", "h!", " h!")}
    params = SamplingParams(bad_words=["he", " h!"], bad_words_token_ids=[[7], list(ids["he"])])
    found = with_bad_words(params, tokenizer)
    assert found.bad_words_token_ids == ((7,), ids["he"], ids[" he"], ids["h!"], ids[" h!"])
    assert [len(word) for word in found.bad_words_token_ids] == [1, 1, 1, 2, 2]
    assert found.bad_words == ("he", " h!")  # what was asked for, as it was
    with pytest.raises(ValueError, match=r"^bad_words: expected none without a tokenizer"):
        with_bad_words(params, None)
