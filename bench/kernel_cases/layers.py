"""What stands around attention in a transformer's layer, on the new tokens of a batch."""

from __future__ import annotations

import torch
from torch.nn import functional

from ... import kernels
from ..attention_problem import AttentionShape
from ..batch_specs import BatchSpec
from ..timing import TimedCall
from .case import KernelCase, relative_error
from .memory import angles, rotated

Tensor = torch.Tensor
_EPS = 1e-5
_RANK, _ADAPTERS = 16, 4


def _hidden(shape: AttentionShape) -> int:
    return shape.num_q_heads * shape.head_size


def _random(*size: int, shape: AttentionShape, device: torch.device) -> Tensor:
    return torch.randn(size, device=device).to(shape.dtype)


def _label(shape: AttentionShape, size: int) -> str:
    return f"{size} {str(shape.dtype).removeprefix('torch.')}"


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + _EPS).rsqrt() * weight.double()


def rms_norm(batch: BatchSpec, shape: AttentionShape, device: torch.device) -> KernelCase:
    size = _hidden(shape)
    x = _random(batch.num_tokens, size, shape=shape, device=device)
    weight = _random(size, shape=shape, device=device)
    exact = _normed(x, weight)
    return KernelCase(
        "rms_norm",
        str(batch),
        _label(shape, size),
        {
            "octavo": TimedCall(lambda: kernels.rms_norm(x, weight, _EPS)),
            "torch": TimedCall(lambda: functional.rms_norm(x, (size,), weight, _EPS)),
        },
        lambda got: relative_error([got], [exact]),
        2 * x.nbytes + weight.nbytes,
        4 * x.numel(),
    )


def fused_add_rms_norm(batch: BatchSpec, shape: AttentionShape, device: torch.device) -> KernelCase:  # fmt: skip
    size = _hidden(shape)
    x, residual = (_random(batch.num_tokens, size, shape=shape, device=device) for _ in range(2))
    weight = _random(size, shape=shape, device=device)

    def plain() -> tuple[Tensor, Tensor]:
        total = x + residual
        return functional.rms_norm(total, (size,), weight, _EPS), total

    exact = _normed(x + residual, weight), x.double() + residual.double()
    return KernelCase(
        "fused_add_rms_norm",
        str(batch),
        _label(shape, size),
        {
            "octavo": TimedCall(lambda: kernels.fused_add_rms_norm(x, residual, weight, _EPS)),
            "torch": TimedCall(plain),
        },
        lambda got: relative_error(got, exact),
        4 * x.nbytes + weight.nbytes,
        5 * x.numel(),
    )


def rotary_embedding(batch: BatchSpec, shape: AttentionShape, device: torch.device) -> KernelCase:
    """In place; torch: rotated halves, as models write it, into new tensors."""
    positions = torch.cat(
        [torch.arange(s - q, s) for q, s in zip(batch.query_lens, batch.seq_lens, strict=True)]
    ).to(device)
    cos_sin = angles(max(batch.seq_lens), shape.head_size, device)
    fresh = [
        _random(batch.num_tokens, heads, shape.head_size, shape=shape, device=device)
        for heads in (shape.num_q_heads, shape.num_kv_heads)
    ]
    q, k = (x.clone() for x in fresh)

    def reset() -> None:
        for x, y in zip((q, k), fresh, strict=True):
            x.copy_(y)

    def octavo() -> tuple[Tensor, Tensor]:
        kernels.rotary_embedding(positions, q, k, cos_sin)
        return q, k

    def plain() -> list[Tensor]:
        both = cos_sin[positions].to(shape.dtype)
        cos, sin = (x.repeat(1, 2)[:, None] for x in both.chunk(2, dim=-1))
        out = []
        for x in (q, k):
            a, b = x.chunk(2, dim=-1)
            out.append(x * cos + torch.cat([-b, a], dim=-1) * sin)
        return out

    exact = [rotated(x, positions, cos_sin) for x in fresh]
    return KernelCase(
        "rotary_embedding",
        str(batch),
        str(shape),
        {"octavo": TimedCall(octavo, reset), "torch": TimedCall(plain, reset)},
        lambda got: relative_error(got, exact),
        2 * (q.nbytes + k.nbytes) + batch.num_tokens * (8 + cos_sin[0].nbytes),
        3 * (q.numel() + k.numel()),
    )


def gate_and_mul(
    batch: BatchSpec, shape: AttentionShape, device: torch.device, *, op: str
) -> KernelCase:
    """The gate of a feed-forward part 3.5 times as wide as the model, Llama-3's ratio."""
    size = 7 * _hidden(shape) // 2
    x = _random(batch.num_tokens, 2 * size, shape=shape, device=device)
    activation = functional.silu if op == "silu_and_mul" else functional.gelu
    call = getattr(kernels, op)
    exact = activation(x[:, :size].double()) * x[:, size:].double()
    return KernelCase(
        op,
        str(batch),
        _label(shape, size),
        {
            "octavo": TimedCall(lambda: call(x)),
            "torch": TimedCall(lambda: activation(x[:, :size]) * x[:, size:]),
        },
        lambda got: relative_error([got], [exact]),
        x.nbytes + x.nbytes // 2,
        5 * x.numel() // 2,
    )


def lora(batch: BatchSpec, shape: AttentionShape, device: torch.device) -> KernelCase:
    """Shrink and expand of a square projection, four adapters of rank 16 over the tokens; torch: one adapter after another."""
    size = _hidden(shape)
    x = _random(batch.num_tokens, size, shape=shape, device=device)
    a = _random(_ADAPTERS, _RANK, size, shape=shape, device=device) / size**0.5
    b = _random(_ADAPTERS, size, _RANK, shape=shape, device=device)
    ids = (torch.arange(batch.num_tokens) % _ADAPTERS).to(torch.int32).to(device)
    ranks = torch.full((_ADAPTERS,), _RANK, dtype=torch.int32, device=device)
    order, starts = kernels.group_by_adapter(ids, _ADAPTERS)
    rows = [(ids == adapter).nonzero().flatten() for adapter in range(_ADAPTERS)]
    out = torch.zeros_like(x)

    def octavo() -> Tensor:
        y = kernels.lora_shrink(x, a, ranks, order, starts, 1.0)
        kernels.lora_expand(y, b, ranks, order, starts, out)
        return out

    def plain() -> Tensor:
        for adapter, tokens in enumerate(rows):
            out.index_add_(0, tokens, x[tokens] @ a[adapter].T @ b[adapter].T)
        return out

    exact = torch.zeros(x.shape, dtype=torch.float64, device=device)
    for adapter, tokens in enumerate(rows):
        exact[tokens] = x[tokens].double() @ a[adapter].T.double() @ b[adapter].T.double()
    return KernelCase(
        "lora",
        str(batch),
        f"{_label(shape, size)} rank {_RANK} {_ADAPTERS} adapters",
        {"octavo": TimedCall(octavo, out.zero_), "torch": TimedCall(plain, out.zero_)},
        lambda got: relative_error([got], [exact]),
        x.nbytes + a.nbytes + b.nbytes + 2 * out.nbytes,
        4 * batch.num_tokens * _RANK * size,
    )
