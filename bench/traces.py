"""Attention problems from a recorded run: the batches that an engine launched, with the block tables they had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..runtime.launch_args import LaunchArgs
from ..runtime.recording import Recording
from ..runtime.recording.format import LayerShape
from ..runtime.recording.launches import numbered_launch_args
from ..runtime.recording.timing import StepClass
from .attention_problem import AttentionProblem, AttentionShape, make_problem
from .batch_specs import BatchSpec


class TracedProblem(NamedTuple):
    problem: AttentionProblem
    step: int  # of the recording
    num_alike: int  # steps of the same class, itself included


def problems_of(
    recording: Recording, device: torch.device | str = "cpu", *, most: int = 8
) -> Iterator[TracedProblem]:
    """The first step of each of the most frequent classes of steps, for each shape of layer. Numbers are random; lengths and
    block tables are those of the recording.

    Raises ValueError for layers that a benchmark problem cannot have.
    """
    shapes = [_shape(layer, recording) for layer in _distinct(recording.header.layers)]
    if most < 1:
        raise ValueError(f"traced: expected at least 1, got {most}")
    if not shapes:
        raise ValueError(f"{recording.path}: expected the shapes of its layers, got none")
    first: dict[StepClass, tuple[int, LaunchArgs]] = {}
    alike: Counter[StepClass] = Counter()
    for number, args in numbered_launch_args(recording, "cpu"):
        step_class = StepClass.of(args)
        alike[step_class] += 1
        first.setdefault(step_class, (number, args))
    for step_class, count in alike.most_common(most):
        number, args = first[step_class]
        lens = zip(args.query_start_loc.diff().tolist(), args.seq_lens.tolist(), strict=True)
        rows = [(query, seq) for query, seq in lens]
        # a chunk of one token counts as a decode here: a batch spec knows lengths alone
        order = sorted(range(len(rows)), key=lambda row: rows[row][0] > 1)
        tables = args.block_tables[order]
        for shape in shapes:
            yield TracedProblem(
                make_problem(BatchSpec.of(rows), shape, device, tables=tables), number, count
            )


def _distinct(layers: list[LayerShape] | tuple[LayerShape, ...]) -> list[LayerShape]:
    return list({_geometry(layer): layer for layer in layers if layer.reads is None}.values())


def _geometry(layer: LayerShape) -> tuple:
    return layer.num_heads, layer.num_kv_heads, layer.head_size, layer.dtype, layer.window, layer.softcap  # fmt: skip


def _shape(layer: LayerShape, recording: Recording) -> AttentionShape:
    if layer.head_size_v != layer.head_size or layer.scale_per_token_head:
        raise ValueError(
            f"{recording.path}: expected layers with one head size and no scale for each token, "
            f"got head sizes {layer.head_size} and {layer.head_size_v}"
        )
    dtype = getattr(torch, recording.header.dtype)
    stored = getattr(torch, layer.dtype)
    return AttentionShape(
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_size,
        recording.header.block_size,
        dtype,
        None if stored == dtype else stored,
        layer.window,
        layer.softcap,
    )
