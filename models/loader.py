"""From files to a model: builds it, fills every parameter exactly once, and refuses a checkpoint that does not fit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .bart import BartForConditionalGeneration
from .layers import Linear
from .llama import LlamaForCausalLM
from .weights import ModelSource

ARCHITECTURES: dict[str, Callable[[Any], nn.Module]] = {
    "BartForConditionalGeneration": BartForConditionalGeneration,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
}

_DERIVED = "rotary_emb.inv_freq"  # old checkpoints hold this; it follows from the configuration


def load_model(
    source: ModelSource,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    model_class: Callable[[Any], nn.Module] | None = None,
    pack: bool = True,
) -> tuple[nn.Module, Any]:
    """Build the source's model on the device and load its weights. Returns (model, configuration).

    dtype        None takes the checkpoint's. On a CPU without bfloat16 instructions, bfloat16 products of several
                 rows take 3 to 6 times as long as float32 ones: ask for torch.float32 there
    model_class  called with the configuration; None looks the architecture up in ARCHITECTURES
    pack         reorder the weights of Linear layers for speed where that pays (`Linear.pack`); torch.compile's inductor
                 cannot read them then
    Raises       ValueError for an unknown architecture, and for parameters that are missing, unknown or of another shape
    """
    config = source.config()
    if model_class is None:
        model_class = _architecture(source, config)
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    model = build_model(model_class, config, _dtype(dtype, config), device)
    _load(model, source)
    if pack:
        for module in model.modules():
            if isinstance(module, Linear):
                module.pack()
    return model.eval().requires_grad_(False), config


def build_model(
    model_class: Callable[[Any], nn.Module],
    config: Any,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """A model whose parameters hold whatever the memory did, in this dtype on this device."""
    with _defaults(dtype, torch.device(device)):
        return model_class(config)


def _architecture(source: ModelSource, config: Any) -> Callable[[Any], nn.Module]:
    names = config.architectures or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise ValueError(
        f"model: expected an architecture of {', '.join(ARCHITECTURES)}, got {', '.join(names) or 'none'} in "
        f"{source.name!r}; pass model_class to run a model of your own"
    )


def _dtype(dtype: torch.dtype | None, config: Any) -> torch.dtype:
    chosen = dtype or config.dtype or torch.float32
    return getattr(torch, chosen) if isinstance(chosen, str) else chosen


@contextlib.contextmanager
def _defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """What `torch.empty` makes in a layer's constructor."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def _load(model: nn.Module, source: ModelSource) -> None:
    targets, tied = parameters_by_name(model)
    missing, unknown = set(targets), []
    for name, tensor in source.weights():
        if name in tied or name.endswith(_DERIVED):
            continue
        if name not in missing:
            if name in targets:
                raise ValueError(f"model: {source.name!r} holds the parameter {name} twice")
            unknown.append(name)
            continue
        if tensor.shape != targets[name].shape:
            raise ValueError(
                f"{name}: expected shape {list(targets[name].shape)}, got {list(tensor.shape)}"
            )
        targets[name].copy_(tensor)
        missing.remove(name)
    if missing or unknown:
        faults = [
            f"{kind} {_some(names)}"
            for kind, names in (("misses", missing), ("has unknown", unknown))
            if names
        ]
        raise ValueError(
            f"model: {source.name!r} does not fit {type(model).__name__}: it {' and '.join(faults)}"
        )


def _some(names: set[str] | list[str], most: int = 6) -> str:
    shown = ", ".join(sorted(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def parameters_by_name(model: nn.Module) -> tuple[dict[str, Tensor], set[str]]:
    """Where each parameter of a checkpoint goes, by its name there; and the names that are tied to one of these.

    A fused Linear is one parameter here and several, beside it, in the checkpoint: these are views of its rows.
    """
    targets: dict[str, Tensor] = {}
    tied: set[str] = set()
    seen: set[int] = set()
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                tied.add(f"{path}.{kind}")
            elif isinstance(module, Linear) and module.parts:
                rows = parameter.split(list(module.parts.values()))
                beside = path.rpartition(".")[0]
                targets |= {
                    ".".join(filter(None, (beside, part, kind))): view
                    for part, view in zip(module.parts, rows, strict=True)
                }
            else:
                targets[".".join(filter(None, (path, kind)))] = parameter
            seen.add(id(parameter))
    return targets, tied
