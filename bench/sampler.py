"""Time and memory of choosing tokens, beside transformers' processors and warpers and a plain sort-based sampler.

    python bench/sampler.py [--rows 256] [--vocab 49152 151936] [--history 1024] [--repeats 5]

Logits are normal with standard deviation 6, where 0.9 of the probability lies on some tens of tokens, as it does in language
models, and with 3, where it lies on thousands. All three start from the same logits and take turns; the fastest of the
repeats counts. Before anything is timed the results are compared: greedy tokens are equal, every drawn token is one that
transformers leaves, penalised logits are equal. Memory is the rise of the resident peak during one call, logits not counted.

    greedy      the most likely tokens. Octavo also gives their log probabilities, here and below
    top-p       temperature 0.8, top_p 0.9
    penalties   repetition, frequency and presence over a history of so many tokens, half prompt, half output; then greedy.
                transformers has repetition alone
    logprobs    greedy, and the 5 most likely tokens with ranks; the others: log_softmax and topk

Then what a step with penalties costs after histories of 128 to 8192 tokens whose frequencies are those of words in a text
(the i-th most frequent comes up 1/i times as often as the first).
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from octavo.runtime.logits_processing import LogitsProcessing
from octavo.runtime.params import SamplingParams
from octavo.runtime.sampler import sample_on_device
from octavo.runtime.sampling_rows import SamplingRows
from octavo.runtime.token_counts import RowExtras

KINDS = {
    "greedy": SamplingParams(temperature=0),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9, seed=1),
    "penalties": SamplingParams(
        temperature=0, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2
    ),
    "logprobs": SamplingParams(temperature=0, logprobs=5),
}
Case = tuple[str, torch.Tensor, torch.Tensor]  # kind, logits, tokens before


class Octavo:
    """Rows that decode: each call is one step, and appends a token to each row's buffer."""

    def __init__(self, kind: str, tokens: torch.Tensor) -> None:
        self.params = KINDS[kind]
        rows, self.length = tokens.shape
        self.half = self.length // 2
        self.buffers = [np.zeros(self.length + 4096, np.int32) for _ in range(rows)]
        for buffer, row in zip(self.buffers, tokens.numpy(), strict=True):
            buffer[: self.length] = row
        self.processing = LogitsProcessing()
        draws = list(zip(*(self.params.draw(0) for _ in range(rows)), strict=True))
        dtypes = (np.float64, np.int64, np.float64, np.float64, np.uint64)
        self.columns = [np.array(c, d) for c, d in zip(draws, dtypes, strict=True)]
        self.columns[4] += np.arange(rows, dtype=np.uint64)

    def rows(self) -> SamplingRows:
        number = len(self.buffers)
        extras: list[RowExtras] = []
        if not self.params.is_plain:
            for row, buffer in enumerate(self.buffers):
                prompt, output = buffer[: self.half], buffer[self.half : self.length]
                extras.append(RowExtras(row, self.params, row, prompt, output))
        step = np.full(number, self.length - self.half, np.uint64)
        ones = np.ones(number, np.int64)
        return SamplingRows(*self.columns, step, ones, tuple(extras))

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        samples = sample_on_device(logits, self.rows(), self.processing)
        token_ids = samples.fetch().token_ids
        return torch.from_numpy(token_ids)

    def advance(self, token_ids: torch.Tensor) -> None:
        for buffer, token in zip(self.buffers, token_ids.tolist(), strict=True):
            buffer[self.length] = token
        self.length += 1


def transformers_sampler(kind: str, tokens: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    # its annotations want a LongTensor, which no tensor is to a type checker
    processors: Any = LogitsProcessorList()
    if kind == "penalties":
        processors.append(RepetitionPenaltyLogitsProcessor(1.2))
    if kind == "top-p":
        processors += [TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.9)]

    def run(logits: torch.Tensor) -> torch.Tensor:
        scores = processors(tokens, logits)
        if kind == "top-p":
            return torch.multinomial(scores.softmax(-1), 1)[:, 0]
        if kind == "logprobs":
            scores.log_softmax(-1).topk(5)
        return scores.argmax(-1)

    return run


def sort_sampler(kind: str, tokens: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """As one would write it down: dense counts, one sort, a cumulative sum."""
    vocab_of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    half = tokens.shape[1] // 2

    def counts(vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
        if vocab not in vocab_of:
            output = torch.zeros(len(tokens), vocab)
            output.scatter_add_(1, tokens[:, half:], torch.ones(tokens[:, half:].shape))
            prompt = torch.zeros(len(tokens), vocab, dtype=torch.bool)
            vocab_of[vocab] = prompt.scatter_(1, tokens[:, :half], True), output
        return vocab_of[vocab]

    def run(logits: torch.Tensor) -> torch.Tensor:
        if kind == "penalties":
            prompt, output = counts(logits.shape[1])
            seen = prompt | (output > 0)
            penalised = torch.where(logits > 0, logits / 1.2, logits * 1.2)
            logits = torch.where(seen, penalised, logits)
            logits = logits - (0.3 * output + 0.2 * (output > 0))
        if kind == "top-p":
            ordered, ids = (logits / 0.8).sort(dim=-1, descending=True)
            probs = ordered.softmax(-1)
            probs[probs.cumsum(-1) - probs >= 0.9] = 0
            return ids.gather(1, torch.multinomial(probs, 1))[:, 0]
        if kind == "logprobs":
            logits.log_softmax(-1).topk(5)
        return logits.argmax(-1)

    return run


def verify(case: Case) -> None:
    kind, logits, tokens = case
    got = Octavo(kind, tokens)(logits)
    if kind == "top-p":
        warpers: Any = LogitsProcessorList([TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.9)])
        scores = warpers(tokens, logits)
        assert scores.gather(1, got[:, None]).isfinite().all()
    elif kind == "penalties":
        assert torch.equal(got, sort_sampler(kind, tokens)(logits))
        penalty: Any = RepetitionPenaltyLogitsProcessor(1.2)
        penalised, expected = logits.clone(), penalty(tokens, logits)
        params = SamplingParams(repetition_penalty=1.2)
        octavo = Octavo(kind, tokens)
        rows = [extras._replace(params=params) for extras in octavo.rows().extras]
        octavo.processing.apply(penalised, rows)
        torch.testing.assert_close(penalised, expected)
    else:
        assert torch.equal(got, logits.argmax(-1))


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) * 1024


def peak_rise(run: Callable[[], object]) -> float:
    """MiB by which the resident memory rose at most; nan where the system does not tell."""
    try:
        ctypes.CDLL(None).malloc_trim(
            0
        )  # what an earlier call left to the process would hide what this one takes
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = _status("VmRSS")
        run()
        return (_status("VmHWM") - before) / 2**20
    except (OSError, AttributeError):
        return float("nan")


def measure(case: Case, repeats: int) -> list[tuple[float, float]]:
    """(milliseconds, MiB) of Octavo, transformers, and the plain one."""
    kind, logits, tokens = case
    runs = [make(kind, tokens) for make in (Octavo, transformers_sampler, sort_sampler)]
    memory = [peak_rise(lambda run=run: run(logits)) for run in runs]
    best = [float("inf")] * len(runs)
    for _ in range(repeats):
        for place, run in enumerate(runs):
            started = perf_counter()
            run(logits)
            best[place] = min(best[place], perf_counter() - started)
    return [(1e3 * seconds, rise) for seconds, rise in zip(best, memory, strict=True)]


def flatness(rows: int, vocab: int, repeats: int) -> list[tuple[int, float, float, float]]:
    """(history, distinct tokens of a row, milliseconds of a step with penalties and of one without), a token more in each."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 6
    found = []
    for history in (128, 1024, 8192):
        chances = 1 / torch.arange(1, vocab + 1, dtype=torch.float64)
        seeded = torch.Generator().manual_seed(1)
        tokens = torch.multinomial(chances, rows * history, True, generator=seeded)
        tokens = torch.randperm(vocab, generator=seeded)[tokens].view(rows, history)
        octavo, greedy = Octavo("penalties", tokens), Octavo("greedy", tokens)
        best = [float("inf")] * 2
        octavo.advance(octavo(logits))
        for _ in range(repeats):
            for place, run in enumerate((octavo, greedy)):
                started = perf_counter()
                token_ids = run(logits)
                best[place] = min(best[place], perf_counter() - started)
                run.advance(token_ids)
        distinct = sum(len(row.unique()) for row in tokens) / rows
        found.append((history, distinct, 1e3 * best[0], 1e3 * best[1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Samplers side by side.")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--history", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    asked = parser.parse_args()
    table = Table(box=SIMPLE_HEAD)
    for name in (
        "vocabulary",
        "deviation",
        "what",
        "octavo",
        "transformers",
        "sort",
        "memory, MiB",
    ):
        table.add_column(name, justify="right")
    generator = torch.Generator().manual_seed(0)
    for vocab in asked.vocab:
        for deviation in (6, 3):
            logits = torch.randn(asked.rows, vocab, generator=generator) * deviation
            tokens = torch.randint(vocab, (asked.rows, asked.history), generator=generator)
            for kind in asked.kinds if deviation == 6 else ["top-p"]:
                case = kind, logits, tokens
                verify(case)
                found = measure(case, asked.repeats)
                table.add_row(
                    f"{vocab}",
                    f"{deviation}",
                    kind,
                    *(f"{time:.0f} ms" for time, _ in found),
                    " / ".join(f"{memory:.0f}" for _, memory in found),
                )
    console = Console(width=120)
    console.print(table)
    for history, distinct, time, plain in flatness(asked.rows, asked.vocab[0], asked.repeats):
        console.print(
            f"history {history:5}, {distinct:5.0f} of them distinct: {time:6.1f} ms, without penalties {plain:6.1f} ms"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        main()
