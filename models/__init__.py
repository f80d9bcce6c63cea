"""For model authors: layers that know paged KV, model definitions, weights, and `LLM`.

A model is an `nn.Module` built as `Model(config)`, called as `model(args, kv) -> hidden [T, hidden]`, with
`compute_logits(hidden [R, hidden]) -> [R, vocab]`. `llama.py` is the example to start from.
"""

from .layers import MLP, Attention, Embedding, Linear, RMSNorm, RotaryEmbedding
from .llama import LlamaForCausalLM
from .loader import ARCHITECTURES, load_model
from .tokenizer import Tokenizer, load_tokenizer
from .weights import ModelSource, resolve_model

__all__ = [
    "ARCHITECTURES",
    "MLP",
    "Attention",
    "Embedding",
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
