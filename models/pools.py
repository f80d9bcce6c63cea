"""The KV pools of an `LLM`: as large as asked for, or as the memory allows."""

from __future__ import annotations

import torch

from ..runtime.kv_pool import KVPool, Layers, block_bytes
from ..runtime.memory import (
    CudaMemoryMeter,
    cpu_pool_blocks,
    free_cpu_memory,
    gib,
    gpu_pool_blocks,
    host_pool_blocks,
    measure_largest_step,
)
from ..runtime.runner import Model
from ..scheduler import SchedulerConfig


def build_pools(
    model: Model,
    layers: Layers,
    device: torch.device,
    config: SchedulerConfig,
    num_gpu_blocks: int | None,
    gpu_memory_utilization: float,
    swap_space_gib: float,
) -> tuple[KVPool, KVPool | None]:
    """The pool beside the loaded model, and one in host memory if there is swap space.

    num_gpu_blocks   usable blocks; None for what fits, but no more than all seats can use
    """
    if num_gpu_blocks is None:
        seat = -(-config.max_model_len // config.block_size)
        fitting = _blocks_that_fit(model, layers, device, config, gpu_memory_utilization)
        num_gpu_blocks = min(config.max_num_seqs * seat, fitting)
    pool = _pool("num_gpu_blocks", num_gpu_blocks + 1, layers, config.block_size, device)
    num_host_blocks = host_pool_blocks(swap_space_gib, pool.block_bytes)
    if num_host_blocks == 0:
        return pool, None
    host = torch.device("cpu")
    return pool, _pool(
        "swap_space_gib", num_host_blocks, layers, config.block_size, host, pool.data.is_cuda
    )


def _blocks_that_fit(
    model: Model,
    layers: Layers,
    device: torch.device,
    config: SchedulerConfig,
    gpu_memory_utilization: float,
) -> int:
    bytes_each = block_bytes(layers, config.block_size)
    if device.type != "cuda":
        return cpu_pool_blocks(free=free_cpu_memory(), block_bytes=bytes_each)
    meter = CudaMemoryMeter(device)
    try:
        peak = measure_largest_step(
            model,
            KVPool(2, layers, config.block_size, device),
            meter,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
        )
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"max_num_batched_tokens: expected a step that fits the memory beside the weights, got "
            f"{config.max_num_batched_tokens} tokens of {config.max_num_seqs} sequences"
        ) from error
    torch.cuda.empty_cache()  # what the run took is free for the pool
    return gpu_pool_blocks(
        total=meter.total(),
        peak=peak,
        gpu_memory_utilization=gpu_memory_utilization,
        block_bytes=bytes_each,
    )


def _pool(
    argument: str,
    num_blocks: int,
    layers: Layers,
    block_size: int,
    device: torch.device,
    pin_memory: bool = False,
) -> KVPool:
    try:
        return KVPool(num_blocks, layers, block_size, device, pin_memory=pin_memory)
    except (RuntimeError, MemoryError) as error:
        size = gib(num_blocks * block_bytes(layers, block_size))
        raise ValueError(
            f"{argument}: expected a pool that fits the memory, {num_blocks} blocks take {size}"
        ) from error
