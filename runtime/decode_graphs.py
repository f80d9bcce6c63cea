"""Decode steps replayed instead of launched call by call: on a GPU as CUDA graphs.

A step of S decodes runs as the captured step of the next size N >= S. The captured calls read fixed tensors, into which a
step's arguments are copied first, and whatever the host decided at capture stays decided: so grids and scratch are sized
for the longest sequences there can be (`max_seq_len`), and what depends on lengths is read on the device.

    rows      0 ... S - 1   S ... N - 1
    tokens    of the step   0, written to no slot (PAD_SLOT)
    lengths   of the step   0: they attend to nothing, and read the null block at most
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .kv_pool import KVPool
from .launch_args import LaunchArgs
from .metadata import NULL_BLOCK, PAD_SLOT


def default_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then every eighth, up to the first that holds all seats."""
    sizes = [1, 2, 4, *range(8, max_num_seqs + 8, 8)]
    return sizes[: bisect_left(sizes, max_num_seqs) + 1]


class Capture(Protocol):
    """Runs some work and keeps its calls."""

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """(result, replay): each `replay()` makes the calls again, on the same tensors, and brings `result` up to date."""
        ...


class CudaCapture:
    """CUDA graphs, which share one pool of memory: they run one at a time."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(2):  # what is compiled, tuned or allocated once is not part of the graph
                work()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            result = work()
        return result, graph.replay


class CallCapture:
    """The same on a CPU: every call of a torch operator is noted with its tensors, and made again in the same order.

    What a CUDA graph would get wrong comes out wrong here too: a length read on the host, a result in memory of its own.
    """

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        calls = _Calls()
        with calls:
            result = work()
        return result, calls.replay


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._noted: list[tuple[Any, tuple, dict, list[Tensor]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._noted.append((func, args, kwargs or {}, _tensors(result)))
        return result

    def replay(self) -> None:
        for func, args, kwargs, before in self._noted:
            for old, new in zip(before, _tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor in place
                    old.copy_(new)


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [each for each in result if isinstance(each, Tensor)] if isinstance(result, (tuple, list)) else []  # fmt: skip


@dataclass(frozen=True)
class _Graph:
    args: LaunchArgs  # fixed tensors
    logits: Tensor  # [N, vocab]
    replay: Callable[[], None]


class DecodeGraphs:
    """The captured decode steps of one model.

    model        what `ModelRunner` runs
    max_seq_len  tokens of the longest sequence there can be
    sizes        numbers of rows to capture; larger steps are not for graphs
    capture      None takes CUDA graphs on a GPU, and elsewhere replays calls
    """

    def __init__(
        self,
        model: Any,
        pool: KVPool,
        max_seq_len: int,
        sizes: Sequence[int],
        capture: Capture | None = None,
    ) -> None:
        if not sizes or min(sizes) < 1:
            raise ValueError(f"sizes: expected numbers of rows >= 1, got {list(sizes)}")
        if max_seq_len < 1:
            raise ValueError(f"max_seq_len: expected a number >= 1, got {max_seq_len}")
        self._model, self._pool = model, pool
        self._sizes = sorted(set(sizes))
        self._max_seq_len = max_seq_len
        on_gpu = pool.data.device.type == "cuda"
        self._capture = capture or (CudaCapture() if on_gpu else CallCapture())
        self._graphs: dict[int, _Graph] = {}

    def takes(self, args: LaunchArgs) -> bool:
        """Whether the step is decodes alone, each of which draws from its own row of logits."""
        num_rows = len(args.seq_lens)
        is_decode = args.num_decodes == num_rows == len(args.logits_indices)
        is_plain = args.cross_seq_lens is None and args.lora_token_order is None
        return is_decode and is_plain and num_rows <= self._sizes[-1]

    def capture_all(self) -> None:
        """Capture every size now, the largest first, whose memory the others then use."""
        for size in reversed(self._sizes):
            self._graph(size)

    def logits(self, args: LaunchArgs) -> Tensor:
        """Run a step that `takes` accepts: logits [S, vocab], valid until the next call."""
        num_rows = len(args.seq_lens)
        graph = self._graph(self._sizes[bisect_left(self._sizes, num_rows)])
        _fill(graph.args, args, num_rows)
        graph.replay()
        return graph.logits[:num_rows]

    def _graph(self, size: int) -> _Graph:
        graph = self._graphs.get(size)
        if graph is None:
            args = self._fixed_args(size)
            work = lambda: self._model.compute_logits(self._model(args, self._pool))  # noqa: E731
            graph = self._graphs[size] = _Graph(args, *self._capture(work))
        return graph

    def _fixed_args(self, size: int) -> LaunchArgs:
        """Of padding alone: capturing writes to no slot."""
        device, width = self._pool.data.device, -(-self._max_seq_len // self._pool.block_size)
        zeros = torch.zeros(size, dtype=torch.int64, device=device)
        return LaunchArgs(
            input_ids=zeros.clone(),
            positions=zeros.clone(),
            slot_mapping=torch.full_like(zeros, PAD_SLOT),
            query_start_loc=torch.arange(size + 1, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(size, dtype=torch.int32, device=device),
            block_tables=torch.full((size, width), NULL_BLOCK, dtype=torch.int32, device=device),
            logits_indices=torch.arange(size, device=device),
            num_decodes=size,
            max_query_len=1,
            max_seq_len=self._max_seq_len,
        )


def _fill(fixed: LaunchArgs, args: LaunchArgs, num_rows: int) -> None:
    """Bring a step into the fixed tensors. `query_start_loc` and `logits_indices` of decodes are always the same."""
    for name, pad in (("input_ids", 0), ("positions", 0), ("slot_mapping", PAD_SLOT), ("seq_lens", 0)):  # fmt: skip
        tensor = getattr(fixed, name)
        tensor[:num_rows].copy_(getattr(args, name))
        tensor[num_rows:] = pad
    fixed.block_tables[:num_rows, : args.block_tables.shape[1]].copy_(args.block_tables)


def captured_decodes(model: Any, pool: KVPool, max_seq_len: int, most_rows: int) -> DecodeGraphs:
    """Graphs of all steps of at most so many decodes, captured."""
    graphs = DecodeGraphs(model, pool, max_seq_len, default_sizes(most_rows))
    with torch.inference_mode():
        graphs.capture_all()
    return graphs
