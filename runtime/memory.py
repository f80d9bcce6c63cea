"""How many KV blocks fit: arithmetic on bytes, and the run that measures what the largest step needs.

GPU    gpu_memory_utilization * total - peak of the largest step, everything else on the device included
CPU    a quarter of the free memory: a CPU shares it with everything else
host   swap_space_gib
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from .kv_pool import KVPool
from .launch_args import LaunchArgs
from .metadata import NULL_BLOCK, PAD_SLOT
from .params import SamplingParams
from .sampler import sample
from .sampling_rows import SamplingRows
from .token_counts import RowExtras

if TYPE_CHECKING:
    from .runner import Model

_CPU_POOL_FRACTION = 0.25


def gpu_pool_blocks(
    *, total: int, peak: int, gpu_memory_utilization: float, block_bytes: int
) -> int:
    """Usable blocks of a pool that leaves room for `peak` in the given share of `total` bytes."""
    share = int(gpu_memory_utilization * total)
    num_blocks = _usable(share - peak, block_bytes)
    if num_blocks < 1:
        raise ValueError(
            f"gpu_memory_utilization: expected a share that holds the largest step and KV blocks beside it, got "
            f"{gpu_memory_utilization}: {gib(share)} of {gib(total)}, of which the step takes {gib(peak)} and two blocks "
            f"{gib(2 * block_bytes)}"
        )
    return num_blocks


def cpu_pool_blocks(*, free: int, block_bytes: int) -> int:
    """Usable blocks of a pool in the main memory."""
    num_blocks = _usable(int(_CPU_POOL_FRACTION * free), block_bytes)
    if num_blocks < 1:
        raise ValueError(
            f"num_gpu_blocks: expected memory for a pool, got {gib(free)} free, of which {_CPU_POOL_FRACTION:.0%} does not "
            f"hold two blocks of {gib(block_bytes)}"
        )
    return num_blocks


def host_pool_blocks(swap_space_gib: float, block_bytes: int) -> int:
    """All blocks of the host pool, its null block included; 0 without swap space."""
    is_number = isinstance(swap_space_gib, (int, float)) and not isinstance(swap_space_gib, bool)
    if not is_number or not 0 <= swap_space_gib < math.inf:
        raise ValueError(f"swap_space_gib: expected a number >= 0, got {swap_space_gib!r}")
    num_blocks = int(swap_space_gib * 2**30) // block_bytes
    if swap_space_gib > 0 and num_blocks < 2:
        raise ValueError(
            f"swap_space_gib: expected 0 or room for two blocks of {gib(block_bytes)}, got {swap_space_gib}"
        )
    return num_blocks


def _usable(budget: int, block_bytes: int) -> int:
    return budget // block_bytes - 1  # the null block takes its place too


def gib(num_bytes: int) -> str:
    """For people: two digits after the point, more where that would be 0.00."""
    return f"{num_bytes / 2**30:.2f} GiB" if abs(num_bytes) > 2**25 else f"{num_bytes} bytes"


def free_cpu_memory(meminfo: str = "/proc/meminfo") -> int:
    """What can be had without swapping: what is unused, and the pages of files that can be read again.

    Right after a model was read most of the memory may be such pages.
    """
    if os.path.exists(meminfo):
        with open(meminfo) as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class MemoryMeter(Protocol):
    """Reads a device's memory, in bytes."""

    def total(self) -> int: ...

    def restart_peak(self) -> None:
        """Forget what was in use so far."""
        ...

    def peak(self) -> int:
        """Most in use at once since the restart, by anybody."""
        ...


class CudaMemoryMeter:
    """The allocator's peak, and beside it what it does not know: contexts, loaded kernels, other processes.

    The peak is that of the reserved bytes. What the allocator took from the device and could not use is gone too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def restart_peak(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        others = total - free - torch.cuda.memory_reserved(self._device)
        return others + torch.cuda.max_memory_reserved(self._device)


def measure_largest_step(
    model: Model,
    pool: KVPool,
    meter: MemoryMeter,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
) -> int:
    """Peak of the memory in use while the model runs the largest step that the limits allow.

    pool   a dummy of two blocks or more: nothing is written to it, and block 1 is read
    """
    args = largest_step(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=pool.block_size,
        device=pool.data.device,
    )
    meter.restart_peak()
    with torch.inference_mode():
        hidden = model(args, pool)
        logits = model.compute_logits(hidden[args.logits_indices])
        sample(logits, _dearest_sampling(len(args.logits_indices)))
    return meter.peak()


def largest_step(
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    device: torch.device | str,
) -> LaunchArgs:
    """As many rows as there are seats, as many tokens as a step may feed, logits for each row.

    Scratch is sized from maxima, never from lengths, so the sequences are short, which makes the run quick, and only the
    maximum says that one could be `max_model_len` long. The last rows are prefills and hold all tokens but one per row.
    """
    num_rows = min(max_num_seqs, max_num_batched_tokens)
    query_lens = np.ones(num_rows, np.int64)
    left = max_num_batched_tokens - num_rows
    for row in reversed(range(num_rows)):
        query_lens[row] += min(left, max_model_len - 1)
        left -= int(query_lens[row]) - 1
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    num_tokens = int(starts[-1])
    positions = np.arange(num_tokens) - np.repeat(starts[:-1], query_lens)
    tables = np.full((num_rows, -(-max_model_len // block_size)), NULL_BLOCK + 1, np.int32)

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return LaunchArgs(
        input_ids=on_device(np.zeros(num_tokens, np.int64)),
        positions=on_device(positions),
        slot_mapping=on_device(np.full(num_tokens, PAD_SLOT, np.int64)),
        query_start_loc=on_device(starts.astype(np.int32)),
        seq_lens=on_device(query_lens.astype(np.int32)),
        block_tables=on_device(tables),
        logits_indices=on_device(starts[1:] - 1),
        num_decodes=int((query_lens == 1).sum()),
        max_query_len=int(query_lens.max()),
        max_seq_len=max_model_len,
    )


def _dearest_sampling(num_rows: int) -> SamplingRows:
    """All filters and penalties on: every row's tokens are counted on the device, and its logits copied."""
    params = SamplingParams(repetition_penalty=1.1)
    token = np.zeros(1, np.int32)
    return SamplingRows(
        temperature=np.ones(num_rows),
        top_k=np.full(num_rows, 50, np.int64),
        top_p=np.full(num_rows, 0.9),
        min_p=np.full(num_rows, 0.01),
        seed=np.arange(num_rows, dtype=np.uint64),
        step=np.zeros(num_rows, np.uint64),
        num_candidates=np.ones(num_rows, np.int64),
        extras=tuple(RowExtras(row, params, row, token, token) for row in range(num_rows)),
    )
