"""How a batch is written down: `8q1s1k` is eight sequences of one new token each, 1024 tokens long.

    batch = part ("_" part)*         part = [count] "q" length ["s" length]         length = digits ["k"]

q is the query length (new tokens of a sequence this step), s its sequence length, the new tokens included; without s the
sequence is all new. k multiplies by 1024. `2q2k_8q1s1k`: two prompts of 2048 tokens and eight decodes. The grammar is that
of vLLM's benchmarks/attention_benchmarks, so that figures can be laid beside public tables.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

_PART = re.compile(r"([0-9]{1,9})?q([0-9]{1,9})(k?)(?:s([0-9]{1,9})(k?))?")
_EXPECTED = "parts such as 8q1s1k or q2k, joined by _"
_MOST_SEQS = 1 << 20
_MOST_TOKENS = (1 << 31) - 1  # lengths are int32 in a launch


@dataclass(frozen=True)
class BatchSpec:
    """Query and sequence lengths in batch order: decodes first, as in a step's launch arguments."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> BatchSpec:
        """Raises ValueError for what the grammar does not have, and for a sequence shorter than its new tokens."""
        rows: list[tuple[int, int]] = []
        num_tokens = 0
        for part in text.split("_"):
            match = _PART.fullmatch(part)
            if match is None:
                raise ValueError(f"batch: expected {_EXPECTED}, got {part!r} in {text!r}")
            count, query, query_k, seq, seq_k = match.groups()
            num_seqs = int(count or 1)
            query_len = int(query) * (1024 if query_k else 1)
            seq_len = query_len if seq is None else int(seq) * (1024 if seq_k else 1)
            if not 1 <= query_len <= seq_len or num_seqs < 1:
                raise ValueError(
                    f"batch: expected at least one sequence with 1 <= q <= s, got {part!r} in {text!r}"
                )
            num_tokens += num_seqs * seq_len
            if num_tokens > _MOST_TOKENS or len(rows) + num_seqs > _MOST_SEQS:
                raise ValueError(
                    f"batch: expected at most {_MOST_SEQS} sequences and {_MOST_TOKENS} tokens, got more with {part!r} in {text!r}"
                )
            rows += [(query_len, seq_len)] * num_seqs
        return cls.of(rows)

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int]]) -> BatchSpec:
        """From (query length, sequence length) pairs; decodes are moved to the front, the order is kept otherwise."""
        if not rows:
            raise ValueError("batch: expected at least one sequence, got none")
        ordered = sorted(rows, key=lambda row: row[0] > 1)
        query_lens, seq_lens = zip(*ordered, strict=True)
        return cls(query_lens, seq_lens)

    def __str__(self) -> str:
        parts = []
        for (query_len, seq_len), run in groupby(zip(self.query_lens, self.seq_lens, strict=True)):
            count = len(list(run))
            parts.append(
                ("" if count == 1 else str(count))
                + f"q{_length(query_len)}"
                + ("" if query_len == seq_len else f"s{_length(seq_len)}")
            )
        return "_".join(parts)

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(self.query_lens)

    @property
    def num_decodes(self) -> int:
        """Sequences of one new token, which come first."""
        return sum(length == 1 for length in self.query_lens)


def _length(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
