"""Recordings and models: what the header of one says of an engine, and the engine's runner built again from it."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ..runtime.kv_pool import KVPool, LayerKV
from ..runtime.params import LoRARequest
from ..runtime.recording import LayerShape, RecordingHeader
from ..runtime.recording.launches import host_pool_of, pool_of
from ..runtime.runner import Model, ModelRunner
from ..scheduler import SchedulerConfig
from .adapters import Adapters
from .layers import Attention, kv_layers, layer_windows
from .loader import load_model
from .weights import ModelSource, resolve_model

# of log probabilities, by the dtype of the model: what another order of the same sums makes of them, and more
TOLERANCES = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}

_PACKAGE = __name__.rsplit(".", 2)[0]

# what a configuration says of the model itself: the rest, and defaults, vary with the version of transformers
_OF_THE_MODEL = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "sliding_window",
    "layer_types",
    "tie_word_embeddings",
)


def recording_path(path: str | os.PathLike[str]) -> Path:
    """Where a recording may be written. Raises ValueError before anything is loaded."""
    place = Path(path).expanduser()
    if place.is_dir() or not place.absolute().parent.is_dir():
        raise ValueError(
            f"record: expected a file in a folder that exists, got {os.fspath(path)!r}"
        )
    return place


def header_of(
    source: ModelSource | None,
    model: nn.Module,
    config: Any,
    pool: KVPool,
    scheduler_config: SchedulerConfig,
    adapters: Adapters | None = None,
) -> RecordingHeader:
    """What it takes to build the engine's runner again."""
    return RecordingHeader(
        octavo_version=importlib.import_module(_PACKAGE).__version__,
        block_size=pool.block_size,
        num_gpu_blocks=scheduler_config.num_gpu_blocks,
        num_cpu_blocks=scheduler_config.num_cpu_blocks,
        layers=_layer_shapes(model, config, pool),
        kv_layout=pool.layout.value,
        dtype=_name(next(model.parameters()).dtype),
        model=None if source is None else source.name,
        model_digest=config_digest(config),
        architecture=type(model).__name__,
        vocab_size=scheduler_config.vocab_size,
        sliding_window=scheduler_config.sliding_window,
        max_model_len=scheduler_config.max_model_len,
        max_num_seqs=scheduler_config.max_num_seqs,
        max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
        max_loras=0 if adapters is None else adapters.num_places,
        max_lora_rank=16 if adapters is None else adapters.max_rank,
    )


def config_digest(config: Any) -> str:
    """SHA-256 of what a configuration says of the model."""
    kept = {name: getattr(config, name, None) for name in _OF_THE_MODEL}
    kept = {name: value for name, value in kept.items() if value is not None}
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _layer_shapes(model: nn.Module, config: Any, pool: KVPool) -> tuple[LayerShape, ...]:
    """From the model's `Attention` layers; for a model without them, as its configuration says."""
    attention = {m.layer: m for m in model.modules() if isinstance(m, Attention)}
    windows = layer_windows(config)
    shapes = []
    for index, layer in enumerate(pool.layers):
        own = attention.get(index)
        kept: Any = layer
        while isinstance(kept, int):
            kept = pool.layers[kept]
        assert isinstance(kept, LayerKV)
        shapes.append(
            LayerShape(
                num_heads=config.num_attention_heads if own is None else own.num_heads,
                num_kv_heads=kept.num_kv_heads,
                head_size=kept.head_size,
                head_size_v=kept.head_size_v or kept.head_size,
                dtype=_name(kept.dtype),
                scale_per_token_head=kept.scale_per_token_head,
                scale=None if own is None else own.scale,
                window=windows[index] if own is None else own.window,
                softcap=None if own is None else own.softcap,
                reads=layer if isinstance(layer, int) else None,
            )
        )
    return tuple(shapes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_runner(
    header: RecordingHeader,
    model: str | None = None,
    *,
    device: torch.device | str = "cpu",
    check: bool = False,
    model_class: Callable[[Any], nn.Module] | None = None,
) -> ModelRunner:
    """The recorded engine's model and pools, on a device.

    model  where it is now, if not under the name it was recorded with
    check  every launch through a `ShadowCache`, as `OCTAVO_CHECK=1` does
    Raises ValueError when it is another model than the recorded one, or the pools do not fit the memory.
    """
    name = header.model if model is None else model
    if name is None:
        raise ValueError("model: expected the name of the recorded model, the recording has none")
    source, place = resolve_model(name), torch.device(device)
    dtype = getattr(torch, header.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: expected one of torch, got {header.dtype!r}")
    loaded, config = load_model(source, dtype, place, model_class)
    digest = config_digest(config)
    if header.model_digest and digest != header.model_digest:
        raise ValueError(
            f"model: expected the recorded one, whose configuration has the digest {header.model_digest[:12]}, "
            f"got {digest[:12]} for {name!r}"
        )
    return runner_of(header, loaded, config, device=place, check=check)


def runner_of(
    header: RecordingHeader,
    model: nn.Module,
    config: Any,
    *,
    device: torch.device | str = "cpu",
    check: bool = False,
) -> ModelRunner:
    """`load_runner` for a model that is loaded already."""
    pool = pool_of(header, device)
    own = next(layer for layer in pool.layers if isinstance(layer, LayerKV))
    layers = tuple(kv_layers(model, config, own.dtype, own.scale_per_token_head))
    if layers != pool.layers:
        raise ValueError(
            f"model: expected one that keeps what the recorded one kept, got {_first_difference(layers, pool.layers)}"
        )
    adapters = None
    if header.max_loras:
        adapters = _AdaptersAsNamed(model, header.max_loras, header.max_lora_rank)
    host_pool = host_pool_of(header, device)
    return ModelRunner(cast(Model, model), pool, host_pool, check, adapters=adapters)


class _AdaptersAsNamed(Adapters):
    """Reads an adapter when a step names it: from the path that its request had when it was recorded."""

    def plan(
        self, requests: Iterable[LoRARequest]
    ) -> tuple[dict[LoRARequest, int], list[tuple[LoRARequest, int]]]:
        wanted = list(requests)
        for request in wanted:
            for other in list(self._known):
                if other.lora_int_id == request.lora_int_id and other != request:
                    self.forget(other)
            self.register(request)
        return super().plan(wanted)


def _first_difference(a: tuple, b: tuple) -> str:
    if len(a) != len(b):
        return f"{len(a)} layers instead of {len(b)}"
    index = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    return f"{a[index]} in layer {index} instead of {b[index]}"
