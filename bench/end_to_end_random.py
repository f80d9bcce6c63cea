"""Whole generations of a random model of Llama-3-8B's shape: tokens per second at 1, 32 and 256 requests, with and without what hides
the host, and transformers over the same weights beside it."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import msgspec
import torch

from .machine import Machine, describe_machine
from .random_engine import LLAMA_3_8B, SMALL, RandomEngine

_MODES = {
    "plain": {},
    "async": {"async_scheduling": True},
    "graphs": {"decode_graphs": True},
    "async+graphs": {"async_scheduling": True, "decode_graphs": True},
}


class GenerationRow(msgspec.Struct, frozen=True):
    """Tokens per second count new tokens alone; the prompts are computed in the same time."""

    num_requests: int
    prompt_len: int
    output_len: int
    mode: str
    tokens_per_s: float
    behind: float | None = (
        None  # largest distance of a chosen token's logit from transformers' best, in deviations
    )


class GenerationResults(msgspec.Struct, frozen=True):
    machine: Machine
    model: str
    rows: list[GenerationRow]


def run(path: Path, device: str, dry_run: bool) -> None:
    """Each mode is verified on a few prompts before it is timed. Saves after every row."""
    shape, dtype = (SMALL, torch.float32) if dry_run else (LLAMA_3_8B, torch.bfloat16)
    counts, prompt_len, output_len = ((1, 4), 24, 8) if dry_run else ((1, 32, 256), 512, 128)
    rows: list[GenerationRow] = []
    model = reference = None
    for mode, options in _MODES.items():
        engine = RandomEngine(
            shape,
            device,
            dtype,
            max_num_seqs=max(counts),
            max_model_len=prompt_len + output_len,
            model=model,
            **options,
        )
        model, reference = engine.model, engine
        prompts = _prompts(max(counts), prompt_len, shape.vocab_size)
        _, outputs = engine.generate(prompts[:4], min(8, output_len))
        behind = engine.verify(prompts[:4], outputs)
        for count in counts:
            rounds = [engine.generate(prompts[:count], output_len)[0] for _ in range(2)]
            speed = count * output_len / statistics.median_low(rounds)
            rows.append(GenerationRow(count, prompt_len, output_len, mode, speed, behind))
            _save(path, device, str(shape), rows)
        del engine
    assert reference is not None
    for count in counts[:2]:
        speed = _transformers_speed(reference, _prompts(count, prompt_len, shape.vocab_size), output_len)  # fmt: skip
        rows.append(GenerationRow(count, prompt_len, output_len, "transformers, static batch", speed))  # fmt: skip
        _save(path, device, str(shape), rows)


def _prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, vocab_size, (count, length), generator=generator).tolist()


@torch.inference_mode()
def _transformers_speed(engine: RandomEngine, prompts: list[list[int]], tokens: int) -> float:
    reference = engine.reference()
    device = next(engine.model.parameters()).device
    ids = torch.tensor(prompts, device=device)
    options = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    reference.generate(ids, max_new_tokens=2, **options)
    started = time.perf_counter()
    out = reference.generate(ids, max_new_tokens=tokens, **options)
    out.cpu()
    assert out.shape[1] == ids.shape[1] + tokens
    return ids.shape[0] * tokens / (time.perf_counter() - started)


def _save(path: Path, device: str, model: str, rows: list[GenerationRow]) -> None:
    results = GenerationResults(describe_machine(device), model, rows)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
