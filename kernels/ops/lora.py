"""Low-rank adapters of linear layers: any mixture of adapters, ranks and tokens without one in a batch."""

from __future__ import annotations

import torch

from .. import cpu
from ._registry import no_result, register, triton_op

Tensor = torch.Tensor

_group_by_adapter = register(
    "group_by_adapter",
    "(Tensor adapter_ids, SymInt num_adapters) -> (Tensor, Tensor)",
    cpu.group_by_adapter,  # torch's sort and search, on any device
    lambda adapter_ids, num_adapters: (
        torch.empty_like(adapter_ids, memory_format=torch.contiguous_format),
        adapter_ids.new_empty(num_adapters + 1),
    ),
)


def group_by_adapter(adapter_ids: Tensor, num_adapters: int) -> tuple[Tensor, Tensor]:
    """(token_order, adapter_starts), both int32: made once a step and used by every layer's `lora_shrink` and `_expand`.

    adapter_ids  [num_tokens] int32   in [0, num_adapters); negative: the token has no adapter
    The tokens of adapter i are token_order[adapter_starts[i] : adapter_starts[i + 1]], in ascending order. Tokens
    without an adapter lie before adapter_starts[0]. Never waits for the device; a host that knows the ids may as well
    make both itself.
    """
    return _group_by_adapter(adapter_ids, num_adapters)


_lora_shrink = register(
    "lora_shrink",
    "(Tensor x, Tensor a, Tensor ranks, Tensor token_order, Tensor adapter_starts, float scale)"
    " -> Tensor",
    triton_op(".lora", "lora_shrink"),
    lambda x, a, *_: x.new_empty(x.shape[0], a.shape[1], dtype=torch.float32),
)


def lora_shrink(
    x: Tensor, a: Tensor, ranks: Tensor, token_order: Tensor, adapter_starts: Tensor, scale: float
) -> Tensor:
    """scale * a[adapter, :rank] @ x[t] for each token t: y [num_tokens, max_rank] fp32.

    x               [num_tokens, in_features]              fp32 | fp16 | bf16; last axis contiguous
    a               [num_adapters, max_rank, in_features]  dtype of x; rows past an adapter's rank are not read
    ranks           [num_adapters] int32                   may differ, and be 0
    token_order     [num_tokens] int32                     } of `group_by_adapter`
    adapter_starts  [num_adapters + 1] int32               }
    Rows of y without an adapter, and columns past an adapter's rank, may hold anything.
    """
    return _lora_shrink(x, a, ranks, token_order, adapter_starts, scale)


_lora_expand = register(
    "lora_expand",
    "(Tensor y, Tensor b, Tensor ranks, Tensor token_order, Tensor adapter_starts, Tensor(a!) out)"
    " -> ()",
    triton_op(".lora", "lora_expand"),
    no_result,
)


def lora_expand(
    y: Tensor, b: Tensor, ranks: Tensor, token_order: Tensor, adapter_starts: Tensor, out: Tensor
) -> None:
    """out[t] += b[adapter, :, :rank] @ y[t, :rank] for each token t that has an adapter, in place.

    y    [num_tokens, max_rank] fp32              from `lora_shrink`; rounded to the dtype of b
    b    [num_adapters, out_features, max_rank]   fp32 | fp16 | bf16; last axis contiguous; columns past an adapter's
         rank are not read
    out  [num_tokens, out_features]               dtype of b; any row stride (a part of a fused projection), last axis
         contiguous
    ranks, token_order, adapter_starts            as in `lora_shrink`
    """
    _lora_expand(y, b, ranks, token_order, adapter_starts, out)
