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
            if tree_mask is not None and 0 <= column < tree_mask.shape[1]:
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
    """What a slot holds, [Hkv, D] in fp64: the stored number times its scale. uint8 is e4m3 by its bits."""
    numbers = cache[slot[0], slot[1]]
    if cache.dtype == torch.uint8:
        numbers = numbers.contiguous().view(torch.float8_e4m3fn)
    numbers = numbers.double()
    if scale is not None and scale.dim() == 3:  # of every slot and head
        scale = scale[slot[0], slot[1]]
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
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write row i of `k` and `v` to slot i of the mapping; a negative slot is skipped."""
    block_size = k_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        for cache, x, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
            place = cache[slot // block_size, slot % block_size]
            if cache.element_size() > 1:
                place.copy_(x[token])
                continue
            for head in range(x.shape[1]):
                if scale is None:
                    factor = 1.0
                elif scale.dim() == 3:
                    scale[slot // block_size, slot % block_size, head] = row_scale(
                        x[token, head], cache.dtype
                    )
                    factor = scale[slot // block_size, slot % block_size, head].item()
                else:
                    factor = scale.view(-1)[head % scale.numel()].item()
                for dim in range(x.shape[2]):
                    number = x[token, head, dim].item() / factor
                    place.view(torch.uint8)[head, dim] = nearest_code(number, cache.dtype)


def row_scale(row: Tensor, dtype: torch.dtype) -> float:
    """What a row is divided by when every token and head has its own scale; NaN for one that is not finite."""
    if not row.isfinite().all():
        return math.nan
    largest = {torch.int8: 127.0, torch.float8_e5m2: 57344.0}.get(dtype, 448.0)
    return max(row.abs().max().item(), 2.0**-100) / largest


def nearest_code(number: float, dtype: torch.dtype) -> int:
    """The bits of the nearest number of a small format, the one with the even code if two are as near."""
    if dtype == torch.int8:
        return 0 if math.isnan(number) else round(max(-127.0, min(number, 127.0))) & 0xFF
    if math.isnan(number):
        return 0x7F
    stored = torch.float8_e4m3fn if dtype == torch.uint8 else dtype
    magnitudes = torch.arange(0x80).to(torch.uint8).view(stored).double()
    magnitudes = magnitudes[magnitudes.isfinite()].tolist()  # rising with the code
    magnitude = min(abs(number), magnitudes[-1])
    _, _, code = min((abs(m - magnitude), c & 1, c) for c, m in enumerate(magnitudes))
    return code | (0x80 if math.copysign(1, number) < 0 else 0)


def copy_blocks(pool: Tensor, pairs: Tensor) -> None:
    """Copy block `pairs[i, 0]` over block `pairs[i, 1]`."""
    swap_blocks(pool, pool, pairs)


def swap_blocks(src_pool: Tensor, dst_pool: Tensor, pairs: Tensor) -> None:
    """Copy block `pairs[i, 0]` of one pool over block `pairs[i, 1]` of another."""
    for source, destination in pairs.tolist():
        dst_pool[destination] = src_pool[source]


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; with `unit_offset`, times 1 + weight."""
    x, weight = x.double(), weight.double() + (1.0 if unit_offset else 0.0)
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    total = x.double() + residual.double()
    return rms_norm(total, weight, eps, unit_offset), total


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


def rope_and_cache(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    is_neox: bool = True,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """A rotated copy of `q`; the rotated `k`, and `v`, are written to the caches."""
    q, k = rotary_embedding(positions, q, k, cos_sin, is_neox)
    reshape_and_cache(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return q


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up, where the last axis of `x` is (gate | up)."""
    gate, up = x.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """gelu(gate) * up, where the last axis of `x` is (gate | up)."""
    gate, up = x.double().chunk(2, dim=-1)
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + torch.tanh(inner)) * up
    return 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2))) * up


def group_by_adapter(adapter_ids: Tensor, num_adapters: int) -> tuple[Tensor, Tensor]:
    """Tokens in the order of their adapters, those without one first, and where each adapter's begin."""
    ids = adapter_ids.tolist()
    order = [
        token
        for adapter in (-1, *range(num_adapters))
        for token, i in enumerate(ids)
        if max(i, -1) == adapter
    ]
    starts = [sum(i < adapter for i in ids) for adapter in range(num_adapters + 1)]
    return torch.tensor(order, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32)


def lora_shrink(
    x: Tensor, a: Tensor, ranks: Tensor, token_order: Tensor, adapter_starts: Tensor, scale: float
) -> Tensor:
    """[T, max_rank]; NaN where no adapter, or no part of it, says what is there."""
    y = torch.full((x.shape[0], a.shape[1]), math.nan, dtype=torch.float64)
    order, starts = token_order.tolist(), adapter_starts.tolist()
    for adapter, rank in enumerate(ranks.tolist()):
        for token in order[starts[adapter] : starts[adapter + 1]]:
            for i in range(rank):
                y[token, i] = scale * (a[adapter, i].double() @ x[token].double())
    return y


def lora_expand(
    y: Tensor, b: Tensor, ranks: Tensor, token_order: Tensor, adapter_starts: Tensor, out: Tensor
) -> Tensor:
    """`out` with the adapters' part added, a copy."""
    out = out.double().clone()
    order, starts = token_order.tolist(), adapter_starts.tolist()
    for adapter, rank in enumerate(ranks.tolist()):
        for token in order[starts[adapter] : starts[adapter + 1]]:
            for i in range(rank):
                out[token] += b[adapter, :, i].double() * y[token, i].double()
    return out


def apply_penalties(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """Penalised logits, a copy."""
    out = logits.double().clone()
    for row in range(out.shape[0]):
        for token in range(out.shape[1]):
            count = int(output_counts[row, token])
            if count > 0 or prompt_mask[row, token]:
                factor = float(repetition[row])
                out[row, token] *= 1 / factor if out[row, token] > 0 else factor
            if count > 0:
                out[row, token] -= float(frequency[row]) * count + float(presence[row])
    return out


def kept_tokens(
    logits: Tensor, top_k: int, top_p: float, min_p: float, temperature: float
) -> list[int]:
    """Token ids of one row that top-k, top-p and min-p allow, most likely first."""
    values = logits.double().tolist()
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if 0 < top_k < len(order):
        order = order[:top_k]
    heat = min(temperature, 1e30)  # -inf / inf is no number
    weights = [math.exp((values[token] - values[order[0]]) / heat) for token in order]
    if top_p < 1:
        target, before, kept = top_p * math.fsum(weights), 0.0, 0
        while kept < len(order) and (kept == 0 or before < target):
            before += weights[kept]
            kept += 1
        order = order[:kept]
    return [token for token, weight in zip(order, weights, strict=False) if weight >= min_p]


def apply_top_k_top_p_min_p(
    logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, temperatures: Tensor | None
) -> Tensor:
    """Logits with -inf where a token is not kept, a copy."""
    out = logits.double().clone()
    for row in range(out.shape[0]):
        temperature = 1.0 if temperatures is None else float(temperatures[row])
        if temperature > 0 and out[row].max().isfinite():  # `max` is NaN where any logit is
            filters = int(top_k[row]), float(top_p[row]), float(min_p[row])
            dropped = torch.ones(out.shape[1], dtype=torch.bool)
            dropped[kept_tokens(logits[row], *filters, temperature)] = False
            out[row, dropped] = -math.inf
    return out


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10: four random words of a counter of four and a key of two."""
    a, b, c, d = counter
    first, second = key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ first, q % 2**32, (p >> 32) ^ d ^ second, p % 2**32
        first, second = (first + 0x9E3779B9) % 2**32, (second + 0xBB67AE85) % 2**32
    return a, b, c, d


def sampling_scores(logits: Tensor, temperature: float, seed: int, step: int) -> list[float]:
    """What the draw of one row takes the largest of."""
    values = logits.double().tolist()
    key = seed % 2**32, (seed >> 32) % 2**32
    scores = []
    for token, value in enumerate(values):
        counter = 1024 * (token // 4096) + token % 1024, 0, step % 2**32, (step >> 32) % 2**32
        uniform = (philox(counter, key)[token // 1024 % 4] + 0.5) / 2**32
        scores.append(
            (value - max(values)) / min(temperature, 1e30) - math.log(-math.log1p(-uniform))
        )
    return scores


def sample(logits: Tensor, temperatures: Tensor, seeds: Tensor, steps: Tensor) -> Tensor:
    """One token id per row, the lowest of equals; -1 for a row that has no finite largest logit."""
    token_ids = []
    for row, temperature in enumerate(temperatures.tolist()):
        values = logits[row].tolist()
        if any(math.isnan(value) for value in values) or not math.isfinite(max(values)):
            token_ids.append(-1)
            continue
        if temperature > 0:
            values = sampling_scores(logits[row], temperature, int(seeds[row]), int(steps[row]))
        token_ids.append(values.index(max(values)))
    return torch.tensor(token_ids, dtype=torch.int64)
