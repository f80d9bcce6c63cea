"""For model authors: layers that know paged KV, model definitions, weights, and `LLM`.

A model is an `nn.Module` built as `Model(config)`, called as `model(args, kv) -> hidden [T, hidden]`, with
`compute_logits(hidden [R, hidden]) -> [R, vocab]`. `llama.py` is the example to start from, `bart.py` the one with an
encoder. A model whose layers are not all alike says what each keeps: `kv_layers(dtype) -> [LayerKV, ...]`.
"""

from .bart import BartForConditionalGeneration
from .layers import (
    MLP,
    Attention,
    CrossAttention,
    Embedding,
    EncoderAttention,
    Linear,
    RMSNorm,
    RotaryEmbedding,
)
from .llama import LlamaForCausalLM
from .loader import ARCHITECTURES, load_model
from .tokenizer import Tokenizer, load_tokenizer
from .weights import ModelSource, resolve_model

__all__ = [
    "ARCHITECTURES",
    "MLP",
    "Attention",
    "BartForConditionalGeneration",
    "CrossAttention",
    "Embedding",
    "EncoderAttention",
    "Linear",
    "LlamaForCausalLM",
    "ModelSource",
    "RMSNorm",
    "RotaryEmbedding",
    "Tokenizer",
    "load_model",
    "load_tokenizer",
    "resolve_model",
]
