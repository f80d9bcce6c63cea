"""Runs steps: launch arguments, block operations, forward pass, sampling. Holds no request state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from msgspec.structs import replace

from ..kernels.swap_costs import PUBLIC_FIGURES, SwapCosts
from .block_mover import BlockMover
from .decode_graphs import DecodeGraphs
from .drawn_tokens import awaited_draws, fed_token_ids, with_drawn
from .kv_pool import KVPool
from .launch_args import LaunchArgs, LaunchBuffers, build_launch_args
from .logits_processing import LogitsProcessing
from .metadata import SamplerOutput, SequenceGroupMetadata
from .params import LoRARequest
from .sampler import sample_on_device
from .sampling_rows import SamplingRows, sampling_rows, with_newest_tokens
from .shadow_cache import ShadowCache
from .snapshots import Snapshots
from .top_logprobs import prompt_logprobs

_Pairs = list[tuple[int, int]] | tuple[()]
_NO_TOKENS = SamplerOutput(np.zeros(0, np.int64), np.zeros(0, np.float32))


class Model(Protocol):
    """What the runner needs of a model; `octavo.models` has the layers to write one."""

    def __call__(
        self, args: LaunchArgs, kv: KVPool
    ) -> torch.Tensor: ...  # hidden states [T, hidden]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...  # [R, hidden] -> [R, vocab]


class AdapterStore(Protocol):
    """Adapters and their places on the device; `models.adapters.Adapters` is one."""

    num_places: int

    def plan(
        self, requests: Iterable[LoRARequest]
    ) -> tuple[dict[LoRARequest, int], list[tuple[LoRARequest, int]]]: ...

    def commit(self, places: dict[LoRARequest, int]) -> None: ...

    def move_in(self, moves: Iterable[tuple[LoRARequest, int]]) -> None: ...


class Executor(Protocol):
    """Where the work of a step is done."""

    def submit(self, work: Callable[[], SamplerOutput], /) -> Future[SamplerOutput]: ...


class AtOnce:
    """Work is done in the call that submits it."""

    def submit(self, work: Callable[[], SamplerOutput], /) -> Future[SamplerOutput]:
        future: Future[SamplerOutput] = Future()
        try:
            future.set_result(work())
        except BaseException as failure:
            future.set_exception(failure)
        return future


def in_background() -> Executor:
    """One thread does all work, in the order in which it was submitted."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="octavo-step")


class ModelRunner:
    """A model, its KV pool and, for swapping, a pool in host memory.

    check       ask a `ShadowCache` before each launch whether every row will read its own tokens
    swap_costs  of this machine, as `octavo kernels calibrate` measured them
    executor    runs what is launched; `in_background()` lets the caller put the next step together meanwhile
    graphs      replay steps of decodes alone
    adapters    of requests that name one; those move into their places before the step runs
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        host_pool: KVPool | None = None,
        check: bool = False,
        swap_costs: SwapCosts = PUBLIC_FIGURES,
        executor: Executor | None = None,
        graphs: DecodeGraphs | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.mover = BlockMover(pool, host_pool, swap_costs)
        self._graphs = graphs
        self._adapters = adapters
        self._executor = AtOnce() if executor is None else executor
        self._buffers = LaunchBuffers(pool.data.device)
        self._processing = LogitsProcessing()
        num_host_blocks = 0 if host_pool is None else host_pool.num_blocks
        self._shadow = (
            ShadowCache(pool.block_size, pool.num_blocks, num_host_blocks) if check else None
        )

    def launch(
        self,
        seq_group_metadata_list: Sequence[SequenceGroupMetadata],
        *,
        blocks_to_swap_out: list[tuple[int, int]] | tuple[()] = (),
        blocks_to_swap_in: list[tuple[int, int]] | tuple[()] = (),
        blocks_to_copy: list[tuple[int, int]] | tuple[()] = (),
        generation_of: Callable[[str], int | None],
        after: object = None,
    ) -> LaunchedStep:
        """Launch one step; its result are tokens in row order. Of a step without rows only the moves are made.

        after   the launch in flight that this one goes on from: it may draw the tokens that this one feeds, and if it fails,
                so does this. At most two are in flight, for the arguments of a third would overwrite those of the first

        Steps run in the order of their launches. Blocks move as `BlockMover` says: swap-outs, swap-ins, copies, before any key
        and value of the step is written. Raises MetadataError or StaleMetadataError before anything is launched.
        """
        snapshots = Snapshots.of(seq_group_metadata_list)
        # first of all: arguments that are built and not launched would take the place of those of a step that runs
        snapshots.check_current(generation_of)
        before = after if isinstance(after, LaunchedStep) else None
        awaited = awaited_draws(snapshots, None if before is None else before.snapshots)
        has_moves = blocks_to_swap_out or blocks_to_swap_in or blocks_to_copy
        args, places, entering = None, None, []
        if self._adapters is not None:
            places, entering = self._adapters.plan(snapshots.lora_requests())
        if len(snapshots) or not has_moves:
            args = build_launch_args(
                snapshots,
                self.pool.block_size,
                self.pool.num_blocks,
                self._buffers,
                places,
                0 if self._adapters is None else self._adapters.num_places,
            )
        step = _Step(
            snapshots,
            before,
            args,
            sampling_rows(snapshots),
            awaited,
            (blocks_to_swap_out, blocks_to_swap_in, blocks_to_copy),
            entering,
        )
        if self._adapters is not None and places is not None:
            self._adapters.commit(places)
        return LaunchedStep(snapshots, self._executor.submit(partial(self._run, step)))

    def execute(
        self, seq_group_metadata_list: Sequence[SequenceGroupMetadata], **kwargs: Any
    ) -> SamplerOutput:
        """`launch`, and wait for the result."""
        return self.launch(seq_group_metadata_list, **kwargs).result()

    @torch.inference_mode()
    def _run(self, step: _Step) -> SamplerOutput:
        if self._adapters is not None:
            # even if the step then fails: they count as being there
            self._adapters.move_in(step.entering)
        before = step.before
        drawn = None if before is None else before.result()  # it ran before this one began
        if self._shadow is not None:
            snapshots = step.snapshots
            if before is not None and drawn is not None:
                snapshots = with_drawn(snapshots, before.snapshots, drawn)
            self.mover.check(*step.moves)  # what the mover refuses would stay in the shadow
            self._shadow.check_step(snapshots, *step.moves)
        self.mover.move(*step.moves, blocks_written(step.snapshots, self.pool.block_size))
        args = step.args
        if args is None:
            return _NO_TOKENS
        if step.awaited is not None and drawn is not None:
            tokens, samples = step.awaited
            token_ids = torch.from_numpy(fed_token_ids(drawn, samples))
            args.input_ids[torch.from_numpy(tokens)] = token_ids.to(args.input_ids.device)
        rows = step.rows
        if before is not None and drawn is not None:
            rows = with_newest_tokens(rows, before.snapshots, drawn)
        if self._graphs is not None and self._graphs.takes(args):
            return sample_on_device(self._graphs.logits(args), rows, self._processing).fetch()
        hidden = self.model(args, self.pool)
        prompts = prompt_logprobs(self.model, hidden, step.snapshots)
        if len(rows.seed) == 0:
            return replace(_NO_TOKENS, prompts=tuple(prompt.fetch() for prompt in prompts))
        logits = self.model.compute_logits(hidden[args.logits_indices])
        return sample_on_device(logits, rows, self._processing, prompts).fetch()


class LaunchedStep(NamedTuple):
    """A step that runs, or has run."""

    snapshots: Snapshots
    future: Future[SamplerOutput]

    def result(self) -> SamplerOutput:
        """Its tokens, as soon as they are there. Raises what the step raised."""
        return self.future.result()


class _Step(NamedTuple):
    """What there is to do for a launch."""

    snapshots: Snapshots
    before: LaunchedStep | None
    args: LaunchArgs | None  # None if there are no rows
    rows: SamplingRows
    awaited: tuple[np.ndarray, np.ndarray] | None  # see `awaited_draws`
    moves: tuple[_Pairs, _Pairs, _Pairs]  # out, in, copies
    entering: list[tuple[LoRARequest, int]]  # adapters, and their places


def blocks_written(
    seq_group_metadata_list: Sequence[SequenceGroupMetadata], block_size: int
) -> Iterator[int]:
    """The blocks that the step's new keys and values go to."""
    for metadata in seq_group_metadata_list:
        for _, data, table in metadata.rows():
            first = data.num_computed_tokens
            last = first + metadata.token_chunk_size - 1
            yield from table[first // block_size : last // block_size + 1].tolist()
