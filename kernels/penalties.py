"""Penalties on tokens that have come up before, on the logits in place.

    logit = logit / repetition if logit > 0 else logit * repetition        for tokens of the prompt or the output
    logit = logit - frequency * count - presence                            for tokens that the output has count > 0 times

Program (i, j) owns tile j of row i. A row whose penalties are all off costs three loads.

Bytes moved: num_penalised_rows * vocab * (5 + element_size), and 2 * element_size for each token that has come up
Reference:   `reference.apply_penalties`
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._sampling_checks import check_penalties


@triton.jit
def _apply_penalties_kernel(
    logits_ptr, prompt_mask_ptr, output_counts_ptr, repetition_ptr, frequency_ptr, presence_ptr,
    vocab, logits_stride_row, prompt_mask_stride_row, output_counts_stride_row, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (num_rows, cdiv(vocab, TILE))."""
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(repetition_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    presence = tl.load(presence_ptr + row)
    if (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0):
        return
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = ids < vocab
    counts = tl.load(output_counts_ptr + row * output_counts_stride_row + ids, mask=mask, other=0)
    in_prompt = tl.load(prompt_mask_ptr + row * prompt_mask_stride_row + ids, mask=mask, other=0)
    in_output = counts > 0
    seen = in_output | (in_prompt != 0)  # masked lanes are neither
    logits_ptr += row * logits_stride_row
    logits = tl.load(logits_ptr + ids, mask=seen, other=0.0).to(tl.float32)
    logits = tl.where(logits > 0, logits / repetition, logits * repetition)
    logits -= tl.where(in_output, frequency * counts.to(tl.float32) + presence, 0.0)
    tl.store(logits_ptr + ids, logits.to(logits_ptr.dtype.element_ty), mask=seen)


@dataclass(frozen=True)
class PenaltiesPlan:
    """Launch choices of the penalties."""

    tile: int  # tokens of one program, a power of two
    num_warps: int


def plan_apply_penalties(*, vocab: int) -> PenaltiesPlan:
    """Tiles of up to 4096 tokens: at eight warps each thread has four 16-byte loads of counts under way."""
    tile = min(4096, triton.next_power_of_2(vocab))
    return PenaltiesPlan(tile, num_warps=max(1, tile // 512))


def apply_penalties(
    logits: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    *,
    plan: PenaltiesPlan | None = None,
) -> None:
    """Penalise tokens of the prompt and the output of each row, in place.

    logits         [num_rows, vocab]        fp32 | fp16 | bf16, any row stride, last axis contiguous; fp32 inside
    prompt_mask    [num_rows, vocab] bool   tokens of the prompt, last axis contiguous
    output_counts  [num_rows, vocab] int32  how often the output has each token, last axis contiguous
    repetition     [num_rows] fp32          > 0; 1 is off
    frequency      [num_rows] fp32          0 is off
    presence       [num_rows] fp32          0 is off
    Raises ValueError naming the argument, what was expected and what came.
    """
    check_penalties(logits, prompt_mask, output_counts, repetition, frequency, presence)
    num_rows, vocab = logits.shape
    if logits.numel() == 0:
        return
    if plan is None:
        plan = plan_apply_penalties(vocab=vocab)
    _apply_penalties_kernel[(num_rows, triton.cdiv(vocab, plan.tile))](
        logits_ptr=logits,
        prompt_mask_ptr=prompt_mask,
        output_counts_ptr=output_counts,
        repetition_ptr=repetition,
        frequency_ptr=frequency,
        presence_ptr=presence,
        vocab=vocab,
        logits_stride_row=logits.stride(0),
        prompt_mask_stride_row=prompt_mask.stride(0),
        output_counts_stride_row=output_counts.stride(0),
        TILE=plan.tile,
        num_warps=plan.num_warps,
        enable_fp_fusion=True,
    )
