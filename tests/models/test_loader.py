"""A checkpoint fills every parameter exactly once, or is refused with the names at fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from octavo.models import Linear, load_model, resolve_model
from octavo.tests.models.test_llama import save


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(tmp_path, "llama")
    return tmp_path


def change(directory: Path, **changes: torch.Tensor | None) -> None:
    """Rewrite the checkpoint with parameters added, replaced or (None) removed."""
    file = directory / "model.safetensors"
    tensors = load_file(file) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def test_missing_and_unknown_names_are_named(checkpoint: Path) -> None:
    gone, extra = "model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.k_proj.bias"
    change(checkpoint, **{gone: None, extra: torch.zeros(16)})
    with pytest.raises(ValueError, match=rf"misses {gone} and has unknown {extra}"):
        load_model(resolve_model(str(checkpoint)))


def test_many_names_are_counted(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    with pytest.raises(ValueError, match=r"misses model\.layers\.3\..* and 12 more"):
        load_model(resolve_model(str(checkpoint)))


def test_wrong_shape_names_both(checkpoint: Path) -> None:
    change(checkpoint, **{"model.norm.weight": torch.ones(47)})
    with pytest.raises(ValueError, match=r"model.norm.weight: expected shape \[48\], got \[47\]"):
        load_model(resolve_model(str(checkpoint)))


def test_a_name_in_two_shards_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama", max_shard_size="40KB")
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second)
    with pytest.raises(ValueError, match=f"holds the parameter {name} twice"):
        load_model(resolve_model(str(tmp_path)))


def test_derived_and_tied_entries_are_not_parameters(tmp_path: Path) -> None:
    hf = save(tmp_path, "llama-tied")
    change(
        tmp_path,
        **{
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
            "lm_head.weight": torch.zeros_like(hf.lm_head.weight),
        },
    )
    model, _ = load_model(resolve_model(str(tmp_path)), pack=False)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, hf.lm_head.weight)


def test_corrupt_safetensors_file(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load_model(resolve_model(str(checkpoint)))


def test_no_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"expected model\.safetensors in "):
        load_model(resolve_model(str(checkpoint)))


def test_unknown_architecture_names_the_known_ones(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(
        json.dumps(config | {"architectures": ["NeoForCausalLM"]})
    )
    with pytest.raises(ValueError, match=r"LlamaForCausalLM, .*got NeoForCausalLM"):
        load_model(resolve_model(str(checkpoint)))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_act", "gelu", "hidden_act: expected 'silu', got 'gelu'"),
        (
            "rope_parameters",
            {
                "rope_type": "longrope",
                "rope_theta": 1.0,
                "short_factor": [1.0],
                "long_factor": [2.0],
                "original_max_position_embeddings": 8,
            },
            "got 'longrope'",
        ),
    ],
)
def test_unsupported_configuration(
    checkpoint: Path, field: str, value: object, message: str
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ValueError, match=message):
        load_model(resolve_model(str(checkpoint)))


def test_model_class_of_ones_own(tmp_path: Path) -> None:
    """Parameters of any module are found by path; those of a fused Linear beside it, biases too."""

    class Own(nn.Module):
        def __init__(self, config) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3))
            self.block = nn.ModuleDict({"ab": Linear(3, {"a": 2, "b": 1}, bias=True)})
            self.ab = Linear(3, {"c": 4})

    (tmp_path / "config.json").write_text(
        json.dumps(dict(model_type="llama", architectures=["Own"]))
    )
    tensors = {
        "scale": torch.randn(3),
        "block.a.weight": torch.randn(2, 3),
        "block.a.bias": torch.randn(2),
        "block.b.weight": torch.randn(1, 3),
        "block.b.bias": torch.randn(1),
        "c.weight": torch.randn(4, 3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    model, config = load_model(resolve_model(str(tmp_path)), model_class=Own, pack=False)
    assert config.model_type == "llama"
    fused = model.block["ab"]
    assert torch.equal(model.scale, tensors["scale"])
    assert torch.equal(
        fused.weight, torch.cat((tensors["block.a.weight"], tensors["block.b.weight"]))
    )
    assert torch.equal(fused.bias, torch.cat((tensors["block.a.bias"], tensors["block.b.bias"])))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert torch.get_default_dtype() == torch.float32
