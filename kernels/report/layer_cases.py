"""The launches of what is around attention, and of a cascade: `LAYERS`, by op."""

from __future__ import annotations

import torch

from .shapes import BLOCK_SIZE, MAX_SEQ_LEN, Shape, bf16, kv_pool, token_scales


def _new_qkv(shape: Shape) -> tuple[torch.Tensor, ...]:
    """Views of one matrix product's output, as a model has them."""
    heads = [shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads]
    return bf16(32, sum(heads), shape.head_size).split(heads, dim=1)


def _rms_norm(shape: Shape) -> None:
    from ..norm import fused_add_rms_norm, rms_norm

    x, weight = bf16(32, shape.hidden), bf16(shape.hidden)
    rms_norm(x, weight, 1e-5)
    for unit_offset in (False, True):
        fused_add_rms_norm(x, x.clone(), weight, 1e-5, unit_offset)


def _silu_and_mul(shape: Shape) -> None:
    from ..activation import silu_and_mul

    silu_and_mul(bf16(32, 6 * shape.hidden))


def _rotary_embedding(shape: Shape) -> None:
    from ..rotary import rotary_embedding

    q, k, _ = _new_qkv(shape)
    for is_neox in (True, False):
        rotary_embedding(torch.arange(32), q, k, torch.empty(4096, shape.head_size), is_neox)


def _reshape_and_cache(shape: Shape) -> None:
    from ..cache_write import reshape_and_cache

    (_, k, v), pool, scale = _new_qkv(shape), kv_pool(shape), torch.empty(shape.num_kv_heads)
    reshape_and_cache(k, v, pool[:, 1, 0], pool[:, 1, 1], torch.arange(32))
    for dtype in (torch.uint8, torch.int8):  # e4m3 by its bits compiles for every target
        caches = pool.to(dtype)[:, 1, 0], pool.to(dtype)[:, 1, 1]
        reshape_and_cache(k, v, *caches, torch.arange(32), scale, scale)
    reshape_and_cache(k, v, *caches, torch.arange(32), *token_scales(shape))


def _merge_attention_states(shape: Shape) -> None:
    from ..merge_states import merge_attention_states

    out, lse = bf16(32, shape.num_q_heads, shape.head_size), torch.empty(32, shape.num_q_heads)
    merge_attention_states(out, lse, out.clone(), lse.clone())


def _gelu_and_mul(shape: Shape) -> None:
    from ..activation import gelu_and_mul

    for approximate in ("none", "tanh"):
        gelu_and_mul(bf16(32, 6 * shape.hidden), approximate)


def _rope_and_cache(shape: Shape) -> None:
    from ..rotary_cache_write import rope_and_cache

    (q, k, v), pool, positions = _new_qkv(shape), kv_pool(shape), torch.arange(32)
    for rotary_size, is_neox in ((shape.head_size, True), (shape.head_size // 2, False)):
        cos_sin = torch.empty(4096, rotary_size)
        rope_and_cache(
            positions, q, k, v, cos_sin, pool[:, 1, 0], pool[:, 1, 1], positions, is_neox
        )
    caches = pool.char()[:, 1, 0], pool.char()[:, 1, 1]
    cos_sin = torch.empty(4096, shape.head_size)
    rope_and_cache(positions, q, k, v, cos_sin, *caches, positions, True, *token_scales(shape))


def _lora(shape: Shape) -> None:
    from ..lora import lora_expand, lora_shrink

    num_adapters, max_rank, width = 8, 64, 3 * shape.hidden
    for num_tokens in (32, 2048):
        x, out = bf16(num_tokens, width), bf16(num_tokens, width)
        ranks, order = (torch.zeros(n, dtype=torch.int32) for n in (num_adapters, num_tokens))
        starts = torch.zeros(num_adapters + 1, dtype=torch.int32)
        y = lora_shrink(x, bf16(num_adapters, max_rank, width), ranks, order, starts, 1.0)
        lora_expand(y, bf16(num_adapters, width, max_rank), ranks, order, starts, out)


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

    copy_blocks(kv_pool(shape), torch.tensor([[0, 4], [1, 5]]))


def _swap_blocks(shape: Shape) -> None:
    from ..block_swap import SwapPlan, swap_blocks

    pairs = torch.tensor([[0, 4], [1, 5]])
    swap_blocks(kv_pool(shape), kv_pool(shape), pairs, plan=SwapPlan(by_kernel=True))


def _cascade_attention(shape: Shape) -> None:
    from ..cascade import cascade_attention

    pool, q = kv_pool(shape), bf16(64, shape.num_q_heads, shape.head_size)
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
