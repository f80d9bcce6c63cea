"""The launches that are compiled, by name: `decode-d128-window` is `paged_decode` at shape d128 with the window on.

`CASES` is a product of tables, so a new variant of attention is one entry in `DECODES` or `PREFILLS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

NUM_SMS = 132  # of the GPU that the decode plans are made for
BLOCK_SIZE = 16
MAX_SEQ_LEN = 4096
WINDOW = 1024


@dataclass(frozen=True)
class Shape:
    """Heads of one model."""

    num_q_heads: int
    num_kv_heads: int
    head_size: int

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def hidden(self) -> int:
        return self.num_q_heads * self.head_size


SHAPES = {
    "d64": Shape(9, 3, 64),  # SmolLM2-135M
    "d128": Shape(32, 8, 128),  # Llama-3-8B
    "d256": Shape(16, 8, 256),  # Gemma-2-9B
}


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
    pool = _pool(shape).to(torch.float8_e4m3fn)
    scale = torch.empty(shape.num_kv_heads)
    return {"k_cache": pool[:, 1, 0], "v_cache": pool[:, 1, 1], "k_scale": scale, "v_scale": scale}


def int8(shape: Shape, num_tokens: int) -> dict[str, Any]:
    caches = {"k_cache": _pool(shape).to(torch.int8)[:, 1, 0]}
    return {**fp8(shape, num_tokens), **caches, "v_cache": caches["k_cache"]}


def with_token_scales(batch_options: Callable[[Shape, int], dict[str, Any]]):
    """These options with a scale for every token and head, in memory beside the blocks."""

    def options(shape: Shape, num_tokens: int) -> dict[str, Any]:
        k_scale, v_scale = _token_scales(shape)
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
    pool = _pool(shape)
    operands = {
        "q": _bf16(num_tokens, shape.num_q_heads, shape.head_size),
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


def _rms_norm(shape: Shape) -> None:
    from ..norm import fused_add_rms_norm, rms_norm

    x, weight = _bf16(32, shape.hidden), _bf16(shape.hidden)
    rms_norm(x, weight, 1e-5)
    for unit_offset in (False, True):
        fused_add_rms_norm(x, x.clone(), weight, 1e-5, unit_offset)


def _silu_and_mul(shape: Shape) -> None:
    from ..activation import silu_and_mul

    silu_and_mul(_bf16(32, 6 * shape.hidden))


def _rotary_embedding(shape: Shape) -> None:
    from ..rotary import rotary_embedding

    q, k, _ = _new_qkv(shape)
    for is_neox in (True, False):
        rotary_embedding(torch.arange(32), q, k, torch.empty(4096, shape.head_size), is_neox)


def _reshape_and_cache(shape: Shape) -> None:
    from ..cache_write import reshape_and_cache

    (_, k, v), pool, scale = _new_qkv(shape), _pool(shape), torch.empty(shape.num_kv_heads)
    reshape_and_cache(k, v, pool[:, 1, 0], pool[:, 1, 1], torch.arange(32))
    for dtype in (torch.uint8, torch.int8):  # e4m3 by its bits compiles for every target
        caches = pool.to(dtype)[:, 1, 0], pool.to(dtype)[:, 1, 1]
        reshape_and_cache(k, v, *caches, torch.arange(32), scale, scale)
    reshape_and_cache(k, v, *caches, torch.arange(32), *_token_scales(shape))


def _merge_attention_states(shape: Shape) -> None:
    from ..merge_states import merge_attention_states

    out, lse = _bf16(32, shape.num_q_heads, shape.head_size), torch.empty(32, shape.num_q_heads)
    merge_attention_states(out, lse, out.clone(), lse.clone())


def _gelu_and_mul(shape: Shape) -> None:
    from ..activation import gelu_and_mul

    for approximate in ("none", "tanh"):
        gelu_and_mul(_bf16(32, 6 * shape.hidden), approximate)


def _rope_and_cache(shape: Shape) -> None:
    from ..rotary_cache_write import rope_and_cache

    (q, k, v), pool, positions = _new_qkv(shape), _pool(shape), torch.arange(32)
    for rotary_size, is_neox in ((shape.head_size, True), (shape.head_size // 2, False)):
        cos_sin = torch.empty(4096, rotary_size)
        rope_and_cache(
            positions, q, k, v, cos_sin, pool[:, 1, 0], pool[:, 1, 1], positions, is_neox
        )
    caches = pool.char()[:, 1, 0], pool.char()[:, 1, 1]
    cos_sin = torch.empty(4096, shape.head_size)
    rope_and_cache(positions, q, k, v, cos_sin, *caches, positions, True, *_token_scales(shape))


def _lora(shape: Shape) -> None:
    from ..lora import lora_expand, lora_shrink

    num_adapters, max_rank, width = 8, 64, 3 * shape.hidden
    for num_tokens in (32, 2048):
        x, out = _bf16(num_tokens, width), _bf16(num_tokens, width)
        ranks, order = (torch.zeros(n, dtype=torch.int32) for n in (num_adapters, num_tokens))
        starts = torch.zeros(num_adapters + 1, dtype=torch.int32)
        y = lora_shrink(x, _bf16(num_adapters, max_rank, width), ranks, order, starts, 1.0)
        lora_expand(y, _bf16(num_adapters, width, max_rank), ranks, order, starts, out)


def _sampling(shape: Shape) -> None:
    from ..penalties import apply_penalties
    from ..sampling import sample
    from ..top_k_top_p import apply_top_k_top_p_min_p

    num_rows, vocab = 64, 128256
    column, seeds = torch.empty(num_rows), torch.arange(num_rows)
    counts = torch.empty(num_rows, vocab, dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.empty(num_rows, vocab, dtype=dtype)
        apply_penalties(logits, counts > 0, counts, column, column, column)
        for temperatures in (column, None):
            apply_top_k_top_p_min_p(logits, seeds.int(), column, column, temperatures)
        sample(logits, column, seeds, seeds)


def _copy_blocks(shape: Shape) -> None:
    from ..block_copy import copy_blocks

    copy_blocks(_pool(shape), torch.tensor([[0, 4], [1, 5]]))


def _swap_blocks(shape: Shape) -> None:
    from ..block_swap import SwapPlan, swap_blocks

    pairs = torch.tensor([[0, 4], [1, 5]])
    swap_blocks(_pool(shape), _pool(shape), pairs, plan=SwapPlan(by_kernel=True))


def _cascade_attention(shape: Shape) -> None:
    from ..cascade import cascade_attention

    pool, q = _pool(shape), _bf16(64, shape.num_q_heads, shape.head_size)
    cascade_attention(
        q,
        pool[:, 1, 0],
        pool[:, 1, 1],
        prefix_block_ids=torch.zeros(32, dtype=torch.int32),
        query_start_loc=torch.arange(65, dtype=torch.int32),
        seq_lens=torch.full((64,), MAX_SEQ_LEN, dtype=torch.int32),
        block_tables=torch.zeros(64, MAX_SEQ_LEN // BLOCK_SIZE, dtype=torch.int32),
        max_query_len=1,
        max_seq_len=MAX_SEQ_LEN,
        num_decodes=64,
        max_decode_query_len=1,
        scale=shape.head_size**-0.5,
        out=torch.empty_like(q),
    )


# Kernels that do not load and store 16 bytes a lane, and why; all others with no tiles of KV do.
NARROW = {
    "_lora_shrink_kernel": "stores end at the adapter's rank, which the device alone knows",
    "_lora_expand_kernel": "loads end at the adapter's rank, which the device alone knows",
    "_apply_penalties_kernel": "touches the tokens that have occurred",
    "_apply_top_k_top_p_min_p_kernel": "stores to the tokens that it drops",
    "_sample_kernel": "stores one token id a row",
    "_query_positions_kernel": "stores one number a token",
    "_merge_splits_kernel": "stores one row of one head",
}

LAYERS = {
    "cascade_attention": _cascade_attention,
    "rms_norm": _rms_norm,
    "silu_and_mul": _silu_and_mul,
    "gelu_and_mul": _gelu_and_mul,
    "rope_and_cache": _rope_and_cache,
    "lora": _lora,
    "sampling": _sampling,
    "rotary_embedding": _rotary_embedding,
    "reshape_and_cache": _reshape_and_cache,
    "merge_attention_states": _merge_attention_states,
    "copy_blocks": _copy_blocks,
    "swap_blocks": _swap_blocks,
}


def _bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def _pool(shape: Shape) -> torch.Tensor:
    return _bf16(8, 2, 2, BLOCK_SIZE, shape.num_kv_heads, shape.head_size)


def _token_scales(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of every token and head, a part of each block as they are in a pool."""
    scales = torch.empty(8, 2, 2, 1024)[:, 1, :, : BLOCK_SIZE * shape.num_kv_heads]
    k_scale, v_scale = scales.unflatten(-1, (BLOCK_SIZE, shape.num_kv_heads)).unbind(1)
    return k_scale, v_scale


def _new_qkv(shape: Shape) -> tuple[torch.Tensor, ...]:
    """Views of one matrix product's output, as a model has them."""
    heads = [shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads]
    return _bf16(32, sum(heads), shape.head_size).split(heads, dim=1)


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
