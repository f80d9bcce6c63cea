"""FlashInfer's wrappers for a paged cache: decodes through the decode wrapper, the other sequences of the batch through the
prefill wrapper, as vLLM splits a step. `plan` is called in `prepare`, `run` is timed: an engine plans once per step and runs
once per layer.

With four or more query heads to a KV head the decode wrapper is told to use tensor cores, as SGLang does; without them it
computes such groups on the ordinary cores and is no rival. FlashInfer compiles its kernels at the first use of a shape.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ..attention_problem import AttentionProblem
from . import Unsupported
from ._sources import package_folder

Tensor = torch.Tensor

_WORKSPACE_BYTES = 128 << 20  # what its documentation recommends
_HEAD_SIZES = (64, 128, 256)
_FEWEST_HEADS_ON_TENSOR_CORES = 4  # query heads of a KV head


class FlashInfer:
    name = "flashinfer"

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def unavailable(self) -> str | None:
        if not torch.cuda.is_available() or torch.version.hip is not None:
            return "flashinfer needs an NVIDIA GPU"
        if package_folder("flashinfer", self._path) is None:
            return "flashinfer is neither installed nor in the folder given (flashinfer=FOLDER)"
        return None

    def prepare(self, problem: AttentionProblem) -> Callable[[], Tensor]:
        shape, batch = problem.shape, problem.batch
        if shape.dtype == torch.float32:
            raise Unsupported("float32: its kernels take float16 and bfloat16")
        if shape.head_size not in _HEAD_SIZES:
            raise Unsupported(f"head size {shape.head_size}: its kernels take {_HEAD_SIZES}")
        library = _import(self._path)
        out = torch.empty_like(problem.q)
        cache = (problem.k_cache, problem.v_cache)
        decodes = batch.num_decodes
        calls = []
        if decodes:
            calls.append((_plan_decode(library, problem), slice(0, decodes)))
        if decodes < batch.num_seqs:
            calls.append((_plan_prefill(library, problem), slice(decodes, None)))

        def run() -> Tensor:
            for wrapper, rows in calls:
                wrapper.run(problem.q[rows], cache, out=out[rows])
            return out

        return run


def _plan_decode(library: types.ModuleType, problem: AttentionProblem) -> Any:
    shape = problem.shape
    heads_per_group = shape.num_q_heads // shape.num_kv_heads
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(problem),
        "NHD",
        use_tensor_cores=heads_per_group >= _FEWEST_HEADS_ON_TENSOR_CORES,
    )
    indptr, indices, last_page_len = _pages(problem, 0, problem.batch.num_decodes)
    wrapper.plan(
        indptr,
        indices,
        last_page_len,
        shape.num_q_heads,
        shape.num_kv_heads,
        shape.head_size,
        shape.block_size,
        **_options(problem),
    )
    return wrapper


def _plan_prefill(library: types.ModuleType, problem: AttentionProblem) -> Any:
    shape, batch = problem.shape, problem.batch
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(_workspace(problem), "NHD")
    indptr, indices, last_page_len = _pages(problem, batch.num_decodes, batch.num_seqs)
    query_indptr = [0, *itertools.accumulate(batch.query_lens[batch.num_decodes :])]
    wrapper.plan(
        torch.tensor(query_indptr, dtype=torch.int32),
        indptr,
        indices,
        last_page_len,
        shape.num_q_heads,
        shape.num_kv_heads,
        shape.head_size,
        shape.block_size,
        causal=True,  # aligned at the end: the last query sees the last key
        **_options(problem),
    )
    return wrapper


def _workspace(problem: AttentionProblem) -> Tensor:
    """One for each wrapper, zero at first: a plan lies in it until the run."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=problem.q.device)


def _options(problem: AttentionProblem) -> dict[str, Any]:
    shape = problem.shape
    return {
        "pos_encoding_mode": "NONE",
        "sm_scale": problem.scale,
        # tokens before the query's own; -1: all
        "window_left": -1 if shape.window is None else shape.window - 1,
        "logits_soft_cap": shape.softcap or 0.0,
        "q_data_type": shape.dtype,
        "kv_data_type": shape.stored_dtype,
    }


def _pages(problem: AttentionProblem, first: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
    """(indptr, indices, last_page_len), int32, of the sequences first..end; indptr and lengths on the host, where they are
    planned with."""
    size, lengths = problem.shape.block_size, problem.batch.seq_lens[first:end]
    counts = [-(-length // size) for length in lengths]
    rows = problem.block_tables[first:end]
    indices = torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])
    indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    last = [length - (count - 1) * size for length, count in zip(lengths, counts, strict=True)]
    return indptr, indices, torch.tensor(last, dtype=torch.int32)


def _import(path: Path | None) -> types.ModuleType:
    """It is a package of extensions and cannot be read file by file, so a folder is searched for it as for any import."""
    folder = package_folder("flashinfer", path) if path is not None else None
    if folder is None:
        return import_module("flashinfer")
    with _first_on_the_path(str(folder.parent)):
        return import_module("flashinfer")


@contextmanager
def _first_on_the_path(folder: str):
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
