"""What a step would take on a device: bytes and operations counted from the step, over rates of public record.

    host      = host_seconds + host_seconds_per_row * rows
    launch    = launches * launch_seconds
    linear    = max(weight bytes / memory rate, linear FLOPs / linear rate)
    attention = max(KV bytes read and written / memory rate, attention FLOPs / attention rate)
    exchange  = 2 * layers * (exchange_seconds + ring bytes / peer rate), with tensor parallelism
    copies    = 2 * block bytes * copied blocks / memory rate
    swaps     = block bytes * (blocks in + blocks out) / link rate

    rate      = peak * efficiency
    linear FLOPs    = 2 * (parameters of the layers * tokens + parameters of the head * rows of logits)
    attention FLOPs = 4 * layers * query heads * head size * (query, key) pairs that see one another

Without a word on overlap these add up. Memory and arithmetic of one kernel overlap (the max); kernels follow one another.
A swap-in and a copy-on-write are waited for by the model. A swap-out runs beside the model until that writes to a block
which is leaving, and blocks are taken because somebody needs them in this very step, so it is counted as waited for, too.
Host work is hidden behind the device only if steps are put together ahead (`simulate(async_scheduling=True)`).
Activations, norms, embedding rows, logits and sampling are left out: small beside the weights, and part of the launch floor.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ...scheduler import SchedulerOutputs
from .devices import Device, ModelShape


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step does, counted.

    num_rows         sequences that are fed
    num_tokens       tokens that are fed; the KV of each is written
    num_logits       rows of logits
    num_kv_tokens    tokens whose KV is read, for each row those it sees; rows that share blocks read them one by one
    num_pairs        pairs of a query and a key that it sees
    """

    num_rows: int = 0
    num_tokens: int = 0
    num_logits: int = 0
    num_kv_tokens: int = 0
    num_pairs: int = 0
    num_copied_blocks: int = 0
    num_blocks_in: int = 0
    num_blocks_out: int = 0


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds, by what they go to; see the head of this file."""

    host: float = 0.0
    launch: float = 0.0
    linear: float = 0.0
    attention: float = 0.0
    exchange: float = 0.0
    copies: float = 0.0
    swaps: float = 0.0

    @property
    def on_device(self) -> float:
        """All but the host's part."""
        launched = self.launch + self.linear + self.attention + self.exchange
        return launched + self.copies + self.swaps

    @property
    def total(self) -> float:
        return self.host + self.on_device


def visible(context_len: int, query_len: int, window: int | None) -> tuple[int, int]:
    """(keys that some query sees, pairs of a query and a key it sees) of one row."""
    if window is None or context_len + query_len <= window:
        return context_len + query_len, query_len * context_len + query_len * (query_len + 1) // 2
    unlimited = min(max(window - context_len, 0), query_len)  # queries whose window is not full
    pairs = unlimited * context_len + unlimited * (unlimited + 1) // 2
    seen = min(context_len + query_len, window - 1 + query_len)
    return seen, pairs + (query_len - unlimited) * window


def work_of(outputs: SchedulerOutputs, window: int | None = None) -> StepWork:
    """Count what a step does. Has to be called before the step is written back."""
    snapshots = outputs.seq_group_metadata_list
    num_rows = num_tokens = num_logits = num_kv_tokens = num_pairs = 0
    if snapshots.decodes is not None:
        lengths = snapshots.decodes.num_tokens
        num_rows = num_tokens = num_logits = len(lengths)
        seen = lengths if window is None else lengths.clip(max=window)
        num_kv_tokens = num_pairs = int(seen.sum())
    for metadata in snapshots.others:
        chunk = metadata.token_chunk_size
        num_logits += metadata.num_logits
        for data in metadata.seq_data.values():
            keys, pairs = visible(data.num_computed_tokens, chunk, window)
            num_rows, num_tokens = num_rows + 1, num_tokens + chunk
            num_kv_tokens, num_pairs = num_kv_tokens + keys, num_pairs + pairs
    return StepWork(
        num_rows,
        num_tokens,
        num_logits,
        num_kv_tokens,
        num_pairs,
        len(outputs.blocks_to_copy),
        len(outputs.blocks_to_swap_in),
        len(outputs.blocks_to_swap_out),
    )


def step_time(work: StepWork, model: ModelShape, device: Device, block_size: int) -> StepTime:
    """The formula at the head of this file."""
    memory_rate = device.memory_bytes_per_s * device.memory_efficiency
    block_bytes = block_size * model.kv_bytes_per_token
    host = device.host_seconds + device.host_seconds_per_row * work.num_rows
    copies = 2 * block_bytes * work.num_copied_blocks / memory_rate
    moved = work.num_blocks_in + work.num_blocks_out
    swaps = block_bytes * moved / (device.link_bytes_per_s * device.link_efficiency)
    if work.num_tokens == 0:  # it only moves blocks
        return StepTime(host=host, copies=copies, swaps=swaps)
    weights = model.layer_parameters + (model.head_parameters if work.num_logits else 0)
    linear_flops = 2 * (
        model.layer_parameters * work.num_tokens + model.head_parameters * work.num_logits
    )
    kv_bytes = model.kv_bytes_per_token * (work.num_kv_tokens + work.num_tokens)
    attention_flops = model.attention_flops_per_pair * work.num_pairs
    return StepTime(
        host=host,
        launch=model.num_launches * device.launch_seconds,
        linear=max(
            weights * model.element_bytes / memory_rate,
            linear_flops / (device.flops_per_s * device.linear_efficiency),
        ),
        attention=max(
            kv_bytes / memory_rate,
            attention_flops / (device.flops_per_s * device.attention_efficiency),
        ),
        exchange=_exchange(work.num_tokens, model, device),
        copies=copies,
        swaps=swaps,
    )


def _exchange(num_tokens: int, model: ModelShape, device: Device) -> float:
    """All-reduces around a ring: each device sends 2 (n - 1) / n of the hidden states."""
    n = model.tensor_parallel
    if n == 1:
        return 0.0
    sent = 2 * (n - 1) / n * num_tokens * model.hidden_size * model.element_bytes
    rate = device.peer_bytes_per_s * device.peer_efficiency
    return 2 * model.num_layers * (device.exchange_seconds + sent / rate)


def summed(times: list[StepTime]) -> StepTime:
    """Part by part."""
    names = [field.name for field in dataclasses.fields(StepTime)]
    return StepTime(**{name: sum(getattr(time, name) for time in times) for name in names})
