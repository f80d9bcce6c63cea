"""The table of a model's rotary embedding: cosines and sines of every position, scaled as its configuration says.

A `rope_parameters` (older: `rope_scaling`) dictionary of a Hugging Face configuration names one of these, for pairs of
dimensions i with plain frequencies f_i = theta^(-2i / n), n the dims of a head that rotate:

    default   f_i
    linear    f_i / factor
    dynamic   f_i with theta * (factor * length / pretrained - (factor - 1))^(n / (n - 2)), for lengths past pretrained
    yarn      f_i / factor where pair i turns few times within the pretrained length, f_i where it turns often, a ramp
              between; cosines and sines times an attention factor
    llama3    likewise by wavelength, with a ramp in 1 / wavelength and no attention factor
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

Tensor = torch.Tensor


def rotary_table(
    config: Any, num_positions: int | None = None, layer_type: str | None = None
) -> Tensor:
    """fp32 [num_positions, n]: n / 2 cosines, then n / 2 sines, as `kernels.rotary_embedding` reads them.

    config         a transformers configuration, or anything with its attributes: head_dim (or hidden_size and
                   num_attention_heads), max_position_embeddings, rope_parameters or rope_scaling and rope_theta
    num_positions  rows; None: config.max_position_embeddings
    layer_type     which of the dictionaries, where rope_parameters holds one for each type of layer
    Raises ValueError on a type of scaling that is not known, or whose parameters are missing.
    """
    if num_positions is None:
        num_positions = int(config.max_position_embeddings)
    frequencies, attention_factor = rotary_frequencies(config, num_positions, layer_type)
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor


def rotary_frequencies(
    config: Any, num_positions: int | None = None, layer_type: str | None = None
) -> tuple[Tensor, float]:
    """(fp32 [n / 2] radians per position, factor of cosines and sines); arguments as in `rotary_table`.

    Dynamic scaling depends on the longest sequence. A cached key cannot be rotated anew when its sequence grows, so all
    sequences get the frequencies of one of num_positions tokens.
    """
    parameters = _parameters(config, layer_type)
    kind = parameters["rope_type"]
    if kind not in _SCALINGS:
        raise ValueError(
            f"config.rope_parameters: expected type {', '.join(_SCALINGS)}, got {kind!r}"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    parameters["pretrained"] = config.max_position_embeddings
    parameters["length"] = max(num_positions or 0, config.max_position_embeddings)
    try:
        frequencies, attention_factor = _SCALINGS[kind](parameters, size)
    except KeyError as missing:
        raise ValueError(
            f"config.rope_parameters: expected {missing} for type {kind}, got "
            f"{', '.join(sorted(_parameters(config, layer_type)))}"
        ) from None
    factors = getattr(config, "rope_factors", None)  # as GGUF files store the scaling of Llama 3
    if factors is not None:
        frequencies = frequencies / torch.tensor(factors)
    return frequencies, attention_factor


def _parameters(config: Any, layer_type: str | None) -> dict[str, Any]:
    """One flat dictionary, whichever generation of transformers wrote the configuration."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if layer_type is not None and isinstance(found.get(layer_type), Mapping):
        found = found[layer_type]
    elif any(isinstance(value, Mapping) for value in found.values()):
        raise ValueError(f"layer_type: expected one of {', '.join(found)}, got {layer_type!r}")
    parameters = dict(found)
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if (value := getattr(config, name, None)) is not None:
            parameters.setdefault(name, value)
    parameters.setdefault("rope_theta", 10000.0)
    parameters.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    return parameters


def _plain(theta: float, size: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)


def _default(parameters: dict[str, Any], size: int) -> tuple[Tensor, float]:
    return _plain(parameters["rope_theta"], size), 1.0


def _linear(parameters: dict[str, Any], size: int) -> tuple[Tensor, float]:
    return _plain(parameters["rope_theta"], size) / parameters["factor"], 1.0


def _dynamic(parameters: dict[str, Any], size: int) -> tuple[Tensor, float]:
    factor, growth = parameters["factor"], parameters["length"] / parameters["pretrained"]
    stretch = (factor * growth - (factor - 1)) ** (size / (size - 2))
    return _plain(parameters["rope_theta"] * stretch, size), 1.0


def _yarn(parameters: dict[str, Any], size: int) -> tuple[Tensor, float]:
    theta, original = parameters["rope_theta"], parameters["original_max_position_embeddings"]
    factor = parameters["factor"] or parameters["pretrained"] / original

    def pair_that_turns(times: float) -> float:
        """The (fractional) pair that turns so many times within the original length."""
        return size * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_that_turns(parameters.get("beta_fast") or 32)
    last = pair_that_turns(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    pairs = torch.arange(size // 2, dtype=torch.float32)
    scaled_share = ((pairs - first) / (last - first)).clamp(0, 1)
    plain = _plain(theta, size)
    frequencies = plain / factor * scaled_share + plain * (1 - scaled_share)
    return frequencies, _yarn_attention_factor(parameters, factor)


def _yarn_attention_factor(parameters: dict[str, Any], factor: float) -> float:
    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if (given := parameters.get("attention_factor")) is not None:
        return given
    weight, weight_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if weight and weight_all:  # DeepSeek: part of the temperature is in the scale of its scores
        return temperature(weight) / temperature(weight_all)
    return temperature(1.0)


def _llama3(parameters: dict[str, Any], size: int) -> tuple[Tensor, float]:
    plain, factor = _plain(parameters["rope_theta"], size), parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * plain / (2 * math.pi)
    kept_share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept_share) * plain / factor + kept_share * plain, 1.0


_SCALINGS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
}
