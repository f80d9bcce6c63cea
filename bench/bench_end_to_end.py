"""pytest-benchmark over whole generations of a random model: SmolLM2-135M's shape on a CPU, Llama-3-8B's on a GPU.

`python bench/end_to_end.py` runs real weights beside transformers.
"""

from __future__ import annotations

import pytest
import torch

from octavo.bench.random_engine import LLAMA_3_8B, SMOLLM2_135M, RandomEngine

_TOKENS = 8


@pytest.fixture(scope="module")
def engine(device):
    """Verified: every token it chooses is the largest of transformers' logits over the same tensors."""
    shape, dtype = (LLAMA_3_8B, torch.bfloat16) if device == "cuda" else (SMOLLM2_135M, torch.float32)  # fmt: skip
    made = RandomEngine(shape, device, dtype, max_num_seqs=32, max_model_len=256)
    prompts = _prompts(3, shape.vocab_size)
    _, outputs = made.generate(prompts, _TOKENS)
    made.verify(prompts, outputs)
    return made


def _prompts(count: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return [
        torch.randint(3, vocab_size, (16 + 29 * i % 100,), generator=generator).tolist()
        for i in range(count)
    ]


@pytest.mark.parametrize("requests", [1, 8, 32])
def bench_generate(benchmark, engine, requests):
    prompts = _prompts(requests, engine.hf_config.vocab_size)
    benchmark.extra_info |= {"requests": requests, "tokens": requests * _TOKENS}
    benchmark.pedantic(engine.generate, (prompts, _TOKENS), rounds=3, warmup_rounds=1)
