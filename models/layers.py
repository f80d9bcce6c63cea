"""Layers to build a model from. T tokens of all sequences lie in one axis; what a batch is, `args` says.

Every layer allocates its parameters unset: `load_model` fills them, and refuses a checkpoint that does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from ..runtime.kv_pool import KVPool
from ..runtime.launch_args import LaunchArgs
from .rotary import rotary_table


def _unset(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Embedding(nn.Module):
    """Token ids [T] -> hidden [T, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = _unset(vocab_size, hidden_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight)


class Linear(nn.Module):
    """x [..., in_features] -> x @ weight.T + bias; several projections of one input may be fused into one.

    out_features  the size, or for a fused projection the size of each part by the name its checkpoint gives it:
                  `self.qkv_proj = Linear(hidden, {"q_proj": q, "k_proj": kv, "v_proj": kv})` loads `q_proj.weight`,
                  `k_proj.weight` and `v_proj.weight` from beside it, and `forward` returns the parts in one tensor
    """

    # Rows the CPU's packed order is meant for. Any number >= 2 gives the same order, good for all numbers of rows.
    _PACKED_FOR_ROWS = 16

    def __init__(
        self, in_features: int, out_features: int | Mapping[str, int], bias: bool = False
    ) -> None:
        super().__init__()
        self.parts = {} if isinstance(out_features, int) else dict(out_features)
        rows = out_features if isinstance(out_features, int) else sum(self.parts.values())
        self.weight = _unset(rows, in_features)
        self.bias = _unset(rows) if bias else None
        self.is_packed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Reorder a loaded fp32 weight on a CPU as oneDNN's matrix product reads it, in place of the plain weight.

        BLAS repacks a plain weight in every call with more than one row. For all the layers of a 135M Llama on two
        AVX2 cores, plain and packed take 43 and 28 ms with 1 row, 81 and 30 with 2, 99 and 61 with 16, 218 and 174
        with 64. Does nothing on other devices and for other dtypes, which gain nothing from it.
        """
        weight = self.weight
        is_fp32_on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
        if is_fp32_on_cpu and torch.backends.mkldnn.is_available() and not self.is_packed:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), self._PACKED_FOR_ROWS)
            self.weight = nn.Parameter(packed, requires_grad=False)
            self.is_packed = True


class RMSNorm(nn.Module):
    """(x, residual) -> (norm(x + residual) * weight, x + residual), in one pass over memory.

    Without a residual, x itself starts the residual stream.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = _unset(size)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return kernels.rms_norm(x, self.weight, self.eps), x
        return kernels.fused_add_rms_norm(x, residual, self.weight, self.eps)


class RotaryEmbedding(nn.Module):
    """Rotates q [T, Hq, D] and k [T, Hkv, D] in place by their positions [T]; one is shared by all layers. `Attention`
    takes one to rotate on the way to the cache.

    config  gives head_dim, max_position_embeddings and rope_parameters, see `rotary`
    """

    cos_sin: Tensor  # fp32 [max_position_embeddings, D]: cosines, then sines, of D / 2 frequencies

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.register_buffer("cos_sin", rotary_table(config), persistent=False)

    def forward(self, positions: Tensor, q: Tensor, k: Tensor) -> None:
        kernels.rotary_embedding(positions, q, k, self.cos_sin)


class Attention(nn.Module):
    """Writes k and v [T, Hkv, D] to their slots and attends q [T, Hq, D] over the paged cache -> [T, Hq, D].

    With `rotary`, q (in place) and what is cached of k are rotated by their positions before, in the same pass over memory
    as the write; k itself stays as it is.

    layer    index of the layer's K and V in the pool
    scale    of the scores, head_dim ** -0.5 by default
    window   tokens a query may see, itself included; None for all
    softcap  c in c * tanh(score / c); None for none
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        layer: int,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads: expected a multiple of num_kv_heads {num_kv_heads}, got {num_heads}"
            )
        self.layer = layer
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window
        self.softcap = softcap

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        args: LaunchArgs,
        kv: KVPool,
        rotary: RotaryEmbedding | None = None,
    ) -> Tensor:
        k_cache, v_cache = kv.layer(self.layer)
        slots = args.slot_mapping
        if rotary is None:
            kernels.reshape_and_cache(k, v, k_cache, v_cache, slots)
        else:
            cos_sin = rotary.cos_sin
            kernels.rope_and_cache(args.positions, q, k, v, cos_sin, k_cache, v_cache, slots)
        out = kernels.paged_attention(
            q,
            k_cache,
            v_cache,
            query_start_loc=args.query_start_loc,
            seq_lens=args.seq_lens,
            block_tables=args.block_tables,
            max_query_len=args.max_query_len,
            max_seq_len=args.max_seq_len,
            num_decodes=args.num_decodes,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
        )
        return cast(Tensor, out)  # a pair only when lse is asked for


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up fused."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = Linear(hidden_size, parts, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(kernels.silu_and_mul(self.gate_up_proj(x)))
