"""Llama models in GGUF files: configuration and dequantised weights, as Hugging Face checkpoints have them.

llama.cpp stores the rows of the query and key projections for interleaved rotary embedding: row 2 * i + j of a head
there is row j * head_dim / 2 + i of the Hugging Face checkpoint. `_unpermute` turns that back.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig

_DTYPES = {0: "float32", 1: "float16"}  # general.file_type; the rest are quantised, or bfloat16
_LONG_ARRAY = 256  # entries; longer ones are the tokenizer's vocabulary
_LAYER_PARTS = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
_ROPE_FACTORS = "rope_freqs.weight"  # part of the configuration, not a parameter


class _Reader(gguf.GGUFReader):
    """Steps over long arrays: a Python object for each token of a vocabulary would take seconds."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == gguf.GGUFValueType.ARRAY:
            (item_type,) = self._get(orig_offs, np.uint32)
            (length,) = self._get(orig_offs + 4, np.uint64)
            if length > _LONG_ARRAY:
                size = self._size_of_items(
                    orig_offs + 12, gguf.GGUFValueType(item_type), int(length)
                )
                return 12 + size, [], [], [gguf.GGUFValueType.ARRAY]
        return super()._get_field_parts(orig_offs, raw_type)

    def _size_of_items(self, start: int, item_type: gguf.GGUFValueType, length: int) -> int:
        if item_type != gguf.GGUFValueType.STRING:
            return np.dtype(self.gguf_scalar_to_np[item_type]).itemsize * length
        read_length = struct.Struct(
            "<Q" if self.endianess == gguf.GGUFEndian.LITTLE else ">Q"
        ).unpack_from
        offset, data = start, self.data.data
        for _ in range(length):
            offset += 8 + read_length(data, offset)[0]
        return offset - start


def _open(path: Path) -> _Reader:
    try:
        reader = _Reader(path)
    except (ValueError, KeyError, IndexError, OverflowError, struct.error) as error:
        raise ValueError(f"model: {path} is not a readable GGUF file: {error}") from error
    architecture = _field(reader, "general.architecture")
    if architecture != "llama" or _field(reader, "llama.expert_count", 0):
        kind = architecture if architecture != "llama" else "llama with experts"
        raise ValueError(f"model: expected a GGUF file of architecture llama, got {kind} in {path}")
    if _field(reader, "split.count", 1) > 1:
        raise ValueError(
            f"model: expected a GGUF file that is whole, got one of several parts in {path}"
        )
    return reader


def _field(reader: _Reader, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _required(reader: _Reader, key: str) -> int:
    value = _field(reader, key)
    if not isinstance(value, int):
        raise ValueError(f"model: expected an integer for the GGUF key {key}, got {value!r}")
    return value


def read_config(path: Path) -> LlamaConfig:
    """The file's metadata as a LlamaConfig; `rope_factors` holds the divisors of the rotary frequencies, if any."""
    reader = _open(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    num_heads = _required(reader, "llama.attention.head_count")
    hidden_size = _required(reader, "llama.embedding_length")
    head_dim = _field(reader, "llama.attention.key_length", hidden_size // num_heads)
    if (rotary := _field(reader, "llama.rope.dimension_count", head_dim)) != head_dim:
        raise ValueError(
            f"model: expected rotary embedding of all {head_dim} dimensions of a head, got {rotary}"
        )
    config = LlamaConfig(
        vocab_size=_field(reader, "llama.vocab_size") or int(tensors["token_embd.weight"].shape[1]),
        hidden_size=hidden_size,
        intermediate_size=_required(reader, "llama.feed_forward_length"),
        num_hidden_layers=_required(reader, "llama.block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=_required(reader, "llama.context_length"),
        rms_norm_eps=_field(reader, "llama.attention.layer_norm_rms_epsilon", 1e-5),
        rope_parameters=_rope_parameters(reader),
        attention_bias="blk.0.attn_q.bias" in tensors,
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
        architectures=["LlamaForCausalLM"],
        dtype=_DTYPES.get(_field(reader, "general.file_type"), "bfloat16"),
    )
    factors = tensors.get(_ROPE_FACTORS)
    config.rope_factors = None if factors is None else factors.data.tolist()
    return config


def _rope_parameters(reader: _Reader) -> dict[str, Any]:
    theta = _field(reader, "llama.rope.freq_base", 10000.0)
    kind = _field(reader, "llama.rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        factor = _field(reader, "llama.rope.scaling.factor", 1.0)
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    raise ValueError(
        f"model: expected rope scaling 'none' or 'linear' in a GGUF file, got {kind!r}"
    )


def iterate_weights(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face parameter name, fp32 tensor). A tensor that Llama does not know keeps its GGUF name."""
    reader = _open(path)
    num_layers = _required(reader, "llama.block_count")
    num_heads = _required(reader, "llama.attention.head_count")
    heads = {
        "q_proj": num_heads,
        "k_proj": _field(reader, "llama.attention.head_count_kv", num_heads),
    }
    names = _hugging_face_names(num_layers)
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            continue
        stem, _, kind = tensor.name.rpartition(".")
        stem = names.get(stem, stem)
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if (part := stem.rpartition(".")[2]) in heads:
            values = _unpermute(values, heads[part])
        if not values.flags.writeable:  # still the file
            values = values.copy()
        yield f"{stem}.{kind}", torch.from_numpy(values)


def _hugging_face_names(num_layers: int) -> dict[str, str]:
    """GGUF names to Hugging Face names, both without `.weight` and `.bias`."""
    to_gguf = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, num_layers)
    names = ["model.embed_tokens", "model.norm", "lm_head"]
    names += [
        f"model.layers.{layer}.{part}" for layer in range(num_layers) for part in _LAYER_PARTS
    ]
    return {str(to_gguf.get_name(name)): name for name in names}


def _unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
