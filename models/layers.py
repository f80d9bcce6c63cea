"""Layers to build a model from. T tokens of all sequences lie in one axis; what a batch is, `args` says.

Every layer allocates its parameters unset: `load_model` fills them, and refuses a checkpoint that does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from ..runtime.kv_pool import KVPool, LayerKV, Layers
from ..runtime.launch_args import LaunchArgs
from .rotary import rotary_table

if TYPE_CHECKING:
    from .adapters import LinearAdapters


def kv_layers(
    model: nn.Module, config: Any, dtype: torch.dtype, scale_per_token_head: bool = False
) -> Layers:
    """What the pool has to keep for each layer: `model.kv_layers(dtype)` if the model says it, else layers all alike."""
    if (own := getattr(model, "kv_layers", None)) is not None:
        layers = own(dtype)
    else:
        layer = LayerKV(config.num_key_value_heads, config.head_dim, dtype)
        layers = [layer] * config.num_hidden_layers
    if not scale_per_token_head:
        return layers
    return [
        layer if isinstance(layer, int) else replace(layer, scale_per_token_head=True)
        for layer in layers
    ]


def layer_windows(config: Any) -> list[int | None]:
    """Tokens a query of each layer may see, itself included; None for all."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def widest_window(config: Any) -> int | None:
    """The window behind which blocks may be freed: all layers share a block table, so if one sees all, none may."""
    limited = [window for window in layer_windows(config) if window is not None]
    return max(limited) if len(limited) == config.num_hidden_layers else None


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
    takes_adapters  `forward` is called with the step's `args`, so that tokens can have low-rank adapters (see `adapters`)
    """

    # Rows the CPU's packed order is meant for. Any number >= 2 gives the same order, good for all numbers of rows.
    _PACKED_FOR_ROWS = 16

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        bias: bool = False,
        takes_adapters: bool = False,
    ) -> None:
        super().__init__()
        self.takes_adapters = takes_adapters
        self.adapters: LinearAdapters | None = None  # what `Adapters` puts here
        self.parts = {} if isinstance(out_features, int) else dict(out_features)
        rows = out_features if isinstance(out_features, int) else sum(self.parts.values())
        self.in_features, self.out_features = in_features, rows
        self.weight = _unset(rows, in_features)
        self.bias = _unset(rows) if bias else None
        self.is_packed = False

    def forward(self, x: Tensor, args: LaunchArgs | None = None) -> Tensor:
        if self.is_packed:
            out = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        else:
            out = F.linear(x, self.weight, self.bias)
        if self.adapters is not None and args is not None and args.lora_token_order is not None:
            self.adapters.add(x, out, args)
        return out

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


def _check_groups(num_heads: int, num_kv_heads: int) -> None:
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads: expected a multiple of num_kv_heads {num_kv_heads}, got {num_heads}"
        )


class Attention(nn.Module):
    """Writes k and v [T, Hkv, D] to their slots and attends q [T, Hq, D] over the paged cache -> [T, Hq, Dv].

    Without k and v it reads what is there: for layers that share the K and V of an earlier one.

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
        _check_groups(num_heads, num_kv_heads)
        self.num_heads = num_heads
        self.layer = layer
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window
        self.softcap = softcap

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        args: LaunchArgs,
        kv: KVPool,
        rotary: RotaryEmbedding | None = None,
    ) -> Tensor:
        (k_cache, v_cache), (k_scale, v_scale) = kv.layer(self.layer), kv.scales(self.layer)
        slots = args.slot_mapping
        if (k is None) != (v is None):
            missing, other = ("k", "v") if k is None else ("v", "k")
            raise ValueError(f"{missing}: expected a tensor with {other}, or neither, got None")
        if k is None or v is None:
            if rotary is not None:
                raise ValueError(
                    "rotary: expected None without k and v, q is rotated by the caller"
                )
        elif rotary is None:
            kernels.reshape_and_cache(k, v, k_cache, v_cache, slots, k_scale, v_scale)
        else:
            kernels.rope_and_cache(
                args.positions,
                q,
                k,
                v,
                rotary.cos_sin,
                k_cache,
                v_cache,
                slots,
                True,
                k_scale,
                v_scale,
            )
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
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return cast(Tensor, out)  # a pair only when lse is asked for


class CrossAttention(nn.Module):
    """Attends q [T, Hq, D] of a decoder to all of the encoder's keys and values, in the cross blocks -> [T, Hq, Dv].

    k and v [E, Hkv, D] are what the layer makes of the encoder's output for the tokens of `args.encoder_input_ids`: they
    are written to their slots once, and read in all later steps. None when no encoder runs in this step.

    layer  index in the pool, that of the decoder's own K and V: the two lie in blocks of their own
    scale  of the scores, head_dim ** -0.5 by default
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        layer: int,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        _check_groups(num_heads, num_kv_heads)
        self.layer = layer
        self.scale = head_dim**-0.5 if scale is None else scale

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, args: LaunchArgs, kv: KVPool
    ) -> Tensor:
        (k_cache, v_cache), (k_scale, v_scale) = kv.layer(self.layer), kv.scales(self.layer)
        for name, x in (("k", k), ("v", v)):
            if (x is None) != (args.cross_slot_mapping is None):
                wanted = "None in a step without" if x is not None else "a tensor in a step with"
                raise ValueError(
                    f"{name}: expected {wanted} encoder tokens, got {'one' if x is not None else 'None'}"
                )
        if k is not None and v is not None and args.cross_slot_mapping is not None:
            kernels.reshape_and_cache(
                k, v, k_cache, v_cache, args.cross_slot_mapping, k_scale, v_scale
            )
        if args.cross_seq_lens is None or args.cross_block_tables is None:
            return q.new_zeros(*q.shape[:2], v_cache.shape[3])  # as rows of no keys in a mixed step
        out = kernels.paged_attention(
            q,
            k_cache,
            v_cache,
            query_start_loc=args.query_start_loc,
            seq_lens=args.cross_seq_lens,
            block_tables=args.cross_block_tables,
            max_query_len=args.max_query_len,
            max_seq_len=args.max_cross_seq_len,
            num_decodes=args.num_decodes,
            scale=self.scale,
            k_scale=k_scale,
            v_scale=v_scale,
            causal=False,
        )
        return cast(Tensor, out)


class EncoderAttention(nn.Module):
    """Attends q [E, Hq, D] of the step's encoder tokens to k and v [E, Hkv, D], each to all of its own sequence -> [E, Hq, Dv].

    Nothing is cached: the packed keys are looked at as a cache of blocks of one token, whose ids are places in the batch
    (`args.encoder_block_tables`). So encoder inputs of any lengths run unpadded in one launch, by the kernels that are
    there. It costs four bytes of table for each key.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float | None = None
    ) -> None:
        super().__init__()
        _check_groups(num_heads, num_kv_heads)
        self.scale = head_dim**-0.5 if scale is None else scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, args: LaunchArgs) -> Tensor:
        starts, lens, tables = (
            args.encoder_query_start_loc,
            args.encoder_seq_lens,
            args.encoder_block_tables,
        )
        if starts is None or lens is None or tables is None:
            raise ValueError("args: expected the tokens of at least one encoder, got none")
        out = kernels.paged_attention(
            q,
            k.unsqueeze(1),
            v.unsqueeze(1),
            query_start_loc=starts,
            seq_lens=lens,
            block_tables=tables,
            max_query_len=args.max_encoder_seq_len,
            max_seq_len=args.max_encoder_seq_len,
            num_decodes=0,
            scale=self.scale,
            causal=False,
        )
        return cast(Tensor, out)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up fused."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = Linear(hidden_size, parts, bias, takes_adapters=True)
        self.down_proj = Linear(intermediate_size, hidden_size, bias, takes_adapters=True)

    def forward(self, x: Tensor, args: LaunchArgs | None = None) -> Tensor:
        return self.down_proj(kernels.silu_and_mul(self.gate_up_proj(x, args)), args)
