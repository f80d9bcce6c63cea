"""Log probabilities of chosen tokens, of the most likely ones, and of a prompt's tokens, all under the model's raw logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from .metadata import PromptLogprobs, SequenceGroupMetadata, TokenLogprobs
from .snapshots import Snapshots

if TYPE_CHECKING:
    from .runner import Model

# logits of a prompt are made, in float32, for so many numbers at a time: 64 MiB, and as much again while they are compared
PIECE_ELEMENTS = 1 << 24
_CHUNK = 64


class DeviceLogprobs(NamedTuple):
    """`TokenLogprobs` that are still on the device."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor

    def fetch(self) -> TokenLogprobs:
        return TokenLogprobs(*(tensor.cpu().numpy() for tensor in self))


class DevicePrompt(NamedTuple):
    """`PromptLogprobs` that are still on the device."""

    request_id: str
    start: int
    pieces: list[DeviceLogprobs]

    def fetch(self) -> PromptLogprobs:
        pieces = [piece.fetch() for piece in self.pieces]
        columns = zip(*((p.token_ids, p.logprobs, p.ranks) for p in pieces), strict=True)
        return PromptLogprobs(
            self.request_id, self.start, TokenLogprobs(*map(np.concatenate, columns))
        )


def most_likely(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, logits) of the `count` largest logits of each row, ties to the lower id, [R, count] each."""
    if logits.is_cuda:  # to look for ties would be to wait
        token_ids, values = _in_order(logits, count)
        return _with_lowest_ties(logits, token_ids, values), values
    found = _in_few_chunks(logits, count) if logits.shape[1] >= 16 * _CHUNK * count else None
    if found is not None:
        return found
    more = min(count + 1, logits.shape[1])
    token_ids, values = _in_order(logits, more)
    crowded = torch.zeros(len(logits), dtype=torch.bool)
    if more > count:  # the value at the cut comes once more, and maybe with a lower id
        crowded = values[:, count - 1] == values[:, count]
        token_ids, values = token_ids[:, :count], values[:, :count]
    if crowded.any():
        rows = crowded.nonzero()[:, 0]
        token_ids[rows] = _with_lowest_ties(logits[rows], token_ids[rows], values[rows])
    return token_ids, values


def _in_order(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, values), those found of equal values by ascending id. `topk` leaves open which of equal values lie beyond
    the cut, and in which order the others come."""
    values, token_ids = logits.topk(count, dim=-1)
    token_ids, order = token_ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return token_ids.gather(1, order), values


def _in_few_chunks(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """As `most_likely`, from the `count` chunks with the largest maxima: one pass over the row instead of a search in it. None
    where maxima tie."""
    num_rows, vocab = logits.shape
    num_chunks = vocab // _CHUNK
    chunks = logits[:, : num_chunks * _CHUNK].reshape(num_rows, num_chunks, _CHUNK)
    maxima, best = chunks.amax(-1).topk(count + 1, dim=-1)
    if (maxima[:, count - 1] == maxima[:, count]).any():
        return None
    best = best[:, :count].sort(dim=-1).values
    rest = torch.arange(num_chunks * _CHUNK, vocab)
    ids = (best[..., None] * _CHUNK + torch.arange(_CHUNK)).flatten(1)
    ids = torch.cat((ids, rest.expand(num_rows, -1)), dim=1)
    places, values = most_likely(logits.gather(1, ids), count)
    return ids.gather(1, places), values


def _with_lowest_ties(
    logits: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Token ids of `values`, those of the last value replaced by the lowest ids that have it."""
    vocab, count = logits.shape[1], values.shape[1]
    last = values[:, -1:]
    ids = torch.arange(vocab, dtype=torch.int32, device=logits.device)
    lowest = torch.where(logits == last, ids, vocab).topk(count, dim=-1, largest=False).values
    lowest = lowest.sort(dim=-1).values.long()
    num_greater = (values > last).sum(-1, keepdim=True)
    place = torch.arange(count, device=logits.device) - num_greater
    return torch.where(place < 0, token_ids, lowest.gather(1, place.clamp(min=0)))


def _num_greater(logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """How many logits of a row are greater than each of its `values` [R, C]."""
    if logits.is_cuda:
        columns = [(logits > column[:, None]).sum(-1) for column in values.T]
        return torch.stack(columns, dim=1)
    counts = np.zeros(values.shape, np.int64)
    for row, (of_row, own) in enumerate(zip(logits.numpy(), values.numpy(), strict=True)):
        for column, value in enumerate(own):
            counts[row, column] = np.count_nonzero(of_row > value)
    return torch.from_numpy(counts)


def token_logprobs(
    logits: torch.Tensor, normaliser: torch.Tensor, token_ids: torch.Tensor, count: int
) -> DeviceLogprobs:
    """Those of `token_ids`, int64 [R, C], and of the `count` most likely tokens of each row: [R * C, 1 + count].

    logits [R, vocab] float32; normaliser [R], their logsumexp. A token id below 0 counts as 0.
    """
    count = min(count, logits.shape[1])
    chosen = token_ids.clamp(min=0)
    values = logits.gather(1, chosen)
    ranks = 1 + _num_greater(logits, values)
    own = chosen[..., None], (values - normaliser[:, None])[..., None], ranks[..., None]
    if count == 0:
        return DeviceLogprobs(*(tensor.flatten(0, 1) for tensor in own))
    top_ids, top_values = most_likely(logits, count)
    place = torch.arange(1, count + 1, device=logits.device)
    first = torch.ones_like(top_values, dtype=torch.bool)
    first[:, 1:] = top_values[:, 1:] < top_values[:, :-1]
    top_ranks = torch.where(first, place, 0).cummax(-1).values
    top = top_ids, top_values - normaliser[:, None], top_ranks
    both = (
        torch.cat((a, b[:, None].expand(-1, a.shape[1], -1)), dim=-1)
        for a, b in zip(own, top, strict=True)
    )
    return DeviceLogprobs(*(tensor.flatten(0, 1) for tensor in both))


def prompt_logprobs(
    model: Model, hidden: torch.Tensor, seq_group_metadata_list: Sequence[SequenceGroupMetadata]
) -> list[DevicePrompt]:
    """Those of the prompt tokens that follow what this step feeds, of the requests that ask for them.

    hidden [T, hidden], of all tokens of the step. At most `PIECE_ELEMENTS` logits exist at a time.
    """
    snapshots = Snapshots.of(seq_group_metadata_list)
    return [
        DevicePrompt(
            metadata.request_id, first, list(_pieces(model, hidden[rows], metadata, first))
        )
        for metadata, first, rows in _asked(snapshots)
    ]


def _asked(snapshots: Snapshots) -> Iterator[tuple[SequenceGroupMetadata, int, slice]]:
    """(request, first position, rows of `hidden`)."""
    start = 0 if snapshots.decodes is None else len(snapshots.decodes)
    for metadata in snapshots.others:
        first, stop = metadata.prompt_logprobs_range
        if first < stop:
            _, data, _ = next(metadata.rows())
            offset = start - data.num_computed_tokens
            yield metadata, first, slice(offset + first, offset + stop)
        start += metadata.token_chunk_size * len(metadata.seq_data)


def _pieces(
    model: Model, hidden: torch.Tensor, metadata: SequenceGroupMetadata, first: int
) -> Iterator[DeviceLogprobs]:
    _, data, _ = next(metadata.rows())
    count = metadata.sampling_params.prompt_logprobs or 0
    targets = data.prompt_token_ids[first + 1 : first + 1 + len(hidden)].astype(np.int64)
    target_ids = torch.from_numpy(targets).to(hidden.device)
    size, start = 1, 0  # the first piece tells the size of the vocabulary
    while start < len(hidden):
        logits = model.compute_logits(hidden[start : start + size]).float()
        vocab = logits.shape[1]
        yield token_logprobs(
            logits,
            logits.logsumexp(-1),
            target_ids[start : start + size, None],
            vocab if count < 0 else count,
        )
        start += size
        size = max(1, PIECE_ELEMENTS // vocab)
