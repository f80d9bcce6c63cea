"""Words that must not come up, as the tokens a model would write them with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..runtime.params import SamplingParams

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def with_bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """`params` with the tokens of its `bad_words`, each with and without a space before it. ValueError without a tokenizer."""
    if tokenizer is None:
        raise ValueError(f"bad_words: expected none without a tokenizer, got {params.bad_words!r}")
    found = dict.fromkeys(tuple(ids) for ids in params.bad_words_token_ids)
    for word in params.bad_words:
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            if ids:
                found[tuple(ids)] = None
    return msgspec.structs.replace(params, bad_words_token_ids=tuple(found))
