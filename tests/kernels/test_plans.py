"""Launch choices: pure functions of integers, so tables of what they should give."""

from __future__ import annotations

import pytest

from octavo.kernels.activation import plan_gate_and_mul
from octavo.kernels.block_copy import plan_copy_blocks
from octavo.kernels.block_swap import plan_swap_blocks
from octavo.kernels.cache_write import plan_reshape_and_cache
from octavo.kernels.lora import plan_lora
from octavo.kernels.merge_states import plan_merge_attention_states
from octavo.kernels.norm import plan_rms_norm
from octavo.kernels.paged_decode import plan_paged_decode
from octavo.kernels.paged_prefill import plan_paged_prefill
from octavo.kernels.penalties import plan_apply_penalties
from octavo.kernels.rotary import plan_rotary_embedding
from octavo.kernels.rotary_cache_write import plan_rope_and_cache
from octavo.kernels.sampling import plan_sample
from octavo.kernels.swap_costs import Crossover, SwapCosts
from octavo.kernels.top_k_top_p import plan_apply_top_k_top_p_min_p


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@pytest.mark.parametrize("head_size", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8, 17])
def test_attention_tiles(head_size, group) -> None:
    for num_seqs in (1, 8, 300):
        for max_seq_len in (1, 100, 4096, 131072):
            plan = plan_paged_decode(
                num_seqs=num_seqs,
                num_kv_heads=8,
                group=group,
                head_size=head_size,
                max_seq_len=max_seq_len,
                num_sms=132,
            )
            assert is_power_of_two(plan.tile_kv) and is_power_of_two(plan.num_warps)
            # a split has work for at least four tiles
            assert plan.num_splits == 1 or plan.num_splits * 4 * plan.tile_kv <= max_seq_len
    for warpgroup_mma in (False, True):
        plan = plan_paged_prefill(
            group=group, head_size=head_size, element_size=2, warpgroup_mma=warpgroup_mma
        )
        assert is_power_of_two(plan.rows) and plan.rows >= max(64, group)


def test_decode_splits_fill_the_gpu_when_sequences_are_few() -> None:
    def splits(num_seqs: int) -> int:
        return plan_paged_decode(
            num_seqs=num_seqs,
            num_kv_heads=8,
            group=4,
            head_size=128,
            max_seq_len=32768,
            num_sms=132,
        ).num_splits

    assert splits(1) * 8 >= 2 * 132
    assert splits(1) >= splits(8) >= splits(64) >= splits(4096) == 1


def test_copies_grow_their_parts_with_the_number_of_pairs() -> None:
    megabyte = 2**20 // 8
    few = plan_copy_blocks(block_words=megabyte, num_pairs=1, num_sms=132)
    many = plan_copy_blocks(block_words=megabyte, num_pairs=512, num_sms=132)
    assert (few.tile_words, few.part_tiles, many.part_tiles) == (1024, 1, 8)
    assert plan_copy_blocks(block_words=3, num_pairs=1, num_sms=132).tile_words == 4


@pytest.mark.parametrize(
    ("block_bytes", "num_pairs", "by_kernel"),
    [(8 * 1024, 64, True), (8 * 1024, 4, False), (64 * 1024, 64, False), (737_280, 16, False)],
)
def test_swaps_use_the_kernel_for_many_small_blocks_only(block_bytes, num_pairs, by_kernel) -> None:
    assert plan_swap_blocks(block_bytes=block_bytes, num_pairs=num_pairs).by_kernel is by_kernel


@pytest.mark.parametrize(
    ("num_copies", "crossover", "by_kernel"),
    [
        (64, Crossover(8193, 64), True),
        (64, Crossover(8192, 64), False),
        (64, Crossover(8193, 65), False),
        (64, Crossover(0, 1), False),
        (32, Crossover(8193, 1), False),  # runs of two blocks are copies of 16 KiB
        (32, Crossover(2**14 + 1, 32), True),
        (1, Crossover(2**30, 2), False),
    ],
)
def test_a_swap_is_planned_by_what_its_copies_carry(num_copies, crossover, by_kernel) -> None:
    plan = plan_swap_blocks(
        block_bytes=8192, num_pairs=64, num_copies=num_copies, crossover=crossover
    )
    assert plan.by_kernel is by_kernel


def test_swap_costs_survive_a_file(tmp_path) -> None:
    path = tmp_path / "costs.json"
    costs = SwapCosts(Crossover(4096, 8), Crossover(0, 1), "somewhere")
    costs.to_json(path)
    assert SwapCosts.from_json(path) == costs != SwapCosts()


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "[]",
        "{}",
        '{"to_device": {}}',
        '{"to_device": {"kernel_below_bytes": -1}, "to_host": {}}',
        '{"to_device": {}, "to_host": {"kernel_from_copies": 0.5}}',
        '{"to_device": {"x": 1}, "to_host": {}}',
        '{"to_device": {}, "to_host": {}, "x": 1}',
    ],
)
def test_files_that_are_not_swap_costs_are_named(tmp_path, text) -> None:
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"swap costs: expected .*costs\.json"):
        SwapCosts.from_json(path)


def test_cache_writes_make_enough_programs_before_they_make_large_ones() -> None:
    def tokens(num_slots: int) -> int:
        return plan_reshape_and_cache(num_slots=num_slots, features=192, num_sms=132).tokens

    assert tokens(1) == tokens(527) == 1
    assert (tokens(528), tokens(3 * 264), tokens(100_000)) == (2, 3, 16)
    assert plan_reshape_and_cache(num_slots=4096, features=10_000, num_sms=132).tokens == 1


def test_the_tile_of_a_cache_write_does_not_depend_on_the_batch() -> None:
    """It is part of the compiled code."""
    plans = [plan_reshape_and_cache(num_slots=n, features=192, num_sms=4) for n in range(1, 999)]
    assert {plan.tile_tokens for plan in plans} == {16}
    assert {plan.tokens for plan in plans} == set(range(1, 17))


@pytest.mark.parametrize("size", [1, 64, 80, 576, 4096, 16384])
def test_row_ops_have_whole_warps(size) -> None:
    norm = plan_rms_norm(size=size)
    assert is_power_of_two(norm.rows) and is_power_of_two(norm.num_warps)
    assert norm.rows * size >= 512  # short rows share a program
    merge = plan_merge_attention_states(head_size=size)
    assert is_power_of_two(merge.rows)
    activation = plan_gate_and_mul(size=size)
    assert is_power_of_two(activation.tile) and is_power_of_two(activation.num_warps)
    assert is_power_of_two(plan_rotary_embedding(num_q_heads=9, rotary_size=size).num_warps)
    fused = plan_rope_and_cache(num_q_heads=9, num_kv_heads=3, head_size=size)
    assert is_power_of_two(fused.num_warps)


def test_adapter_tiles_depend_little_on_the_batch() -> None:
    """Two tiles in all, and the order of additions along a row never changes: splits are the layer's."""
    plans = {plan_lora(num_tokens=n, in_features=14336, element_size=2) for n in range(1, 2000)}
    assert {plan.tokens for plan in plans} == {16, 64} and len(plans) == 2
    assert {plan.num_splits for plan in plans} == {3}
    for plan in plans:
        # 16 is the least of each side that a matrix product takes
        assert all(is_power_of_two(n) and n >= 16 for n in (plan.tile_in, plan.tile_rank))
    assert plan_lora(num_tokens=1, in_features=576, element_size=2).num_splits == 1


@pytest.mark.parametrize("vocab", [1, 50, 32_000, 49_152, 128_256, 262_144])
def test_sampling_tiles(vocab) -> None:
    plans = (
        plan_apply_penalties(vocab=vocab),
        plan_apply_top_k_top_p_min_p(vocab=vocab),
        plan_sample(vocab=vocab),
    )
    for plan in plans:
        assert is_power_of_two(plan.tile) and is_power_of_two(plan.num_warps)
        assert plan.num_warps <= 16 and plan.tile <= 4096
