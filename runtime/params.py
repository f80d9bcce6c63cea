"""What a caller may ask of one request. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Any

import msgspec

GREEDY_TEMPERATURE = 0.0
_MOST_LENGTH_PENALTY = 32  # no length below 2**31 to this power leaves the range of a float


def _require(ok: bool, name: str, expected: str, got: Any) -> None:
    if not ok:
        raise ValueError(f"{name}: expected {expected}, got {got!r}")


def _is_int(value: Any) -> bool:
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


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one request are chosen and when they end. Validated at construction, then immutable.

    n             completions of one prompt; the prompt's KV is stored once. Sample i draws with seed + i
    best_of       completions that are made, of which the n with the highest cumulative logprob are returned; None for n.
                  With beam search the width of the beam
    use_beam_search  search for the most likely completions, `best_of` at a time. Needs temperature 0 and no top-k, top-p,
                  min-p or stop strings; the texts come when the request ends
    length_penalty  beams are compared by cumulative_logprob / num_output_tokens ** length_penalty
    early_stopping  when a beam search ends: True as soon as best_of completions have ended; False when no running beam of
                  its present length could enter them; "never" when none could at any length (as in transformers)
    temperature   0 is greedy (and needs best_of = 1, all samples would be equal); any other value >= 0 is used as it is
    top_k         -1 is off, else keep the k most likely tokens, k >= 1; more than the vocabulary acts as off
    top_p         in (0, 1]; keep the smallest set of most likely tokens whose probability reaches top_p
    min_p         in [0, 1]; drop tokens less likely than min_p times the most likely one; 0 is off
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

    def __post_init__(self) -> None:
        stop = _as_tuple("stop", self.stop)
        stop_token_ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        msgspec.structs.force_setattr(self, "stop", stop)
        msgspec.structs.force_setattr(self, "stop_token_ids", stop_token_ids)
        _require(_is_int(self.n) and self.n >= 1, "n", "an integer >= 1", self.n)
        _require(
            _is_number(self.temperature) and self.temperature >= 0,
            "temperature",
            "a number >= 0",
            self.temperature,
        )
        best_of_ok = self.best_of is None or (_is_int(self.best_of) and self.best_of >= self.n)
        _require(best_of_ok, "best_of", f"None or an integer >= n = {self.n}", self.best_of)
        name = "n" if self.best_of is None else "best_of"
        _require(
            self.width == 1 or self.temperature > 0 or self.use_beam_search,
            name,
            "1 with temperature 0 (greedy samples are all equal)",
            self.width,
        )
        _require(
            _is_int(self.top_k) and (self.top_k == -1 or self.top_k >= 1),
            "top_k",
            "-1 or an integer >= 1",
            self.top_k,
        )
        _require(
            _is_number(self.top_p) and 0 < self.top_p <= 1,
            "top_p",
            "a number in (0, 1]",
            self.top_p,
        )
        _require(
            _is_number(self.min_p) and 0 <= self.min_p <= 1,
            "min_p",
            "a number in [0, 1]",
            self.min_p,
        )
        seed_ok = self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**63)
        _require(seed_ok, "seed", "None or a 64-bit integer", self.seed)
        max_ok = self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1)
        _require(max_ok, "max_tokens", "None or an integer >= 1", self.max_tokens)
        _require(all(isinstance(s, str) and s for s in stop), "stop", "non-empty strings", stop)
        ids_ok = all(_is_int(i) and i >= 0 for i in self.stop_token_ids)
        _require(ids_ok, "stop_token_ids", "token ids >= 0", self.stop_token_ids)
        flags = (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "use_beam_search",
        )
        for name in flags:
            _require(
                isinstance(getattr(self, name), bool), name, "True or False", getattr(self, name)
            )

        _require(
            _is_number(self.length_penalty) and abs(self.length_penalty) <= _MOST_LENGTH_PENALTY,
            "length_penalty",
            f"a number in [-{_MOST_LENGTH_PENALTY}, {_MOST_LENGTH_PENALTY}]",
            self.length_penalty,
        )
        early_ok = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        _require(early_ok, "early_stopping", "True, False or 'never'", self.early_stopping)
        if self.use_beam_search:
            self._check_beam_search()

    def _check_beam_search(self) -> None:
        """A beam search takes the most likely tokens of the model itself."""
        for name, value in (("temperature", 0), ("top_k", -1), ("top_p", 1), ("min_p", 0)):
            got = getattr(self, name)
            _require(got == value, name, f"{value} with use_beam_search", got)
        _require(not self.stop, "stop", "none with use_beam_search", self.stop)

    @property
    def width(self) -> int:
        """Sequences the request has at once, of which n are returned."""
        return self.n if self.best_of is None else self.best_of

    def draw(self, index: int) -> tuple[float, int, float, float, int]:
        """What the draws of sample `index` depend on: temperature, top_k, top_p, min_p, seed."""
        top_k = min(self.top_k, 2**31)  # any vocabulary is smaller
        return self.temperature, top_k, self.top_p, self.min_p, ((self.seed or 0) + index) % 2**64

    @property
    def is_greedy(self) -> bool:
        return self.temperature == GREEDY_TEMPERATURE


class LoRARequest(msgspec.Struct, frozen=True):
    """A loaded LoRA adapter. Loading it again, from the same path even, is another adapter with another id.

    lora_name    what users call it
    lora_int_id  >= 1, one for each load: cached prefixes are shared within one id only
    lora_path    where its weights are
    Raises ValueError naming the field, what was expected and what came.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        _require(
            isinstance(self.lora_name, str)
            and bool(self.lora_name)
            and self.lora_name.isprintable(),
            "lora_name",
            "a printable name",
            self.lora_name,
        )
        id_ok = _is_int(self.lora_int_id) and self.lora_int_id >= 1
        _require(id_ok, "lora_int_id", "an integer >= 1", self.lora_int_id)
        _require(isinstance(self.lora_path, str), "lora_path", "a path", self.lora_path)


class MultiModalSpan(msgspec.Struct, frozen=True):
    """An image, a sound or the like, in place of `length` placeholder tokens of the prompt.

    offset    index of its first placeholder in the prompt's tokens
    length    placeholders, one for each of its embeddings; they count as tokens everywhere
    digest    8 to 64 bytes that identify the content: prefixes are shared only where the digests are equal
    data      what the model makes the embeddings from, or the embeddings themselves
    is_whole  the model needs the span in one step (for example with attention both ways): it is never split into chunks
    Raises ValueError naming the field, what was expected and what came.
    """

    offset: int
    length: int
    digest: bytes
    data: Any = None
    is_whole: bool = False

    def __post_init__(self) -> None:
        _require(
            _is_int(self.offset) and self.offset >= 0, "offset", "an integer >= 0", self.offset
        )
        _require(
            _is_int(self.length) and self.length >= 1, "length", "an integer >= 1", self.length
        )
        digest_ok = isinstance(self.digest, bytes) and 8 <= len(self.digest) <= 64
        _require(digest_ok, "digest", "8 to 64 bytes", self.digest)

    @property
    def stop(self) -> int:
        return self.offset + self.length
