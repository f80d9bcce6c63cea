"""The public ops, registered with torch in the namespace `octavo`, so that `torch.compile` sees through a model.

    tensors on     OCTAVO_BACKEND             what runs
    CUDA           any                        the Triton kernels
    CPU            unset, "" or "auto"        `cpu`, vectorised torch; Triton is not imported
    CPU            "interpret"                the Triton kernels, by Triton's interpreter (exact, and slow)

The variable is read once, when this module is imported. All ops are for inference: none has a derivative. Arguments are
checked where the op runs: a ValueError names the argument, what was expected and what came. Lengths, slots and table
entries live on the device and are not checked, for that would wait for the device.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from . import cpu
from ._checks import MAX_QUERIES

Tensor = torch.Tensor

_LIBRARY = torch.library.Library("octavo", "DEF")


def _interpreted() -> bool:
    """Whether CPU tensors go to Triton's interpreter; prepares the interpreter if so."""
    backend = os.environ.get("OCTAVO_BACKEND", "")
    if backend not in ("", "auto", "interpret"):
        raise ValueError(f'OCTAVO_BACKEND: expected "auto" or "interpret", got "{backend}"')
    if backend != "interpret":
        return False
    os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when a kernel is decorated
    importlib.import_module(".interpreter", __package__).install()
    return True


_INTERPRETED = _interpreted()


def _triton(module: str, name: str) -> Any:
    """The Triton wrapper `name`, its file imported at the first call."""

    def wrapper(*args):
        return getattr(importlib.import_module(module, __package__), name)(*args)

    return wrapper


def _register(name: str, schema: str, triton_impl: Any, fake: Any) -> Any:
    """Define an op with its three implementations; returns the callable that dispatches to them."""
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, triton_impl, "CUDA")
    _LIBRARY.impl(name, triton_impl if _INTERPRETED else getattr(cpu, name), "CPU")
    torch.library.register_fake(f"octavo::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.octavo, name).default


def _no_result(*args) -> None:
    """Fake of an op that only writes to its arguments."""


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# ---------------------------------------------------------------- attention


def _triton_attention(
    q, k_cache, v_cache, query_start_loc, seq_lens, block_tables, max_query_len, max_seq_len,
    scale, causal, window, softcap, alibi_slopes, sinks, tree_mask, num_decodes, out, lse, plan=None,
) -> None:  # fmt: skip
    """Sequences [0, num_decodes) to paged decode, the others to paged prefill."""
    options = {
        "max_seq_len": max_seq_len,
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "plan": plan,
    }
    if num_decodes > 0:
        from .paged_decode import paged_decode

        several = num_decodes == seq_lens.shape[0] and max_query_len > 1
        rows = slice(None) if several else slice(num_decodes)
        paged_decode(
            q[rows],
            k_cache,
            v_cache,
            seq_lens=seq_lens[:num_decodes],
            block_tables=block_tables[:num_decodes],
            query_start_loc=query_start_loc if several else None,
            max_query_len=max_query_len if several else 1,
            causal=causal,
            tree_mask=tree_mask,
            out=out[rows],
            lse=None if lse is None else lse[rows],
            **options,
        )
    if num_decodes < seq_lens.shape[0]:
        from .paged_prefill import paged_prefill

        rows = slice(num_decodes, None)
        paged_prefill(
            q,
            k_cache,
            v_cache,
            query_start_loc=query_start_loc[rows],
            seq_lens=seq_lens[rows],
            block_tables=block_tables[rows],
            max_query_len=max_query_len,
            causal=causal,
            out=out,
            lse=lse,
            **options,
        )


_paged_attention = _register(
    "paged_attention",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor query_start_loc, Tensor seq_lens,"
    " Tensor block_tables, SymInt max_query_len, SymInt max_seq_len, float scale, bool causal,"
    " int? window, float? softcap, Tensor? alibi_slopes, Tensor? sinks, Tensor? tree_mask, SymInt num_decodes,"
    " Tensor(a!) out, Tensor(b!)? lse) -> ()",
    _triton_attention,
    _no_result,
)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    num_decodes: int | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    plan: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the queries of a batch over the paged keys and values of their sequences.

    The queries of sequence i are rows [query_start_loc[i], query_start_loc[i + 1]) of q, and are its last tokens: their
    keys and values have been written to the cache before the call (`reshape_and_cache`).

    q                [num_tokens, num_q_heads, head_size]                fp32 | fp16 | bf16; last axis contiguous
    k_cache          [num_blocks, block_size, num_kv_heads, head_size]   dtype of q; any strides, last axis contiguous
    v_cache          [num_blocks, block_size, num_kv_heads, head_size_v]
    query_start_loc  [num_seqs + 1] int32     not decreasing; query lengths may be 0
    seq_lens         [num_seqs] int32         context length + query length, in tokens
    block_tables     [num_seqs, width] int32  block ids; entries past ceil(seq_len / block_size) may hold anything
    max_query_len    upper bound of the query lengths
    max_seq_len      upper bound of seq_lens
    scale            multiplies q.k; None: head_size ** -0.5
    causal           a query sees keys up to its own position; False: all keys of its sequence
    window           tokens a query may see, itself included; None: all. Without causal only the past is limited
    softcap          c: scores become c * tanh(score / c), after scale
    alibi_slopes     [num_q_heads] fp32: slope * (key position - query position) is added, after softcap
    sinks            [num_q_heads]: one more logit in each row's denominator, with no value; lse includes it
    tree_mask        [num_tokens, max_query_len] bool: whether a query sees the j-th query of its sequence, on top of the
                     other rules; all see the context. For drafts that branch; needs max_query_len <= 16 and no prefills
    num_decodes      the first so many sequences take the decode kernel, which splits their keys over programs: with one
                     query each, or, if these are all sequences, up to 16. None: all if max_query_len <= 16, else none.
                     A decode row with seq_len 0 is padding
    out              [num_tokens, num_q_heads, head_size_v], dtype of q; None: allocated
    plan             a `DecodePlan` (num_decodes is num_seqs) or `PrefillPlan` (num_decodes is 0) for tuners: calls the
                     Triton wrapper directly, past torch's dispatcher; on a CPU only under the interpreter

    Returns out, or (out, lse [num_tokens, num_q_heads] fp32, natural log). Rows that see no key: out 0, lse -inf. Rows
    of no sequence (before query_start_loc[0], past query_start_loc[-1]) are not written.
    """
    num_tokens, num_q_heads, head_size = q.shape
    num_seqs = seq_lens.shape[0]
    if scale is None:
        scale = head_size**-0.5
    if num_decodes is None:
        num_decodes = num_seqs if max_query_len <= MAX_QUERIES else 0
    if tree_mask is not None and (num_decodes < num_seqs or max_query_len > MAX_QUERIES):
        raise ValueError(
            f"tree_mask: expected decodes of up to {MAX_QUERIES} queries only, got max_query_len {max_query_len} and "
            f"{num_decodes} decodes of {num_seqs} sequences"
        )
    if num_decodes == num_seqs and max_query_len > MAX_QUERIES:
        raise ValueError(
            f"num_decodes: expected at most {MAX_QUERIES} queries each if all are decodes, got {max_query_len}"
        )
    if not 0 <= num_decodes <= min(num_seqs, num_tokens):
        raise ValueError(
            f"num_decodes: expected at most {min(num_seqs, num_tokens)} (sequences, tokens), got {num_decodes}"
        )
    if out is None:
        out = q.new_empty(num_tokens, num_q_heads, v_cache.shape[3])
    lse = q.new_empty(num_tokens, num_q_heads, dtype=torch.float32) if return_lse else None
    args = (
        q, k_cache, v_cache, query_start_loc, seq_lens, block_tables, max_query_len, max_seq_len,
        scale, causal, window, softcap, alibi_slopes, sinks, tree_mask, num_decodes, out, lse,
    )  # fmt: skip
    if plan is None:
        _paged_attention(*args)
    elif num_decodes in (0, num_seqs):
        _triton_attention(*args, plan)
    else:
        raise ValueError(
            f"plan: expected decodes or prefills only, got {num_decodes} decodes of {num_seqs}"
        )
    return out if lse is None else (out, lse)


_merge_attention_states = _register(
    "merge_attention_states",
    "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    _triton(".merge_states", "merge_attention_states"),
    lambda out_a, lse_a, out_b, lse_b: (_empty_like(out_a), _empty_like(lse_a)),
)


def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """(out, lse) over the union of two disjoint sets of keys, from the attention over each.

    out_a, out_b  [num_tokens, num_heads, head_size]  fp32 | fp16 | bf16; last axis contiguous
    lse_a, lse_b  [num_tokens, num_heads] fp32        natural log; -inf: no key was seen, and that side is not read
    Where both are -inf: out 0, lse -inf.
    """
    return _merge_attention_states(out_a, lse_a, out_b, lse_b)


# ---------------------------------------------------------------- the cache

_reshape_and_cache = _register(
    "reshape_and_cache",
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping) -> ()",
    _triton(".cache_write", "reshape_and_cache"),
    _no_result,
)


def reshape_and_cache(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write row i of `k` and `v` to slot `slot_mapping[i]` of the caches, in place.

    k, v              [num_tokens, num_kv_heads, head_size or head_size_v]               last axis contiguous
    k_cache, v_cache  [num_blocks, block_size, num_kv_heads, head_size or head_size_v]   dtype of k; any strides, last
                      axis contiguous
    slot_mapping      [num_slots] int64   block id * block_size + offset, no slot twice; negative: skipped. num_slots <=
                      num_tokens; rows of k and v beyond it are padding
    """
    _reshape_and_cache(k, v, k_cache, v_cache, slot_mapping)


_copy_blocks = _register(
    "copy_blocks",
    "(Tensor(a!) pool, Tensor pairs) -> ()",
    _triton(".block_copy", "copy_blocks"),
    _no_result,
)


def copy_blocks(pool: Tensor, pairs: Tensor) -> None:
    """Copy block `pairs[i, 0]` of the pool over block `pairs[i, 1]`: all layers, K and V, in one launch.

    pool   [num_blocks, ...]              any dtype; each block contiguous
    pairs  [num_pairs, 2] int64, on CPU   ids in [0, num_blocks); each destination once, and none is also a source
    A bad batch is refused before anything moves.
    """
    _copy_blocks(pool, pairs)


_swap_blocks = _register(
    "swap_blocks",
    "(Tensor src_pool, Tensor(a!) dst_pool, Tensor pairs) -> ()",
    _triton(".block_swap", "swap_blocks"),
    _no_result,
)


def swap_blocks(src_pool: Tensor, dst_pool: Tensor, pairs: Tensor) -> None:
    """Copy block `pairs[i, 0]` of one pool over block `pairs[i, 1]` of another, in the order of the current stream.

    src_pool, dst_pool  [num_blocks, ...]             alike but for num_blocks and device; each block contiguous; on the
                        host pinned, or the copies are not asynchronous
    pairs               [num_pairs, 2] int64, on CPU  ids in range, each destination once
    The host may touch either pool again only after the stream has passed this point.
    """
    _swap_blocks(src_pool, dst_pool, pairs)


# ---------------------------------------------------------------- around attention

_rms_norm = _register(
    "rms_norm",
    "(Tensor x, Tensor weight, float eps) -> Tensor",
    _triton(".norm", "rms_norm"),
    lambda x, weight, eps: _empty_like(x),
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, fp32 inside; a new contiguous tensor.

    x       [..., size]   fp32 | fp16 | bf16; last axis contiguous
    weight  [size]        dtype of x
    """
    return _rms_norm(x, weight, eps)


_fused_add_rms_norm = _register(
    "fused_add_rms_norm",
    "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    _triton(".norm", "fused_add_rms_norm"),
    lambda x, residual, weight, eps: (_empty_like(x), _empty_like(x)),
)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), two new contiguous tensors.

    x, residual  [..., size]   fp32 | fp16 | bf16; last axis contiguous. The sum is rounded to this dtype, then normed
    weight       [size]        dtype of x
    """
    return _fused_add_rms_norm(x, residual, weight, eps)


_rotary_embedding = _register(
    "rotary_embedding",
    "(Tensor positions, Tensor(a!) q, Tensor(b!) k, Tensor cos_sin, bool is_neox) -> ()",
    _triton(".rotary", "rotary_embedding"),
    _no_result,
)


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor, is_neox: bool = True
) -> None:
    """Rotate the heads of `q` and `k` in place, by the angles of their tokens' positions.

    positions  [num_tokens] int64                      each below max_position
    q          [num_tokens, num_q_heads, head_size]    fp32 | fp16 | bf16; any strides, last axis contiguous
    k          [num_tokens, num_kv_heads, head_size]   dtype of q
    cos_sin    [max_position, rotary_size] fp32        cosines, then sines; dims past rotary_size stay as they are
    is_neox    pairs are (i, i + rotary_size / 2); False: (2i, 2i + 1)
    """
    _rotary_embedding(positions, q, k, cos_sin, is_neox)


_silu_and_mul = _register(
    "silu_and_mul",
    "(Tensor x) -> Tensor",
    _triton(".activation", "silu_and_mul"),
    lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2),
)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up for x = (gate | up), fp32 inside; a new contiguous tensor [..., size].

    x  [..., 2 * size]   fp32 | fp16 | bf16; last axis contiguous
    """
    return _silu_and_mul(x)
