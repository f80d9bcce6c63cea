"""The feature space of paged attention: what there is, what excludes what, and cases drawn from it.

A case is a value for every feature. `pairwise` covers every pair of values that may meet with few cases, `random_case`
draws any; `build` makes the batch, with spikes at every kind of edge.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch

from octavo.tests.kernels.cases import QUANTISED, Batch, random_tree

FEATURES: dict[str, list[Any]] = {
    "shape": ["decode", "drafts", "prefill", "mixed", "drafts and prefills"],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "heads": [(2, 1), (1, 1), (3, 1), (10, 2), (7, 1), (16, 1), (71, 1)],  # query and KV heads
    "head_size": [32, 40, 64, 80, 96, 112, 128, 256, (192, 128), (192, 192), (32, 64)],
    "block_size": [16, 1, 5, 8, 32, 48, 64, 128, 256, 544],
    "hnd": [False, True],
    "cache": [None, *QUANTISED],
    "scales": [None, "tensor", "head", "token"],
    "causal": [True, False],
    "window": [None, 1, 16, 37],
    "attention_chunk": [None, 5, 32],
    "softcap": [None, 1.5, 50.0],
    "alibi": [False, True],
    "sinks": [False, True],
    "ranges": [False, True],
    "tree": [False, True],
    "cascade": [False, True],
    "lse": [True, False],
    "batch_invariant": [False, True],
    "empty_rows": [False, True],
    "dispatch": ["told", "default"],  # whether num_decodes is given
}
Case = dict[str, Any]


def allowed(case: Case) -> bool:
    """Whether these values may meet; a case with few of the features is allowed if some whole case is."""
    if case.get("tree") and case.get("shape", "drafts") not in ("drafts", "drafts and prefills"):
        return False  # the line of a tree is at most 16 tokens long
    if case.get("dispatch") == "default" and case.get("shape") == "drafts and prefills":
        return False  # which are which has to be told
    # plain numbers have no scales
    return not (case.get("scales") and "cache" in case and case["cache"] is None)


def single() -> list[Case]:
    """Every value of every feature, all others at their first."""
    plain = {name: values[0] for name, values in FEATURES.items()}
    cases = [plain]
    for name, values in FEATURES.items():
        for value in values[1:]:
            needs = {"tree": {"shape": "drafts"}, "scales": {"cache": "e4m3"}}.get(name, {})
            cases.append({**plain, **needs, name: value})
    return cases


def pairwise(seed: int) -> list[Case]:
    """Cases in which every two values that may meet do meet: each case takes the values with most pairs left."""
    draw = random.Random(seed)
    pairs = {
        frozenset([(a, i), (b, j)])
        for a, b in itertools.combinations(FEATURES, 2)
        for i, x in enumerate(FEATURES[a])
        for j, y in enumerate(FEATURES[b])
        if allowed({a: x, b: y})
    }
    cases = []
    while pairs:
        chosen = dict(min(pairs, key=lambda pair: sorted(pair)))
        names = [name for name in FEATURES if name not in chosen]
        draw.shuffle(names)
        for name in names:
            options = []
            for i, value in enumerate(FEATURES[name]):
                so_far = {n: FEATURES[n][k] for n, k in chosen.items()}
                if allowed({**so_far, name: value}):
                    gain = sum(frozenset([(name, i), item]) in pairs for item in chosen.items())
                    options.append((gain, draw.random(), i))
            chosen[name] = max(options)[2]
        pairs -= {frozenset(pair) for pair in itertools.combinations(chosen.items(), 2)}
        cases.append({name: FEATURES[name][i] for name, i in chosen.items()})
    return cases


def random_case(draw: random.Random) -> Case:
    while True:
        case = {
            # often a feature is at its first value, so that others show what they do
            name: values[0] if draw.random() < 0.3 else draw.choice(values)
            for name, values in FEATURES.items()
        }
        if allowed(case):
            return case


def build(case: Case, draw: random.Random) -> Batch:
    """The batch of a case; draws from torch's generator and from `draw`."""
    block_size = case["block_size"]
    prefix = 0
    if case["cascade"]:
        prefix = draw.choice([0, 1, 2]) if block_size > 8 else draw.choice([3, 7, 12])
    query_lens, seq_lens, num_decodes = _lengths(case, prefix * block_size, draw)
    num_q_heads, num_kv_heads = case["heads"]
    head_size = case["head_size"]
    head_size, head_size_v = head_size if isinstance(head_size, tuple) else (head_size, None)
    options: dict[str, Any] = {
        name: case[name]
        for name in ("causal", "window", "attention_chunk", "softcap")
        if case[name] is not None
    }
    if case["alibi"]:
        options["alibi_slopes"] = torch.rand(num_q_heads) * 0.4
    if case["sinks"]:
        options["sinks"] = torch.randn(num_q_heads) * 2
    if case["ranges"]:
        options["prefix_lm_ranges"] = _ranges(seq_lens, draw)
    cache_dtype = None if case["cache"] is None else QUANTISED[case["cache"]]
    if case["scales"] != "token" and (case["scales"] or cache_dtype == torch.int8):
        number = 1 / 32 if cache_dtype == torch.int8 else 1.0
        for name in ("k_scale", "v_scale"):
            size = {None: (), "tensor": draw.choice([(), (1,)]), "head": (num_kv_heads,)}
            options[name] = number * (0.5 + torch.rand(size[case["scales"]]))
    batch = Batch(
        seq_lens,
        query_lens,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        head_size_v=head_size_v,
        block_size=block_size,
        dtype=case["dtype"],
        cache_dtype=cache_dtype,
        num_decodes=num_decodes if case["dispatch"] == "told" else None,
        max_decode_query_len=_draft_len(case, query_lens, num_decodes),
        nobodys=(0, 0) if case["dispatch"] == "told" else (draw.randint(0, 2), draw.randint(0, 2)),
        num_prefix_blocks=prefix if case["cascade"] else None,
        hnd=case["hnd"],
        options=options,
    )
    if case["scales"] == "token":
        options |= {"k_scale": batch.token_scales(), "v_scale": batch.token_scales()}
    if case["tree"]:
        options["tree_mask"] = random_tree(batch)
    _add_spikes(batch, draw)
    return batch


def _draft_len(case: Case, query_lens: list[int], num_decodes: int) -> int | None:
    """The bound that has to be told where drafts and prefills share a batch."""
    mixed = case["shape"] == "drafts and prefills"
    return max(query_lens[:num_decodes]) if mixed else None


def _lengths(case: Case, prefix_len: int, draw: random.Random) -> tuple[list[int], list[int], int]:
    """(query_lens, seq_lens, num_decodes)."""
    edges = [1, case["block_size"], 32, 33, 63, 64, 65, 100]
    contexts = [0, 1, 15, 16, 31, 64, 90]
    shape = case["shape"]
    if shape == "decode":
        query_lens = [1] * draw.randint(1, 4)
    elif shape == "drafts":
        query_lens = [draw.randint(1, 7) for _ in range(draw.randint(1, 3))]
        query_lens[0] = max(query_lens[0], 2)
    else:
        # many heads make a tile of few tokens, and the oracle works for every head
        most = 9 if case["heads"][0] > 16 else 40
        chunks = [draw.choice([1, 3, most // 2, most]) for _ in range(draw.randint(1, 2))]
        before = {"mixed": [1] * draw.randint(1, 2), "drafts and prefills": [3, draw.randint(1, 5)]}
        query_lens = before.get(shape, []) + chunks
    seq_lens = []
    for query_len in query_lens:
        length = prefix_len + query_len + draw.choice(contexts)
        if query_len == 1 and shape != "drafts" and not prefix_len:
            length = min(draw.choice(edges), 150)
        seq_lens.append(length)
    num_decodes = {
        "decode": len(query_lens),
        "drafts": len(query_lens),
        "prefill": 0,
        "drafts and prefills": 2,
    }.get(shape, sum(1 for i in range(len(query_lens)) if query_lens[: i + 1] == [1] * (i + 1)))
    if case["empty_rows"]:
        if shape == "drafts" or case["dispatch"] == "default":  # no queries
            query_lens.append(0)
            seq_lens.append(prefix_len + 9)
            num_decodes += shape in ("decode", "drafts")
        if num_decodes:  # a decode row that is padding
            query_lens.insert(0, 1)
            seq_lens.insert(0, 0)
            num_decodes += 1
        if shape not in ("decode", "drafts"):  # no queries, no keys, and more queries than keys
            query_lens += [0, 2] if prefix_len or case["cascade"] else [0, 2, 6]
            seq_lens += [prefix_len + 9, 0] if prefix_len or case["cascade"] else [9, 0, 4]
    return query_lens, seq_lens, num_decodes


def _ranges(seq_lens: list[int], draw: random.Random) -> torch.Tensor:
    """Two disjoint ranges a sequence: often at its end, where queries are, sometimes unused or out of the sequence."""
    ranges = []
    for seq_len in seq_lens:
        points = sorted(draw.randint(-4, seq_len + 3) for _ in range(3))
        end = seq_len + draw.choice([0, 0, 2])
        ranges.append([[points[0], points[1]], [max(points[1], end - draw.randint(0, 30)), end]])
    return torch.tensor(ranges, dtype=torch.int32).view(len(seq_lens), 2, 2)


def _add_spikes(batch: Batch, draw: random.Random) -> None:
    """Keys that draw all attention of what sees them, next to edges of blocks, tiles, splits and of every query's sight."""
    starts = batch.query_start_loc.tolist()
    group = batch.num_q_heads // batch.num_kv_heads
    for row, (seq_len, query_len) in enumerate(zip(batch.seq_lens, batch.query_lens, strict=True)):
        if seq_len == 0 or query_len == 0:
            continue
        query = draw.randrange(query_len)
        seen = batch.sight(row)[1][query].nonzero().flatten().tolist() or [0]
        tile = draw.choice([16, 32, 64, batch.block_size])
        edges = [0, seq_len - 1, seen[0], seen[-1], tile * draw.randint(0, seq_len // tile)]
        position = draw.choice(edges) + draw.choice([-1, 0])
        table = batch.table(row)
        if not 0 <= position < seq_len:
            continue
        block, offset = table[position // batch.block_size], position % batch.block_size
        if block >= batch.used.shape[0]:
            continue
        # a position out of every query's sight stays unread, so that only an edge within the batch's sight is spiked
        if not batch.used[block, offset]:
            continue
        toward = batch.q[starts[row] + query].float().unflatten(0, (batch.num_kv_heads, group))
        toward = toward.mean(1)
        spike = 3 * toward / toward.norm(dim=-1, keepdim=True).clamp_min(0.1) * batch.head_size**0.5
        batch.k_cache[block, offset] = batch.stored(spike)
