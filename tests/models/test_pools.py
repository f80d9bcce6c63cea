"""The pools of an `LLM` are as large as asked for or as fits, and its largest step runs through real models."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, MistralConfig

from octavo.models import pools
from octavo.models.llama import LlamaForCausalLM
from octavo.runtime.kv_pool import KVPool, LayerKV
from octavo.runtime.memory import measure_largest_step
from octavo.scheduler import SchedulerConfig
from octavo.tests.models.test_llama import SIZES

LAYERS = [LayerKV(2, 8, torch.float32)] * 3
BLOCK_BYTES = 3 * 2 * 4 * 2 * 8 * 4
CONFIG = SchedulerConfig(
    num_gpu_blocks=1, block_size=4, max_num_seqs=5, max_num_batched_tokens=200, max_model_len=90
)
CPU = torch.device("cpu")


class Peak:
    """Looks at what the model was given instead of at memory."""

    def total(self) -> int:
        return 1

    def restart_peak(self) -> None:
        pass

    def peak(self) -> int:
        return 7


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SIZES), MistralConfig(**SIZES, sliding_window=5)],
    ids=["llama", "mistral"],
)
def test_the_largest_step_runs_through_a_model_and_writes_nothing(config) -> None:
    model = LlamaForCausalLM(config).eval()
    pool = KVPool(2, LAYERS, 4)
    fed, asked = [], []
    model.model.register_forward_hook(lambda module, args, out: fed.append(out.shape))
    model.lm_head.register_forward_hook(lambda module, args, out: asked.append(out.shape))
    peak = measure_largest_step(
        model, pool, Peak(), max_num_batched_tokens=200, max_num_seqs=5, max_model_len=90
    )
    assert peak == 7
    assert fed == [(200, 48)] and asked == [(5, 199)]
    assert pool.data.count_nonzero() == 0


def build(num_gpu_blocks, swap_space_gib=0.0):
    return pools.build_pools(
        LlamaForCausalLM(LlamaConfig(**SIZES)).eval(),
        LAYERS,
        CPU,
        CONFIG,
        num_gpu_blocks,
        0.9,
        swap_space_gib,
    )


@pytest.mark.parametrize(
    ("free", "num_blocks"),
    [
        (4 * BLOCK_BYTES * 12, 11),
        (2**40, 5 * 23),  # no more than five sequences of 90 tokens can use
    ],
)
def test_without_a_number_of_blocks_memory_decides(monkeypatch, free, num_blocks) -> None:
    monkeypatch.setattr(pools, "free_cpu_memory", lambda: free)
    pool, host = build(None)
    assert pool.num_blocks == num_blocks + 1
    assert pool.block_bytes == BLOCK_BYTES
    assert host is None


def test_swap_space_becomes_a_host_pool() -> None:
    pool, host = build(3, swap_space_gib=10.5 * BLOCK_BYTES / 2**30)
    assert (pool.num_blocks, host.num_blocks) == (4, 10)
    assert host.data.shape[1:] == pool.data.shape[1:]
    assert not host.data.is_pinned()
    with pytest.raises(ValueError, match="swap_space_gib: expected a pool that fits the memory"):
        build(3, swap_space_gib=10**9)


@pytest.mark.gpu
def test_on_a_gpu_the_pool_fits_beside_the_step() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(device, torch.float16).eval()
    layers = [LayerKV(2, 8, torch.float16)] * 3
    config = SchedulerConfig(
        num_gpu_blocks=1, block_size=4, max_num_seqs=10**4, max_num_batched_tokens=10**4,
        max_model_len=20_000,
    )  # fmt: skip
    args = (model, layers, device, config, None)
    pool, host = pools.build_pools(*args, 0.2, 0.01)
    assert pool.num_blocks > 1 and pool.data.numel() < 0.2 * torch.cuda.mem_get_info()[1]
    assert host is not None and host.data.is_pinned()
    with pytest.raises(ValueError, match="gpu_memory_utilization: expected a share"):
        pools.build_pools(*args, 1e-4, 0)
