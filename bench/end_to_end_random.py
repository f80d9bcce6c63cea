"""Whole generations of a random model of Llama-3-8B's shape: tokens per second at 1, 32 and 256 requests, with and without what hides
the host, and transformers over the same weights beside it."""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from typing import Any

import msgspec
import torch

from .generation_results import GenerationResults, GenerationRow
from .machine import describe_machine
from .random_engine import LLAMA_3_8B, SMALL, RandomEngine, random_llama
from .results import write_whole

_TRANSFORMERS = "transformers, static batch"
# in the order of what one wants to know first: a run may be stopped at its limit
_MODES: dict[str, dict[str, Any] | None] = {
    "async+graphs": {"async_scheduling": True, "decode_graphs": True},
    "plain": {},
    _TRANSFORMERS: None,
    "graphs": {"decode_graphs": True},
    "async": {"async_scheduling": True},
}
_LONG = 256  # requests that take seconds: one round of them is enough, of fewer the faster of two counts


def run(path: Path, device: str, dry_run: bool) -> None:
    """Each mode is verified on a few prompts before it is timed. Saves after every row. A mode that is wrong or fails has no
    rows, and the process ends with 1 when all have had their turn."""
    shape, dtype = (SMALL, torch.float32) if dry_run else (LLAMA_3_8B, torch.bfloat16)
    counts, prompt_len, output_len = ((1, 4), 24, 8) if dry_run else ((1, 32, _LONG), 512, 128)
    prompts = _prompts(max(counts), prompt_len, shape.vocab_size)
    rows: list[GenerationRow] = []

    def add(count: int, mode: str, seconds: list[float], behind: float | None = None) -> None:
        speed = count * output_len / min(seconds)
        rows.append(GenerationRow(count, prompt_len, output_len, mode, speed, behind))
        _save(path, device, str(shape), rows)

    def engine(**options: Any) -> RandomEngine:
        longest = prompt_len + output_len
        return RandomEngine(
            shape, device, dtype, max_num_seqs=max(counts), max_model_len=longest, model=model, **options
        )  # fmt: skip

    def measure(mode: str, options: dict[str, Any] | None) -> None:
        """Its engine, with a cache of tens of gigabytes, is gone before the next is made."""
        if options is None:
            reference = engine()
            for count in counts[:2]:
                add(count, mode, _transformers_seconds(reference, prompts[:count], output_len))
            return
        own = engine(**options)
        _, outputs = own.generate(prompts[:4], min(8, output_len))
        behind = own.verify(prompts[:4], outputs)
        for count in counts:
            rounds = range(_num_rounds(count))
            seconds = [own.generate(prompts[:count], output_len)[0] for _ in rounds]
            add(count, mode, seconds, behind)

    model = random_llama(shape, device, dtype, prompt_len + output_len)
    failed = False
    for mode, options in _MODES.items():
        try:
            measure(mode, options)
        except Exception:
            print(f"{mode}: {traceback.format_exc()}", flush=True)
            failed = True
    if failed:
        raise SystemExit(1)


def _num_rounds(num_requests: int) -> int:
    return 1 if num_requests >= _LONG else 2


def _prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, vocab_size, (count, length), generator=generator).tolist()


@torch.inference_mode()
def _transformers_seconds(
    engine: RandomEngine, prompts: list[list[int]], tokens: int
) -> list[float]:
    """Of each round."""
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
    for _ in range(_num_rounds(len(prompts))):
        started = time.perf_counter()
        out = reference.generate(ids, max_new_tokens=tokens, **options).cpu()
        rounds.append(time.perf_counter() - started)
        assert out.shape[1] == ids.shape[1] + tokens
    return rounds


def _save(path: Path, device: str, model: str, rows: list[GenerationRow]) -> None:
    results = GenerationResults(describe_machine(device), model, rows)
    write_whole(path, msgspec.json.format(msgspec.json.encode(results)))
