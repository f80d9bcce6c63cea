"""Text of one completion as its tokens arrive, and where a stop string ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTEXT_TOKENS = (
    4  # of the prompt, so that the first token is spaced as it would be in the middle of a text
)
_INCOMPLETE = "\ufffd"


class TextStream:
    """Decodes token by token; bytes of an unfinished character are held back until it is whole.

    text:  [ settled, visible ........ | may become a stop string ]
                                       ^ len(visible)
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        from tokenizers.decoders import DecodeStream

        context = prompt_token_ids[-_CONTEXT_TOKENS:]
        if tokenizer.decode(context, skip_special_tokens=skip_special_tokens).endswith(_INCOMPLETE):
            context = []
        self._tokenizer = tokenizer
        self._context = context
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(ids=context, skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._num_settled = 0  # tokens whose text is all there
        self._stop = stop
        self._longest_stop = max(map(len, stop), default=0)
        self._include_stop = include_stop
        self._min_tokens = min_tokens  # a stop string within these is text like any other
        self.text = ""
        self.is_over = False

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def push(self, token_id: int) -> str | None:
        """Take one token in; returns the stop string that it completed, if any, with `text` cut accordingly."""
        if self.is_over:
            return None
        self._token_ids.append(token_id)
        try:
            more = self._stream.step(self._tokenizer, token_id)
        except Exception:  # of a class of its own it has none
            more = self._start_anew()
        if more is None:
            return None
        self._num_settled = len(self._token_ids)
        return self._append(more)

    def _start_anew(self) -> str:
        """The text of the held tokens, where with the newest of them those before mean something else than they did: decoders
        that make characters of tokens of single bytes take none of a run of bytes if one does not fit."""
        from tokenizers.decoders import DecodeStream

        held = self._token_ids[self._num_settled :]
        self._stream = DecodeStream(ids=held, skip_special_tokens=self._skip_special_tokens)
        return self._decode(held)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def close(self) -> str | None:
        """No token follows: what was held back becomes visible. Returns a stop string found in it, if any."""
        if self.is_over:
            return None
        stop, held = None, self._token_ids[self._num_settled :]
        if held:
            known = self._decode(self._context) + self.text
            whole = self._decode(self._context + self._token_ids)
            # alone, held tokens may lose a space at their beginning
            more = whole[len(known) :] if whole.startswith(known) else self._decode(held)
            stop = self._append(more)
        self.is_over = True
        return stop

    def _append(self, more: str) -> str | None:
        known = len(self.text)
        self.text += more
        if len(self._token_ids) <= self._min_tokens or not more:
            return None
        found = []
        for stop in self._stop:
            at = self.text.find(stop, max(0, known - len(stop) + 1))  # what ends in `more`
            if at >= 0:
                found.append((at, stop))
        if not found:
            return None
        at, stop = min(found, key=lambda pair: pair[0])
        self.text = self.text[: at + len(stop) if self._include_stop else at]
        self.is_over = True
        return stop

    @property
    def visible(self) -> str:
        """What may be shown now: no later token takes any of it back."""
        if self.is_over or not self._stop:
            return self.text
        for held in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            ending = self.text[-held:]
            if any(len(stop) > held and stop.startswith(ending) for stop in self._stop):
                return self.text[:-held]
        return self.text
