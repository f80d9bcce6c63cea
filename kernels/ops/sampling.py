"""What lies between logits and tokens: penalties, filters and the draw, each a function of its row alone."""

from __future__ import annotations

import torch

from ._registry import no_result, register, triton_op

Tensor = torch.Tensor

_apply_penalties = register(
    "apply_penalties",
    "(Tensor(a!) logits, Tensor prompt_mask, Tensor output_counts, Tensor repetition,"
    " Tensor frequency, Tensor presence) -> ()",
    triton_op(".penalties", "apply_penalties"),
    no_result,
)


def apply_penalties(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Penalise tokens that have come up before, in place.

    logits         [num_rows, vocab]        fp32 | fp16 | bf16; any row stride, last axis contiguous
    prompt_mask    [num_rows, vocab] bool   tokens of the prompt
    output_counts  [num_rows, vocab] int32  how often the output has each token
    repetition     [num_rows] fp32          > 0; of the prompt and the output: positive logits are divided by it, others
                                            multiplied; 1 is off
    frequency      [num_rows] fp32          taken off once for each time in the output; 0 is off
    presence       [num_rows] fp32          taken off once for tokens of the output; 0 is off
    """
    _apply_penalties(logits, prompt_mask, output_counts, repetition, frequency, presence)


_apply_top_k_top_p_min_p = register(
    "apply_top_k_top_p_min_p",
    "(Tensor(a!) logits, Tensor top_k, Tensor top_p, Tensor min_p, Tensor? temperatures) -> ()",
    triton_op(".top_k_top_p", "apply_top_k_top_p_min_p"),
    no_result,
)


def apply_top_k_top_p_min_p(
    logits: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    temperatures: Tensor | None = None,
) -> None:
    """Set what a row's filters do not allow to -inf, in place. First top-k, then top-p of what is left, then min-p.

    logits        [num_rows, vocab]   fp32 | fp16 | bf16; any row stride, last axis contiguous
    top_k         [num_rows] int32    keep k tokens, of equal logits those of lowest id; <= 0 or >= vocab: off
    top_p         [num_rows] fp32     keep each token before which less than p of the probability lies; >= 1: off
    min_p         [num_rows] fp32     keep tokens at least min_p times as likely as the most likely one; <= 0: off
    temperatures  [num_rows] fp32     that the row is to be drawn at, for top-p and min-p; a row of temperature 0 is left
                  alone. None: 1, for logits already divided by it
    A row that has a NaN, or whose largest logit is infinite, is left alone.
    """
    _apply_top_k_top_p_min_p(logits, top_k, top_p, min_p, temperatures)


_sample = register(
    "sample",
    "(Tensor logits, Tensor temperatures, Tensor seeds, Tensor steps) -> Tensor",
    triton_op(".sampling", "sample"),
    lambda logits, temperatures, seeds, steps: seeds.new_empty(logits.shape[0]),
)


def sample(logits: Tensor, temperatures: Tensor, seeds: Tensor, steps: Tensor) -> Tensor:
    """Draw one token id per row, int64 [num_rows], with probability softmax(logits / temperature).

    logits        [num_rows, vocab]   fp32 | fp16 | bf16; any row stride, last axis contiguous; -inf is never drawn
    temperatures  [num_rows] fp32     0: the largest logit, of equal ones the lowest id
    seeds, steps  [num_rows] int64    a draw depends on these, the temperature and the row's logits, and on nothing else
    A row with a NaN, an infinite logit, or nothing but -inf gets -1. All devices draw from the same random words; a
    draw may differ between them only where two scores are equal to within rounding.
    """
    return _sample(logits, temperatures, seeds, steps)
