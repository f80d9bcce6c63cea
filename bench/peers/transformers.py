"""transformers generating whole outputs: its usual static batch, and its continuous batching over a paged cache.

Both take a loaded model, so that one set of weights serves both and whoever checks their tokens. Outputs are greedy, the best
beams or (the static batch) samples, and have exactly the length asked for: end tokens do not end them (the static batch never draws one, continuous
batching goes on after it).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from . import Unsupported

_PAD = 0  # any token: it is masked
_PAGE_SIZE = 256  # tokens; its default
_MOST_TOKENS = 2048  # of a step; Octavo's default


def load_model(model: str) -> Any:
    """In float32, from what Octavo's `resolve_model` finds: a folder of safetensors or a GGUF file."""
    from transformers import AutoModelForCausalLM

    from ...models.weights import resolve_model

    path = resolve_model(model).path
    if path.suffix == ".gguf":
        return AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


class TransformersStatic:
    """One left-padded batch that runs until its longest request is done."""

    name = "transformers"

    def __init__(self, model: Any) -> None:
        self._model = model

    def unavailable(self) -> str | None:
        return _not_installed()

    @torch.inference_mode()
    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        *,
        n: int = 1,
        num_beams: int = 1,
        temperature: float = 0.0,
    ) -> list[list[list[int]]]:
        """`temperature` above 0 draws from the whole vocabulary, whatever the model's own settings say."""
        if temperature == 0:
            _check(n, num_beams)
        drawing = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        width = max(map(len, prompts))
        ids = [[_PAD] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        device = self._model.device
        out = self._model.generate(
            torch.tensor(ids, device=device),
            attention_mask=torch.tensor(mask, device=device),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            **(drawing if temperature > 0 else {"do_sample": False}),
            num_beams=num_beams,
            num_return_sequences=n,
            pad_token_id=_PAD,
        )
        outputs = out[:, width:].tolist()
        return [outputs[i : i + n] for i in range(0, len(outputs), n)]


class TransformersContinuous:
    """`generate_batch` with a cache that holds all requests at once, made anew only when more is needed.

    Its prefix sharing is off: a second round of the same prompts would find them in the cache.
    """

    name = "transformers-continuous"

    def __init__(self, model: Any) -> None:
        self._model = model
        self._num_blocks = 0

    def unavailable(self) -> str | None:
        if reason := _not_installed():
            return reason
        try:
            from transformers import ContinuousBatchingConfig  # noqa: F401
        except ImportError:
            return "this release of transformers has no ContinuousBatchingConfig"
        return None

    def generate(
        self, prompts: list[list[int]], max_tokens: int, *, n: int = 1, num_beams: int = 1
    ) -> list[list[list[int]]]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        if num_beams > 1:
            raise Unsupported("its continuous batching has no beam search")
        _check(n, num_beams)
        needed = sum(-(-(len(prompt) + max_tokens) // _PAGE_SIZE) for prompt in prompts)
        if needed > self._num_blocks:
            self._model.destroy_cached_continuous_batching_manager()
            self._num_blocks = needed
        with _only_errors():  # it warns that a manager which is kept has a fixed size
            outputs = self._model.generate_batch(
                prompts,
                generation_config=GenerationConfig(
                    max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=_PAD
                ),
                continuous_batching_config=ContinuousBatchingConfig(
                    page_size=_PAGE_SIZE,
                    num_blocks=self._num_blocks,
                    max_batch_tokens=_MOST_TOKENS,
                    allow_block_sharing=False,
                ),
                persistent_manager=True,
                max_new_tokens=max_tokens,
            )
        failed = [output.error for output in outputs.values() if output.error is not None]
        if failed or len(outputs) != len(prompts):
            raise RuntimeError(f"{len(outputs)} of {len(prompts)} requests ended: {failed}")
        return [[output.generated_tokens] for output in outputs.values()]


def _not_installed() -> str | None:
    return None if find_spec("transformers") else "transformers is not installed"


def _check(n: int, num_beams: int) -> None:
    if n > num_beams:
        raise Unsupported(f"{n} outputs of {num_beams} beam(s): without sampling they are the same")


@contextmanager
def _only_errors() -> Iterator[None]:
    logger = logging.getLogger("ContinuousBatchingLogger")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
