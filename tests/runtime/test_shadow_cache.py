"""The shadow cache passes what is right and catches what goes wrong between scheduler and kernels: planted here."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from octavo.runtime.metadata import MetadataError, SequenceData, SequenceGroupMetadata
from octavo.runtime.params import SamplingParams
from octavo.runtime.shadow_cache import ShadowCache

BLOCK_SIZE = 4


def snapshot(
    rows: dict[int, tuple[list[int], list[int]]],
    computed: int,
    chunk: int,
    request: str = "r",
    **more,
) -> SequenceGroupMetadata:
    """`rows` is seq_id -> (tokens, table); the step feeds tokens [computed, computed + chunk) of each."""
    return SequenceGroupMetadata(
        request_id=request,
        is_prompt=chunk > 1,
        seq_data={
            seq_id: SequenceData(
                np.array(tokens, np.int32), np.zeros(0, np.int32), computed, 0.0, np.zeros(0), index
            )
            for index, (seq_id, (tokens, _)) in enumerate(rows.items())
        },
        block_tables={seq_id: np.array(table, np.int32) for seq_id, (_, table) in rows.items()},
        sampling_params=SamplingParams(temperature=0),
        token_chunk_size=chunk,
        computed_block_nums=np.zeros(0, np.int32),
        do_sample=True,
        generation_id=0,
        **more,
    )


PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture
def shadow() -> ShadowCache:
    """Blocks 1 and 2 hold the prompt of one request."""
    shadow = ShadowCache(BLOCK_SIZE, num_blocks=10, num_host_blocks=4)
    shadow.check_step([snapshot({0: (PROMPT, [1, 2])}, 0, 6)])
    return shadow


def test_what_is_right_passes(shadow) -> None:
    """A decode, a request that shares the first block, chunks, a moved table, and a round trip through the host."""
    shadow.check_step([snapshot({0: ([*PROMPT, 11], [1, 2])}, 6, 1)])
    other = [5, 6, 7, 8, 50, 51, 52]
    shadow.check_step([snapshot({0: (other, [1, 3])}, 4, 2, "other")])
    shadow.check_step([snapshot({0: (other, [1, 3])}, 6, 1, "other")])
    shadow.check_step([], blocks_to_swap_out=[(1, 0), (2, 3)])
    shadow.check_step(
        [snapshot({0: ([*PROMPT, 11, 12], [8, 9])}, 7, 1)], blocks_to_swap_in=[(0, 8), (3, 9)]
    )


def test_a_table_entry_off_by_one(shadow) -> None:
    shadow.check_step([snapshot({0: ([1, 2, 3, 4, 5], [3, 4])}, 0, 5, "other")])
    with pytest.raises(
        MetadataError, match=r"'r': block_tables: .* token 4 in block 3, .* another"
    ) as raised:
        shadow.check_step([snapshot({0: ([*PROMPT, 11], [1, 3])}, 6, 1)])
    assert raised.value.request_id == "r"


def test_a_missed_copy_on_write(shadow) -> None:
    """Two samples of one prompt write their tokens to the shared second block."""
    a, b = [*PROMPT, 11], [*PROMPT, 12]
    with pytest.raises(MetadataError, match="got slot 10, which r writes too"):
        shadow.check_step([snapshot({0: (a, [1, 2]), 1: (b, [1, 2])}, 6, 1)])
    # not in the same step: the second writer's own read is right, the first one's next is not
    shadow.check_step([snapshot({0: (a, [1, 2])}, 6, 1)])
    shadow.check_step([snapshot({0: (b, [1, 2])}, 6, 1, "fork")])
    with pytest.raises(MetadataError, match="own token 6 in block 2, offset 2, got another prefix"):
        shadow.check_step([snapshot({0: ([*a, 13], [1, 2])}, 7, 1)])


def test_the_copy_makes_it_right(shadow) -> None:
    a, b = [*PROMPT, 11], [*PROMPT, 12]
    shadow.check_step([snapshot({0: (a, [1, 2]), 1: (b, [1, 4])}, 6, 1)], blocks_to_copy=[(2, 4)])
    shadow.check_step([snapshot({0: ([*a, 1], [1, 2]), 1: ([*b, 1], [1, 4])}, 7, 1)])


def test_only_one_sequence_of_a_group_was_swapped(shadow) -> None:
    """B89: the other's table names device blocks that somebody else has meanwhile."""
    both = {0: ([*PROMPT, 11], [1, 2]), 1: ([*PROMPT, 12], [1, 4])}
    shadow.check_step([snapshot(both, 6, 1)], blocks_to_copy=[(2, 4)])
    shadow.check_step([], blocks_to_swap_out=[(1, 0), (2, 1)])  # 4 was forgotten
    shadow.check_step([snapshot({0: (list(range(20, 32)), [1, 2, 4])}, 0, 12, "other")])
    back = {0: ([*PROMPT, 11, 13], [5, 6]), 1: ([*PROMPT, 12, 13], [5, 4])}
    with pytest.raises(MetadataError, match=r"sequence 1: .* token 4 in block 4"):
        shadow.check_step([snapshot(back, 7, 1)], blocks_to_swap_in=[(0, 5), (1, 6)])


def test_a_block_is_swapped_out_before_another_group_is_swapped_into_it(shadow) -> None:
    """One step; the other way round the swap-out would save the other group's tokens."""
    shadow.check_step([snapshot({0: (list(range(20, 24)), [3])}, 0, 4, "other")])
    shadow.check_step([], blocks_to_swap_out=[(3, 0)])
    other = snapshot({0: (list(range(20, 25)), [1, 5])}, 4, 1, "other")
    shadow.check_step([other], blocks_to_swap_out=[(1, 2), (2, 3)], blocks_to_swap_in=[(0, 1)])
    back = snapshot({0: ([*PROMPT, 11], [7, 8])}, 6, 1)
    shadow.check_step([back], blocks_to_swap_in=[(2, 7), (3, 8)])


def test_a_block_given_away_while_a_row_still_names_it(shadow) -> None:
    """Freed too early: another request writes to it in the very step that reads it."""
    row = snapshot({0: ([*PROMPT, 11], [1, 2])}, 6, 1)
    thief = snapshot({0: ([40, 41, 42], [1])}, 0, 3, "thief")
    with pytest.raises(MetadataError, match=r"'r': .* token 0 in block 1, offset 0, got another"):
        shadow.check_step([row, thief])
    shadow.check_step([row])  # the refused step changed nothing


def test_a_block_that_nobody_wrote_and_the_null_block(shadow) -> None:
    with pytest.raises(MetadataError, match="token 4 in block 7, offset 0, got nothing"):
        shadow.check_step([snapshot({0: ([*PROMPT, 11], [1, 7])}, 6, 1)])
    with pytest.raises(MetadataError, match="expected a block for token 4, got the null block"):
        shadow.check_step([snapshot({0: ([*PROMPT, 11], [1, 0])}, 6, 1)])


def test_a_table_that_names_a_block_twice(shadow) -> None:
    """Two rows of tokens in one block: caught although the last writer's tokens stand there."""
    with pytest.raises(
        MetadataError, match=r"'x': block_tables: .* each 4 tokens, got block 5 twice"
    ):
        shadow.check_step([snapshot({0: ([7] * 8, [5, 5])}, 0, 8, "x")])


def test_token_ids_below_zero(shadow) -> None:
    with pytest.raises(MetadataError, match="'x': seq_data: expected token ids >= 0, got -3"):
        shadow.check_step([snapshot({0: ([1, -3, 2], [5])}, 0, 3, "x")])
    shadow.check_step([snapshot({0: ([*PROMPT, 11], [1, 2])}, 6, 1)])


def test_blocks_that_are_none(shadow) -> None:
    """A negative id would be looked up from the end. Nothing has changed afterwards."""
    for bad in ({"blocks_to_copy": [(1, 10)]}, {"blocks_to_swap_out": [(1, -1)]}):
        with pytest.raises(ValueError, match=next(iter(bad)) + r": expected blocks in \[0, "):
            shadow.check_step([], blocks_to_swap_in=[(0, 1)], **bad)
    for table, message in (([1, -8], r"\[1, 10\), got \[-8"), ([1, 10], "got"), ([1], "2 entries")):
        with pytest.raises(MetadataError, match="block_tables: sequence 0: expected .*" + message):
            shadow.check_step([snapshot({0: ([*PROMPT, 11], table)}, 6, 1)])
    shadow.check_step([snapshot({0: ([*PROMPT, 11], [1, 2])}, 6, 1)])


def test_a_window_frees_what_it_does_not_see(shadow) -> None:
    row = {0: ([*PROMPT, 11], [0, 2])}
    shadow.check_step([snapshot(row, 6, 1, sliding_window=3)])
    with pytest.raises(MetadataError, match="token 3, got the null block"):
        shadow.check_step([snapshot(row, 6, 1, sliding_window=4)])


def test_adapters_do_not_share(shadow) -> None:
    with pytest.raises(MetadataError, match="another prefix"):
        shadow.check_step([snapshot({0: ([*PROMPT, 1], [1, 2])}, 6, 1, "l", lora_request="x")])


def test_tokens_that_change_are_hashed_again() -> None:
    """A step that was rolled back may come again with other tokens."""
    draw, shadow = random.Random(0), ShadowCache(BLOCK_SIZE, num_blocks=20)
    tokens: list[int] = []
    for _ in range(50):
        kept = draw.randint(0, min(len(tokens), 50))
        tokens = [*tokens[:kept], *(draw.randrange(100) for _ in range(draw.randint(1, 8)))]
        table = list(range(1, 1 + -(-len(tokens) // BLOCK_SIZE)))
        shadow.check_step([snapshot({0: (tokens, table)}, kept, len(tokens) - kept)])
        with pytest.raises(MetadataError):
            wrong = [tokens[0] + 1, *tokens[1:], 1]
            more = [*table, 19] if len(tokens) % BLOCK_SIZE == 0 else table
            shadow.check_step([snapshot({0: (wrong, more)}, len(tokens), 1)])


def crossing(ids, cross_table, encoder_is_cached=True, request="r", decoder=PROMPT, **row):
    """A group of one sequence in blocks 1 and 2, with an encoder."""
    computed = len(ids) if encoder_is_cached else 0
    fields = dict(tokens=decoder, table=[1, 2], computed=len(decoder) - 1, chunk=1) | row
    return snapshot(
        {0: (fields["tokens"], fields["table"])},
        fields["computed"],
        fields["chunk"],
        request,
        encoder_seq_data=SequenceData(
            np.array(ids, np.int32), np.zeros(0, np.int32), computed, 0.0, np.zeros(0)
        ),
        cross_block_table=np.array(cross_table, np.int32),
    )


SOURCE = [20, 21, 22, 23, 24]


@pytest.fixture
def translating() -> ShadowCache:
    """Blocks 1 and 2 hold what a decoder made of its own tokens, 3 and 4 what it made of the encoder's."""
    shadow = ShadowCache(BLOCK_SIZE, num_blocks=10, num_host_blocks=4)
    shadow.check_step([crossing(SOURCE, [3, 4], False, computed=0, chunk=6)])
    return shadow


def test_decoding_over_an_encoder_passes(translating) -> None:
    """By two sequences, after a round trip through the host, and by a group that shares an equal encoder."""
    longer = [*PROMPT, 11]
    translating.check_step([crossing(SOURCE, [3, 4], decoder=longer)])
    translating.check_step([], blocks_to_swap_out=[(1, 0), (2, 1), (3, 2), (4, 3)])
    translating.check_step(
        [crossing(SOURCE, [8, 7], decoder=[*longer, 12], table=[5, 6])],
        blocks_to_swap_in=[(0, 5), (1, 6), (2, 8), (3, 7)],
    )
    same = crossing(SOURCE, [8, 7], request="s", decoder=[1, 2], table=[9], computed=0, chunk=2)
    translating.check_step([same])


def test_reading_the_encoder_of_somebody_else(translating) -> None:
    """The planted bug: a decode whose cross table is another request's."""
    other = crossing(
        [30, 31, 32, 33, 34], [5, 6], False, "other", table=[7, 8], computed=0, chunk=6
    )
    translating.check_step([other])
    right = crossing(SOURCE, [3, 4], decoder=[*PROMPT, 11])
    with pytest.raises(
        MetadataError,
        match=r"'r': cross_block_table: encoder: .* token 0 in block 5, offset 0, got something else \(5 of 5",
    ) as raised:
        translating.check_step([crossing(SOURCE, [5, 6], decoder=[*PROMPT, 11])])
    assert raised.value.field == "cross_block_table"
    with pytest.raises(MetadataError, match=r"token 0 in block 4, .* \(5 of 5"):
        translating.check_step([crossing(SOURCE, [4, 3], decoder=[*PROMPT, 11])])
    translating.check_step([right])


def test_an_encoder_is_not_a_prefix(translating) -> None:
    """Bidirectional: an input that only begins alike has other keys from the first token on."""
    with pytest.raises(MetadataError, match=r"token 0 in block 3, .* \(4 of 4"):
        translating.check_step(
            [crossing(SOURCE[:4], [3], request="s", decoder=[1, 2], table=[9], computed=0, chunk=2)]
        )


def test_an_encoder_under_an_adapter_is_another(translating) -> None:
    """Its keys and values are made of other weights."""
    row = crossing(SOURCE, [3, 4], decoder=[1, 2], table=[9], computed=0, chunk=2)
    with pytest.raises(MetadataError, match=r"cross_block_table: encoder: .* token 0 in block 3"):
        translating.check_step([msgspec.structs.replace(row, lora_request="x")])


def test_an_encoder_that_was_never_run(translating) -> None:
    with pytest.raises(
        MetadataError, match=r"encoder: .* token 4 in block 6, offset 0, got nothing"
    ):
        translating.check_step([crossing(SOURCE, [3, 6], decoder=[*PROMPT, 11])])
    with pytest.raises(MetadataError, match="encoder: expected a block for token 4, got the null"):
        translating.check_step([crossing(SOURCE, [3, 0], decoder=[*PROMPT, 11])])


def test_cross_blocks_given_away(translating) -> None:
    """Freed too early: the row's own new tokens, or another request's, land in the encoder's blocks."""
    with pytest.raises(MetadataError, match=r"'r': cross_block_table: .* token 0 in block 3"):
        translating.check_step(
            [
                crossing(SOURCE, [3, 4], decoder=[*PROMPT, 11]),
                snapshot({0: ([40, 41, 42], [3])}, 0, 3, "thief"),
            ]
        )
    with pytest.raises(MetadataError, match="got slot 16, which r writes too"):
        translating.check_step(
            [crossing(SOURCE, [3, 4], False, decoder=[*PROMPT, 1, 1, 1], table=[1, 2, 4])]
        )


def test_a_prefix_under_another_encoder_is_another_prefix(translating) -> None:
    """What a decoder keeps of its own tokens depends on what it attended across to."""
    other = [30, 31]
    translating.check_step([crossing(other, [5], False, "o", table=[7], decoder=[5], computed=0)])
    with pytest.raises(MetadataError, match=r"'o': block_tables: .* token 0 in block 1"):
        translating.check_step([crossing(other, [5], request="o", decoder=[*PROMPT, 11])])
    translating.check_step([crossing(SOURCE, [3, 4], request="o", decoder=[*PROMPT, 11])])
