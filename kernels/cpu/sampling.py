"""What lies between logits and tokens."""

from __future__ import annotations

import numpy as np
import torch

from .._sampling_checks import check_filters, check_penalties, check_sample

Tensor = torch.Tensor

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_LANES = 1024  # tokens between two words of one counter, see `kernels.sampling`


def apply_penalties(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    check_penalties(logits, prompt_mask, output_counts, repetition, frequency, presence)
    rows = torch.nonzero((repetition != 1) | (frequency != 0) | (presence != 0))[:, 0]
    if len(rows) == 0:
        return
    counts = output_counts[rows]
    in_output = counts > 0
    x = logits[rows].float()
    factor = repetition[rows, None]
    penalised = torch.where(x > 0, x / factor, x * factor)
    x = torch.where(in_output | prompt_mask[rows], penalised, x)
    taken = frequency[rows, None] * counts + presence[rows, None]
    x -= torch.where(in_output, taken, 0.0)
    logits[rows] = x.to(logits.dtype)


def apply_top_k_top_p_min_p(
    logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, temperatures: Tensor | None
) -> None:
    check_filters(logits, top_k, top_p, min_p, temperatures)
    vocab = logits.shape[1]
    filtered = ((top_k > 0) & (top_k < vocab)) | (top_p < 1) | (min_p > 0)
    if temperatures is not None:
        filtered &= temperatures > 0
    filtered &= logits.amax(dim=-1).isfinite() if vocab else False
    rows = torch.nonzero(filtered)[:, 0]
    if len(rows) == 0:
        return
    ordered, token_ids = logits[rows].double().sort(dim=-1, descending=True, stable=True)
    ordered = ordered - ordered[:, :1]
    if temperatures is not None:
        ordered /= temperatures[rows, None].double().clamp_(max=1e30)  # -inf / inf is no number
    weights = ordered.exp()
    k = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)[rows, None]
    keep = torch.arange(vocab) < k
    weights.masked_fill_(~keep, 0.0)
    before = weights.cumsum(dim=-1) - weights
    target = top_p[rows, None].double() * weights.sum(dim=-1, keepdim=True)
    keep &= (before < target) | (top_p[rows, None] >= 1)
    keep[:, 0] = True
    keep &= weights >= min_p[rows, None]
    logits[rows] = logits[rows].masked_fill_(
        torch.zeros_like(keep).scatter_(1, token_ids, ~keep), float("-inf")
    )


def sample(logits: Tensor, temperatures: Tensor, seeds: Tensor, steps: Tensor) -> Tensor:
    check_sample(logits, temperatures, seeds, steps)
    if len(logits) == 0:
        return seeds.new_empty(0)
    peaks, token_ids = logits.float().max(dim=-1)
    is_finite = peaks.isfinite()  # `max` is NaN where any logit is
    for row in torch.nonzero(is_finite & (temperatures > 0))[:, 0].tolist():
        scaled = (logits[row].float() - peaks[row]) / temperatures[row].clamp(1e-30, 1e30)
        words = philox_words(int(seeds[row]), int(steps[row]), logits.shape[1])
        token_ids[row] = torch.argmax(scaled - _exponential(words).log_())
    return token_ids.masked_fill_(~is_finite, -1)


def _exponential(words: np.ndarray) -> Tensor:
    """As `kernels.sampling.exponential`."""
    v = torch.from_numpy(words.astype(np.float32)) * 2.0**-32 + 2.0**-33
    return -torch.log1p(-v.clamp_(max=1 - 2.0**-24))


def philox_words(seed: int, step: int, count: int) -> np.ndarray:
    """The random words, uint32, of token ids [0, count)."""
    num_groups, lanes = -(-count // (4 * _LANES)), min(count, _LANES)
    groups = np.arange(num_groups, dtype=np.uint64)[:, None] * np.uint64(_LANES)
    first = (groups + np.arange(lanes, dtype=np.uint64)).reshape(-1)
    zeros = np.zeros_like(first)
    halves = np.uint64(step & 0xFFFFFFFF), np.uint64((step >> 32) & 0xFFFFFFFF)
    counter = [first, zeros, zeros + halves[0], zeros + halves[1]]
    words = np.stack(_philox(counter, seed % 2**64)).reshape(4, num_groups, lanes)
    return words.swapaxes(0, 1).reshape(-1)[:count].astype(np.uint32)


def _philox(counter: list[np.ndarray], key: int) -> list[np.ndarray]:
    """Philox4x32-10 of the key's two halves; 32-bit words in uint64 arrays."""
    halves = [key & 0xFFFFFFFF, key >> 32]
    a, b, c, d = counter
    for _ in range(10):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b = (second >> np.uint64(32)) ^ b ^ np.uint64(halves[0]), second & _LOW
        c, d = (first >> np.uint64(32)) ^ d ^ np.uint64(halves[1]), first & _LOW
        halves = [(half + step) % 2**32 for half, step in zip(halves, _KEY_STEPS, strict=True)]
    return [a, b, c, d]
