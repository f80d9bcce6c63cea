"""nano-vllm's host work in a decode step, from a checkout beside this project: its scheduler, its lists, its write-back.

Its own code runs unchanged: `Scheduler.schedule`, `ModelRunner.prepare_decode` and `prepare_sample`, `Scheduler.postprocess`.
What needs a GPU or one of its models is not imported, and pinned memory and the copy to the device cost it nothing here.
It needs xxhash. Its block size is a multiple of 256 by its own rule; 16 is set for the comparison at our size.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch


def load(checkout: str | Path) -> types.SimpleNamespace:
    """The classes that are measured. Raises ValueError when `checkout` is not one of nano-vllm."""
    package = Path(checkout) / "nanovllm"
    if not (package / "engine" / "scheduler.py").is_file():
        raise ValueError(f"checkout: expected a directory with nanovllm/, got {str(checkout)!r}")
    for name in ("nanovllm", "nanovllm.engine", "nanovllm.utils"):
        module = types.ModuleType(name)
        module.__path__ = [str(package / name.partition(".")[2])]  # its __init__ imports the models
        sys.modules[name] = module
    for name, missing in _NOT_IMPORTED.items():
        module = types.ModuleType(name)
        module.__dict__.update(dict.fromkeys(missing))
        sys.modules[name] = module
    runner: Any = importlib.import_module("nanovllm.engine.model_runner")
    runner.torch = _HostTorch()
    return types.SimpleNamespace(
        Scheduler=importlib.import_module("nanovllm.engine.scheduler").Scheduler,
        Sequence=importlib.import_module("nanovllm.engine.sequence").Sequence,
        SamplingParams=importlib.import_module("nanovllm.sampling_params").SamplingParams,
        ModelRunner=runner.ModelRunner,
        get_context=importlib.import_module("nanovllm.utils.context").get_context,
    )


_NOT_IMPORTED = {
    "nanovllm.config": ["Config"],
    "nanovllm.models": [],
    "nanovllm.models.qwen3": ["Qwen3ForCausalLM"],
    "nanovllm.layers": [],
    "nanovllm.layers.sampler": ["Sampler"],
    "nanovllm.utils.loader": ["load_model"],
}


class _OnDevice:
    """A tensor that is where it should be already."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def cuda(self, non_blocking: bool = False) -> torch.Tensor:
        return self.tensor


class _HostTorch:
    """`torch` without a GPU: `tensor(...).cuda()` stays on the host."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(data: Any, dtype: torch.dtype, pin_memory: bool = False) -> _OnDevice:
        return _OnDevice(torch.tensor(data, dtype=dtype))


class NanoHostStep:
    """`step()` runs the host's part of one decode step and returns its nanoseconds."""

    def __init__(
        self, nano: types.SimpleNamespace, prompts: list[list[int]], steps: int, block_size: int
    ) -> None:
        longest = max(map(len, prompts)) + steps
        config = types.SimpleNamespace(
            max_num_seqs=len(prompts),
            max_num_batched_tokens=len(prompts) * longest,
            eos=-1,
            kvcache_block_size=block_size,
            num_kvcache_blocks=len(prompts) * (longest // block_size + 3),
        )
        self._nano = nano
        self._scheduler = nano.Scheduler(config)
        self._runner = object.__new__(nano.ModelRunner)
        self._runner.block_size = block_size
        self._take_turn()
        params = nano.SamplingParams(max_tokens=1 << 30, ignore_eos=True)
        for prompt in prompts:
            self._scheduler.add(nano.Sequence(prompt, params))
        self._sampled = [(7 * row + 11) % 30000 for row in range(len(prompts))]
        seqs, is_prefill = self._scheduler.schedule()
        assert is_prefill and len(seqs) == len(prompts)
        self._scheduler.postprocess(seqs, self._sampled, is_prefill)

    def _take_turn(self) -> None:
        """Its block size is an attribute of the class, which steps of several sizes share."""
        self._nano.Sequence.block_size = self._runner.block_size

    def step(self) -> int:
        self._take_turn()
        started = perf_counter_ns()
        seqs, is_prefill = self._scheduler.schedule()
        self._runner.prepare_decode(seqs)
        self._runner.prepare_sample(seqs)
        self._scheduler.postprocess(seqs, self._sampled, is_prefill)
        return perf_counter_ns() - started

    def verify(self, positions: np.ndarray) -> None:
        """The step's rows are at these positions, and each is written to the slot that its table gives."""
        self._take_turn()
        seqs, is_prefill = self._scheduler.schedule()
        assert not is_prefill
        _, got = self._runner.prepare_decode(seqs)
        assert got.tolist() == positions.tolist()
        context, size = self._nano.get_context(), self._runner.block_size
        blocks = context.block_tables[torch.arange(len(seqs)), got // size]
        assert torch.equal(context.slot_mapping, blocks * size + (got % size).int())
        assert context.context_lens.tolist() == (positions + 1).tolist()
        self._scheduler.postprocess(seqs, self._sampled, is_prefill)
