"""KV into the cache, and blocks of a whole pool from place to place."""

from __future__ import annotations

import torch

from ... import kernels
from ..attention_problem import AttentionShape, WrongResult, make_problem
from ..batch_specs import BatchSpec
from ..timing import TimedCall
from .case import KernelCase, equal, relative_error

Tensor = torch.Tensor
_LAYERS = 8  # of the pool whose blocks move: megabytes a block at Llama-3-8B's shape would fill a small machine with 32


def _slots(batch: BatchSpec, shape: AttentionShape, tables: Tensor) -> tuple[Tensor, Tensor]:
    """(positions, slots) of the new tokens, both [T] int64, on the CPU."""
    positions, slots = [], []
    for seq, (query, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        new = torch.arange(length - query, length)
        positions.append(new)
        blocks = tables[seq, new // shape.block_size].long()
        slots.append(blocks * shape.block_size + new % shape.block_size)
    return torch.cat(positions), torch.cat(slots)


def rotated(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Heads of x [T, H, D] rotated in fp64, pairs (i, i + D / 2)."""
    cos, sin = cos_sin[positions].double().chunk(2, dim=-1)
    a, b = x.double().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def angles(length: int, head_size: int, device: torch.device) -> Tensor:
    """[length, head_size] fp32: cosines, then sines, of theta 10,000."""
    frequency = 10000.0 ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float().to(device)


def reshape_and_cache(batch: BatchSpec, shape: AttentionShape, device: torch.device) -> KernelCase:
    """New K and V of the batch to their slots; torch: two index_copy_ over the flat cache."""
    problem = make_problem(batch, shape, device)
    _, slots = _slots(batch, shape, problem.block_tables.cpu())
    slots = slots.to(device)
    size = (batch.num_tokens, shape.num_kv_heads, shape.head_size)
    k, v = (torch.randn(size, device=device).to(shape.dtype) for _ in range(2))
    caches = problem.k_cache, problem.v_cache
    scales = () if shape.cache_dtype is None else (torch.ones(1, device=device),) * 2
    flat = [cache.view(-1, *cache.shape[2:]) for cache in caches]

    def octavo() -> None:
        kernels.reshape_and_cache(k, v, *caches, slots, *scales)

    def plain() -> None:
        for cache, new in zip(flat, (k, v), strict=True):
            cache.index_copy_(0, slots, new)

    calls = {"octavo": TimedCall(octavo)}
    if shape.cache_dtype is None:
        calls["torch"] = TimedCall(plain)
    exact = [x.to(shape.stored_dtype) for x in (k, v)]
    return KernelCase(
        "reshape_and_cache",
        str(batch),
        str(shape),
        calls,
        lambda _: _written(flat, slots, exact),
        k.nbytes + v.nbytes + sum(x.nbytes for x in exact) + slots.nbytes,
        0,
        spoil=lambda: _zero(caches),
    )


def _zero(caches: tuple[Tensor, Tensor]) -> None:
    for cache in caches:
        cache.view(torch.uint8).zero_()


def _written(flat: list[Tensor], slots: Tensor, exact: list[Tensor]) -> float:
    """Of caches that were zero: the slots hold these vectors, and no other slot holds anything."""
    others = torch.ones(len(flat[0]), dtype=torch.bool, device=slots.device)
    others[slots] = False
    if any(bool(x.view(torch.uint8)[others].any()) for x in flat):
        raise WrongResult("a slot was written that is nobody's")
    return equal(_at(flat, slots), exact)


def _at(flat: list[Tensor], slots: Tensor) -> list[Tensor]:
    """What the slots of the caches hold; bytes, because indexing has no kernels for every fp8 dtype."""
    return [x.view(torch.uint8)[slots].view(x.dtype) if x.itemsize == 1 else x[slots] for x in flat]


def rope_and_cache(batch: BatchSpec, shape: AttentionShape, device: torch.device) -> KernelCase:
    """Queries rotated, keys rotated on their way to the cache; beside the two ops it fuses."""
    problem = make_problem(batch, shape, device)
    positions, slots = (x.to(device) for x in _slots(batch, shape, problem.block_tables.cpu()))
    cos_sin = angles(max(batch.seq_lens), shape.head_size, device)
    size = (batch.num_tokens, shape.num_kv_heads, shape.head_size)
    k, v = (torch.randn(size, device=device).to(shape.dtype) for _ in range(2))
    q, fresh_q, fresh_k = problem.q.clone(), problem.q, k.clone()
    caches = problem.k_cache, problem.v_cache
    scales = () if shape.cache_dtype is None else (torch.ones(1, device=device),) * 2
    flat = [cache.view(-1, *cache.shape[2:]) for cache in caches]

    def reset() -> None:
        q.copy_(fresh_q)
        k.copy_(fresh_k)

    def fused() -> None:
        kernels.rope_and_cache(positions, q, k, v, cos_sin, *caches, slots, True, *scales)

    def apart() -> None:
        kernels.rotary_embedding(positions, q, k, cos_sin)
        kernels.reshape_and_cache(k, v, *caches, slots, *scales)

    exact_q, exact_k = (rotated(x, positions, cos_sin) for x in (fresh_q, fresh_k))

    def check(_: object) -> float:
        keys, _ = _at(flat, slots)
        _written(flat, slots, [keys, v.to(shape.stored_dtype)])
        return relative_error([q, keys], [exact_q, exact_k])

    return KernelCase(
        "rope_and_cache",
        str(batch),
        str(shape),
        {"octavo": TimedCall(fused, reset), "two ops": TimedCall(apart, reset)},
        check,
        2 * q.nbytes
        + (k.nbytes + v.nbytes)
        + 2 * k.numel() * shape.stored_dtype.itemsize
        + batch.num_tokens * (16 + cos_sin[0].nbytes),  # a position, a slot, a row of angles
        3 * (q.numel() + k.numel()),
        spoil=lambda: _zero(caches),
    )


def _pool(num_blocks: int, shape: AttentionShape, device: torch.device) -> Tensor:
    """[num_blocks, bytes of a block over all layers] of random bytes."""
    block = 2 * _LAYERS * shape.block_size * shape.num_kv_heads * shape.head_size
    size = (num_blocks, block * shape.stored_dtype.itemsize)
    return torch.randint(0, 256, size, dtype=torch.uint8, device=device)


def _from_host(pairs: Tensor, device: torch.device) -> Tensor:
    """As a step has its pairs: on the host, and pinned for a GPU, so that every implementation has to move them."""
    return pairs.pin_memory() if device.type == "cuda" else pairs


def copy_blocks(batch: BatchSpec, shape: AttentionShape, device: torch.device) -> KernelCase:
    """One block of each sequence copied on write, all layers; torch: one indexed copy."""
    count = batch.num_seqs
    pool = _pool(2 * count + 1, shape, device)
    order = (1 + torch.randperm(2 * count)).tolist()
    pairs = _from_host(torch.tensor(list(zip(order[:count], order[count:], strict=True))), device)
    sources, targets = pairs.to(device).unbind(1)
    exact = pool.clone()
    exact[targets] = pool[sources]

    def plain() -> None:
        source, target = pairs.to(device, non_blocking=True).unbind(1)
        pool[target] = pool[source]

    return KernelCase(
        "copy_blocks",
        f"{count} blocks",
        f"{shape} {_LAYERS} layers",
        {
            "octavo": TimedCall(lambda: kernels.copy_blocks(pool, pairs)),
            "torch": TimedCall(plain),
        },
        lambda _: equal([pool], [exact]),
        2 * count * pool[0].nbytes,
        0,
        spoil=lambda: pool.index_fill_(0, targets, 0),
    )


def swap_blocks(batch: BatchSpec, shape: AttentionShape, device: torch.device) -> KernelCase:
    """All blocks of the batch to host memory, in runs as a used pool has them; torch: one copy after an index."""
    counts = [-(-length // shape.block_size) for length in batch.seq_lens]
    total = min(sum(counts), 4096)
    source = _pool(2 * total + 1, shape, device)
    on_gpu = device.type == "cuda"
    target = torch.zeros(total + 1, source.shape[1], dtype=torch.uint8, pin_memory=on_gpu)
    firsts = 1 + 2 * torch.randperm(total)[: -(-total // 2)]
    ids = torch.stack([firsts, firsts + 1], dim=1).flatten()[:total]  # blocks that lie in twos
    pairs = _from_host(torch.stack([ids, torch.arange(1, total + 1)], dim=1), device)
    exact = torch.zeros_like(target)
    exact[1:] = source[pairs[:, 0].to(device)].cpu()

    def swap() -> None:
        kernels.swap_blocks(source, target, pairs)

    def plain() -> None:
        sources = pairs.to(device, non_blocking=True)[:, 0]
        target[1:].copy_(source[sources], non_blocking=True)

    def check(_: object) -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return equal([target], [exact])

    return KernelCase(
        "swap_blocks",
        f"{total} blocks",
        f"{shape} {_LAYERS} layers",
        {"octavo": TimedCall(swap), "torch": TimedCall(plain)},
        check,
        2 * exact[1:].nbytes,
        0,
        spoil=target.zero_,
    )
