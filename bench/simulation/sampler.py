"""Tokens with no model: a hash of (request, sample, place in the output), so they are the same whatever the schedule.

A row of a beam search gets as many candidates as the scheduler asks for, most likely first: tokens in a row from the hashed
one on, log probabilities that fall by a hashed step. Beams differ in their steps, so some branch and some end.
"""

from __future__ import annotations

import numpy as np

from ...runtime.metadata import SamplerOutput
from ...runtime.snapshots import Snapshots

_ODD = np.uint64(
    0x9E3779B97F4A7C15
)  # 2^64 over the golden ratio: counters far apart from each other
_FIRST_LOGPROB, _LEAST_STEP, _STEPS = -0.1, 0.05, 0.45


def hashed(seeds: np.ndarray, places: np.ndarray) -> np.ndarray:
    """uint64 [n], equally spread: the finaliser of SplitMix64, over the seed and then over the place."""
    return _mixed(
        _mixed(seeds.astype(np.uint64)) + (places.astype(np.uint64) + np.uint64(1)) * _ODD
    )


def _mixed(words: np.ndarray) -> np.ndarray:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def draw(snapshots: Snapshots, vocab_size: int) -> SamplerOutput:
    """What a runner would give back for the step. Has to be called before the step is written back."""
    seeds, places, counts = [], [], []
    rows = snapshots.decodes
    for metadata in snapshots.others:
        if not metadata.do_sample:
            continue
        params, num_candidates = metadata.sampling_params, metadata.num_candidates
        branches = params.width > 1 and metadata.num_logits > len(metadata.seq_data)
        for _, data, _ in metadata.rows():
            samples = params.width if branches else 1
            place = metadata.num_drawn(data)
            for index in range(data.index, data.index + samples):
                seeds.append(params.draw(index)[4])
                places.append(place)
                counts.append(num_candidates)
    all_seeds, all_places = np.array(seeds, np.uint64), np.array(places, np.int64)
    if rows is not None:
        all_seeds = np.concatenate((rows.seed, all_seeds))
        all_places = np.concatenate((rows.num_tokens - rows.num_prompt_tokens, all_places))
        counts = [1] * len(rows) + counts
    words = hashed(all_seeds, all_places)
    repeats = np.array(counts, np.int64)
    ranks = np.arange(int(repeats.sum())) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    words = np.repeat(words, repeats)
    tokens = (words % np.uint64(vocab_size)).astype(np.int64) + ranks
    steps = _LEAST_STEP + _STEPS * (words >> np.uint64(40)).astype(np.float64) / 2**24
    logprobs = (_FIRST_LOGPROB - ranks * steps).astype(np.float32)
    return SamplerOutput(tokens % vocab_size, logprobs)
