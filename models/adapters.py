"""Low-rank adapters (LoRA) of a model's Linear layers: read from a PEFT directory, several in one batch.

    y = W x + b,   and for a token with an adapter   y += scale * B (A x),   scale = lora_alpha / r

The device has a fixed number of places, each with room for one adapter of at most `max_rank`; an adapter moves into one when a
step needs it, in place of the one that was used least recently. Its name in the checkpoint is that of the layer before fusing
(`layers.0.self_attn.q_proj`); what names no layer is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from .. import kernels
from ..runtime.launch_args import LaunchArgs
from ..runtime.params import LoRARequest
from .layers import Linear
from .weights import read_json

_PREFIX = "base_model.model."
_SUFFIXES = {".lora_A.weight": 0, ".lora_B.weight": 1}
Weights = dict[str, tuple[Tensor, Tensor]]  # layer's name -> A [r, in], scale * B [out, r]


class LinearAdapters(nn.Module):
    """The places of one Linear layer: `add` gives each token what its adapter adds.

    a      [places, max_rank, in_features], one for each part of a fused layer
    b      [places, out_features of the part, max_rank], scales included
    ranks  [places] int32, one for each part
    """

    def __init__(self, linear: Linear, in_features: int, places: int, max_rank: int) -> None:
        super().__init__()
        rows = linear.parts or {"": linear.out_features}
        dtype, device = linear.weight.dtype, linear.weight.device
        self.sizes = list(rows.values())
        self.a = [
            torch.zeros(places, max_rank, in_features, dtype=dtype, device=device) for _ in rows
        ]
        self.b = [
            torch.zeros(places, size, max_rank, dtype=dtype, device=device) for size in self.sizes
        ]
        self.ranks = [torch.zeros(places, dtype=torch.int32, device=device) for _ in rows]

    def fill(self, place: int, part: int, weights: tuple[Tensor, Tensor] | None) -> None:
        """Put an adapter's weights of one part into a place; None if it has none there."""
        rank = 0 if weights is None else weights[0].shape[0]
        self.ranks[part][place] = rank
        if weights is not None:
            self.a[part][place, :rank].copy_(weights[0])
            self.b[part][place, :, :rank].copy_(weights[1])

    def add(self, x: Tensor, out: Tensor, args: LaunchArgs) -> None:
        """out [T, out_features] += what the adapters make of x [T, in_features], in place."""
        order, starts = args.lora_token_order, args.lora_adapter_starts
        assert order is not None and starts is not None
        parts = out.split(self.sizes, dim=-1)
        for a, b, ranks, part in zip(self.a, self.b, self.ranks, parts, strict=True):
            y = kernels.lora_shrink(x, a, ranks, order, starts, 1.0)
            kernels.lora_expand(y, b, ranks, order, starts, part)


class Adapters:
    """The adapters of one model.

    model      its Linear layers that are called with `args` take part
    places     adapters that one step may use
    max_rank   the largest rank an adapter may have
    Raises ValueError for a number that is out of range.
    """

    def __init__(self, model: nn.Module, places: int, max_rank: int = 16) -> None:
        if places < 1:
            raise ValueError(f"max_loras: expected a number >= 1, got {places}")
        if max_rank < 1:
            raise ValueError(f"max_lora_rank: expected a number >= 1, got {max_rank}")
        self.num_places, self.max_rank = places, max_rank
        self._layers: dict[str, tuple[LinearAdapters, int]] = {}  # name -> places, part
        self._shapes: dict[str, tuple[int, int]] = {}  # name -> out_features, in_features
        for path, module in model.named_modules():
            if isinstance(module, Linear) and module.takes_adapters:
                self._add_layer(path, module)
        self._known: dict[LoRARequest, Weights] = {}
        self._places: dict[LoRARequest, int] = {}  # least recently used first

    def _add_layer(self, path: str, linear: Linear) -> None:
        in_features = linear.in_features
        own = linear.adapters = LinearAdapters(linear, in_features, self.num_places, self.max_rank)
        beside = path.rpartition(".")[0]
        names = [f"{beside}.{part}" for part in linear.parts] or [path]
        for part, (name, size) in enumerate(zip(names, own.sizes, strict=True)):
            self._layers[name] = (own, part)
            self._shapes[name] = (size, in_features)

    def register(self, request: LoRARequest) -> None:
        """Read the adapter's weights, if this has not been done, and check that every one of them has its layer.

        Raises ValueError naming what does not fit; nothing changes then.
        """
        if request in self._known:
            return
        for other in self._known:
            if other.lora_int_id == request.lora_int_id:
                raise ValueError(
                    f"lora_int_id: expected one of its own for {request.lora_name!r}, got "
                    f"{request.lora_int_id}, which {other.lora_name!r} has"
                )
        self._known[request] = self._read(Path(request.lora_path))

    def forget(self, request: LoRARequest) -> None:
        """Let go of an adapter that no unfinished request names, and of its place. Registered again it is read again."""
        self._known.pop(request, None)
        self._places.pop(request, None)

    def plan(
        self, requests: Iterable[LoRARequest]
    ) -> tuple[dict[LoRARequest, int], list[tuple[LoRARequest, int]]]:
        """(the places once a step with these adapters runs, least recently used first; what moves into which place).

        Raises ValueError for more adapters than places, and for one that is not registered: it would have no effect.
        """
        wanted = list(dict.fromkeys(requests))
        for request in wanted:
            if request not in self._known:
                raise ValueError(
                    f"lora_request: expected an adapter that is registered, got {request.lora_name!r}"
                )
        if len(wanted) > self.num_places:
            raise ValueError(
                f"lora_request: expected at most {self.num_places} adapters in a step, got {len(wanted)}"
            )
        kept = {request: place for request, place in self._places.items() if request not in wanted}
        used = {request: self._places[request] for request in wanted if request in self._places}
        free = [p for p in range(self.num_places) if p not in self._places.values()]
        moves = []
        for request in wanted:
            if request not in used:
                place = free.pop(0) if free else kept.pop(next(iter(kept)))
                used[request] = place
                moves.append((request, place))
        return {**kept, **used}, moves

    def commit(self, places: dict[LoRARequest, int]) -> None:
        """The step that `plan` was asked for is launched."""
        self._places = places

    @torch.inference_mode()
    def move_in(self, moves: Iterable[tuple[LoRARequest, int]]) -> None:
        """Copy adapters into their places. In order with the steps that use them."""
        for request, place in moves:
            # forgotten since the launch: then nobody waits for what the step makes of it
            weights = self._known.get(request, {})
            for name, (layer, part) in self._layers.items():
                layer.fill(place, part, weights.get(name))

    # -- reading

    def _read(self, directory: Path) -> Weights:
        config = read_json(directory / "adapter_config.json")
        files = sorted(directory.glob("adapter_model*.safetensors"))
        if not files:
            raise ValueError(
                f"lora_path: expected adapter_model.safetensors in {str(directory)!r}, there is none"
            )
        _check_config(config)
        halves: dict[str, dict[int, Tensor]] = {}
        unknown = []
        for file in files:
            with safe_open(str(file), framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118  not a dict
                    name, half = _layer_of(key)
                    if half is None or name not in self._layers:
                        unknown.append(key)
                    else:
                        halves.setdefault(name, {})[half] = tensors.get_tensor(key)
        if unknown:
            raise ValueError(
                f"lora_path: expected weights of the model's linear layers alone, got in {str(directory)!r} also "
                f"{_some(unknown)}; the layers are {_some(sorted(self._layers))}"
            )
        if not halves:
            raise ValueError(
                f"lora_path: expected weights of an adapter, got none in {str(directory)!r}"
            )
        return {name: self._checked(name, both, config) for name, both in halves.items()}

    def _checked(
        self, name: str, halves: Mapping[int, Tensor], config: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        out_features, in_features = self._shapes[name]
        if halves.keys() != {0, 1}:
            raise ValueError(f"lora_path: expected lora_A and lora_B of {name}, got one of them")
        a, b = halves[0], halves[1]
        rank = a.shape[0]
        if a.shape != (rank, in_features) or b.shape != (out_features, rank):
            raise ValueError(
                f"lora_path: expected A [r, {in_features}] and B [{out_features}, r] of {name}, got "
                f"{list(a.shape)} and {list(b.shape)}"
            )
        if not 1 <= rank <= self.max_rank:
            raise ValueError(
                f"lora_path: expected a rank of 1 to {self.max_rank} (max_lora_rank), got {rank} of {name}"
            )
        alpha = _pattern(config, "alpha_pattern", name, config.get("lora_alpha", rank))
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        dtype = self._layers[name][0].a[0].dtype
        return a.to(dtype), (b.float() * scale).to(dtype)


def _check_config(config: dict[str, Any]) -> None:
    """What these layers cannot do is refused: it would have no effect, or another one than it should."""
    for key, plain in (("use_dora", False), ("bias", "none"), ("modules_to_save", None)):
        got = config.get(key)
        if got not in (plain, None, []):
            raise ValueError(f"adapter_config.{key}: expected {plain}, got {got!r}")


def _layer_of(key: str) -> tuple[str, int | None]:
    for suffix, half in _SUFFIXES.items():
        if key.endswith(suffix):
            return key.removesuffix(suffix).removeprefix(_PREFIX), half
    return key, None


def _pattern(config: dict[str, Any], key: str, name: str, default: float) -> float:
    """A value that PEFT gives by the end of a layer's name."""
    for end, value in (config.get(key) or {}).items():
        if name == end or name.endswith("." + end):
            return value
    return default


def _some(names: list[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
