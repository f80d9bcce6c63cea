"""A step's snapshots, those of plain decodes kept column by column. Torch-free.

Most rows of most steps are requests with one sequence that decode one token. For them a step's facts are a few columns of
numbers that change, and lists that do not; a `SequenceGroupMetadata` is made of a row only when somebody looks at it. The
columns are as frozen as the objects are: numbers are copied, token buffers and block tables are append-only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np

from .metadata import SequenceData, SequenceGroupMetadata, StaleMetadataError
from .params import LoRARequest, SamplingParams


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """R requests, one sequence each, that feed their newest token. Lists and arrays have one entry for each row.

    num_tokens           int64   prompt and output; all but the newest are computed
    num_prompt_tokens    int64
    last_token_ids       int64   the newest token
    cumulative_logprobs  float64
    tokens, logprobs     read-only buffers whose beginnings are the sequence's tokens and its outputs' log probabilities
    tables               int32 arrays whose first ceil(num_tokens / block_size) entries are the block table
    temperature, top_k, top_p, min_p, seed   the sampling parameters as columns, see `sampling_rows.SamplingRows`
    is_plain             bool    `SamplingParams.is_plain`
    awaits_draw          the newest token of each is the one that the step before this draws: it is counted, but its id is
                         not known yet, and stands in neither `last_token_ids` nor `tokens`
    """

    request_ids: list[str]
    generation_ids: list[int]
    seq_ids: list[int]
    sampling_params: list[SamplingParams]
    lora_requests: list[LoRARequest | None]
    eos_token_ids: list[tuple[int, ...]]
    num_tokens: np.ndarray
    num_prompt_tokens: np.ndarray
    last_token_ids: np.ndarray
    cumulative_logprobs: np.ndarray
    tokens: list[np.ndarray]
    logprobs: list[np.ndarray]
    tables: list[np.ndarray]
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    is_plain: np.ndarray
    block_size: int
    sliding_window: int | None
    awaits_draw: bool = False

    def __len__(self) -> int:
        return len(self.request_ids)

    def take(self, kept: list[int]) -> DecodeRows:
        """Some of the rows, in order."""
        values = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                value = [value[row] for row in kept]
            elif isinstance(value, np.ndarray):
                value = value[kept]
            values[field.name] = value
        return DecodeRows(**values)

    def metadata(self, row: int) -> SequenceGroupMetadata:
        """The snapshot of one row."""
        num_tokens, prompt_len = int(self.num_tokens[row]), int(self.num_prompt_tokens[row])
        num_known = num_tokens - self.awaits_draw
        tokens = self.tokens[row]
        computed = num_tokens - 1
        table = self.tables[row][: -(-num_tokens // self.block_size)]
        table.flags.writeable = False
        data = SequenceData(
            tokens[:prompt_len],
            tokens[prompt_len:num_known],
            computed,
            float(self.cumulative_logprobs[row]),
            self.logprobs[row][: num_known - prompt_len],
        )
        seq_id = self.seq_ids[row]
        return SequenceGroupMetadata(
            request_id=self.request_ids[row],
            is_prompt=False,
            seq_data=MappingProxyType({seq_id: data}),
            block_tables=MappingProxyType({seq_id: table}),
            sampling_params=self.sampling_params[row],
            token_chunk_size=1,
            computed_block_nums=table[: computed // self.block_size],
            do_sample=True,
            generation_id=self.generation_ids[row],
            sliding_window=self.sliding_window,
            lora_request=self.lora_requests[row],
            eos_token_ids=self.eos_token_ids[row],
        )


class Snapshots(Sequence):
    """`SequenceGroupMetadata` of one step in row order: plain decodes, which `decodes` has as columns, then `others`."""

    __slots__ = ("_made", "decodes", "others")

    def __init__(
        self, decodes: DecodeRows | None = None, others: Sequence[SequenceGroupMetadata] = ()
    ) -> None:
        self.decodes = decodes
        self.others = others
        self._made: list[SequenceGroupMetadata] | None = None

    @classmethod
    def of(cls, seq_group_metadata_list: Sequence[SequenceGroupMetadata]) -> Snapshots:
        if isinstance(seq_group_metadata_list, Snapshots):
            return seq_group_metadata_list
        return cls(None, seq_group_metadata_list)

    def __len__(self) -> int:
        return (0 if self.decodes is None else len(self.decodes)) + len(self.others)

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def _all(self) -> list[SequenceGroupMetadata]:
        if self._made is None:
            rows = self.decodes
            made = [] if rows is None else [rows.metadata(row) for row in range(len(rows))]
            self._made = [*made, *self.others]
        return self._made

    def lora_requests(self) -> list[LoRARequest]:
        """The adapters of the step's requests, each once."""
        rows = self.decodes
        requests = [] if rows is None else rows.lora_requests
        requests = [*requests, *(metadata.lora_request for metadata in self.others)]
        return list(dict.fromkeys(request for request in requests if request is not None))

    def check_current(self, generation_of: Callable[[str], int | None]) -> None:
        """Raise StaleMetadataError for a request whose placement has changed since."""
        rows = self.decodes
        if rows is not None:
            current = list(map(generation_of, rows.request_ids))
            if current != rows.generation_ids:
                row = next(i for i, now in enumerate(current) if now != rows.generation_ids[i])
                raise StaleMetadataError(
                    rows.request_ids[row], rows.generation_ids[row], current[row]
                )
        for metadata in self.others:
            now = generation_of(metadata.request_id)
            if now != metadata.generation_id:
                raise StaleMetadataError(metadata.request_id, metadata.generation_id, now)
