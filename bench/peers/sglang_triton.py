"""SGLang's Triton attention: `decode_attention` for batches of decodes, `extend_attention` for every other.

Its files are read from an installed SGLang or from a folder that holds one (a checkout, an unpacked wheel); nothing of
SGLang is started. The cache is what its token pool is: pages of one token, the slots of each sequence listed in `prepare`.
A batch that mixes decodes and prompts goes through `extend_attention` as a whole, as with its mixed chunks; the keys and
values of new tokens are then given beside the cache, as its model has them at hand. Splits are chosen by its own kernel.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..attention_problem import AttentionProblem
from . import Unsupported
from ._sources import accepted, first_module, import_sources, package_folder

Tensor = torch.Tensor

_DECODE = (
    "sglang.kernels.ops.attention.decode_attention",
    "sglang.srt.layers.attention.triton_ops.decode_attention",
)
_EXTEND = (
    "sglang.kernels.ops.attention.extend_attention",
    "sglang.srt.layers.attention.triton_ops.extend_attention",
)
_METADATA = ("sglang.kernels.ops.attention.metadata",)
_MOST_SPLITS = 8  # its default of --triton-attention-num-kv-splits
_UNIT_SCALES = {"k_scale": 1.0, "v_scale": 1.0}


class SGLangTriton:
    name = "sglang"

    def __init__(self, path: Path | None) -> None:
        self._folder = package_folder("sglang", path)

    def unavailable(self) -> str | None:
        if self._folder is None:
            return "sglang is neither installed nor in the folder given (sglang=FOLDER)"
        for places in (_DECODE, _EXTEND):
            if first_module(self._folder, places) is None:
                return f"{self._folder} has no {' and no '.join(places)}"
        return None

    def prepare(self, problem: AttentionProblem) -> Callable[[], Tensor]:
        assert self._folder is not None
        shape = problem.shape
        if problem.k_cache.flatten(0, 1).data_ptr() != problem.k_cache.data_ptr():
            raise Unsupported("its pool has one stride from token to token, this cache has not")
        if shape.dtype == torch.float32 and problem.q.is_cuda and not torch.version.hip:
            raise Unsupported("float32: its products are computed in TF32")
        if shape.stored_dtype.itemsize == 1 and _rounds_to_cache_dtype(problem):
            raise Unsupported(
                "fp8 cache: probabilities (and queries, of chunks) are rounded to fp8 for its products, "
                "which errs by 5 to 15 %"
            )
        if problem.batch.num_decodes == problem.batch.num_seqs:
            return _decode(problem, self._folder)
        if shape.window == 1:
            raise Unsupported("extend_attention takes a window of one token for none")
        return _extend(problem, self._folder)


def _rounds_to_cache_dtype(problem: AttentionProblem) -> bool:
    """Not where there are no products of matrices (one query head to a KV head) or nothing is read from the cache."""
    shape, batch = problem.shape, problem.batch
    if batch.num_decodes == batch.num_seqs:
        return shape.num_q_heads > shape.num_kv_heads
    return batch.query_lens != batch.seq_lens


def _decode(problem: AttentionProblem, folder: Path) -> Callable[[], Tensor]:
    shape, num_seqs = problem.shape, problem.batch.num_seqs
    attention = _module(folder, _DECODE).decode_attention_fwd
    # a window is given as fewer slots
    lengths = [min(length, shape.window or length) for length in problem.batch.seq_lens]
    indptr, slots = _slots(problem, problem.batch.seq_lens, lengths)
    out = torch.empty_like(problem.q)
    sizes = (num_seqs, shape.num_q_heads, _MOST_SPLITS)
    arguments = {
        "q": problem.q,
        "k_buffer": problem.k_cache.flatten(0, 1),
        "v_buffer": problem.v_cache.flatten(0, 1),
        "o": out,
        "kv_indptr": indptr,
        "kv_indices": slots,
        "attn_logits": problem.q.new_empty((*sizes, shape.head_size), dtype=torch.float32),
        "attn_lse": problem.q.new_empty(sizes, dtype=torch.float32),
        "num_kv_splits": _num_splits(problem, lengths, folder),
        "max_kv_splits": _MOST_SPLITS,
        "sm_scale": problem.scale,
        "logit_cap": shape.softcap or 0.0,
    } | accepted(attention, **_UNIT_SCALES)

    def run() -> Tensor:
        attention(**arguments)
        return out

    return run


def _extend(problem: AttentionProblem, folder: Path) -> Callable[[], Tensor]:
    shape, batch = problem.shape, problem.batch
    attention = _module(folder, _EXTEND).extend_attention_fwd
    prefixes = [seq - query for query, seq in zip(batch.query_lens, batch.seq_lens, strict=True)]
    # of a prefix only what the first new token sees is listed, the token itself not counted
    lengths = [min(length, length if shape.window is None else shape.window - 1) for length in prefixes]  # fmt: skip
    indptr, slots = _slots(problem, prefixes, lengths)
    new_keys, new_values = _new_tokens(problem)
    out = torch.empty_like(problem.q)
    arguments = {
        "q_extend": problem.q.contiguous(),
        "k_extend": new_keys,
        "v_extend": new_values,
        "o_extend": out,
        "k_buffer": problem.k_cache.flatten(0, 1),
        "v_buffer": problem.v_cache.flatten(0, 1),
        "qo_indptr": problem.query_start_loc,
        "kv_indptr": indptr,
        "kv_indices": slots,
        "custom_mask": None,
        "is_causal": True,
        "mask_indptr": None,
        "max_len_extend": max(batch.query_lens),
        "sm_scale": problem.scale,
        "logit_cap": shape.softcap or 0.0,
        # it counts the tokens before the query's own
        "sliding_window_size": -1 if shape.window is None else shape.window - 1,
    } | accepted(attention, **_UNIT_SCALES)

    def run() -> Tensor:
        attention(**arguments)
        return out

    return run


def _slots(problem: AttentionProblem, ends: list[int] | tuple[int, ...], counts: list[int]) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(indptr int32 [S+1], slots int64): the `counts[s]` tokens of sequence s that lie before position `ends[s]`."""
    size, device = problem.shape.block_size, problem.q.device
    slots = []
    for row, end, count in zip(problem.block_tables.long(), ends, counts, strict=True):
        positions = torch.arange(end - count, end, device=device)
        slots.append(row[positions // size] * size + positions % size)
    indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)
    return indptr, torch.cat(slots)


def _new_tokens(problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    """Keys and values of the tokens of this step, [T, Hkv, D] in the dtype of q."""
    keys, values = zip(
        *(
            tuple(x[-query_len:].to(problem.shape.dtype) for x in problem.gathered(seq))
            for seq, query_len in enumerate(problem.batch.query_lens)
        ),
        strict=True,
    )
    return torch.cat(keys), torch.cat(values)


def _num_splits(problem: AttentionProblem, lengths: list[int], folder: Path) -> Tensor:
    """int32 [S]; without a GPU, or in a release whose kernel cannot be imported alone, the most, as it does itself."""
    num_seqs, device = problem.batch.num_seqs, problem.q.device
    splits = torch.full((num_seqs,), _MOST_SPLITS, dtype=torch.int32, device=device)
    if _core_count() > 0 and first_module(folder, _METADATA) is not None:
        _module(folder, _METADATA).get_num_kv_splits_triton[(1,)](
            splits,
            torch.tensor(lengths, dtype=torch.int64, device=device),
            num_seqs,
            1,
            problem.shape.num_q_heads,
            problem.shape.num_kv_heads,
            _MOST_SPLITS,
            _core_count(),
            MAX_NUM_SEQ=max(256, 1 << (num_seqs - 1).bit_length()),
        )
    return splits


def _core_count() -> int:
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(0).multi_processor_count


@functools.cache
def _module(folder: Path, places: tuple[str, ...]) -> types.ModuleType:
    name = first_module(folder, places)
    assert name is not None
    return import_sources(folder, [name], _STAND_INS)[0]


class _Unset:
    """SGLang's environment variables, none of which is set."""

    def __getattr__(self, name: str) -> _Unset:
        return self

    def get(self) -> bool:
        return False


def _is_architecture(name: str) -> bool:
    if torch.version.hip is None or not torch.cuda.is_available():
        return False
    return name in torch.cuda.get_device_properties(0).gcnArchName


_STAND_INS: dict[str, dict[str, Any]] = {
    "sglang.srt.environ": {"envs": _Unset()},
    "sglang.srt.utils": {
        "get_device_core_count": lambda device_id=0: _core_count(),
        "is_cuda": lambda: torch.version.cuda is not None and torch.cuda.is_available(),
        "is_hip": lambda: torch.version.hip is not None,
        "is_gfx95_supported": lambda: _is_architecture("gfx95"),
        "is_gfx1250_supported": lambda: _is_architecture("gfx1250"),
    },
}
