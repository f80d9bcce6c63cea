"""An engine over a Llama of random weights, made where it runs: the shape of a large model without its files, and no tokenizer.

Random weights are as fast as trained ones. That its tokens are right is checked against transformers' model over the very same
tensors: each chosen token must be the largest of its logits, to within rounding.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..models.layers import kv_layers
from ..models.llama import LlamaForCausalLM
from ..models.loader import build_model, parameters_by_name
from ..models.pools import build_pools
from ..runtime.decode_graphs import captured_decodes
from ..runtime.params import SamplingParams
from ..runtime.runner import ModelRunner, in_background
from ..scheduler import Engine, Scheduler, SchedulerConfig
from .attention_problem import WrongResult


@dataclass(frozen=True)
class LlamaShape:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    vocab_size: int


LLAMA_3_8B = LlamaShape(4096, 14336, 32, 32, 8, 128_256)
SMOLLM2_135M = LlamaShape(576, 1536, 30, 9, 3, 49_152)
SMALL = LlamaShape(64, 128, 2, 4, 2, 512)  # to rehearse


class RandomEngine:
    """`generate` runs prompts to the same number of tokens each, greedily, and says how long it took."""

    def __init__(
        self,
        shape: LlamaShape,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        max_num_seqs: int,
        max_model_len: int,
        async_scheduling: bool = False,
        decode_graphs: bool = False,
        model: LlamaForCausalLM | None = None,
    ) -> None:
        """`model`: another engine's, whose weights are then shared."""
        self.hf_config = _hf_config(shape, max_model_len)
        self.model = model or random_llama(shape, device, dtype, max_model_len)
        config = SchedulerConfig(
            num_gpu_blocks=max_num_seqs * (max_model_len // 16 + 1),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max(2048, max_num_seqs),
            vocab_size=shape.vocab_size,
            enable_prefix_caching=False,  # each round has the same prompts
        )
        layers = kv_layers(self.model, self.hf_config, dtype)
        pool, _ = build_pools(
            self.model, layers, torch.device(device), config, config.num_gpu_blocks, 0.9, 0
        )
        graphs = None
        if decode_graphs:
            graphs = captured_decodes(self.model, pool, max_model_len, max_num_seqs)
        executor = in_background() if async_scheduling else None
        runner = ModelRunner(self.model, pool, executor=executor, graphs=graphs)
        self.engine = Engine(Scheduler(config), runner, async_scheduling=async_scheduling)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
        """(seconds, tokens of each prompt)."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        started = time.perf_counter()
        requests = [
            self.engine.add_request(str(number), prompt, params)
            for number, prompt in enumerate(prompts)
        ]
        while self.engine.has_unfinished():
            self.engine.step()
        seconds = time.perf_counter() - started
        return seconds, [list(request.output().outputs[0].token_ids) for request in requests]

    @torch.inference_mode()
    def verify(self, prompts: list[list[int]], outputs: list[list[int]]) -> float:
        """The most by which a chosen token's logit is behind transformers' largest, in standard deviations of the logits.

        Raises WrongResult where it is more than rounding makes it.
        """
        reference = self.reference()
        device = next(self.model.parameters()).device
        worst = 0.0
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = torch.tensor([prompt + output[:-1]], device=device)
            logits = reference(ids).logits[0, len(prompt) - 1 :].float()
            chosen = logits.gather(1, torch.tensor(output, device=device)[:, None])[:, 0]
            behind = (logits.max(dim=-1).values - chosen) / logits.std(dim=-1)
            worst = max(worst, float(behind.nan_to_num(nan=torch.inf).max()))
        bound = (
            1e-3 if reference.dtype == torch.float32 else 0.1
        )  # 16 bits round in dozens of layers
        if not worst <= bound:
            raise WrongResult(f"a token's logit is {worst:.2g} deviations behind transformers' best, expected at most {bound}")  # fmt: skip
        return worst

    def reference(self) -> Any:
        """transformers' model over the same tensors."""
        from transformers import LlamaForCausalLM as HFLlama

        with torch.device("meta"):
            reference = HFLlama(self.hf_config)
        weights, _ = parameters_by_name(self.model)
        weights = {name: tensor.detach() for name, tensor in weights.items()}
        reference.load_state_dict(weights, assign=True)
        # what is computed from the configuration was made on no device
        with next(self.model.parameters()).device:
            reference.model.rotary_emb = type(reference.model.rotary_emb)(self.hf_config)
        return reference.eval().requires_grad_(False)


def random_llama(
    shape: LlamaShape, device: torch.device | str, dtype: torch.dtype, max_model_len: int
) -> LlamaForCausalLM:
    """Weights normal with deviation 0.02, norms 1, as Llama starts its training."""
    config = _hf_config(shape, max_model_len)
    model = cast(LlamaForCausalLM, build_model(LlamaForCausalLM, config, dtype, device))
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02, generator=generator)
            else:
                parameter.fill_(1)
    return model


def _hf_config(shape: LlamaShape, max_model_len: int) -> Any:
    from transformers import LlamaConfig

    # its fields come from a decorator that type checkers do not follow
    make = cast(Any, LlamaConfig)
    return make(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_q_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.hidden_size // shape.num_q_heads,
        max_position_embeddings=max_model_len,
        rope_theta=500_000.0,
        tie_word_embeddings=False,
    )
