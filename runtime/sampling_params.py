"""How the tokens of one request are chosen and when they end. Torch-free. In the order in which they act: docs/sampling.md."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import msgspec

GREEDY_TEMPERATURE = 0.0
ALL_LOGPROBS = -1
_MOST_LENGTH_PENALTY = 32  # no length below 2**31 to this power leaves the range of a float
_MOST_BIAS = 100


def require(ok: bool, name: str, expected: str, got: Any) -> None:
    if not ok:
        raise ValueError(f"{name}: expected {expected}, got {got!r}")


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _as_tuple(name: str, value: Any) -> tuple:
    try:
        return () if value is None else (value,) if isinstance(value, str) else tuple(value)
    except TypeError:
        raise ValueError(f"{name}: expected a list, got {value!r}") from None


def _is_text(value: Any) -> bool:
    """UTF-8 can hold it, and so tokens can: half of a surrogate pair alone is no character."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _are_ids(values: Any) -> bool:
    return all(is_int(i) and i >= 0 for i in values)


class Guided(msgspec.Struct, frozen=True, kw_only=True):
    """What the text of a completion has to be, from its first character to its last. One of:

    json_schema  the schema that it follows, as JSON text or as a dict
    regex        the regular expression that matches all of it (Rust's syntax)
    choice       the texts of which it is one
    Raises ValueError naming the field, what was expected and what came.
    """

    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Seq[str] = ()

    def __post_init__(self) -> None:
        choice = _as_tuple("choice", self.choice)
        msgspec.structs.force_setattr(self, "choice", choice)
        names = ("json_schema", "regex", "choice")
        given = [name for name in names if getattr(self, name) not in (None, ())]
        require(len(given) == 1, "guided", "one of json_schema, regex and choice", given)
        ok = self.regex is None or _is_text(self.regex)
        require(ok, "regex", "a regular expression in UTF-8", self.regex)
        require(
            all(t and _is_text(t) for t in choice), "choice", "non-empty texts in UTF-8", choice
        )
        if self.json_schema is not None:
            msgspec.structs.force_setattr(self, "json_schema", _as_json(self.json_schema))


def _as_json(schema: Any) -> str:
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(parsed, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"json_schema: expected a JSON schema, got {reprlib.repr(schema)}: {error}"
        ) from error
    require(isinstance(parsed, Mapping), "json_schema", "a JSON schema", schema)
    return text


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one request are chosen and when they end. Validated at construction, then immutable.

    n             completions of one prompt; the prompt's KV is stored once. Sample i draws with seed + i
    best_of       completions that are made, of which the n with the highest cumulative logprob are returned; None for n.
                  With beam search the width of the beam
    use_beam_search  search for the most likely completions, `best_of` at a time. Needs temperature 0 and no top-k, top-p,
                  min-p, penalties, bias, processors or stop strings; the texts come when the request ends
    length_penalty  beams are compared by cumulative_logprob / num_output_tokens ** length_penalty
    early_stopping  when a beam search ends: True as soon as best_of completions have ended; False when no running beam of
                  its present length could enter them; "never" when none could at any length (as in transformers)
    temperature   0 is greedy (and needs best_of = 1, all samples would be equal); any other value >= 0 is used as it is
    top_k         -1 is off, else keep the k most likely tokens, k >= 1; more than the vocabulary acts as off
    top_p         in (0, 1]; keep the smallest set of most likely tokens whose probability reaches top_p
    min_p         in [0, 1]; drop tokens less likely than min_p times the most likely one; 0 is off
    repetition_penalty  in (0, 2]; logits of tokens of the prompt and the output are divided by it where positive, else
                  multiplied; 1 is off
    frequency_penalty, presence_penalty  in [-2, 2]; taken off a token's logit once for each time it stands in the output,
                  and once if it stands there at all; 0 is off
    logit_bias    token id -> number in [-100, 100] that is added to its logit
    allowed_token_ids  no other tokens are chosen; None for all
    bad_words     texts whose tokens never come up in a row in the output, be it at the beginning of a word or within one;
                  the text may still come about from other tokens
    bad_words_token_ids  the same, as lists of token ids; the engine adds those of `bad_words`
    min_tokens    tokens before which no stop string, stop token or end-of-sequence ends the completion; the tokens are not
                  chosen until then. At most max_tokens
    logits_processors  functions (output_token_ids, logits) or (prompt_token_ids, output_token_ids, logits) -> logits that
                  change a row of logits, float32 [vocab], in place or not, in turn. Ids are read-only int32 arrays. One
                  that raises ends its own request. Such a request cannot be serialised
    guided        a JSON schema, a regular expression or a choice of texts that the output follows. Give it max_tokens enough:
                  a text that is cut short follows nothing. Not with ignore_eos. Cannot be serialised, as logits_processors
    logprobs      k: for each output token its log probability and rank under the raw logits, and those of the k most
                  likely tokens at its place; 0 for the token alone, -1 for all of the vocabulary; None for nothing
    prompt_logprobs  the same for the tokens of the prompt, of which the first has none. The request then takes no KV from
                  the prefix cache for positions whose logits it needs
    seed          the draw of a token depends on (seed + sample, its place in the output) and the logits alone; None
                  lets the engine choose a seed for the request
    max_tokens    most tokens to generate, >= 1; None means until the context is full
    stop          strings that end a completion; they are cut off unless include_stop_str_in_output
    stop_token_ids  token ids that end a completion, kept in `token_ids` and, with special tokens, left out of the text
    ignore_eos    go on after the model's end-of-sequence token
    skip_special_tokens  leave special tokens out of the text
    Raises ValueError naming the field, what was expected and what came.
    """

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | Seq[str] = ()
    stop_token_ids: Seq[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Seq[int] | None = None
    bad_words: str | Seq[str] = ()
    bad_words_token_ids: Seq[Seq[int]] = ()
    min_tokens: int = 0
    logits_processors: Seq[Any] = ()
    guided: Guided | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._take_lists()
        self._check_numbers()
        self._check_counts()
        self._check_tokens()
        if self.use_beam_search:
            self._check_beam_search()

    def _take_lists(self) -> None:
        """What the caller can no longer change."""
        values: dict[str, Any] = {
            name: _as_tuple(name, getattr(self, name))
            for name in ("stop", "stop_token_ids", "bad_words", "logits_processors")
        }
        values["bad_words_token_ids"] = tuple(
            _as_tuple("bad_words_token_ids", ids)
            for ids in _as_tuple("bad_words_token_ids", self.bad_words_token_ids)
        )
        if self.allowed_token_ids is not None:
            values["allowed_token_ids"] = _as_tuple("allowed_token_ids", self.allowed_token_ids)
        if self.logit_bias is not None:
            ok = isinstance(self.logit_bias, Mapping)
            require(ok, "logit_bias", "token id -> number", self.logit_bias)
            values["logit_bias"] = dict(self.logit_bias)
        for name, value in values.items():
            msgspec.structs.force_setattr(self, name, value)

    def _check_numbers(self) -> None:
        def check(name: str, expected: str, is_right: Callable[[Any], bool]) -> None:
            value = getattr(self, name)
            require(is_right(value), name, expected, value)

        def check_range(name: str, most: float, least: float) -> None:
            expected = f"a number in [{least}, {most}]"
            check(name, expected, lambda v: _is_number(v) and least <= v <= most)

        check("temperature", "a number >= 0", lambda v: _is_number(v) and v >= 0)
        check("top_k", "-1 or an integer >= 1", lambda v: is_int(v) and (v == -1 or v >= 1))
        check("top_p", "a number in (0, 1]", lambda v: _is_number(v) and 0 < v <= 1)
        check("repetition_penalty", "a number in (0, 2]", lambda v: _is_number(v) and 0 < v <= 2)
        check_range("min_p", 1, 0)
        check_range("frequency_penalty", 2, -2)
        check_range("presence_penalty", 2, -2)
        check_range("length_penalty", _MOST_LENGTH_PENALTY, -_MOST_LENGTH_PENALTY)
        check(
            "seed",
            "None or a 64-bit integer",
            lambda v: v is None or (is_int(v) and -(2**63) <= v < 2**63),
        )
        early_ok = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        require(early_ok, "early_stopping", "True, False or 'never'", self.early_stopping)
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "use_beam_search",
        ):
            check(name, "True or False", lambda v: isinstance(v, bool))

    def _check_counts(self) -> None:
        def check(name: str, least: int, most: float, expected: str, none: bool = True) -> None:
            value = getattr(self, name)
            ok = (none and value is None) or (is_int(value) and least <= value <= most)
            require(ok, name, expected, value)

        check("n", 1, math.inf, "an integer >= 1", none=False)
        check("best_of", self.n, math.inf, f"None or an integer >= n = {self.n}")
        require(
            self.width == 1 or self.temperature > 0 or self.use_beam_search,
            "n" if self.best_of is None else "best_of",
            "1 with temperature 0 (greedy samples are all equal)",
            self.width,
        )
        check("max_tokens", 1, math.inf, "None or an integer >= 1")
        most = math.inf if self.max_tokens is None else self.max_tokens
        expected = f"an integer in [0, max_tokens = {self.max_tokens}]"
        check("min_tokens", 0, most, expected, none=False)
        for name in ("logprobs", "prompt_logprobs"):
            check(name, ALL_LOGPROBS, math.inf, "None, -1 or an integer >= 0")

    def _check_tokens(self) -> None:
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            ok = all(text and _is_text(text) for text in texts)
            require(ok, name, "non-empty strings in UTF-8", texts)
        require(
            _are_ids(self.stop_token_ids), "stop_token_ids", "token ids >= 0", self.stop_token_ids
        )
        words_ok = all(ids and _are_ids(ids) for ids in self.bad_words_token_ids)
        words = self.bad_words_token_ids
        require(words_ok, "bad_words_token_ids", "non-empty lists of token ids >= 0", words)
        allowed = self.allowed_token_ids
        allowed_ok = allowed is None or (len(allowed) > 0 and _are_ids(allowed))
        require(allowed_ok, "allowed_token_ids", "None or at least one token id >= 0", allowed)
        for token, bias in (self.logit_bias or {}).items():
            require(_are_ids([token]), "logit_bias", "token ids >= 0", token)
            ok = _is_number(bias) and abs(bias) <= _MOST_BIAS
            require(ok, "logit_bias", f"numbers in [-{_MOST_BIAS}, {_MOST_BIAS}]", bias)
        processors = self.logits_processors
        require(all(map(callable, processors)), "logits_processors", "functions", processors)
        ok = self.guided is None or isinstance(self.guided, Guided)
        require(ok, "guided", "None or a Guided", self.guided)
        require(
            self.guided is None or self.ignore_eos is False,
            "ignore_eos",
            "False with guided, for a text that is complete has to end",
            self.ignore_eos,
        )

    def _check_beam_search(self) -> None:
        """A beam search takes the most likely tokens of the model itself. Some may be forbidden, none can be made more or
        less likely: a score is a sum of the model's log probabilities."""
        off = {
            "temperature": 0,
            "top_k": -1,
            "top_p": 1,
            "min_p": 0,
            "repetition_penalty": 1,
            "frequency_penalty": 0,
            "presence_penalty": 0,
        }
        for name, value in off.items():
            got = getattr(self, name)
            require(got == value, name, f"{value} with use_beam_search", got)
        require(not self.logit_bias, "logit_bias", "none with use_beam_search", self.logit_bias)
        for name in ("logits_processors", "guided", "stop"):
            got = getattr(self, name)
            require(not got, name, "none with use_beam_search", got)

    @property
    def width(self) -> int:
        """Sequences the request has at once, of which n are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """The completions that are returned compete for their places until the request ends."""
        return self.use_beam_search or self.width != self.n

    def draw(self, index: int) -> tuple[float, int, float, float, int]:
        """What the draws of sample `index` depend on: temperature, top_k, top_p, min_p, seed."""
        top_k = min(self.top_k, 2**31)  # any vocabulary is smaller
        return self.temperature, top_k, self.top_p, self.min_p, ((self.seed or 0) + index) % 2**64

    def token_id_lists(self) -> list[tuple[str, list[int]]]:
        """(field, the token ids it names): what has to lie in the vocabulary."""
        return [
            ("logit_bias", list(self.logit_bias or ())),
            ("allowed_token_ids", list(self.allowed_token_ids or ())),
            ("bad_words_token_ids", [i for ids in self.bad_words_token_ids for i in ids]),
        ]

    @property
    def is_greedy(self) -> bool:
        return self.temperature == GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
        )

    @property
    def changes_logits(self) -> bool:
        """Something comes between the model's logits and the temperature."""
        return bool(
            self.logits_processors
            or self.guided is not None
            or self.has_penalties
            or self.bad_words
            or self.bad_words_token_ids
            or self.min_tokens
            or self.logit_bias
            or self.allowed_token_ids is not None
        )

    @property
    def is_plain(self) -> bool:
        """`draw` is all that sampling needs to know, and a token and its log probability all that is wanted of it."""
        return self.logprobs is None and not self.changes_logits
