"""The oracle: every op in plain loops and fp64, with no Triton and no cleverness.

Arithmetic is done and returned in fp64, so that an error measured against it is the implementation's own. Data movement
is exact and works in place, as the ops do. Arguments mean what they mean in `ops`.
"""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    attention_chunk: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    prefix_lm_ranges: Tensor | None = None,
    tree_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [T, Hq, Dv], lse [T, Hq]), both fp64. Rows that see no key, or belong to no sequence: out 0, lse -inf."""
    num_tokens, num_q_heads, head_size = q.shape
    _, block_size, num_kv_heads, head_size_v = v_cache.shape
    group = num_q_heads // num_kv_heads
    if scale is None:
        scale = 1 / math.sqrt(head_size)
    out = torch.zeros(num_tokens, num_q_heads, head_size_v, dtype=torch.float64)
    lse = torch.full((num_tokens, num_q_heads), -math.inf, dtype=torch.float64)
    starts = query_start_loc.tolist()
    for seq, seq_len in enumerate(seq_lens.tolist()):
        query_len = starts[seq + 1] - starts[seq]
        table = block_tables[seq].tolist()
        ranges = [] if prefix_lm_ranges is None else prefix_lm_ranges[seq].tolist()

        def sees(token: int, position: int, key: int) -> bool:
            together = any(low <= position < high and low <= key < high for low, high in ranges)  # noqa: B023
            visible = together or (
                (not causal or key <= position)
                and (window is None or key > position - window)
                and (attention_chunk is None or key >= position - position % attention_chunk)
            )
            column = key - (seq_len - query_len)  # noqa: B023
            if tree_mask is not None and column >= 0:
                visible = visible and bool(tree_mask[token, column])
            return visible

        for i in range(query_len):
            token = starts[seq] + i
            position = seq_len - query_len + i
            seen = [key for key in range(seq_len) if sees(token, position, key)]
            if not seen:
                continue
            slots = [(table[key // block_size], key % block_size) for key in seen]
            keys = torch.stack([_stored(k_cache, slot, k_scale) for slot in slots])
            values = torch.stack([_stored(v_cache, slot, v_scale) for slot in slots])
            for head in range(num_q_heads):
                scores = scale * (keys[:, head // group] @ q[token, head].double())
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if alibi_slopes is not None:
                    distance = torch.tensor(seen, dtype=torch.float64) - position
                    scores = scores + alibi_slopes[head].double() * distance
                total = torch.logsumexp(scores, dim=0)
                if sinks is not None:
                    total = torch.logaddexp(total, sinks[head].double())
                out[token, head] = torch.exp(scores - total) @ values[:, head // group]
                lse[token, head] = total
    return out, lse


def _stored(cache: Tensor, slot: tuple[int, int], scale: Tensor | None) -> Tensor:
    """What a slot holds, [Hkv, D] in fp64: the stored number times the scale of its head. uint8 is e4m3 by its bits."""
    numbers = cache[slot[0], slot[1]]
    if cache.dtype == torch.uint8:
        numbers = numbers.contiguous().view(torch.float8_e4m3fn)
    numbers = numbers.double()
    return numbers if scale is None else numbers * scale.double().view(-1, 1)


def cascade_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    prefix_block_ids: Tensor,
    block_tables: Tensor,
    **arguments,
) -> tuple[Tensor, Tensor]:
    """Attention of sequences whose first blocks are `prefix_block_ids`, whatever their tables say."""
    tables = block_tables.clone()
    tables[:, : len(prefix_block_ids)] = prefix_block_ids
    return paged_attention(q, k_cache, v_cache, block_tables=tables, **arguments)


def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys: (out [T, H, D], lse [T, H]), both fp64."""
    out = torch.zeros(out_a.shape, dtype=torch.float64)
    lse = torch.full(lse_a.shape, -math.inf, dtype=torch.float64)
    for token in range(out_a.shape[0]):
        for head in range(out_a.shape[1]):
            a, b = lse_a[token, head].double(), lse_b[token, head].double()
            lse[token, head] = torch.logaddexp(a, b)
            if a > -math.inf:
                out[token, head] += torch.exp(a - lse[token, head]) * out_a[token, head].double()
            if b > -math.inf:
                out[token, head] += torch.exp(b - lse[token, head]) * out_b[token, head].double()
    return out, lse


def reshape_and_cache(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write row i of `k` and `v` to slot i of the mapping; a negative slot is skipped."""
    block_size = k_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            k_cache[slot // block_size, slot % block_size] = k[token]
            v_cache[slot // block_size, slot % block_size] = v[token]


def copy_blocks(pool: Tensor, pairs: Tensor) -> None:
    """Copy block `pairs[i, 0]` over block `pairs[i, 1]`."""
    swap_blocks(pool, pool, pairs)


def swap_blocks(src_pool: Tensor, dst_pool: Tensor, pairs: Tensor) -> None:
    """Copy block `pairs[i, 0]` of one pool over block `pairs[i, 1]` of another."""
    for source, destination in pairs.tolist():
        dst_pool[destination] = src_pool[source]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    x = x.double()
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight.double()


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    total = x.double() + residual.double()
    return rms_norm(total, weight, eps), total


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor, is_neox: bool = True
) -> tuple[Tensor, Tensor]:
    """Rotated copies of `q` and `k`: pairs (i, i + n/2), or (2i, 2i + 1) when not neox, of the first n dims."""
    half = cos_sin.shape[1] // 2
    rotated = q.double().clone(), k.double().clone()
    for token, position in enumerate(positions.tolist()):
        for i in range(half):
            cos, sin = cos_sin[position, i].double(), cos_sin[position, half + i].double()
            a, b = (i, i + half) if is_neox else (2 * i, 2 * i + 1)
            for x in rotated:
                first, second = x[token, :, a].clone(), x[token, :, b].clone()
                x[token, :, a] = first * cos - second * sin
                x[token, :, b] = second * cos + first * sin
    return rotated


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up, where the last axis of `x` is (gate | up)."""
    gate, up = x.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up
