"""Whole generations of a random model of Llama-3-8B's shape: tokens per second at 1, 32 and 256 requests, with and without what hides
the host, and transformers over the same weights beside it."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import torch

from .generation_results import GenerationResults, GenerationRow
from .machine import describe_machine
from .random_engine import LLAMA_3_8B, SMALL, RandomEngine
from .results import write_whole

_MODES = {
    "plain": {},
    "async": {"async_scheduling": True},
    "graphs": {"decode_graphs": True},
    "async+graphs": {"async_scheduling": True, "decode_graphs": True},
}
_ROUNDS = 2  # of which the faster counts: for transformers, too


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
            rounds = [engine.generate(prompts[:count], output_len)[0] for _ in range(_ROUNDS)]
            speed = count * output_len / min(rounds)
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
    rounds = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        out = reference.generate(ids, max_new_tokens=tokens, **options).cpu()
        rounds.append(time.perf_counter() - started)
        assert out.shape[1] == ids.shape[1] + tokens
    return ids.shape[0] * tokens / min(rounds)


def _save(path: Path, device: str, model: str, rows: list[GenerationRow]) -> None:
    results = GenerationResults(describe_machine(device), model, rows)
    write_whole(path, msgspec.json.format(msgspec.json.encode(results)))
