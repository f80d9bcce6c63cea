"""BART: an encoder that reads a whole input at once, and a decoder that attends to it from every layer.

In the step in which a request begins, the encoder runs over its input and every decoder layer writes what it makes of
the result to the request's cross blocks; from then on the encoder's output is needed no more.

    encoder_input_ids [E] -> encoder -> [E, hidden] -> each layer's encoder_attn: k, v -> cross blocks
    input_ids [T]         -> decoder: self_attn over the row's blocks, encoder_attn over its cross blocks -> [T, hidden]
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..runtime.kv_pool import KVPool, LayerKV, Layers
from ..runtime.launch_args import LaunchArgs
from .layers import Attention, CrossAttention, Embedding, EncoderAttention, Linear

_ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu}
_FIRST_POSITION = 2  # row of the table for position 0; the two before it belong to padding


class BartForConditionalGeneration(nn.Module):
    """Built from a transformers configuration. Module names are those of the checkpoint, fused parts aside."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        _check(config)
        self.config = config
        self.model = BartModel(config)
        self.lm_head = Linear(config.d_model, config.vocab_size)
        self.lm_head.weight = self.model.shared.weight
        self.final_logits_bias = nn.Parameter(torch.empty(1, config.vocab_size))

    def forward(self, args: LaunchArgs, kv: KVPool) -> Tensor:
        return self.model(args, kv)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden) + self.final_logits_bias

    def kv_layers(self, dtype: torch.dtype) -> Layers:
        heads = self.config.decoder_attention_heads
        return [LayerKV(heads, self.config.d_model // heads, dtype)] * self.config.decoder_layers


class BartModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.shared = Embedding(config.vocab_size, config.d_model)
        self.encoder = BartEncoder(config, self.shared)
        self.decoder = BartDecoder(config, self.shared)

    def forward(self, args: LaunchArgs, kv: KVPool) -> Tensor:
        encoded = None if args.encoder_input_ids is None else self.encoder(args)
        return self.decoder(encoded, args, kv)


class BartEmbedding(nn.Module):
    """Tokens and learned positions, normalised; base of the encoder and the decoder, whose names it takes."""

    def __init__(self, config: Any, shared: Embedding) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.d_model)
        self.embed_tokens.weight = shared.weight
        self.embed_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        rows = config.max_position_embeddings + _FIRST_POSITION
        self.embed_positions = Embedding(rows, config.d_model)
        self.layernorm_embedding = nn.LayerNorm(config.d_model)

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        tokens = self.embed_tokens(input_ids) * self.embed_scale
        return self.layernorm_embedding(tokens + self.embed_positions(positions + _FIRST_POSITION))


class BartEncoder(BartEmbedding):
    def __init__(self, config: Any, shared: Embedding) -> None:
        super().__init__(config, shared)
        self.layers = nn.ModuleList(BartEncoderLayer(config) for _ in range(config.encoder_layers))

    def forward(self, args: LaunchArgs) -> Tensor:
        """[E, hidden] of all encoder tokens of the step."""
        if args.encoder_input_ids is None or args.encoder_positions is None:
            raise ValueError("args: expected the tokens of at least one encoder, got none")
        hidden = self.embed(args.encoder_input_ids, args.encoder_positions)
        for layer in self.layers:
            hidden = layer(hidden, args)
        return hidden


class BartDecoder(BartEmbedding):
    def __init__(self, config: Any, shared: Embedding) -> None:
        super().__init__(config, shared)
        self.layers = nn.ModuleList(
            BartDecoderLayer(config, i) for i in range(config.decoder_layers)
        )

    def forward(self, encoded: Tensor | None, args: LaunchArgs, kv: KVPool) -> Tensor:
        hidden = self.embed(args.input_ids, args.positions)
        for layer in self.layers:
            hidden = layer(hidden, encoded, args, kv)
        return hidden


class BartEncoderLayer(nn.Module):
    """Post-norm layer: each part's result is added to its input and the sum normalised."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = BartEncoderAttention(config)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.fc1 = Linear(config.d_model, config.encoder_ffn_dim, bias=True)
        self.fc2 = Linear(config.encoder_ffn_dim, config.d_model, bias=True)
        self.final_layer_norm = nn.LayerNorm(config.d_model)
        self.activation = _ACTIVATIONS[config.activation_function]

    def forward(self, hidden: Tensor, args: LaunchArgs) -> Tensor:
        hidden = self.self_attn_layer_norm(hidden + self.self_attn(hidden, args))
        return self.final_layer_norm(hidden + self.fc2(self.activation(self.fc1(hidden))))


class BartDecoderLayer(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.self_attn = BartSelfAttention(config, index)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.encoder_attn = BartCrossAttention(config, index)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.fc1 = Linear(config.d_model, config.decoder_ffn_dim, bias=True)
        self.fc2 = Linear(config.decoder_ffn_dim, config.d_model, bias=True)
        self.final_layer_norm = nn.LayerNorm(config.d_model)
        self.activation = _ACTIVATIONS[config.activation_function]

    def forward(
        self, hidden: Tensor, encoded: Tensor | None, args: LaunchArgs, kv: KVPool
    ) -> Tensor:
        hidden = self.self_attn_layer_norm(hidden + self.self_attn(hidden, args, kv))
        attended = self.encoder_attn(hidden, encoded, args, kv)
        hidden = self.encoder_attn_layer_norm(hidden + attended)
        return self.final_layer_norm(hidden + self.fc2(self.activation(self.fc1(hidden))))


class BartEncoderAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        heads, size = config.encoder_attention_heads, config.d_model
        self.head_dim = size // heads
        self.qkv_proj = Linear(size, {"q_proj": size, "k_proj": size, "v_proj": size}, bias=True)
        self.out_proj = Linear(size, size, bias=True)
        self.attention = EncoderAttention(heads, heads, self.head_dim)

    def forward(self, hidden: Tensor, args: LaunchArgs) -> Tensor:
        q, k, v = _heads(self.qkv_proj(hidden), 3, self.head_dim)
        return self.out_proj(self.attention(q, k, v, args).flatten(-2))


class BartSelfAttention(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        heads, size = config.decoder_attention_heads, config.d_model
        self.head_dim = size // heads
        self.qkv_proj = Linear(size, {"q_proj": size, "k_proj": size, "v_proj": size}, bias=True)
        self.out_proj = Linear(size, size, bias=True)
        self.attention = Attention(heads, heads, self.head_dim, index)

    def forward(self, hidden: Tensor, args: LaunchArgs, kv: KVPool) -> Tensor:
        q, k, v = _heads(self.qkv_proj(hidden), 3, self.head_dim)
        return self.out_proj(self.attention(q, k, v, args, kv).flatten(-2))


class BartCrossAttention(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        heads, size = config.decoder_attention_heads, config.d_model
        self.head_dim = size // heads
        self.q_proj = Linear(size, size, bias=True)
        self.kv_proj = Linear(size, {"k_proj": size, "v_proj": size}, bias=True)
        self.out_proj = Linear(size, size, bias=True)
        self.attention = CrossAttention(heads, heads, self.head_dim, index)

    def forward(
        self, hidden: Tensor, encoded: Tensor | None, args: LaunchArgs, kv: KVPool
    ) -> Tensor:
        (q,) = _heads(self.q_proj(hidden), 1, self.head_dim)
        k = v = None
        if encoded is not None:
            k, v = _heads(self.kv_proj(encoded), 2, self.head_dim)
        return self.out_proj(self.attention(q, k, v, args, kv).flatten(-2))


def _heads(projected: Tensor, parts: int, head_dim: int) -> tuple[Tensor, ...]:
    """[T, parts * hidden] -> parts of [T, heads, head_dim], views."""
    return tuple(part.unflatten(-1, (-1, head_dim)) for part in projected.chunk(parts, dim=-1))


def _check(config: Any) -> None:
    if config.activation_function not in _ACTIVATIONS:
        raise ValueError(
            f"config.activation_function: expected {' or '.join(_ACTIVATIONS)}, got {config.activation_function!r}"
        )
    if not config.tie_word_embeddings:
        raise ValueError(
            "config.tie_word_embeddings: expected True, encoder, decoder and head share one table, got False"
        )
