"""The oracle against torch: another route to the same numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from octavo.kernels import reference
from octavo.tests.kernels.cases import Batch

TIGHT = {"rtol": 1e-9, "atol": 1e-9}


def contiguous(batch: Batch, seq: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of one sequence as [1, heads, tokens, head_size], fp64."""
    start, stop = batch.query_start_loc[seq : seq + 2].tolist()
    keys, values = [], []
    for i in range(batch.seq_lens[seq]):
        block = batch.block_tables[seq, i // batch.block_size]
        keys.append(batch.k_cache[block, i % batch.block_size])
        values.append(batch.v_cache[block, i % batch.block_size])
    tensors = (batch.q[start:stop], torch.stack(keys), torch.stack(values))
    return tuple(t.double().transpose(0, 1)[None] for t in tensors)  # type: ignore[return-value]


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_sdpa(causal: bool, window: int | None) -> None:
    batch = Batch([9, 5, 17], [4, 5, 1], head_size_v=16, block_size=4)
    out, _ = reference.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, **batch.index, causal=causal, window=window
    )
    for seq, (start, stop) in enumerate(itertools.pairwise(batch.query_start_loc.tolist())):
        q, k, v = contiguous(batch, seq)
        query = torch.arange(batch.seq_lens[seq] - (stop - start), batch.seq_lens[seq])[:, None]
        key = torch.arange(batch.seq_lens[seq])
        mask = torch.ones(len(query), len(key), dtype=torch.bool)
        mask &= (key <= query) | (not causal)
        mask &= (key > query - window) if window is not None else True
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        torch.testing.assert_close(out[start:stop], expected[0].transpose(0, 1), **TIGHT)


def test_alibi_is_sdpa_with_a_bias_and_a_sink_is_sdpa_with_one_more_key() -> None:
    batch = Batch([11], [3], block_size=4)
    slopes, sinks = torch.rand(6), torch.randn(6)
    out, lse = reference.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, **batch.index, alibi_slopes=slopes, sinks=sinks
    )
    q, k, v = contiguous(batch, 0)
    distance = (torch.arange(11) - torch.arange(8, 11)[:, None]).double()
    bias = (slopes.double()[:, None, None] * distance).masked_fill(distance > 0, float("-inf"))
    bias = torch.cat([bias, sinks.double()[:, None, None].expand(6, 3, 1)], dim=-1)[None]
    k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
    torch.testing.assert_close(out, expected[0].transpose(0, 1), **TIGHT)
    logits = q @ k.repeat_interleave(3, 1).transpose(-1, -2) * 32**-0.5 + bias
    torch.testing.assert_close(lse, logits.logsumexp(-1)[0].t(), **TIGHT)


def test_softcap_is_between_scale_and_alibi() -> None:
    batch = Batch([6], [1], block_size=4)
    slopes = torch.rand(6)
    out, _ = reference.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, **batch.index, softcap=0.7, alibi_slopes=slopes
    )
    q, k, v = contiguous(batch, 0)
    k, v = (x.repeat_interleave(3, 1) for x in (k, v))
    scores = 0.7 * torch.tanh(q @ k.transpose(-1, -2) * 32**-0.5 / 0.7)
    scores = scores + slopes.double()[:, None, None] * (torch.arange(6) - 5)
    torch.testing.assert_close(out, (scores.softmax(-1) @ v)[0].transpose(0, 1), **TIGHT)


def test_rows_that_see_no_key() -> None:
    """B02: query length 0 and sequence length 0 are legal; so are more queries than tokens."""
    batch = Batch([0, 5, 2], [2, 0, 4], block_size=4)
    out, lse = reference.paged_attention(batch.q, batch.k_cache, batch.v_cache, **batch.index)
    empty = torch.tensor([True, True, True, True, False, False])
    assert (out[empty] == 0).all() and (lse[empty] == float("-inf")).all()
    assert out[~empty].isfinite().all() and lse[~empty].isfinite().all()


def test_merging_two_halves_is_attention_over_the_whole() -> None:
    q, k, v = torch.randn(3, 2, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)

    def attend(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.einsum("qhd,khd->qhk", q.double(), k[keys].double())
        return torch.einsum("qhk,khd->qhd", scores.softmax(-1), v[keys].double()), scores.logsumexp(
            -1
        )

    merged = reference.merge_attention_states(*attend(slice(0, 4)), *attend(slice(4, 9)))
    for actual, expected in zip(merged, attend(slice(0, 9)), strict=True):
        torch.testing.assert_close(actual, expected, **TIGHT)


def test_layer_ops_are_what_torch_computes() -> None:
    x, weight = torch.randn(4, 24).double(), torch.randn(24).double()
    torch.testing.assert_close(
        reference.rms_norm(x, weight, 1e-5), F.rms_norm(x, (24,), weight, 1e-5)
    )
    torch.testing.assert_close(reference.silu_and_mul(x), F.silu(x[:, :12]) * x[:, 12:])


@pytest.mark.parametrize("is_neox", [True, False])
def test_rotary_embedding_is_a_complex_product(is_neox: bool) -> None:
    angles = torch.randn(10, 4).double()
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions, q, k = torch.tensor([3, 0, 9]), torch.randn(3, 2, 12), torch.randn(3, 1, 12)
    for x, actual in zip(
        (q, k), reference.rotary_embedding(positions, q, k, cos_sin, is_neox), strict=True
    ):
        head = x[..., :8].double()
        pairs = head.unflatten(-1, (2, 4)).mT if is_neox else head.unflatten(-1, (4, 2))
        turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(
            torch.ones(3, 1, 4).double(), angles[positions][:, None]
        )
        turned = torch.view_as_real(turned)
        expected = turned.mT.flatten(-2) if is_neox else turned.flatten(-2)
        torch.testing.assert_close(actual[..., :8], expected, **TIGHT)
        torch.testing.assert_close(actual[..., 8:], x[..., 8:].double())
