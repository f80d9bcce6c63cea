"""Output that has to follow a JSON schema, a regular expression, or be one of several texts: `SamplingParams(guided=...)`.

The library llguidance (`pip install octavo[guided]`) says which tokens may come next; a logits processor forbids the others.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from msgspec.structs import replace

from ..runtime.sampling_params import Guided, SamplingParams

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

_MOST_STATES = 64  # of one request: its completions, and where they were a few steps ago


class Guides:
    """Makes the processors of requests; what the library wants to know of the tokenizer is made at the first of them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._known: Any = None

    def with_processor(self, params: SamplingParams) -> SamplingParams:
        """The parameters, with a processor for `params.guided` behind their own.

        Raises ValueError when the library is missing, or cannot follow what is asked for.
        """
        assert params.guided is not None
        processor = Guide(self._matcher(params.guided), self._tokenizer.eos_token_ids)
        return replace(
            params, logits_processors=(*params.logits_processors, processor), guided=None
        )

    def _matcher(self, guided: Guided) -> Any:
        try:
            import llguidance.hf
        except ImportError as error:
            raise ValueError(
                "guided: expected llguidance to be installed (pip install octavo[guided]), it is not"
            ) from error
        if self._known is None:
            self._known = llguidance.hf.from_tokenizer(
                self._tokenizer.hf, self._vocab_size, sorted(self._tokenizer.eos_token_ids)
            )
        make = llguidance.LLMatcher
        if guided.json_schema is not None:
            grammar = make.grammar_from_json_schema(str(guided.json_schema))
        elif guided.regex is not None:
            grammar = make.grammar_from_regex(guided.regex)
        else:
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in guided.choice)
            grammar = make.grammar_from_lark(f"start: {texts}")
        if fault := make.validate_grammar(grammar, self._known):
            raise ValueError(f"guided: expected what llguidance can follow, got {fault}")
        return make(self._known, grammar)


class Guide:
    """Leaves a row only the tokens that may come next. Knows where a text stands from its tokens alone, so that whatever
    happens to a request, and however many completions it has, the answer is the same; states are kept to be quick."""

    def __init__(self, matcher: Any, eos_token_ids: frozenset[int]) -> None:
        self._start = matcher
        self._ends = sorted(eos_token_ids)
        self._states: OrderedDict[bytes, Any] = OrderedDict()  # by the output's tokens

    def __call__(self, output_token_ids: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        state = self._state(output_token_ids)
        if state.is_stopped():
            forbidden = np.ones(len(logits), bool)
        else:
            bits = np.frombuffer(state.compute_bitmask(), np.uint8)
            forbidden = np.unpackbits(bits, bitorder="little")[: len(logits)] == 0
        # also where their own names are what the text is to be
        forbidden[self._ends] = not state.is_accepting()
        logits[torch.from_numpy(forbidden).to(logits.device)] = -torch.inf
        return logits

    def _state(self, output_token_ids: np.ndarray) -> Any:
        output = np.asarray(output_token_ids, np.int32)
        key = output.tobytes()
        state = self._states.get(key)
        if state is None:
            before = self._states.get(key[: -output.itemsize]) if len(output) else None
            state = (self._start if before is None else before).deep_copy()
            news = output if before is None else output[-1:]
            if len(news) and not state.consume_tokens(news.tolist()):
                fault = str(state.get_error()).partition("\n")[0]  # its own state follows
                raise ValueError(f"the output does not follow the grammar: {fault}")
            self._states[key] = state
            if len(self._states) > _MOST_STATES:
                self._states.popitem(last=False)
        self._states.move_to_end(key)
        return state
