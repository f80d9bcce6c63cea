"""Tables of the rotary embedding against those of transformers, for every kind of scaling."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.models.layers import RotaryEmbedding
from octavo.models.rotary import rotary_frequencies, rotary_table

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn betas": {**YARN, "beta_fast": 20, "beta_slow": 2},
    "yarn mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn attention factor": {**YARN, "attention_factor": 0.8},
    "yarn not truncated": {**YARN, "truncate": False},
    "yarn no scaling": {**YARN, "factor": 1.0},
    "yarn factor from lengths": {**YARN, "factor": None},
    "yarn without a ramp": {**YARN, "beta_fast": 1e-9, "beta_slow": 1e-9},
    "llama3": LLAMA3,
    "llama3 narrow ramp": {**LLAMA3, "high_freq_factor": 1.001},
}


def llama(parameters: dict[str, Any], **changes: Any) -> LlamaConfig:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
    parameters = {"rope_theta": 10000.0, **parameters}
    return LlamaConfig(
        **{**sizes, "max_position_embeddings": 1024, "rope_parameters": parameters, **changes}
    )


def peer_frequencies(config: LlamaConfig, length: int | None = None) -> tuple[torch.Tensor, float]:
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_frequencies(kind, theta, head_dim) -> None:
    config = llama({**SCALINGS[kind], "rope_theta": theta}, head_dim=head_dim)
    frequencies, factor = rotary_frequencies(config)
    expected, expected_factor = peer_frequencies(config)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-12)
    scaled = factor != 1 or not torch.allclose(
        frequencies, rotary_frequencies(llama({"rope_theta": theta}, head_dim=head_dim))[0]
    )
    assert scaled == (kind not in ("default", "dynamic", "yarn no scaling"))


@pytest.mark.parametrize("length", [100, 1024, 1025, 4000])
def test_dynamic_scaling_starts_past_the_pretrained_length(length) -> None:
    config = llama(SCALINGS["dynamic"])
    frequencies, _ = rotary_frequencies(config, length)
    torch.testing.assert_close(frequencies, peer_frequencies(config, length)[0], rtol=1e-6, atol=0)
    assert torch.equal(frequencies, rotary_frequencies(config)[0]) == (length <= 1024)


@pytest.mark.parametrize("kind", SCALINGS)
def test_table_is_what_transformers_rotates_by(kind) -> None:
    """The attention factor included, up to the last position."""
    config = llama(SCALINGS[kind])
    table = rotary_table(config)
    assert table.shape == (1024, 64) and table.dtype == torch.float32
    x = torch.zeros(1, 1, 1)
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(1024)[None])
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], rtol=0, atol=1e-4)
    torch.testing.assert_close(table[:, 32:], sin[0, :, :32], rtol=0, atol=1e-4)
    assert torch.equal(RotaryEmbedding(config).cos_sin, table)


def test_part_of_a_head() -> None:
    config = llama({**LLAMA3, "partial_rotary_factor": 0.25})
    frequencies, _ = rotary_frequencies(config)
    assert rotary_table(config, 10).shape == (10, 16)
    torch.testing.assert_close(frequencies, peer_frequencies(config)[0], rtol=1e-6, atol=0)


def test_older_configurations() -> None:
    """`rope_scaling` with `type`, the base beside it, head_dim left to be derived."""
    old = SimpleNamespace(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=1024,
        rope_theta=5000.0,
        rope_scaling={"type": "linear", "factor": 3.0},
    )
    new = llama({"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0})
    assert torch.equal(rotary_table(old, 50), rotary_table(new, 50))


def test_a_dictionary_for_each_type_of_layer() -> None:
    config = SimpleNamespace(
        head_dim=64,
        max_position_embeddings=1024,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    full = rotary_table(config, 9, "full_attention")
    expected = rotary_table(llama(config.rope_parameters["full_attention"]), 9)
    assert torch.equal(full, expected)
    assert not torch.equal(full, rotary_table(config, 9, "sliding_attention"))
    with pytest.raises(ValueError, match="layer_type: expected one of full_attention, sliding_at"):
        rotary_table(config, 9)


def test_what_is_not_known_is_refused() -> None:
    config = SimpleNamespace(head_dim=64, max_position_embeddings=64)
    config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4}
    with pytest.raises(ValueError, match=r"expected type default, linear.* got 'longrope'"):
        rotary_table(config)
    config.rope_parameters = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="expected 'low_freq_factor' for type llama3, got"):
        rotary_table(config)
