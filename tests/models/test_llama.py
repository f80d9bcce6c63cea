"""Tiny random models, saved by transformers, must give transformers' logits through paged KV in any chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from octavo.kernels import reference
from octavo.models import Attention, RotaryEmbedding, load_model, resolve_model
from octavo.models import LlamaForCausalLM as OurLlama
from octavo.models.layers import layer_windows, widest_window
from octavo.runtime.kv_pool import KVPool, LayerKV
from octavo.runtime.launch_args import LaunchArgs
from octavo.tests.models.paged import PagedRun

SIZES = dict(
    vocab_size=199,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
WINDOW = dict(use_sliding_window=True, sliding_window=5)
YARN = dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=16)
LINEAR = dict(rope_type="linear", rope_theta=1000.0, factor=3.0)

CASES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, dict(tie_word_embeddings=True)),
    "llama-head-dim-32": (LlamaForCausalLM, LlamaConfig, dict(head_dim=32)),
    "llama-biases": (LlamaForCausalLM, LlamaConfig, dict(attention_bias=True, mlp_bias=True)),
    "llama-rope-linear": (LlamaForCausalLM, LlamaConfig, dict(rope_parameters=LINEAR)),
    "llama-rope-llama3": (LlamaForCausalLM, LlamaConfig, dict(rope_parameters=LLAMA3)),
    "llama-rope-yarn": (LlamaForCausalLM, LlamaConfig, dict(rope_parameters=YARN)),
    "mistral-window-5": (MistralForCausalLM, MistralConfig, dict(sliding_window=5)),
    "mistral-no-window": (MistralForCausalLM, MistralConfig, dict(sliding_window=None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2-windows-from-layer-1": (
        Qwen2ForCausalLM,
        Qwen2Config,
        WINDOW | dict(max_window_layers=1),
    ),
    "qwen2-window-in-the-middle": (
        Qwen2ForCausalLM,
        Qwen2Config,
        WINDOW | dict(layer_types=["full_attention", "sliding_attention", "full_attention"]),
    ),
    "qwen2-window-that-no-layer-has": (
        Qwen2ForCausalLM,
        Qwen2Config,
        WINDOW | dict(max_window_layers=9),
    ),
}


def save(directory: Path, case: str, dtype: torch.dtype = torch.float32, **save_options):
    """A model with random parameters, biases and norms included, as transformers writes it."""
    model_class, config_class, changes = CASES[case]
    torch.manual_seed(0)
    model = model_class(config_class(**(SIZES | changes))).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(directory, **save_options)
    return model


def sequences(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, SIZES["vocab_size"], (n,), generator=generator) for n in lengths]


@torch.inference_mode()
def expected_logits(hf, tokens: torch.Tensor) -> torch.Tensor:
    return hf(tokens[None]).logits[0]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_in_chunks_and_decode(case: str, tmp_path: Path) -> None:
    hf = save(tmp_path, case)
    model, config = load_model(resolve_model(str(tmp_path)))
    tokens = sequences(23, 9, 14)
    run = PagedRun(model, config, tokens)
    schedule = [
        [(0, 7), (1, 5)],
        [(1, 1), (0, 6), (2, 3)],
        [(1, 1), (0, 5), (2, 11)],
        [(0, 1), (1, 1)],
        [(0, 1), (1, 1)],
        [(0, 1)],
        [(0, 2)],
    ]
    got: list[list[torch.Tensor]] = [[], [], []]
    for chunks in schedule:
        for (sequence, _), logits in zip(chunks, run.step(chunks), strict=True):
            got[sequence].append(logits)
    for sequence, parts in zip(tokens, got, strict=True):
        expected = expected_logits(hf, sequence)
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_rotates_on_the_way_to_the_cache(dtype: torch.dtype) -> None:
    """With a rotary embedding it does what rotating first does, to the bit, and leaves k alone."""
    config = LlamaConfig(**SIZES)
    rotary, attention = RotaryEmbedding(config), Attention(6, 2, 8, layer=1)
    qkv = torch.randn(7, 10, 8).to(dtype)
    args = LaunchArgs(
        input_ids=torch.zeros(7, dtype=torch.int64),
        positions=torch.arange(7),
        slot_mapping=torch.tensor([4, 5, 6, 7, 12, 13, 14]),
        query_start_loc=torch.tensor([0, 7], dtype=torch.int32),
        seq_lens=torch.tensor([7], dtype=torch.int32),
        block_tables=torch.tensor([[1, 3]], dtype=torch.int32),
        logits_indices=torch.tensor([6]),
        num_decodes=0,
        max_query_len=7,
        max_seq_len=7,
    )
    results = []
    for fused in (False, True):
        pool = KVPool(4, [LayerKV(2, 8, dtype)] * 3, 4)
        q, k, v = qkv.clone().split((6, 2, 2), dim=1)
        if fused:
            out = attention(q, k, v, args, pool, rotary)
            assert torch.equal(k, qkv[:, 6:8])
        else:
            rotary(args.positions, q, k)
            out = attention(q, k, v, args, pool)
        results.append((out, pool.data))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert results[0][1].any()
    for half in ((k, None), (None, v)):  # what was written is not known, so nothing may be read
        with pytest.raises(ValueError, match=r"expected a tensor with [kv], or neither, got None"):
            attention(q, *half, args, pool)


def test_attention_heeds_scale_window_and_softcap() -> None:
    """Each changes the result, to that of the oracle."""
    q, k, v = torch.randn(7, 4, 8), 3 * torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    index = dict(
        query_start_loc=torch.tensor([0, 7], dtype=torch.int32),
        seq_lens=torch.tensor([7], dtype=torch.int32),
        block_tables=torch.tensor([[1, 3]], dtype=torch.int32),
    )
    args = LaunchArgs(
        input_ids=torch.zeros(7, dtype=torch.int64),
        positions=torch.arange(7),
        slot_mapping=torch.tensor([4, 5, 6, 7, 12, 13, 14]),
        logits_indices=torch.tensor([6]),
        num_decodes=0,
        max_query_len=7,
        max_seq_len=7,
        **index,
    )
    results = []
    for options in ({}, {"scale": 1.5}, {"window": 3}, {"softcap": 2.0}):
        pool = KVPool(4, [LayerKV(2, 8, torch.float32)], 4)
        out = Attention(4, 2, 8, layer=0, **options)(q, k, v, args, pool)
        exact, _ = reference.paged_attention(q, *pool.layer(0), **index, **options)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
        results.append(out)
    assert not any(torch.allclose(results[0], out, atol=1e-2) for out in results[1:])


def test_bf16_checkpoint_keeps_its_dtype_unless_told(tmp_path: Path) -> None:
    save(tmp_path, "llama", torch.bfloat16)
    source = resolve_model(str(tmp_path))
    kept, _ = load_model(source)
    assert {parameter.dtype for parameter in kept.parameters()} == {torch.bfloat16}
    model, config = load_model(source, torch.float32)
    (tokens,) = sequences(17)
    (logits,) = PagedRun(model, config, [tokens]).step([(0, 17)])
    hf = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits, expected_logits(hf, tokens), rtol=1e-4, atol=1e-4)


def test_sharded_checkpoint_equals_whole(tmp_path: Path) -> None:
    save(tmp_path / "whole", "llama-tied")
    save(tmp_path / "sharded", "llama-tied", max_shard_size="40KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    (tokens,) = sequences(9)
    got = []
    for name in ("whole", "sharded"):
        model, config = load_model(resolve_model(str(tmp_path / name)))
        got += PagedRun(model, config, [tokens]).step([(0, 9)])
    assert torch.equal(*got)


def test_packed_weights_are_the_same_weights(tmp_path: Path) -> None:
    save(tmp_path, "llama-biases")
    source = resolve_model(str(tmp_path))
    plain, config = load_model(source, pack=False)
    packed, _ = load_model(source)
    assert packed.lm_head.is_packed == torch.backends.mkldnn.is_available()
    (tokens,) = sequences(13)
    for size in (1, 2, 5, 13):
        results = [PagedRun(m, config, [tokens]).step([(0, size)])[0] for m in (plain, packed)]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    for a, b in zip(plain.parameters(), packed.parameters(), strict=False):
        assert torch.equal(a, b.to_dense() if b.is_mkldnn else b)


def test_layers_of_another_kind_are_refused() -> None:
    config = Qwen2Config(**SIZES, layer_types=["full_attention"] * 2 + ["chunked_attention"])
    with pytest.raises(ValueError, match=r"layer_types: .* got chunked_attention"):
        OurLlama(config)


@pytest.mark.parametrize(
    ("config", "windows", "widest"),
    [
        (MistralConfig(**SIZES, sliding_window=7), [7, 7, 7], 7),
        (MistralConfig(**SIZES, sliding_window=None), [None] * 3, None),
        (LlamaConfig(**SIZES), [None] * 3, None),
        (Qwen2Config(**SIZES, **WINDOW, max_window_layers=0), [5, 5, 5], 5),
        (Qwen2Config(**SIZES, **WINDOW, max_window_layers=2), [None, None, 5], None),
        (Qwen2Config(**SIZES, **WINDOW, max_window_layers=3), [None] * 3, None),
    ],
)
def test_blocks_are_freed_behind_a_window_only_if_all_layers_have_one(config, windows, widest):
    assert layer_windows(config) == windows
    assert widest_window(config) == widest


def test_a_layer_may_read_what_an_earlier_one_wrote() -> None:
    """Two layers over one K and V; only the first writes them, in a pool that keeps them once."""
    pool = KVPool(3, [LayerKV(2, 8, torch.float32), 0], block_size=4)
    args = LaunchArgs(
        input_ids=torch.zeros(5, dtype=torch.int64),
        positions=torch.arange(5),
        slot_mapping=torch.tensor([8, 9, 10, 11, 4]),
        query_start_loc=torch.tensor([0, 5], dtype=torch.int32),
        seq_lens=torch.tensor([5], dtype=torch.int32),
        block_tables=torch.tensor([[2, 1]], dtype=torch.int32),
        logits_indices=torch.tensor([4]),
        num_decodes=0,
        max_query_len=5,
        max_seq_len=5,
    )
    first, second = (Attention(4, 2, 8, layer) for layer in (0, 1))
    q, k, v = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    expected = first(q, k, v, args, pool)
    before = pool.data.clone()
    assert torch.equal(second(q, None, None, args, pool), expected)
    assert torch.equal(pool.data, before)
