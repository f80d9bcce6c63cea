"""Plans to try for one attention problem: what the wrapper would choose, and a grid around it.

A sweep shows the regret of the plan functions: how much slower the chosen plan is than the best of the grid.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

from ..kernels._checks import has_warpgroup_mma, multiprocessors, warp_size
from ..kernels.paged_decode import DecodePlan, plan_paged_decode
from ..kernels.paged_prefill import PrefillPlan, plan_paged_prefill
from .attention_problem import AttentionProblem
from .machine import backend_of

Plan = DecodePlan | PrefillPlan

_DECODE_GRID = {"tile_kv": (16, 32, 64, 128), "num_warps": (1, 2, 4), "num_stages": (2, 3)}
_PREFILL_GRID = {
    "rows": (64, 128),
    "tile_kv": (32, 64, 128),
    "num_warps": (4, 8),
    "num_stages": (2, 3),
}
_SPLIT_FACTORS = (0.25, 0.5, 1, 2, 4)
_MOST_SPLITS = 128
_PART = re.compile(r"([a-z_]+)=([0-9]{1,6})")


def chosen_plan(problem: AttentionProblem) -> Plan:
    """What `octavo.kernels.paged_attention` chooses by itself. Raises ValueError for a batch of decodes and prefills, which
    takes two kernels with a plan each."""
    batch, shape, device = problem.batch, problem.shape, problem.q.device
    group = shape.num_q_heads // shape.num_kv_heads
    quantised = shape.stored_dtype != shape.dtype
    if batch.num_decodes == batch.num_seqs:
        return plan_paged_decode(
            num_seqs=batch.num_seqs,
            num_kv_heads=shape.num_kv_heads,
            group=group,
            head_size=shape.head_size,
            max_seq_len=max(batch.seq_lens),
            num_sms=multiprocessors(device),
            quantised=quantised,
        )
    if batch.num_decodes == 0:
        return plan_paged_prefill(
            group=group,
            head_size=shape.head_size,
            element_size=shape.dtype.itemsize,
            warpgroup_mma=has_warpgroup_mma(device),
            quantised=quantised,
            warp_size=warp_size(device),
        )
    raise ValueError(
        f"batch: expected decodes alone or prefills alone for a plan, got {batch.num_decodes} decodes of {batch.num_seqs} sequences"
    )


def plan_in_use(problem: AttentionProblem) -> str | None:
    """The label of the plan that a call without one runs with; None where there is not one: decodes and prefills take two
    kernels, and the CPU's own version has no plan."""
    is_mixed = 0 < problem.batch.num_decodes < problem.batch.num_seqs
    if is_mixed or backend_of(problem.q.device) == "cpu":
        return None
    return plan_label(chosen_plan(problem))


def plan_grid(problem: AttentionProblem) -> list[Plan]:
    """The chosen plan first, then every combination of the grid. Splits are halved and doubled from the chosen number."""
    chosen = chosen_plan(problem)
    if isinstance(chosen, PrefillPlan):
        # a program holds whole tokens, so at least the queries that share a KV head
        group = problem.shape.num_q_heads // problem.shape.num_kv_heads
        grid: dict[str, Sequence[int]] = {
            **_PREFILL_GRID,
            "rows": [rows for rows in _PREFILL_GRID["rows"] if rows >= group] or [chosen.rows],
        }
    else:
        longest = max(problem.batch.seq_lens)
        splits = {round(chosen.num_splits * factor) for factor in _SPLIT_FACTORS}
        most = min(_MOST_SPLITS, -(-longest // min(_DECODE_GRID["tile_kv"])))
        grid = {**_DECODE_GRID, "num_splits": sorted({min(max(1, n), most) for n in splits})}
    plans = [
        dataclasses.replace(chosen, **dict(zip(grid, values, strict=True)))
        for values in itertools.product(*grid.values())
    ]
    return list(dict.fromkeys([chosen, *plans]))


def parse_plan(text: str, problem: AttentionProblem) -> Plan:
    """`tile_kv=32,num_warps=2`: the chosen plan with fields replaced. Raises ValueError naming what is not a field of it."""
    chosen = chosen_plan(problem)
    return dataclasses.replace(chosen, **_changes(text, _names(type(chosen))))


def check_plan(text: str) -> None:
    """Raises ValueError for what is a plan of neither kernel."""
    names = (_names(DecodePlan), _names(PrefillPlan))
    changes = _changes(text, tuple(dict.fromkeys([*names[0], *names[1]])))
    if not any(changes.keys() <= set(each) for each in names):
        raise ValueError(
            f"plan: expected names of {', '.join(names[0])} or of {', '.join(names[1])}, got {text!r}"
        )


def _names(plan: type[Plan]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(plan))


def _changes(text: str, names: Sequence[str]) -> dict[str, int]:
    changes: dict[str, int] = {}
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None or match[1] not in names or match[1] in changes or int(match[2]) < 1:
            raise ValueError(
                f"plan: expected NAME=NUMBER, each once, with a name of {', '.join(names)}, got {part!r} in {text!r}"
            )
        changes[match[1]] = int(match[2])
    return changes


def plan_label(plan: Plan) -> str:
    """As `parse_plan` takes it; fields that are None are left out."""
    values = dataclasses.asdict(plan).items()
    return ",".join(f"{name}={value}" for name, value in values if value is not None)
