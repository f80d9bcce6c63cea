"""What a caller may ask of one request. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Any

import msgspec

GREEDY_TEMPERATURE = 0.0


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
    temperature   0 is greedy (and needs n = 1, all samples would be equal); any other value >= 0 is used as it is
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
        _require(
            self.n == 1 or self.temperature > 0,
            "n",
            "1 with temperature 0 (greedy samples are all equal)",
            self.n,
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
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            _require(
                isinstance(getattr(self, name), bool), name, "True or False", getattr(self, name)
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == GREEDY_TEMPERATURE
