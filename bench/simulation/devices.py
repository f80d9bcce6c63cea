"""Devices and models as numbers. Rates are those of data sheets; what part of them is reached is an assumption, and said so.

Sources. H200 SXM: NVIDIA's data sheet (4.8 TB/s, 141 GB, 989 TFLOP/s dense bf16, NVLink 900 GB/s both ways, PCIe 5.0 x16).
A100 SXM 80 GB: NVIDIA's data sheet (2.039 TB/s, 80 GB, 312 TFLOP/s dense bf16, NVLink 600 GB/s both ways, PCIe 4.0 x16).
Models: the `config.json` of meta-llama/Meta-Llama-3-8B, meta-llama/Meta-Llama-3-70B and HuggingFaceTB/SmolLM2-135M.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ...runtime.sampling_params import is_int, require


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator and its host.

    memory_bytes         of device memory
    memory_bytes_per_s   its peak rate
    flops_per_s          peak of dense bf16 matrix products
    link_bytes_per_s     to and from host memory, one direction
    peer_bytes_per_s     to the other accelerators, one direction
    memory_efficiency    assumed 0.85. Paged decode of FlashAttention 3 reaches 4.24 of 4.8 TB/s, 0.88, with 8 sequences of 32k
                         tokens, less with short ones (vllm#43232, bytes over time)
    linear_efficiency    assumed 0.75. An H800 of the same peak reaches 865 TFLOP/s, 0.87, in one large product before it
                         throttles (FlashMLA, deep dive of 2025-04-22); the products of a step are smaller
    attention_efficiency  assumed 0.5. Causal prefill of FlashAttention 3 has 474 to 714 TFLOP/s, 0.48 to 0.72, at 2k to 32k
                         tokens (vllm#43232); chunks are shorter
    link_efficiency      assumed 0.78: 50 GB/s of 64 from pinned memory, PCIe 5.0 x16 (vLLM's blog, 2026-01-08)
    peer_efficiency      assumed 0.75
    exchange_seconds     assumed 10 us: what an all-reduce takes however small it is
    launch_seconds       assumed 2 us: what a kernel takes however small it is, in a replayed graph. The smallest attention
                         steps in vllm#43232 take 7.6 to 11 us, two kernels and their work
    host_seconds, host_seconds_per_row  of schedule, launch arguments, sampling parameters and write-back: 138 us for one row
                         and 1.1 ms for 1024 (docs/performance.md)
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float
    peer_bytes_per_s: float
    memory_efficiency: float = 0.85
    linear_efficiency: float = 0.75
    attention_efficiency: float = 0.5
    link_efficiency: float = 0.78
    peer_efficiency: float = 0.75
    exchange_seconds: float = 10e-6
    launch_seconds: float = 2e-6
    host_seconds: float = 138e-6
    host_seconds_per_row: float = 0.95e-6

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name == "name":
                require(isinstance(value, str) and bool(value), name, "a name", value)
                continue
            ok = isinstance(value, (int, float)) and not isinstance(value, bool)
            ok = ok and math.isfinite(value)
            if name.endswith("_efficiency"):
                require(ok and 0 < value <= 1, name, "a number in (0, 1]", value)
            elif "seconds" in name:
                require(ok and value >= 0, name, "a number >= 0", value)
            else:
                require(ok and value > 0, name, "a number > 0", value)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder of Llama's kind; the counts below it are those of one of `tensor_parallel` devices.

    Tensor parallelism is taken as an even division of weights, heads and KV, with two all-reduces a layer between.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    is_tied: bool = False  # the head is the embedding
    element_bytes: int = 2  # of weights, KV and hidden states
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name == "name":
                require(isinstance(value, str) and bool(value), name, "a name", value)
            elif name == "is_tied":
                require(isinstance(value, bool), name, "True or False", value)
            else:
                require(is_int(value) and value >= 1, name, "an integer >= 1", value)
        n = self.tensor_parallel
        for name in ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size"):
            value = getattr(self, name)
            require(value % n == 0, name, f"a multiple of tensor_parallel = {n}", value)

    @property
    def layer_parameters(self) -> int:
        """Of the matrices of all layers: queries, keys, values, output, gate, up, down."""
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_size
        one = self.hidden_size * (heads + 3 * self.intermediate_size)
        return self.num_layers * one // self.tensor_parallel

    @property
    def head_parameters(self) -> int:
        return self.hidden_size * self.vocab_size // self.tensor_parallel

    @property
    def weight_bytes(self) -> int:
        """What a device keeps."""
        embeddings = 1 if self.is_tied else 2
        return self.element_bytes * (self.layer_parameters + embeddings * self.head_parameters)

    @property
    def kv_bytes_per_token(self) -> int:
        heads = self.num_kv_heads // self.tensor_parallel
        return 2 * self.num_layers * heads * self.head_size * self.element_bytes

    @property
    def attention_flops_per_pair(self) -> int:
        """Two products, a multiplication and an addition each, in every layer."""
        return 4 * self.num_layers * self.num_heads * self.head_size // self.tensor_parallel

    @property
    def num_launches(self) -> int:
        """Ten kernels a layer (two norms, four products, rotation and cache write, attention, its merge, activation), the
        embedding, the last norm, the head and the draw."""
        return 10 * self.num_layers + 4


DEVICES = {
    "h200": Device(
        name="H200",
        memory_bytes=141e9,
        memory_bytes_per_s=4.8e12,
        flops_per_s=989e12,
        link_bytes_per_s=64e9,
        peer_bytes_per_s=450e9,
    ),
    "a100": Device(
        name="A100",
        memory_bytes=80e9,
        memory_bytes_per_s=2.039e12,
        flops_per_s=312e12,
        link_bytes_per_s=32e9,
        peer_bytes_per_s=300e9,
    ),
}

MODELS = {
    "llama-3-8b": ModelShape(
        name="Llama-3-8B",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        intermediate_size=14336,
        vocab_size=128256,
    ),
    "llama-3-70b-tp8": ModelShape(
        name="Llama-3-70B (tp 8)",
        num_layers=80,
        hidden_size=8192,
        num_heads=64,
        num_kv_heads=8,
        head_size=128,
        intermediate_size=28672,
        vocab_size=128256,
        tensor_parallel=8,
    ),
    "smollm2-135m": ModelShape(
        name="SmolLM2-135M",
        num_layers=30,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        intermediate_size=1536,
        vocab_size=49152,
        is_tied=True,
    ),
}


def pool_tokens(model: ModelShape, device: Device, utilization: float = 0.9) -> int:
    """Tokens whose KV fits beside the weights in a share of the device's memory. ValueError if the weights do not."""
    ok = isinstance(utilization, (int, float)) and 0 < utilization <= 1
    require(ok, "utilization", "a number in (0, 1]", utilization)
    room = utilization * device.memory_bytes - model.weight_bytes
    if room < model.kv_bytes_per_token:
        raise ValueError(
            f"model: expected weights that leave room for KV in {utilization:g} of the {device.memory_bytes / 1e9:g} GB of "
            f"{device.name}, got {model.weight_bytes / 1e9:.1f} GB of {model.name}"
        )
    return int(room // model.kv_bytes_per_token)
