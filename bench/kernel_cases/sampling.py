"""From logits to tokens: one row for each sequence of the batch, over Llama-3's vocabulary."""

from __future__ import annotations

import torch

from ... import kernels
from ..attention_problem import AttentionShape, WrongResult
from ..batch_specs import BatchSpec
from ..timing import TimedCall
from .case import KernelCase, relative_error

Tensor = torch.Tensor
VOCAB_SIZE = 128_256
_HISTORY = 256  # tokens of the prompt, and of the output
_SPREAD = 6.0  # of the logits: 0.9 of the probability then lies on some tens of tokens, as in language models


def _logits(rows: int, device: torch.device) -> Tensor:
    return _SPREAD * torch.randn(rows, VOCAB_SIZE, device=device)


def _column(rows: int, value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((rows,), value, dtype=dtype, device=device)


def _label() -> str:
    return f"vocabulary {VOCAB_SIZE} float32"


def apply_penalties(batch: BatchSpec, shape: AttentionShape, device: torch.device) -> KernelCase:
    rows = batch.num_seqs
    fresh = _logits(rows, device)
    logits = fresh.clone()
    prompt = torch.zeros(rows, VOCAB_SIZE, dtype=torch.bool, device=device)
    counts = torch.zeros(rows, VOCAB_SIZE, dtype=torch.int32, device=device)
    seen = torch.randint(0, VOCAB_SIZE, (2, rows, _HISTORY), device=device)
    prompt.scatter_(1, seen[0], True)
    counts.scatter_add_(1, seen[1], torch.ones_like(seen[1], dtype=torch.int32))
    repetition, frequency, presence = 1.2, 0.3, 0.2
    columns = [_column(rows, value, torch.float32, device) for value in (repetition, frequency, presence)]  # fmt: skip

    def octavo() -> Tensor:
        kernels.apply_penalties(logits, prompt, counts, *columns)
        return logits

    def plain(x: Tensor = logits) -> Tensor:
        repeated = torch.where(x > 0, x / repetition, x * repetition)
        x = torch.where(prompt | (counts > 0), repeated, x)
        return x - frequency * counts - presence * (counts > 0)

    exact = plain(fresh.double())
    return KernelCase(
        "apply_penalties",
        f"{rows} rows",
        _label(),
        {
            "octavo": TimedCall(octavo, lambda: logits.copy_(fresh)),
            "torch": TimedCall(plain, lambda: logits.copy_(fresh)),
        },
        lambda got: relative_error([got], [exact]),
        2 * logits.nbytes + prompt.nbytes + counts.nbytes,
        5 * logits.numel(),
    )


def apply_top_k_top_p_min_p(
    batch: BatchSpec, shape: AttentionShape, device: torch.device
) -> KernelCase:
    """top-k 50 of every other row, top-p 0.9 of all; torch: one sort."""
    rows = batch.num_seqs
    fresh = _logits(rows, device)
    logits = fresh.clone()
    top_k = _column(rows, -1, torch.int32, device)
    top_k[::2] = 50
    top_p = _column(rows, 0.9, torch.float32, device)
    min_p = _column(rows, 0.0, torch.float32, device)

    def octavo() -> Tensor:
        kernels.apply_top_k_top_p_min_p(logits, top_k, top_p, min_p)
        return logits

    def by_sort(x: Tensor) -> Tensor:
        values, order = x.sort(dim=-1, descending=True, stable=True)
        place = torch.arange(VOCAB_SIZE, device=device)
        kept = torch.where(top_k > 0, top_k, VOCAB_SIZE)[:, None]
        values = values.masked_fill(place >= kept, -torch.inf)
        weights = values.softmax(-1)
        values = values.masked_fill(weights.cumsum(-1) - weights >= 0.9, -torch.inf)
        return torch.empty_like(x).scatter_(1, order, values)

    exact = by_sort(fresh.double())

    def check(got: Tensor) -> float:
        """The same tokens are left, but for one at the edge of the nucleus, where sums of float32 may decide otherwise."""
        differing = (got.isinf() != exact.isinf()).sum(-1)
        if int(differing.max()) > 1:
            raise WrongResult(f"expected the tokens of a sort, got {int(differing.max())} others")
        both = ~got.isinf() & ~exact.isinf()
        if not torch.equal(got[both], fresh[both]):
            raise WrongResult("expected logits that are left to stay as they are")
        return 0.0

    return KernelCase(
        "apply_top_k_top_p_min_p",
        f"{rows} rows",
        _label(),
        {
            "octavo": TimedCall(octavo, lambda: logits.copy_(fresh)),
            "torch": TimedCall(lambda: by_sort(logits), lambda: logits.copy_(fresh)),
        },
        check,
        2 * logits.nbytes,
        3 * logits.numel(),
    )


def sample(batch: BatchSpec, shape: AttentionShape, device: torch.device) -> KernelCase:
    """Draws at temperature 0.8; torch: softmax and multinomial. A draw is checked to be a likely one, not for its value."""
    rows = batch.num_seqs
    logits = _logits(rows, device)
    temperatures = _column(rows, 0.8, torch.float32, device)
    seeds = torch.arange(rows, device=device)
    steps = torch.full((rows,), 7, device=device)
    scaled = logits.double() / 0.8
    # the chance that some row draws a token so unlikely is below 1e-9
    floor = scaled.logsumexp(-1) + torch.log(torch.tensor(1e-9 / (VOCAB_SIZE * rows)))

    def check(got: Tensor) -> float:
        if got.dtype != torch.int64 or got.shape != (rows,) or not int(got.min()) >= 0:
            raise WrongResult(f"expected {rows} token ids, got {got}")
        if not bool((scaled.gather(1, got[:, None])[:, 0] > floor).all()):
            raise WrongResult("a token was drawn that is next to impossible")
        return 0.0

    return KernelCase(
        "sample",
        f"{rows} rows",
        _label(),
        {
            "octavo": TimedCall(lambda: kernels.sample(logits, temperatures, seeds, steps)),
            "torch": TimedCall(lambda: torch.multinomial((logits / 0.8).softmax(-1), 1).squeeze(1)),
        },
        check,
        logits.nbytes,
        4 * logits.numel(),
    )
