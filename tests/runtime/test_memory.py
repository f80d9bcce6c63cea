"""How many blocks fit, in numbers; and the run that measures what the largest step needs."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.runtime import memory
from octavo.runtime.kv_pool import KVPool, LayerKV
from octavo.runtime.memory import (
    CudaMemoryMeter,
    cpu_pool_blocks,
    free_cpu_memory,
    gpu_pool_blocks,
    host_pool_blocks,
    largest_step,
    measure_largest_step,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("utilization", "peak", "block_bytes", "expected"),
    [
        (0.9, 20 * GIB, GIB, 51),  # 72 - 20, less the null block
        (1.0, 20 * GIB, GIB, 59),
        (0.5, 20 * GIB, 3 * GIB, 5),  # a part of a block is none
        (0.5, 38 * GIB, GIB, 1),
        (0.9, 0, 9 * 2**20, 8191),
    ],
)
def test_a_gpu_pool_is_what_the_largest_step_leaves(utilization, peak, block_bytes, expected):
    num_blocks = gpu_pool_blocks(
        total=80 * GIB, peak=peak, gpu_memory_utilization=utilization, block_bytes=block_bytes
    )
    assert num_blocks == expected
    assert (num_blocks + 1) * block_bytes + peak <= utilization * 80 * GIB


@pytest.mark.parametrize("peak", [39 * GIB, 39 * GIB - 1 + GIB, 40 * GIB, 70 * GIB])
def test_no_room_for_a_block_is_told_in_numbers(peak) -> None:
    message = r"gpu_memory_utilization: .* got 0\.5: 40\.00 GiB of 80\.00 GiB, .* takes [347]\d\.\d+ GiB and two blocks 4\.00"
    with pytest.raises(ValueError, match=message):
        gpu_pool_blocks(total=80 * GIB, peak=peak, gpu_memory_utilization=0.5, block_bytes=2 * GIB)


def test_a_cpu_pool_takes_a_quarter_of_the_free_memory() -> None:
    assert cpu_pool_blocks(free=8 * GIB, block_bytes=2**20) == 2047
    with pytest.raises(ValueError, match=r"num_gpu_blocks: .* got 1\.00 GiB free, of which 25%"):
        cpu_pool_blocks(free=GIB, block_bytes=GIB // 4)


def test_cached_files_are_free_memory(tmp_path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(
        "MemTotal: 9000 kB\nMemFree:  100 kB\nMemAvailable:    700 kB\nBuffers: 1 kB\n"
    )
    assert free_cpu_memory(str(meminfo)) == 700 * 1024
    meminfo.write_text("MemTotal: 9000 kB\n")
    for without in (meminfo, tmp_path / "none"):
        assert 0 < free_cpu_memory(str(without)) < 2**60


@pytest.mark.parametrize(
    ("swap_space_gib", "block_bytes", "expected"),
    [(0, 2**20, 0), (0.0, 1, 0), (4, 2**20, 4096), (0.5, 3 * 2**20, 170), (2, GIB, 2)],
)
def test_a_host_pool_stays_within_the_swap_space(swap_space_gib, block_bytes, expected) -> None:
    """Exactly, because pinned memory is rounded up to a power of two."""
    assert host_pool_blocks(swap_space_gib, block_bytes) == expected


@pytest.mark.parametrize("bad", [-1, math.inf, math.nan, "4", None, True])
def test_swap_space_has_to_be_a_number(bad) -> None:
    with pytest.raises(ValueError, match="swap_space_gib: expected a number >= 0, got"):
        host_pool_blocks(bad, 2**20)


def test_swap_space_holds_two_blocks_or_none_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"swap_space_gib: .* two blocks of 1\.00 GiB, got 1\.5"):
        host_pool_blocks(1.5, GIB)


@pytest.mark.parametrize(
    ("tokens", "seqs", "model_len", "query_lens", "num_decodes"),
    [
        (16, 4, 64, [1, 1, 1, 13], 3),
        (16, 4, 8, [1, 1, 6, 8], 2),  # no chunk is longer than a sequence
        (16, 4, 3, [3, 3, 3, 3], 0),  # the seats cannot feed more
        (4, 9, 64, [1, 1, 1, 1], 4),  # a token for each seat that can be fed
        (5, 1, 64, [5], 0),
    ],
)
def test_the_largest_step(tokens, seqs, model_len, query_lens, num_decodes) -> None:
    args = largest_step(
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        max_model_len=model_len,
        block_size=4,
        device="cpu",
    )
    starts = args.query_start_loc
    assert starts.diff().tolist() == args.seq_lens.tolist() == query_lens
    assert args.num_decodes == num_decodes
    assert len(args.input_ids) == len(args.positions) == len(args.slot_mapping) == sum(query_lens)
    assert args.positions.tolist() == [i for length in query_lens for i in range(length)]
    assert args.logits_indices.tolist() == (starts[1:] - 1).tolist()
    assert (args.max_query_len, args.max_seq_len) == (max(query_lens), model_len)
    assert args.block_tables.shape == (len(query_lens), -(-model_len // 4))
    assert set(args.block_tables.unique().tolist()) == {1}
    dtypes = {name: getattr(args, name).dtype for name in ("input_ids", "positions")}
    assert set(dtypes.values()) == {torch.int64}
    assert args.block_tables.dtype == starts.dtype == args.seq_lens.dtype == torch.int32


class CountingModel:
    """Says what it would take: `WEIGHTS` for ever, 1000 bytes per token while it runs, the logits after that."""

    WEIGHTS, PER_TOKEN, VOCAB = 10**6, 1000, 32

    def __init__(self) -> None:
        self.in_use = self.most = self.WEIGHTS
        self.calls = 0

    def __call__(self, args, kv):
        self.calls += 1
        self.take(self.PER_TOKEN * len(args.input_ids))
        return torch.zeros(len(args.input_ids), 4)

    def compute_logits(self, hidden):
        assert torch.is_inference_mode_enabled()
        self.take(4 * self.VOCAB * len(hidden))
        return torch.zeros(len(hidden), self.VOCAB)

    def take(self, num_bytes: int) -> None:
        self.most = max(self.most, self.in_use + num_bytes)

    # the meter
    def total(self) -> int:
        return 10**7

    def restart_peak(self) -> None:
        assert self.calls == 0
        self.most = self.in_use

    def peak(self) -> int:
        assert self.calls == 1
        return self.most


LIMITS = {"max_num_batched_tokens": 600, "max_num_seqs": 8, "max_model_len": 512}


def test_the_run_measures_the_whole_step() -> None:
    model = CountingModel()
    model.take(5 * 10**6)  # loading took more, which does not count
    pool = KVPool(2, [LayerKV(1, 8, torch.float32)], 4)
    peak = measure_largest_step(model, pool, model, **LIMITS)
    assert peak == model.WEIGHTS + 600 * model.PER_TOKEN
    fitting = gpu_pool_blocks(
        total=model.total(), peak=peak, gpu_memory_utilization=0.5, block_bytes=10**5
    )
    assert fitting == 33  # (5.0 - 1.6) MB, less the null block
    model = CountingModel()
    model.PER_TOKEN = 0
    assert measure_largest_step(model, pool, model, **LIMITS) == model.WEIGHTS + 8 * 4 * 32


def test_the_run_samples_with_all_filters(monkeypatch) -> None:
    """They sort the logits of every row, which takes more memory than the logits."""
    asked = []
    real = memory.sample
    monkeypatch.setattr(
        memory, "sample", lambda logits, rows: asked.append(rows) or real(logits, rows)
    )
    model, pool = CountingModel(), KVPool(2, [LayerKV(1, 8, torch.float32)], 4)
    measure_largest_step(model, pool, model, **LIMITS)
    (rows,) = asked
    assert all(len(column) == 8 for column in rows)
    filters = (rows.temperature > 0) & (rows.top_k > 0) & (rows.top_p < 1) & (rows.min_p > 0)
    assert filters.all()


@pytest.mark.gpu
def test_a_gpu_holds_the_step_and_the_pool_it_was_measured_for() -> None:
    """Weights count, and so do the step's hidden states; what the run took is free again."""
    device = torch.device("cuda", torch.cuda.current_device())

    class Model:
        def __init__(self) -> None:
            self.weights = torch.zeros(2**28, dtype=torch.uint8, device=device)

        def __call__(self, args, kv):
            return torch.zeros(len(args.input_ids), 2**18, device=device)  # 600 MiB

        def compute_logits(self, hidden):
            return hidden[:, :1000].clone()

    meter = CudaMemoryMeter(device)
    meter.restart_peak()
    before = meter.peak()
    pool = KVPool(2, [LayerKV(1, 8, torch.float32)], 4, device)
    peak = measure_largest_step(Model(), pool, meter, **LIMITS)
    assert 0 <= peak - before - (2**28 + 600 * 2**20) < 2**28
    meter.restart_peak()
    assert meter.peak() - before < 2**28, "the weights and the run's memory are given back"
