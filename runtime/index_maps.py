"""Which tokens of a step take an embedding that is not a token's, and which take which adapter.

Example: row a decodes under the adapter in place 1; row b feeds a chunk of 4 over a context of 2 and has none, with an image
of 3 placeholders at the prompt's tokens 3 to 5; row c feeds 2 tokens under the adapter in place 0:

    tokens of the step     a   b   b   b   b   c   c
    place in the prompt        2   3   4   5
    multi_modal_places             2   3   4           image's embeddings 0, 1, 2 (multi_modal_parts)
    adapter                1   -   -   -   -   0   0
    lora_token_order       1  2  3  4 | 5  6 | 0       tokens without one first, then place by place
    lora_adapter_starts    4, 6, 7
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .launch_checks import check_span_chunk
from .metadata import MetadataError, SequenceGroupMetadata, SpanChunk
from .params import LoRARequest
from .snapshots import Snapshots


def multi_modal_places(
    seq_group_metadata_list: Sequence[SequenceGroupMetadata], num_tokens_before: int
) -> tuple[np.ndarray, tuple[SpanChunk, ...]] | None:
    """(tokens of the step that take an embedding, int64 [M]; whose they are, in that order); None if there are none.

    So many tokens of other rows come before those of the snapshots.
    """
    places: list[np.ndarray] = []
    parts: list[SpanChunk] = []
    start = num_tokens_before
    for metadata in seq_group_metadata_list:
        for _ in metadata.seq_data:  # several sequences feed the same tokens
            for part in metadata.multi_modal_data:
                check_span_chunk(metadata, part)
                places.append(start + part.offset + np.arange(part.stop - part.start))
                parts.append(part)
            start += metadata.token_chunk_size
    return (np.concatenate(places), tuple(parts)) if parts else None


def adapter_order(
    snapshots: Snapshots,
    query_lens: np.ndarray,
    places: Mapping[LoRARequest, int],
    num_places: int,
) -> dict[str, np.ndarray]:
    """`lora_token_order` and `lora_adapter_starts` of a step; nothing if no row has an adapter.

    query_lens   int64 [S], in row order
    places       of the adapters that are loaded, each in [0, num_places)
    """
    requests: list[LoRARequest | None] = []
    if snapshots.decodes is not None:
        requests += snapshots.decodes.lora_requests
    for metadata in snapshots.others:
        requests += [metadata.lora_request] * len(metadata.seq_data)
    if not any(requests):
        return {}
    missing = next((each for each in requests if each is not None and each not in places), None)
    if missing is not None:
        owner = next(metadata for metadata in snapshots if metadata.lora_request == missing)
        raise MetadataError(
            owner.request_id,
            "lora_request",
            f"expected an adapter that is loaded, got {missing.lora_name!r}",
        )
    of_row = np.array([-1 if request is None else places[request] for request in requests])
    of_token = np.repeat(of_row, query_lens)
    order = np.argsort(of_token, kind="stable")
    starts = np.searchsorted(of_token[order], np.arange(num_places + 1))
    return {
        "lora_token_order": order.astype(np.int32),
        "lora_adapter_starts": starts.astype(np.int32),
    }
