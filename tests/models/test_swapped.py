"""A sequence whose blocks went to host memory and came back elsewhere goes on as if nothing had happened."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from octavo.models.llama import LlamaForCausalLM
from octavo.runtime.kv_pool import KVLayout, KVPool, LayerKV
from octavo.runtime.metadata import SequenceData, SequenceGroupMetadata
from octavo.runtime.params import SamplingParams
from octavo.runtime.runner import ModelRunner
from octavo.tests.models.test_llama import SIZES

BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS = 4, 6, 10


class Sequence:
    """One request, fed by hand."""

    def __init__(self, name: str, prompt: list[int], table: list[int]) -> None:
        self.name, self.prompt, self.table = name, prompt, table
        self.in_host: list[int] = []
        self.outputs: list[int] = []
        self.computed = 0

    def snapshot(self) -> SequenceGroupMetadata:
        total = len(self.prompt) + len(self.outputs)
        data = SequenceData(
            np.array(self.prompt, np.int32), np.array(self.outputs, np.int32), self.computed, 0.0,
            np.zeros(len(self.outputs)),
        )  # fmt: skip
        return SequenceGroupMetadata(
            request_id=self.name,
            is_prompt=total - self.computed > 1,
            seq_data={0: data},
            block_tables={0: np.array(self.table, np.int32)},
            sampling_params=SamplingParams(temperature=0, max_tokens=100),
            token_chunk_size=total - self.computed,
            computed_block_nums=np.zeros(0, np.int32),
            do_sample=True,
            generation_id=0,
        )


def step(runner: ModelRunner, sequence: Sequence, **moves) -> None:
    out = runner.execute([sequence.snapshot()], generation_of=lambda _: 0, **moves)
    sequence.computed = len(sequence.prompt) + len(sequence.outputs)
    sequence.outputs.append(int(out.token_ids[0]))


@pytest.mark.parametrize("layout", KVLayout)
def test_two_sequences_take_turns_on_the_same_blocks(layout) -> None:
    """One leaves and the other comes in the same step, into the blocks just vacated: five, which one needs alone."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    draw = random.Random(0)
    prompts = {name: [draw.randrange(199) for _ in range(6)] for name in "ab"}
    shape = ([LayerKV(2, 8, torch.float32)] * 3, BLOCK_SIZE, "cpu", layout)

    def runner() -> ModelRunner:
        pool, host = KVPool(NUM_BLOCKS, *shape), KVPool(NUM_HOST_BLOCKS, *shape)
        return ModelRunner(model, pool, host, check=True)

    alone = {}
    for name, prompt in prompts.items():
        solo = Sequence(name, prompt, [1, 2, 3, 4, 5])
        solo_runner = runner()
        for _ in range(12):
            step(solo_runner, solo)
        alone[name] = solo.outputs
    assert alone["a"] != alone["b"]

    shared = runner()
    a, b = (Sequence(name, prompts[name], []) for name in "ab")
    for turn in range(8):
        running, away = (a, b) if turn % 2 == 0 else (b, a)
        moves = {}
        if away.table:
            free = sorted(set(range(NUM_HOST_BLOCKS)) - set(running.in_host))
            away.in_host = draw.sample(free, len(away.table))
            moves["blocks_to_swap_out"] = list(zip(away.table, away.in_host, strict=True))
            away.table = []
        if running.in_host:
            running.table = draw.sample(range(1, NUM_BLOCKS), len(running.in_host))
            moves["blocks_to_swap_in"] = list(zip(running.in_host, running.table, strict=True))
            running.in_host = []
        for _ in range(3):
            needed = -(-(len(running.prompt) + len(running.outputs)) // BLOCK_SIZE)
            free = [block for block in range(1, NUM_BLOCKS) if block not in running.table]
            running.table += free[: needed - len(running.table)]
            step(shared, running, **moves)
            moves = {}
    assert {"a": a.outputs, "b": b.outputs} == alone
