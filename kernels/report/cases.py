"""The launches that are compiled, by name: `decode-d128-window` is `paged_decode` at shape d128 with the window on.

`CASES` is a product of tables, so a new variant of attention is one entry in `DECODES` or `PREFILLS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .layer_cases import LAYERS
from .shapes import BLOCK_SIZE, MAX_SEQ_LEN, SHAPES, Shape, bf16, kv_pool, token_scales

NUM_SMS = 132  # of the GPU that the decode plans are made for
WINDOW = 1024


@dataclass(frozen=True)
class Batch:
    """What one attention launch is given: `query_len` new tokens of each sequence, and `options(shape, num_tokens)`."""

    num_seqs: int
    query_len: int
    options: Callable[[Shape, int], dict[str, Any]]


def no_options(shape: Shape, num_tokens: int) -> dict[str, Any]:
    return {}


def window(shape: Shape, num_tokens: int) -> dict[str, Any]:
    return {"window": WINDOW}


def all_options(shape: Shape, num_tokens: int) -> dict[str, Any]:
    return {
        "attention_chunk": 2 * WINDOW,
        "window": WINDOW,
        "softcap": 30.0,
        "alibi_slopes": torch.empty(shape.num_q_heads),
        "sinks": torch.empty(shape.num_q_heads, dtype=torch.bfloat16),
        "lse": torch.empty(num_tokens, shape.num_q_heads),
    }


def not_causal(shape: Shape, num_tokens: int) -> dict[str, Any]:
    return {"causal": False}


def fp8(shape: Shape, num_tokens: int) -> dict[str, Any]:
    """e4m3 with a scale per head. Its bits where the target has no conversion: see `_operands`."""
    pool = kv_pool(shape).to(torch.float8_e4m3fn)
    scale = torch.empty(shape.num_kv_heads)
    return {"k_cache": pool[:, 1, 0], "v_cache": pool[:, 1, 1], "k_scale": scale, "v_scale": scale}


def int8(shape: Shape, num_tokens: int) -> dict[str, Any]:
    caches = {"k_cache": kv_pool(shape).to(torch.int8)[:, 1, 0]}
    return {**fp8(shape, num_tokens), **caches, "v_cache": caches["k_cache"]}


def with_token_scales(batch_options: Callable[[Shape, int], dict[str, Any]]):
    """These options with a scale for every token and head, in memory beside the blocks."""

    def options(shape: Shape, num_tokens: int) -> dict[str, Any]:
        k_scale, v_scale = token_scales(shape)
        return {**batch_options(shape, num_tokens), "k_scale": k_scale, "v_scale": v_scale}

    return options


def fp8_options(shape: Shape, num_tokens: int) -> dict[str, Any]:
    return {**fp8(shape, num_tokens), **all_options(shape, num_tokens)}


def int8_options(shape: Shape, num_tokens: int) -> dict[str, Any]:
    return {**int8(shape, num_tokens), **all_options(shape, num_tokens)}


def drafts(shape: Shape, num_tokens: int) -> dict[str, Any]:
    """Four new tokens of each sequence, under a tree mask."""
    num_seqs = num_tokens // 4
    return {
        "query_start_loc": torch.arange(0, num_tokens + 1, 4, dtype=torch.int32)[: num_seqs + 1],
        "max_query_len": 4,
        "tree_mask": torch.ones(num_tokens, 4, dtype=torch.bool),
    }


DECODES = {
    "split": Batch(1, 1, no_options),
    "whole": Batch(2048, 1, no_options),  # enough sequences that none is split
    "window": Batch(1, 1, window),
    "options": Batch(64, 1, all_options),
    "drafts": Batch(16, 4, drafts),
    "fp8": Batch(1, 1, fp8),
    "int8": Batch(1, 1, int8),
    "fp8-options": Batch(64, 1, fp8_options),
    "int8-options": Batch(64, 1, int8_options),
    "fp8-tokens": Batch(1, 1, with_token_scales(fp8)),
    "int8-tokens": Batch(1, 1, with_token_scales(int8)),
    "int8-tokens-options": Batch(64, 1, with_token_scales(int8_options)),
}
PREFILLS = {
    "plain": Batch(2, 32, no_options),
    "full": Batch(2, 32, not_causal),
    "window": Batch(2, 32, window),
    "options": Batch(2, 32, all_options),
    "fp8": Batch(2, 32, fp8),
    "int8": Batch(2, 32, int8),
    "fp8-options": Batch(2, 32, fp8_options),
    "int8-options": Batch(2, 32, int8_options),
    "fp8-tokens": Batch(2, 32, with_token_scales(fp8)),
    "int8-tokens": Batch(2, 32, with_token_scales(int8)),
    "int8-tokens-options": Batch(2, 32, with_token_scales(int8_options)),
}


def _operands(shape: Shape, batch: Batch, target: str) -> dict[str, Any]:
    num_tokens = batch.num_seqs * batch.query_len
    pool = kv_pool(shape)
    operands = {
        "q": bf16(num_tokens, shape.num_q_heads, shape.head_size),
        "k_cache": pool[:, 1, 0],
        "v_cache": pool[:, 1, 1],
        "seq_lens": torch.full((batch.num_seqs,), MAX_SEQ_LEN, dtype=torch.int32),
        "block_tables": torch.zeros(batch.num_seqs, MAX_SEQ_LEN // BLOCK_SIZE, dtype=torch.int32),
        "max_seq_len": MAX_SEQ_LEN,
        "scale": shape.head_size**-0.5,
        **batch.options(shape, num_tokens),
    }
    if target in ("sm_80", "gfx942"):  # as the wrappers do on a device: `_checks.converts_e4m3`
        for cache in ("k_cache", "v_cache"):
            if operands[cache].dtype == torch.float8_e4m3fn:
                operands[cache] = operands[cache].view(torch.uint8)
    return operands


def _decode(shape: Shape, batch: Batch, target: str) -> None:
    from ..paged_decode import paged_decode, plan_paged_decode

    operands = _operands(shape, batch, target)
    plan = plan_paged_decode(
        num_seqs=batch.num_seqs,
        num_kv_heads=shape.num_kv_heads,
        group=shape.group,
        head_size=shape.head_size,
        max_seq_len=MAX_SEQ_LEN,
        num_sms=NUM_SMS,
        num_queries=batch.query_len,
        quantised=operands["k_cache"].dtype != operands["q"].dtype,
    )
    paged_decode(**operands, plan=plan)


def _prefill(shape: Shape, batch: Batch, target: str) -> None:
    from ..paged_prefill import paged_prefill, plan_paged_prefill

    operands = _operands(shape, batch, target)
    plan = plan_paged_prefill(
        group=shape.group,
        head_size=shape.head_size,
        element_size=2,
        warpgroup_mma=target == "sm_90",
        quantised=operands["k_cache"].dtype != operands["q"].dtype,
        warp_size=64 if target == "gfx942" else 32,
    )
    starts = torch.arange(batch.num_seqs + 1, dtype=torch.int32) * batch.query_len
    paged_prefill(
        **operands,
        query_start_loc=starts,
        max_query_len=batch.query_len,
        plan=plan,
    )


# name -> what launches it, given the target
CASES: dict[str, Callable[[str], None]] = {
    **{
        f"decode-{name}-{variant}": lambda target, s=shape, b=batch: _decode(s, b, target)
        for variant, batch in DECODES.items()
        for name, shape in SHAPES.items()
    },
    **{
        f"prefill-{name}-{variant}": lambda target, s=shape, b=batch: _prefill(s, b, target)
        for variant, batch in PREFILLS.items()
        for name, shape in SHAPES.items()
    },
    **{
        f"{op}-{name}": lambda _, s=shape, launch=launch: launch(s)
        for op, launch in LAYERS.items()
        for name, shape in SHAPES.items()
    },
}
