"""vLLM's Triton unified attention: one kernel for decodes, prompts and chunks over a paged cache, split along the keys for
small batches of decodes.

Its file is read from an installed vLLM or from a folder that holds one (a checkout, an unpacked wheel); nothing of vLLM is
started. Launch choices are those of vLLM's Triton backend: 16 segments, split while sequences * KV heads <= 128.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from ..attention_problem import AttentionProblem
from . import Unsupported
from ._sources import accepted, first_module, import_sources, package_folder

Tensor = torch.Tensor

_MODULES = (
    "vllm.v1.attention.ops.triton_unified_attention",
    "vllm.attention.ops.triton_unified_attention",
)
_FEWEST_PROGRAMS = 128  # of a launch that does not split
_SEGMENTS = 16
_LARGEST_TILE = (
    128  # key tokens; the kernel reads the table entries of its last tile without a mask
)


class VLLMTriton:
    name = "vllm"

    def __init__(self, path: Path | None) -> None:
        self._folder = package_folder("vllm", path)

    def unavailable(self) -> str | None:
        if self._folder is None:
            return "vllm is neither installed nor in the folder given (vllm=FOLDER)"
        if first_module(self._folder, _MODULES) is None:
            return f"{self._folder} has no {' and no '.join(_MODULES)}"
        return None

    def prepare(self, problem: AttentionProblem) -> Callable[[], Tensor]:
        shape = problem.shape
        if shape.dtype == torch.float32 and problem.q.is_cuda and not torch.version.hip:
            raise Unsupported("float32: its products are computed in TF32")
        assert self._folder is not None
        module = _module(self._folder)
        attention = module.unified_attention
        out = torch.empty_like(problem.q)
        arguments = _arguments(problem) | {"out": out}
        # what is neutral or only for speed differs from release to release; the rest must be there
        arguments |= accepted(attention, **_quantisation(problem, module), **_scratch(problem))

        def run() -> Tensor:
            attention(**arguments)
            return out

        return run


def _arguments(problem: AttentionProblem) -> dict[str, Any]:
    shape, batch = problem.shape, problem.batch
    tile_end = -(-max(batch.seq_lens) // _LARGEST_TILE) * _LARGEST_TILE
    missing = max(0, -(-tile_end // shape.block_size) - problem.block_tables.shape[1])
    return {
        "q": problem.q,
        "k": problem.k_cache,
        "v": problem.v_cache,
        "cu_seqlens_q": problem.query_start_loc,
        "max_seqlen_q": max(batch.query_lens),
        "seqused_k": problem.seq_lens,
        "max_seqlen_k": max(batch.seq_lens),
        "softmax_scale": problem.scale,
        "causal": True,
        # tokens to the left and to the right of the query's own; -1: all
        "window_size": (-1, -1) if shape.window is None else (shape.window - 1, 0),
        "block_table": torch.nn.functional.pad(problem.block_tables, (0, missing)).contiguous(),
        "softcap": shape.softcap or 0.0,
    }


def _quantisation(problem: AttentionProblem, module: types.ModuleType) -> dict[str, Any]:
    scales = problem.q.new_ones(1, dtype=torch.float32)
    scales = scales.expand(problem.batch.num_seqs, problem.shape.num_kv_heads)
    keywords: dict[str, Any] = {"q_descale": None, "k_descale": scales, "v_descale": scales}
    if problem.shape.stored_dtype.itemsize == 1 and hasattr(module, "KVQuantMode"):
        keywords["kv_quant_mode"] = module.KVQuantMode.FP8_PER_TENSOR
    return keywords


def _scratch(problem: AttentionProblem) -> dict[str, Any]:
    shape = problem.shape
    threshold = _FEWEST_PROGRAMS // shape.num_kv_heads
    # rows of a split: one token of each sequence, as vLLM sizes it where it does not speculate
    rows = (threshold, shape.num_q_heads, _SEGMENTS)

    def scratch(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.float32, device=problem.q.device)

    return {
        "seq_threshold_3D": threshold,
        "num_par_softmax_segments": _SEGMENTS,
        "softmax_segm_output": scratch(*rows, triton.next_power_of_2(shape.head_size)),
        "softmax_segm_max": scratch(*rows),
        "softmax_segm_expsum": scratch(*rows),
    }


@functools.cache
def _module(folder: Path) -> types.ModuleType:
    name = first_module(folder, _MODULES)
    assert name is not None
    return import_sources(folder, [name], _STAND_INS)[0]


class _Platform:
    """What the kernels' files ask of `vllm.platforms.current_platform`."""

    def is_rocm(self) -> bool:
        return torch.version.hip is not None

    def is_cuda(self) -> bool:
        return torch.version.cuda is not None

    def fp8_dtype(self) -> torch.dtype:
        is_gfx94 = self.is_rocm() and "gfx94" in torch.cuda.get_device_properties(0).gcnArchName
        return torch.float8_e4m3fnuz if is_gfx94 else torch.float8_e4m3fn

    def is_device_capability_family(self, family: int) -> bool:
        if not (self.is_cuda() and torch.cuda.is_available()):
            return False
        return torch.cuda.get_device_capability()[0] == family // 10


class _KVQuantMode(enum.IntEnum):
    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


class _Silent:
    """A logger whose every method does nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


_STAND_INS = {
    "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
    "vllm.logger": {"init_logger": _Silent},
    "vllm.platforms": {"current_platform": _Platform()},
    "vllm.triton_utils": {"HAS_TRITON": True, "tl": tl, "triton": triton},
    "vllm.v1.kv_cache_interface": {"KVQuantMode": _KVQuantMode},
    "vllm.model_executor.layers.batch_invariant": {"vllm_is_batch_invariant": lambda: False},
}
