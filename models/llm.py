"""`LLM`: a model, a KV pool and an engine behind a few methods."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch

from ..kernels.swap_costs import PUBLIC_FIGURES, SwapCosts
from ..runtime.decode_graphs import captured_decodes
from ..runtime.memory import host_pool_blocks
from ..runtime.params import LoRARequest, SamplingParams
from ..runtime.recording import RecordingRunner, RecordingWriter
from ..runtime.runner import Model, ModelRunner, in_background
from ..scheduler import Engine, RequestOutput, Scheduler, SchedulerConfig, SchedulerStats
from .adapters import Adapters
from .guided import Guides
from .layers import kv_layers, widest_window
from .loader import load_model
from .pools import build_pools
from .replay import header_of, recording_path
from .tokenizer import load_tokenizer
from .weights import resolve_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..scheduler.engine import Request

Prompt = str | Seq[int]
Adapter = LoRARequest | None
Messages = Seq[Mapping[str, str]]  # {"role": ..., "content": ...}

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# dtype of the cache (None: the model's), and whether each key and value has a scale of its own
_KV_CACHE_DTYPES = {
    "auto": (None, False),
    "fp8": (torch.float8_e4m3fn, False),
    "fp8_e5m2": (torch.float8_e5m2, False),
    "fp8_per_token_head": (torch.float8_e4m3fn, True),
    "int8_per_token_head": (torch.int8, True),
}


@dataclass(kw_only=True)
class EngineStats(SchedulerStats):
    """Where the engine stands: what the scheduler says, and the size of a block of all layers."""

    peak_used_blocks: int
    block_bytes: int


class LLM:
    """Generates text for many prompts at once through paged KV blocks.

    model                   a bundled name ("smollm2-135m"), a .gguf file, a Hugging Face directory or a hub id
    device, dtype           "auto": the GPU if there is one; the checkpoint's dtype there, float32 on a CPU
    kv_cache_dtype          of the stored keys and values: "auto" (the model's); "fp8" (e4m3) or "fp8_e5m2", which take half
                            the memory of 16-bit numbers and cost some accuracy; "fp8_per_token_head" or
                            "int8_per_token_head", with a scale for each key and value of each head: 4 bytes more, and
                            accurate whatever their size
    block_size              tokens per KV block
    num_gpu_blocks          usable blocks of the KV pool; None takes what the weights and the largest step leave of
                            gpu_memory_utilization on a GPU, which a run finds out, a quarter of the free memory on a
                            CPU, and never more than max_num_seqs full sequences need
    swap_space_gib          of host memory for blocks swapped out, pinned where there is a GPU (torch then rounds it up
                            to a power of two); 0 for none
    swap_costs              of this machine, `SwapCosts.from_json(path)` of what `octavo kernels calibrate` wrote
    max_model_len           most tokens of a sequence; None takes the model's limit
    max_num_seqs            sequences that hold KV at once
    max_num_batched_tokens  most tokens fed in one step
    async_scheduling        put the next step together while the last one runs: the same tokens, sooner where the host's work
                            counts; a step that ends a request may be run in vain for it
    decode_graphs           replay steps of decodes alone as CUDA graphs, captured at the start, see `runtime.decode_graphs`;
                            on a CPU their calls are replayed one by one, which is no faster
    max_loras               adapters that may take part in one step, each with room for ranks up to max_lora_rank; 0 for none
    preemption_mode, policy, order, admission  what happens when blocks or seats run short, see `SchedulerConfig`
    model_class             a model of your own, built as model_class(config); see docs/design.md
    seed                    of requests that name none
    record                  a file that takes every executed step, to be run again by `octavo replay`; it is whole after
                            `close()`, which the end of the process calls too. See docs/recording.md
    Raises ValueError naming the argument, what was expected and what came.
    """

    recording: RecordingWriter | None = None

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        block_size: int = 16,
        num_gpu_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        swap_space_gib: float = 0,
        swap_costs: SwapCosts = PUBLIC_FIGURES,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        preemption_mode: str = "auto",
        policy: str = "fcfs",
        order: str = "decode-first",
        admission: str = "optimistic",
        async_scheduling: bool = False,
        decode_graphs: bool = False,
        max_loras: int = 0,
        max_lora_rank: int = 16,
        model_class: Callable[[Any], torch.nn.Module] | None = None,
        seed: int = 0,
        record: str | os.PathLike[str] | None = None,
    ) -> None:
        on_device = torch_device(device)
        torch_dtype = _dtype(dtype, on_device)
        _check_options(
            kv_cache_dtype,
            gpu_memory_utilization,
            swap_costs,
            model_class,
            {"async_scheduling": async_scheduling, "decode_graphs": decode_graphs},
            seed,
        )
        host_pool_blocks(swap_space_gib, 1)  # a bad number is refused before the weights are loaded
        record_to = None if record is None else recording_path(record)
        source = resolve_model(os.fspath(model))
        config = source.config()
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(
                f"model: expected one without an encoder, requests have no input for it, got {source.name!r}"
            )
        limit: int = config.max_position_embeddings
        if max_model_len is None:
            max_model_len = limit
        scheduler_config = SchedulerConfig(
            num_gpu_blocks=1 if num_gpu_blocks is None else num_gpu_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            vocab_size=config.vocab_size,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            sliding_window=widest_window(config),
            policy=policy,
            order=order,
            admission=admission,
            preemption_mode=preemption_mode,
            max_loras=max_loras,
        )
        if max_model_len > limit:
            raise ValueError(
                f"max_model_len: expected 1 to {limit} (the model's limit), got {max_model_len}"
            )
        self.tokenizer = load_tokenizer(source)
        loaded, self.config = load_model(source, torch_dtype, on_device, model_class)
        self.adapters = Adapters(loaded, max_loras, max_lora_rank) if max_loras else None
        cache_dtype, has_scales = _KV_CACHE_DTYPES[kv_cache_dtype]
        cache_dtype = cache_dtype or next(loaded.parameters()).dtype
        self.pool, self.host_pool = build_pools(
            cast(Model, loaded),
            kv_layers(loaded, self.config, cache_dtype, has_scales),
            on_device,
            scheduler_config,
            num_gpu_blocks,
            gpu_memory_utilization,
            swap_space_gib,
        )
        scheduler_config = replace(
            scheduler_config,
            num_gpu_blocks=self.pool.num_blocks - 1,
            num_cpu_blocks=0 if self.host_pool is None else self.host_pool.num_blocks - 1,
        )
        graphs = None
        if decode_graphs:
            most_rows = min(max_num_seqs, max_num_batched_tokens)
            graphs = captured_decodes(loaded, self.pool, max_model_len, most_rows)
        check = os.environ.get("OCTAVO_CHECK") == "1"
        runner: Any = ModelRunner(
            cast(Model, loaded),
            self.pool,
            self.host_pool,
            check,
            swap_costs,
            in_background() if async_scheduling else None,
            graphs,
            self.adapters,
        )
        if record_to is not None:
            header = header_of(
                source, loaded, self.config, self.pool, scheduler_config, self.adapters
            )
            header = msgspec.structs.replace(header, kv_cache_dtype=kv_cache_dtype, seed=seed)
            self.recording = RecordingWriter(record_to, header)
            weakref.finalize(self, self.recording.close)
            runner = RecordingRunner(runner, self.recording)
        self.engine = Engine(
            Scheduler(scheduler_config),
            runner,
            self.tokenizer.backend_tokenizer,
            self.tokenizer.eos_token_ids,
            seed,
            check,
            async_scheduling,
        )
        self._guides = Guides(self.tokenizer, self.config.vocab_size)
        self._ids = itertools.count()
        # requests that changed in a step which another call took, until their own call looks
        self._changed: dict[Request, None] = {}

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        progress: bool = False,
        lora_request: Adapter | Seq[Adapter] = None,
    ) -> list[RequestOutput]:
        """Complete the prompts (text or token ids) together; one result each, in their order.

        sampling_params, and lora_request (the adapter to use), may be one for all or one for each. Raises ValueError, with nothing run, when a prompt is
        impossible. `progress` shows a bar on standard error.
        """
        requests = self.add_requests(prompts, sampling_params, lora_request)
        try:
            with progress_bar(len(requests), progress) as advance:
                for done in self._run(requests):
                    advance(sum(request.finished for request in done))
        finally:
            self._abandon(requests)
        return [request.output() for request in requests]

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        lora_request: Adapter | Seq[Adapter] = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Complete the prompts together; yields (index of the prompt, its output so far) whenever one grew.

        Text only ever grows. The prompts are checked and queued when the iteration begins; closing the iterator aborts
        what is unfinished. Other calls may run in between: all share the steps.
        """
        requests = self.add_requests(prompts, sampling_params, lora_request)
        places = {request: place for place, request in enumerate(requests)}
        try:
            for changed in self._run(requests):
                for request in changed:
                    yield places[request], request.output()
        finally:
            self._abandon(requests)

    def chat(
        self,
        messages: Messages | Seq[Messages],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        progress: bool = False,
        lora_request: Adapter | Seq[Adapter] = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template."""
        if not isinstance(messages, (list, tuple)) or not messages:
            raise ValueError(f"messages: expected a list of at least one message, got {messages!r}")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = [self.tokenizer.encode_chat(cast("Messages", c)) for c in conversations]
        return self.generate(prompts, sampling_params, progress=progress, lora_request=lora_request)

    def abort(self, request_id: str) -> bool:
        """End a request of a `stream`, which yields its output once more, with reason "abort". False when there is no such
        request, or it has ended."""
        return self.engine.abort(request_id)

    def close(self) -> None:
        """End the recording, if there is one: the file then says that it is whole. Later steps are not recorded."""
        if self.recording is not None:
            self.recording.close()

    def stats(self) -> EngineStats:
        return EngineStats(
            **vars(self.engine.scheduler.stats()),
            peak_used_blocks=self.engine.peak_used_blocks,
            block_bytes=self.pool.block_bytes,
        )

    def add_requests(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
        lora_request: Adapter | Seq[Adapter] = None,
    ) -> list[Request]:
        """Queue requests for `engine.step`, all or, with a ValueError, none."""
        batch = _as_batch(prompts)
        adapters = self._registered(lora_request, len(batch))
        params: list[Any]
        if isinstance(sampling_params, (list, tuple)):
            params = list(sampling_params)
        else:
            params = [SamplingParams() if sampling_params is None else sampling_params] * len(batch)
        for each in params:
            if not isinstance(each, SamplingParams):
                raise ValueError(f"sampling_params: expected SamplingParams, got {each!r}")
        if len(params) != len(batch):
            raise ValueError(
                f"sampling_params: expected one, or one for each of {len(batch)} prompts, got {len(params)}"
            )
        for each in params if self.recording is not None else ():
            if each.logits_processors or each.guided is not None:
                raise ValueError(
                    "logits_processors, guided: expected none while a run is recorded, functions are not data"
                )
        params = [
            self._guides.with_processor(each) if each.guided is not None else each
            for each in params
        ]
        encoded = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in batch]
        requests: list[Request] = []
        try:
            asked = zip(batch, encoded, params, adapters, strict=True)
            for prompt, token_ids, each, adapter in asked:
                text = prompt if isinstance(prompt, str) else None
                name = f"request-{next(self._ids)}"
                requests.append(
                    self.engine.add_request(name, token_ids, each, text, lora_request=adapter)
                )
        except BaseException as error:
            self._abandon(requests)
            if isinstance(error, ValueError):
                raise ValueError(f"prompt {len(requests)}: {error}") from error
            raise
        return requests

    def _registered(
        self, lora_request: Adapter | Seq[Adapter], num_prompts: int
    ) -> list[LoRARequest | None]:
        """The adapter of each prompt, read and checked."""
        if lora_request is None or isinstance(lora_request, LoRARequest):
            requests: list[Adapter] = [lora_request] * num_prompts
        else:
            requests = list(lora_request)
        if len(requests) != num_prompts:
            raise ValueError(
                f"lora_request: expected one, or one for each of {num_prompts} prompts, got {len(requests)}"
            )
        for request in requests:
            if request is not None and not isinstance(request, LoRARequest):
                raise ValueError(f"lora_request: expected a LoRARequest, got {request!r}")
            if request is not None and self.adapters is None:
                raise ValueError(
                    f"lora_request: expected None with max_loras = 0, got {request.lora_name!r}"
                )
            if request is not None and self.adapters is not None:
                self.adapters.register(request)
        return requests

    def _run(self, requests: list[Request]) -> Iterator[list[Request]]:
        """Step until all of `requests` have ended; yields those that changed since the last time."""
        ours = set(requests)
        while ours:
            if not any(request in self._changed for request in ours):
                self._changed |= dict.fromkeys(self.engine.step())
            changed = [request for request in requests if request in self._changed]
            for request in changed:
                del self._changed[request]
            ours -= {request for request in changed if request.finished}
            yield changed

    def _abandon(self, requests: list[Request]) -> None:
        for request in requests:
            if not request.finished:
                self.engine.abort(request.group.request_id)
        if not self.engine.scheduler.has_unfinished() and self.engine.has_unfinished():
            self._changed |= dict.fromkeys(self.engine.step())  # takes leave of what was aborted
        for request in requests:
            self._changed.pop(request, None)


def _check_options(
    kv_cache_dtype: str,
    gpu_memory_utilization: float,
    swap_costs: SwapCosts,
    model_class: object,
    flags: dict[str, object],
    seed: int,
) -> None:
    """Refuse what no model makes right, before one is loaded."""
    if kv_cache_dtype not in _KV_CACHE_DTYPES:
        names = ", ".join(_KV_CACHE_DTYPES)
        raise ValueError(f"kv_cache_dtype: expected one of {names}, got {kv_cache_dtype!r}")
    is_number = isinstance(gpu_memory_utilization, (int, float))
    if not is_number or not 0 < gpu_memory_utilization <= 1:
        raise ValueError(
            f"gpu_memory_utilization: expected a number in (0, 1], got {gpu_memory_utilization!r}"
        )
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"seed: expected an integer, got {seed!r}")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{name}: expected True or False, got {flag!r}")
    if not isinstance(swap_costs, SwapCosts):
        raise ValueError(f"swap_costs: expected SwapCosts, got {swap_costs!r}")
    if model_class is not None and not callable(model_class):
        raise ValueError(f"model_class: expected a class, got {model_class!r}")


def _as_batch(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt or several -> several. A flat run of integers (list, tuple, array or tensor) is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    batch = _as_list("prompts", prompts)
    if batch and all(isinstance(item, Integral) for item in batch):
        return [batch]
    return [
        item if isinstance(item, str) else _as_list(f"prompts[{place}]", item)
        for place, item in enumerate(batch)
    ]


def _as_list(name: str, value: Any) -> list:
    if hasattr(value, "tolist"):  # numpy and torch
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name}: expected text or a list of token ids, got {value!r:.80}")
    return list(value)


@contextmanager
def progress_bar(total: int, show: bool) -> Iterator[Callable[[int], None]]:
    """Gives a function that advances the bar by so many finished requests."""
    if not show:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)


def torch_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device: expected 'auto', 'cpu' or 'cuda', got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected 'auto', 'cpu' or 'cuda', got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device: expected 'cpu', this machine has no GPU that torch can use, got " + repr(name)
        )
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype | None:
    """None stands for the checkpoint's own dtype."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else None
    if name not in _DTYPES:
        raise ValueError(f"dtype: expected 'auto' or one of {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]
