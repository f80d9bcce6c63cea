"""The chosen plan is the one that is launched; the grid begins with it; plans are read as they are written."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import time

import pytest
import torch

from octavo.bench import plans
from octavo.bench.attention_problem import AttentionProblem, AttentionShape, make_problem
from octavo.bench.batch_specs import BatchSpec
from octavo.bench.kernel_cases.attention import attention_case
from octavo.bench.plans import (
    check_plan,
    chosen_plan,
    parse_plan,
    plan_grid,
    plan_in_use,
    plan_label,
)
from octavo.bench.suite import measure_case
from octavo.kernels.ops import attention

SMALL = AttentionShape(4, 2, 16, 8, torch.float32)


def problem_of(batch: str, shape: AttentionShape = SMALL) -> AttentionProblem:
    return make_problem(BatchSpec.parse(batch), shape)


SHAPES = [
    SMALL,
    AttentionShape(7, 1, 96, 16, torch.bfloat16),
    AttentionShape(2, 2, 256, 16, torch.float32, torch.float8_e4m3fn),
    AttentionShape(32, 1, 64, 1, torch.float16, window=5),
]


class _Launched(Exception):
    pass


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("batch", ["q1", "3q1s300", "64q1s70", "q9", "2q3s40", "q200s400"])
def test_what_is_said_to_be_chosen_is_launched(
    batch: str, shape: AttentionShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrapper's own planning is watched up to the launch."""
    problem = problem_of(batch, shape)
    chosen = chosen_plan(problem)
    kernel = "paged_decode" if problem.batch.num_decodes else "paged_prefill"
    module, name = importlib.import_module(f"octavo.kernels.{kernel}"), f"plan_{kernel}"
    monkeypatch.setattr(attention, "_paged_attention", attention._triton_attention)
    real = getattr(module, name)
    launched = []

    def watched(**asked: object) -> object:
        launched.append(real(**asked))
        raise _Launched

    monkeypatch.setattr(module, name, watched)
    with pytest.raises(_Launched):
        problem.run()
    assert launched == [chosen]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("batch", ["q1", "8q1s1k", "q64"])
def test_the_grid_begins_with_the_chosen_and_has_each_plan_once(
    batch: str, shape: AttentionShape
) -> None:
    problem = problem_of(batch, shape)
    grid = plan_grid(problem)
    assert grid[0] == chosen_plan(problem)
    assert len(set(grid)) == len(grid) > 10
    group = shape.num_q_heads // shape.num_kv_heads
    for plan in grid:
        if isinstance(plan, plans.PrefillPlan):
            assert plan.rows >= group
        else:
            assert 1 <= plan.num_splits <= 128
        assert parse_plan(plan_label(plan), problem) == plan


def test_a_prompt_of_many_queries_a_kv_head_has_a_grid() -> None:
    """More query heads on one KV head than the rows of the grid: the chosen number of rows is kept."""
    problem = problem_of("q3", AttentionShape(160, 1, 16, 8, torch.float32))
    grid = plan_grid(problem)
    assert len(grid) > 1
    assert {plan.rows for plan in grid if isinstance(plan, plans.PrefillPlan)} == {256}


def test_splits_are_bounded_by_what_can_be_split() -> None:
    assert {plan.num_splits for plan in plan_grid(problem_of("q1s16")) if isinstance(plan, plans.DecodePlan)} == {1}  # fmt: skip


@pytest.mark.parametrize("batch", ["2q1s40", "q9"])
def test_every_plan_of_a_grid_gives_the_right_result(batch: str) -> None:
    """A few from all over it, by the interpreter."""
    problem = problem_of(batch)
    for plan in itertools.islice(plan_grid(problem), 0, None, 11):
        problem.verify(problem.run(plan))


def test_a_batch_of_two_kernels_has_no_plan() -> None:
    problem = problem_of("2q1s40_q5")
    for refused in (chosen_plan, plan_grid, lambda problem: parse_plan("tile_kv=16", problem)):
        with pytest.raises(ValueError, match="batch: expected decodes alone or prefills alone"):
            refused(problem)


def test_what_is_left_out_of_a_plan_is_as_chosen() -> None:
    problem = problem_of("2q1s40")
    chosen = chosen_plan(problem)
    assert parse_plan("num_warps=2", problem) == dataclasses.replace(chosen, num_warps=2)
    assert parse_plan("split_len=64,num_splits=3", problem) == dataclasses.replace(
        chosen, split_len=64, num_splits=3
    )


@pytest.mark.parametrize(
    "text",
    [
        "", "tile_kv", "tile_kv=", "=3", "tile_kv=0", "tile_kv=-1", "tile_kv=1.5", "tile_kv=x", "tile=32", "tile_kv=32,",
        "tile_kv=32;num_warps=2", "tile_kv=16,tile_kv=32", "tile_kv=32 ,num_warps=2", "tile_kv=99999999999", "tile_kv=٣",
        "TILE_KV=32",
    ],
)  # fmt: skip
def test_plans_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"plan: expected NAME=NUMBER.*got "):
        parse_plan(text, problem_of("2q1s40"))
    with pytest.raises(ValueError, match=r"plan: expected NAME=NUMBER.*got "):
        check_plan(text)


def test_a_plan_of_one_kernel_is_none_of_the_other() -> None:
    with pytest.raises(ValueError, match="'rows=64'"):
        parse_plan("rows=64", problem_of("2q1s40"))
    with pytest.raises(ValueError, match="'num_splits=2'"):
        parse_plan("num_splits=2", problem_of("q9"))
    check_plan("rows=64,tile_kv=32")
    check_plan("num_splits=2,tile_kv=32")
    with pytest.raises(ValueError, match=r"plan: expected names of .*'num_splits=2,rows=64'"):
        check_plan("num_splits=2,rows=64")


def test_where_no_plan_is_used_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's own version has none, and a batch of two kernels not one."""
    monkeypatch.delenv("OCTAVO_BACKEND", raising=False)
    assert plan_in_use(problem_of("2q1s20")) is None
    monkeypatch.setenv("OCTAVO_BACKEND", "interpret")
    assert plan_in_use(problem_of("2q1s20")) == plan_label(chosen_plan(problem_of("2q1s20")))
    assert plan_in_use(problem_of("q1s20_q5")) is None


def test_a_plan_is_timed_under_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three plans the second is made slow: its row is the slow one, and no other, nor the choice without a plan."""
    problem = problem_of("2q1s20")
    asked = [dataclasses.replace(chosen_plan(problem), num_splits=n) for n in (5, 6, 7)]
    real = AttentionProblem.run
    run = []

    def slow(self: AttentionProblem, plan=None) -> torch.Tensor:
        run.append(plan)
        time.sleep(0.02 if plan == asked[1] else 0)
        return real(self)

    monkeypatch.setattr(AttentionProblem, "run", slow)
    rows = list(measure_case(attention_case(problem), plans=asked, seconds=0))
    assert [each.plan for each in rows] == [None, *map(plan_label, asked)]
    assert [(each.median_us or 0) > 19_000 for each in rows] == [False, False, True, False]
    assert {*run} == {None, *asked}
