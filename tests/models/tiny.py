"""An engine over a tiny random Llama (or, with a window, Mistral) of transformers, with the model itself as the oracle. No tokenizer."""

from __future__ import annotations

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from octavo.models import load_model, resolve_model
from octavo.models.adapters import Adapters
from octavo.models.layers import kv_layers
from octavo.runtime.decode_graphs import DecodeGraphs
from octavo.runtime.kv_pool import KVPool
from octavo.runtime.runner import ModelRunner, in_background
from octavo.scheduler import Engine, Scheduler, SchedulerConfig

VOCAB = 61
EOS = 3


class TinyModel:
    """Weights are large, so that the next tokens are far from equally likely and ties do not occur."""

    def __init__(self, seed: int = 0, eos_scale: float = 1.0, window: int | None = None) -> None:
        torch.manual_seed(seed)
        self.window = window
        kinds = (LlamaConfig, LlamaForCausalLM)
        if window is not None:
            kinds = (MistralConfig, MistralForCausalLM)
        config = kinds[0](
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            eos_token_id=EOS,
            pad_token_id=0,
            bos_token_id=1,
            **({} if window is None else {"sliding_window": window}),
        )
        self.reference = kinds[1](config).eval()
        with torch.no_grad():
            for parameter in self.reference.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.25)
            self.reference.lm_head.weight[EOS] *= eos_scale  # how often it is the likeliest
        self.config = config
        with tempfile.TemporaryDirectory() as directory:
            self.reference.save_pretrained(directory)
            self.model, _ = load_model(resolve_model(directory), torch.float32, torch.device("cpu"))

    def engine(
        self,
        num_gpu_blocks: int = 200,
        block_size: int = 4,
        async_scheduling=False,
        graph_sizes=(),
        **config,
    ) -> Engine:
        layers = kv_layers(self.model, self.config, torch.float32)
        scheduler_config = SchedulerConfig(
            num_gpu_blocks=num_gpu_blocks,
            block_size=block_size,
            vocab_size=VOCAB,
            sliding_window=self.window,
            **{"max_model_len": 256, **config},
        )
        pool = KVPool(num_gpu_blocks + 1, layers, block_size)
        num_host = scheduler_config.num_cpu_blocks
        host = KVPool(num_host + 1, layers, block_size) if num_host else None
        executor = in_background() if async_scheduling else None
        graphs, max_loras = None, scheduler_config.max_loras
        self.adapters = Adapters(self.model, max_loras, 8) if max_loras else None
        if graph_sizes:
            graphs = DecodeGraphs(self.model, pool, scheduler_config.max_model_len, graph_sizes)
        return Engine(
            Scheduler(scheduler_config),
            ModelRunner(
                self.model,
                pool,
                host,
                check=True,
                executor=executor,
                graphs=graphs,
                adapters=self.adapters,
            ),
            eos_token_ids=frozenset([EOS]),
            check=True,
            async_scheduling=async_scheduling,
        )


def run(engine: Engine, max_steps: int = 4000) -> list:
    """Step until all has ended; returns the finished requests in the order they ended."""
    finished = []
    for _ in range(max_steps):
        if not engine.has_unfinished():
            assert engine.scheduler.blocks.num_used_blocks == 0
            return finished
        finished += [request for request in engine.step() if request.finished]
    raise AssertionError("not drained")
