"""The kernels of a recorded run, timed on its launches: new keys and values to the cache, and attention over it.

No weights are needed: keys, values and queries are random numbers of the recorded shapes, in a pool laid out and addressed as
the recorded one. All layers run one after the other, as in a model, so that on a GPU a layer does not find its keys in the
cache of the device; attention across to an encoder is left out. Steps of one class (`StepClass`) are alike to a kernel, so
only some of each are timed.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ...kernels import paged_attention, reshape_and_cache
from ..kv_pool import KVPool
from ..launch_args import LaunchArgs
from .format import LayerShape
from .launches import numbered_launch_args, pool_of
from .reader import Recording

_MOST_RANDOM = (
    1 << 24
)  # numbers made at once, so that filling a large pool takes little memory beside it


class StepClass(NamedTuple):
    """Steps that are alike, by powers of two: 5 to 8 decodes are one class. 0 for none."""

    decodes: int
    prefill_tokens: int
    longest: int

    @classmethod
    def of(cls, args: LaunchArgs) -> StepClass:
        prefill_tokens = len(args.input_ids) - args.num_decodes
        numbers = (args.num_decodes, prefill_tokens, args.max_seq_len)
        return cls(*(0 if number == 0 else 1 << (number - 1).bit_length() for number in numbers))


@dataclass(frozen=True)
class StepTiming:
    """One step. Microseconds are of all layers together, the median of its repeats."""

    step: int
    num_decodes: int
    num_prefills: int
    num_prefill_tokens: int
    longest: int
    num_context_tokens: int
    attention_us: float
    cache_write_us: float
    step_class: StepClass


def time_kernels(
    recording: Recording,
    device: torch.device | str = "cpu",
    *,
    repeats: int = 5,
    most_per_class: int = 8,
    most_steps: int | None = None,
) -> Iterator[StepTiming]:
    """Time the recorded launches, at most so many of each class.

    Raises ValueError when the recording does not say what its layers are, or the pool does not fit the memory.
    """
    place = torch.device(device)
    layers = recording.header.layers
    if not layers:
        raise ValueError(f"{recording.path}: expected the shapes of its layers, got none")
    largest = _largest_block(recording, most_steps)
    pool = pool_of(recording.header, place, largest + 1)
    _fill(pool, layers)
    seen: Counter[StepClass] = Counter()
    for number, args in numbered_launch_args(recording, place):
        if most_steps is not None and number >= most_steps:
            return
        step_class = StepClass.of(args)
        seen[step_class] += 1
        if seen[step_class] > most_per_class:
            continue
        seq_lens, starts = args.seq_lens.cpu(), args.query_start_loc.cpu()
        num_rows = len(seq_lens)
        num_tokens, dtype = len(args.input_ids), recording.header.dtype
        made = {shape: _inputs(shape, num_tokens, dtype, place) for shape in set(layers)}
        inputs = [made[shape] for shape in layers]
        write, attend = (
            _median_us(partial(_run, kernel, layers, inputs, args, pool), place, repeats)
            for kernel in (_write, _attend)
        )
        yield StepTiming(
            number,
            args.num_decodes,
            num_rows - args.num_decodes,
            len(args.input_ids) - args.num_decodes,
            args.max_seq_len,
            int((seq_lens - starts.diff()).sum()),
            attend,
            write,
            step_class,
        )


def timings_table(timings: Sequence[StepTiming], title: str) -> Table:
    """One line for each class of steps."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    columns = ("steps", "decodes", "prefill tokens", "longest", "attention us", "cache write us")
    for name in columns:
        table.add_column(name, justify="right")
    by_class: dict[StepClass, list[StepTiming]] = {}
    for timing in timings:
        by_class.setdefault(timing.step_class, []).append(timing)
    for _, group in sorted(by_class.items()):
        table.add_row(
            str(len(group)),
            _span([timing.num_decodes for timing in group]),
            _span([timing.num_prefill_tokens for timing in group]),
            _span([timing.longest for timing in group]),
            f"{statistics.median(timing.attention_us for timing in group):.1f}",
            f"{statistics.median(timing.cache_write_us for timing in group):.1f}",
        )
    return table


def _span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


def _largest_block(recording: Recording, most_steps: int | None) -> int:
    """The largest block id that a step names: the pool needs no more."""
    largest = 1
    for number, step in enumerate(recording):
        if most_steps is not None and number >= most_steps:
            break
        for metadata in step.snapshots:
            for table in metadata.block_tables.values():
                largest = max(largest, int(table.max(initial=0)))
    return min(largest, recording.header.num_gpu_blocks)


@torch.no_grad()
def _fill(pool: KVPool, layers: Sequence[LayerShape]) -> None:
    """Random keys and values, and scales that leave them of that size."""
    for index, shape in enumerate(layers):
        if shape.reads is not None:
            continue
        for cache in pool.layer(index):
            step = max(1, _MOST_RANDOM // max(1, cache[0].numel()))
            for part in cache.split(step):
                part.copy_(_random(part.shape, cache.dtype, cache.device))
        for scale in pool.scales(index):
            if scale is not None:
                scale.fill_(1.0)


def _random(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if not dtype.is_floating_point:
        return torch.randint(-3, 4, tuple(shape), device=device).to(dtype)
    return torch.randn(*shape, device=device).to(dtype)


class _Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def _inputs(shape: LayerShape, num_tokens: int, dtype: str, device: torch.device) -> _Inputs:
    kind: torch.dtype = getattr(torch, dtype)
    return _Inputs(
        _random((num_tokens, shape.num_heads, shape.head_size), kind, device),
        _random((num_tokens, shape.num_kv_heads, shape.head_size), kind, device),
        _random((num_tokens, shape.num_kv_heads, shape.head_size_v), kind, device),
    )


def _run(
    kernel: Callable,
    layers: Sequence[LayerShape],
    inputs: list[_Inputs],
    args: LaunchArgs,
    pool: KVPool,
) -> None:
    for index, shape in enumerate(layers):
        kernel(index, shape, inputs[index], args, pool)


def _write(index: int, shape: LayerShape, inputs: _Inputs, args: LaunchArgs, pool: KVPool) -> None:
    if shape.reads is None:
        k_cache, v_cache = pool.layer(index)
        scales = pool.scales(index)
        reshape_and_cache(inputs.k, inputs.v, k_cache, v_cache, args.slot_mapping, *scales)


def _attend(index: int, shape: LayerShape, inputs: _Inputs, args: LaunchArgs, pool: KVPool) -> None:
    k_cache, v_cache = pool.layer(index)
    k_scale, v_scale = pool.scales(index)
    paged_attention(
        inputs.q,
        k_cache,
        v_cache,
        query_start_loc=args.query_start_loc,
        seq_lens=args.seq_lens,
        block_tables=args.block_tables,
        max_query_len=args.max_query_len,
        max_seq_len=args.max_seq_len,
        num_decodes=args.num_decodes,
        scale=shape.scale,
        window=shape.window,
        softcap=shape.softcap,
        k_scale=k_scale,
        v_scale=v_scale,
    )


@torch.inference_mode()
def _median_us(work: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Once to compile and warm up, then timed: by the GPU's events, by the clock where there is none."""
    work()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e3)
        else:
            started = time.perf_counter()
            work()
            times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times)
