"""Llama, and the models that are Llama but for a detail: Mistral (sliding window), Qwen2 (biases on q, k
and v, a window in some layers)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..runtime.kv_pool import KVPool
from ..runtime.launch_args import LaunchArgs
from .layers import MLP, Attention, Embedding, Linear, RMSNorm, RotaryEmbedding, layer_windows

_LAYER_TYPES = {"full_attention", "sliding_attention"}


class LlamaForCausalLM(nn.Module):
    """Built from a transformers configuration. Module names are those of the checkpoint, fused parts aside."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        _check(config)
        self.model = LlamaModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, args: LaunchArgs, kv: KVPool) -> Tensor:
        return self.model(args, kv)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)


class LlamaModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config)
        self.layers = nn.ModuleList(LlamaLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, args: LaunchArgs, kv: KVPool) -> Tensor:
        hidden, residual = self.embed_tokens(args.input_ids), None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, self.rotary, args, kv)
        return self.norm(hidden, residual)[0]


class LlamaLayer(nn.Module):
    """Pre-norm layer. `hidden` is what the layer before has yet to add to `residual`."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        bias = getattr(config, "mlp_bias", False)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, bias)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        rotary: RotaryEmbedding,
        args: LaunchArgs,
        kv: KVPool,
    ) -> tuple[Tensor, Tensor]:
        hidden, stream = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, rotary, args, kv)
        hidden, stream = self.post_attention_layernorm(hidden, stream)
        return self.mlp(hidden, args), stream


class LlamaAttention(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        heads, kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.sizes = (heads * self.head_dim, kv_heads * self.head_dim, kv_heads * self.head_dim)
        qkv_bias = config.model_type == "qwen2" or getattr(config, "attention_bias", False)
        parts: dict[str, int] = dict(zip(("q_proj", "k_proj", "v_proj"), self.sizes, strict=True))
        self.qkv_proj = Linear(config.hidden_size, parts, qkv_bias, takes_adapters=True)
        bias = getattr(config, "attention_bias", False)
        self.o_proj = Linear(self.sizes[0], config.hidden_size, bias, takes_adapters=True)
        window = layer_windows(config)[index]
        self.attention = Attention(heads, kv_heads, self.head_dim, index, window=window)

    def forward(
        self, hidden: Tensor, rotary: RotaryEmbedding, args: LaunchArgs, kv: KVPool
    ) -> Tensor:
        parts = self.qkv_proj(hidden, args).split(self.sizes, dim=-1)
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)) for part in parts
        )  # [T, heads, head_dim]
        return self.o_proj(self.attention(q, k, v, args, kv, rotary).flatten(-2), args)


def _check(config: Any) -> None:
    if config.hidden_act != "silu":
        raise ValueError(f"config.hidden_act: expected 'silu', got {config.hidden_act!r}")
    unknown = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if unknown:
        raise ValueError(
            f"config.layer_types: expected {' or '.join(sorted(_LAYER_TYPES))}, got {', '.join(sorted(unknown))}"
        )
