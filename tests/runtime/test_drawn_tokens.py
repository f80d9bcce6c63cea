"""Which token of a step is which sample of the step before."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from octavo.runtime.drawn_tokens import awaited_draws, sample_places, with_drawn
from octavo.runtime.metadata import MetadataError, SamplerOutput
from octavo.runtime.params import SamplingParams
from octavo.runtime.snapshots import Snapshots
from octavo.tests.runtime.test_launch_args import snapshot


def decode(name: str, seq_id: int, context: int, known: int):
    """Feeds token `context` of a sequence of which `known` are known."""
    md = snapshot(name, tokens=range(known), prompt_len=2, context=context, chunk=1, table=[1, 2], seq_id=seq_id)  # fmt: skip
    return msgspec.structs.replace(md, do_sample=True)


BEFORE = Snapshots.of(
    [
        decode("a", 4, 2, 3),
        decode("b", 2, 3, 4),
        snapshot("long", tokens=range(9), context=0, chunk=4, table=[3], seq_id=9),  # draws nothing
        snapshot("new", tokens=range(3), context=0, chunk=3, table=[4], seq_id=7),
    ]
)
DRAWN = SamplerOutput(np.array([40, 20, 70]), np.array([-0.5, -0.25, -1.0], np.float32))


def test_places_of_tokens_and_samples():
    """Rows may come in another order, in company, and after others have left."""
    step = Snapshots.of(
        [decode("new", 7, 3, 3), decode("other", 11, 2, 3), decode("a", 4, 3, 3), snapshot("long", tokens=range(9), context=4, chunk=4, table=[3, 5], seq_id=9)]
    )  # fmt: skip
    tokens, samples = awaited_draws(step, BEFORE)
    assert tokens.tolist() == [0, 2] and samples.tolist() == [2, 0]
    completed = with_drawn(step, BEFORE, DRAWN)
    assert completed[0].seq_data[7].output_token_ids.tolist() == [2, 70]
    assert completed[0].seq_data[7].cumulative_logprob == -1.0
    assert completed[2].seq_data[4].output_token_ids.tolist() == [2, 40]
    assert completed[1].seq_data[11].output_token_ids.tolist() == [2]
    assert step[0].seq_data[7].output_token_ids.tolist() == [2], "the snapshot itself stays"


def test_where_no_token_could_be_drawn_the_snapshots_have_what_is_fed():
    """Logits that were not finite: the shadow cache must not take the step for one of negative token ids."""
    drawn = SamplerOutput(np.array([-1, 20, 70]), np.array([np.nan, -0.25, -1.0], np.float32))
    [step] = with_drawn(Snapshots.of([decode("a", 4, 3, 3)]), BEFORE, drawn)
    assert step.seq_data[4].output_token_ids.tolist() == [2, 0]


def test_nothing_is_awaited_where_all_is_known():
    step = Snapshots.of([decode("a", 4, 2, 3)])
    assert awaited_draws(step, BEFORE) is None and awaited_draws(step, None) is None
    assert with_drawn(step, BEFORE, DRAWN) == list(step)


@pytest.mark.parametrize("before", [None, BEFORE], ids=["nothing before", "another draws"])
def test_a_token_nobody_draws_is_refused(before):
    step = Snapshots.of([decode("x", 33, 3, 3)])
    with pytest.raises(MetadataError, match="'x': seq_data: expected a known token to feed"):
        awaited_draws(step, before)


def test_the_several_candidates_of_a_search_are_nobodys_next_token():
    beams = SamplingParams(use_beam_search=True, n=2, temperature=0)
    search = msgspec.structs.replace(decode("a", 4, 2, 3), sampling_params=beams)
    with pytest.raises(MetadataError, match="neither"):
        awaited_draws(Snapshots.of([decode("a", 4, 3, 3)]), Snapshots.of([search]))


def test_samples_of_a_group_are_placed_by_ascending_sequence():
    two, one = decode("a", 8, 2, 3), decode("a", 5, 2, 3)
    group = msgspec.structs.replace(
        two,
        seq_data={**two.seq_data, **one.seq_data},
        block_tables={**two.block_tables, **one.block_tables},
        sampling_params=SamplingParams(n=2),
    )
    places = sample_places(Snapshots.of([decode("b", 6, 2, 3), group, decode("c", 1, 2, 3)]))
    assert places == {6: 0, 5: 1, 8: 2, 1: 3}
