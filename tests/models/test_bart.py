"""A tiny random BART, saved by transformers, must give transformers' encoder output and logits through cross blocks.

Everything runs as in a step of the engine: snapshots, launch arguments, runner with the shadow cache, pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BartConfig
from transformers import BartForConditionalGeneration as HFBart

from octavo import LLM
from octavo.kernels import ops
from octavo.kernels.ops._registry import with_scales
from octavo.models import load_model, resolve_model
from octavo.models.layers import CrossAttention, EncoderAttention, kv_layers
from octavo.runtime.kv_pool import KVLayout, KVPool, LayerKV
from octavo.runtime.launch_args import LaunchArgs, LaunchBuffers, build_launch_args
from octavo.runtime.metadata import MetadataError, SequenceData, SequenceGroupMetadata
from octavo.runtime.params import SamplingParams
from octavo.runtime.runner import ModelRunner

SIZES = dict(
    vocab_size=101,
    d_model=48,
    encoder_layers=2,
    decoder_layers=3,
    encoder_attention_heads=3,
    decoder_attention_heads=2,
    encoder_ffn_dim=40,
    decoder_ffn_dim=56,
    max_position_embeddings=64,
)
BLOCK_SIZE = 4
INT32 = torch.int32


def save(directory: Path, **changes) -> HFBart:
    torch.manual_seed(0)
    model = HFBart(BartConfig(**(SIZES | changes))).eval()
    with torch.no_grad():
        for parameter in [*model.parameters(), model.final_logits_bias]:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(directory)
    return model


def tokens(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 101, count, dtype=np.int32)


@dataclass
class Request:
    """One group. Its sequences' tokens are given: what the sampler draws is not looked at."""

    name: str
    source: np.ndarray
    cross_table: list[int]
    targets: list[np.ndarray]  # of each sequence
    tables: list[list[int]]
    num_computed: int = 0
    num_encoded: int = 0
    logits: list[list[torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.logits = [[] for _ in self.targets]

    def snapshot(self, chunk: int, last: bool = True) -> SequenceGroupMetadata:
        """`last`: all tokens known so far are computed with this chunk."""
        empty, stop = np.zeros(0, np.int32), self.num_computed + chunk + (not last)
        return SequenceGroupMetadata(
            request_id=self.name,
            is_prompt=chunk > 1 or not last,
            seq_data={
                i: SequenceData(ids[:stop], empty, self.num_computed, 0.0, np.zeros(0), i)
                for i, ids in enumerate(self.targets)
            },
            block_tables={i: np.array(table, np.int32) for i, table in enumerate(self.tables)},
            sampling_params=SamplingParams(temperature=0),
            token_chunk_size=chunk,
            computed_block_nums=empty,
            do_sample=last,
            generation_id=0,
            encoder_seq_data=SequenceData(self.source, empty, self.num_encoded, 0.0, np.zeros(0)),
            cross_block_table=np.array(self.cross_table, np.int32),
        )


class Recorded:
    """The model, keeping the logits of all tokens of the last step."""

    def __init__(self, model) -> None:
        self.model = model

    def __call__(self, args: LaunchArgs, kv: KVPool) -> torch.Tensor:
        hidden = self.model(args, kv)
        self.logits = self.model.compute_logits(hidden)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.compute_logits(hidden)


class Run:
    def __init__(self, directory: Path, layout: KVLayout = KVLayout.NHD) -> None:
        loaded, config = load_model(resolve_model(str(directory)))
        self.model = Recorded(loaded)
        layers = kv_layers(loaded, config, torch.float32)
        assert [layer for layer in layers if isinstance(layer, LayerKV)] == [
            LayerKV(2, 24, torch.float32)
        ] * 3
        self.pool, self.host = (
            KVPool(blocks, layers, BLOCK_SIZE, layout=layout) for blocks in (40, 20)
        )
        self.pool.data.fill_(0xFF)  # NaN wherever nobody has written
        self.runner = ModelRunner(self.model, self.pool, self.host, check=True)

    def step(self, *chunks: tuple[Request, int], unfinished: str = "", **moves) -> None:
        snapshots = [
            request.snapshot(chunk, last=request.name not in unfinished)
            for request, chunk in chunks
        ]
        self.runner.execute(snapshots, generation_of=lambda _: 0, **moves)
        sizes = [chunk for request, chunk in chunks for _ in request.targets]
        rows = iter(self.model.logits.split(sizes))
        for request, chunk in chunks:
            request.num_computed += chunk
            request.num_encoded = len(request.source)
            for logits in request.logits:
                logits.append(next(rows))


def check(hf: HFBart, *requests: Request) -> None:
    for request in requests:
        source = torch.from_numpy(request.source).long()[None]
        for target, logits in zip(request.targets, request.logits, strict=True):
            fed = torch.from_numpy(target[: request.num_computed]).long()[None]
            with torch.inference_mode():
                expected = hf(input_ids=source, decoder_input_ids=fed).logits[0]
            torch.testing.assert_close(torch.cat(logits), expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(params=["cpu", "triton"])
def backend(request, monkeypatch) -> None:
    """Attention and cache writes by the CPU's versions or by the Triton kernels, interpreted."""
    if request.param == "triton":
        if torch.cuda.is_available():
            pytest.skip("tensors of these tests are on the CPU, the kernels are compiled")
        monkeypatch.setattr(ops.attention, "_paged_attention", ops.attention._triton_attention)
        from octavo.kernels import cache_write

        monkeypatch.setattr(
            ops.cache, "_reshape_and_cache", with_scales(cache_write.reshape_and_cache, 5)
        )


@pytest.mark.parametrize(
    "changes",
    [dict(), dict(scale_embedding=True, activation_function="relu", encoder_attention_heads=6)],
    ids=["bart", "bart-scaled-relu"],
)
def test_the_encoder_equals_transformers(tmp_path, changes, backend) -> None:
    """Three inputs of different lengths, packed."""
    hf = save(tmp_path, **changes)
    model, _ = load_model(resolve_model(str(tmp_path)))
    requests = [
        Request(f"r{i}", tokens(n, i), list(range(1 + 10 * i, 8 + 10 * i)), [tokens(3, 9)], [[8 + 10 * i]])
        for i, n in enumerate((11, 1, 18))
    ]  # fmt: skip
    args = build_launch_args([r.snapshot(3) for r in requests], BLOCK_SIZE, 40, LaunchBuffers())
    with torch.inference_mode():
        outputs = model.model.encoder(args).split([11, 1, 18])
        for request, output in zip(requests, outputs, strict=True):
            source = torch.from_numpy(request.source).long()[None]
            expected = hf.get_encoder()(input_ids=source).last_hidden_state[0]
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("backend", "layout"),
    [("cpu", KVLayout.NHD), ("cpu", KVLayout.HND), ("triton", KVLayout.HND)],
    indirect=["backend"],
    ids=str,
)
def test_prefills_chunks_and_decodes_equal_transformers(tmp_path, layout, backend) -> None:
    """Inputs shorter and longer than what the decoder is fed, in one batch; a third request joins halfway."""
    hf = save(tmp_path)
    run = Run(tmp_path, layout)
    a = Request("a", tokens(11, 1), [9, 3, 6], [tokens(20, 2)], [[1, 2, 4, 5]])
    b = Request("b", tokens(2, 3), [12], [tokens(20, 4)], [[10, 11, 7, 8]])
    c = Request("c", tokens(5, 5), [15, 13], [tokens(20, 6)], [[16, 14]])
    run.step((a, 5), (b, 4), unfinished="b")
    run.step((a, 1), (b, 3))
    run.step((a, 1), (b, 1))
    run.step((a, 1), (b, 1), (c, 2))
    for _ in range(2):
        run.step((a, 1), (b, 1), (c, 1))
    check(hf, a, b, c)


def test_sequences_of_a_group_share_the_encoder(tmp_path, backend) -> None:
    """Two beams over one cross table, through a copy of a shared block and a round trip through host memory."""
    hf = save(tmp_path)
    run = Run(tmp_path)
    first = tokens(12, 2)
    beam = Request("beam", tokens(7, 1), [9, 3], [first], [[1, 2]])
    run.step((beam, 6))
    second = np.concatenate((first[:6], tokens(6, 8)))
    beam.targets.append(second)
    beam.tables.append([1, 4])
    beam.logits.append(list(beam.logits[0]))
    run.step((beam, 1), blocks_to_copy=[(2, 4)])
    there = [(block, place) for place, block in enumerate([1, 2, 4, 9, 3])]
    other = Request("other", tokens(8, 3), [9, 2], [tokens(8, 4)], [[1, 3]])
    run.step((other, 7), blocks_to_swap_out=there)  # takes the very blocks
    back = {1: 20, 2: 21, 4: 22, 9: 23, 3: 24}
    beam.tables = [
        [*(back[block] for block in table), 25 + i] for i, table in enumerate(beam.tables)
    ]
    beam.cross_table = [back[block] for block in beam.cross_table]
    run.step((beam, 1), blocks_to_swap_in=[(place, back[block]) for block, place in there])
    run.step((beam, 1), (other, 1))
    check(hf, beam, other)


def test_a_preempted_request_runs_its_encoder_again(tmp_path, backend) -> None:
    hf = save(tmp_path)
    run = Run(tmp_path)
    request = Request("r", tokens(6, 1), [5, 6], [tokens(12, 2)], [[1, 2]])
    run.step((request, 3))
    run.step((request, 1))
    again = Request("r", request.source, [7, 8], request.targets, [[10, 9, 11]])
    run.step((again, 4))
    run.step((again, 1))
    check(hf, request, again)


def test_reading_the_encoder_of_somebody_else_is_refused(tmp_path) -> None:
    """The shadow cache sees the planted bug before the kernels read a wrong block."""
    save(tmp_path)
    run = Run(tmp_path)
    a = Request("a", tokens(6, 1), [5, 6], [tokens(12, 2)], [[1, 2]])
    b = Request("b", tokens(6, 3), [7, 8], [tokens(12, 4)], [[3, 4]])
    run.step((a, 3), (b, 3))
    b.cross_table = a.cross_table
    with pytest.raises(MetadataError, match=r"'b': cross_block_table: .* block 5"):
        run.step((a, 1), (b, 1))


def test_rows_without_an_encoder_attend_to_nothing(backend) -> None:
    """A mixed step: decodes and chunks, with an encoder shorter or longer than the chunk and with none."""
    pool = KVPool(12, [LayerKV(2, 8, torch.float32)], BLOCK_SIZE)
    pool.data.fill_(0xFF)
    query_lens, cross_lens = [1, 1, 1, 5, 3, 4], [6, 0, 3, 2, 0, 9]
    tables = torch.tensor(
        [[5, 2, 0], [0, 0, 0], [7, 0, 0], [1, 0, 0], [0, 0, 0], [4, 8, 3]], dtype=INT32
    )
    starts = torch.tensor([0, 1, 2, 3, 8, 11, 15], dtype=INT32)
    slots = [
        int(tables[row, i // BLOCK_SIZE]) * BLOCK_SIZE + i % BLOCK_SIZE
        for row, length in enumerate(cross_lens)
        for i in range(length)
    ]
    args = LaunchArgs(
        input_ids=torch.zeros(15, dtype=torch.int64),
        positions=torch.zeros(15, dtype=torch.int64),
        slot_mapping=torch.zeros(15, dtype=torch.int64),
        query_start_loc=starts,
        seq_lens=torch.tensor(query_lens, dtype=INT32),
        block_tables=torch.ones(6, 1, dtype=INT32),
        logits_indices=torch.zeros(0, dtype=torch.int64),
        num_decodes=3,
        max_query_len=5,
        max_seq_len=5,
        cross_seq_lens=torch.tensor(cross_lens, dtype=INT32),
        cross_block_tables=tables,
        max_cross_seq_len=9,
        cross_slot_mapping=torch.tensor(slots),
    )
    layer = CrossAttention(4, 2, 8, layer=0)
    q, k, v = torch.randn(15, 4, 8), torch.randn(20, 2, 8), torch.randn(20, 2, 8)
    out = layer(q, k, v, args, pool)
    small = KVPool(12, [LayerKV(2, 8, torch.int8, scale_per_token_head=True)], BLOCK_SIZE)
    torch.testing.assert_close(layer(q, k, v, args, small), out, rtol=0, atol=0.05)
    later = replace(args, cross_slot_mapping=None)
    assert torch.equal(layer(q, None, None, later, pool), out), "later steps read what was written"
    with pytest.raises(ValueError, match="k: expected a tensor in a step with encoder tokens"):
        layer(q, None, None, args, pool)
    with pytest.raises(ValueError, match="v: expected a tensor in a step with encoder tokens"):
        layer(q, k, None, args, pool)
    with pytest.raises(ValueError, match="k: expected None in a step without encoder tokens"):
        layer(q, k, v, later, pool)
    keys, values = k.split(cross_lens), v.split(cross_lens)
    for row, rows in enumerate(torch.arange(15).split(query_lens)):
        if cross_lens[row] == 0:
            assert out[rows].count_nonzero() == 0
            continue
        exact = torch.nn.functional.scaled_dot_product_attention(
            q[rows].transpose(0, 1)[None],
            keys[row].transpose(0, 1)[None],
            values[row].transpose(0, 1)[None],
            enable_gqa=True,
        )
        torch.testing.assert_close(out[rows], exact[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_a_step_without_any_encoder(tmp_path) -> None:
    """Cross-attention gives zeros, as it does for such a row of a mixed step; encoder attention has nothing to do."""
    args = LaunchArgs(
        input_ids=torch.zeros(2, dtype=torch.int64),
        positions=torch.arange(2),
        slot_mapping=torch.tensor([4, 5]),
        query_start_loc=torch.tensor([0, 2], dtype=INT32),
        seq_lens=torch.tensor([2], dtype=INT32),
        block_tables=torch.tensor([[1]], dtype=INT32),
        logits_indices=torch.tensor([1]),
        num_decodes=0,
        max_query_len=2,
        max_seq_len=2,
    )
    pool = KVPool(2, [LayerKV(2, 8, torch.float32, head_size_v=16)], BLOCK_SIZE)
    out = CrossAttention(4, 2, 8, layer=0)(torch.randn(2, 4, 8), None, None, args, pool)
    assert out.shape == (2, 4, 16) and out.count_nonzero() == 0
    x = torch.randn(2, 4, 8)
    with pytest.raises(ValueError, match="args: expected the tokens of at least one encoder"):
        EncoderAttention(4, 4, 8)(x, x, x, args)


def test_what_cannot_be_run_is_refused(tmp_path) -> None:
    save(tmp_path, activation_function="tanh")
    with pytest.raises(ValueError, match="activation_function: expected gelu or relu, got 'tanh'"):
        load_model(resolve_model(str(tmp_path)))
    with pytest.raises(ValueError, match="model: expected one without an encoder"):
        LLM(str(tmp_path))
