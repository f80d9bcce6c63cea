"""A scheduler with the shadow runner, driven step by step."""

from __future__ import annotations

from octavo.runtime.params import SamplingParams
from octavo.scheduler import Engine, Scheduler, SchedulerConfig
from octavo.scheduler.engine import Request
from octavo.tests.scheduler.shadow import VOCAB, ShadowRunner


class Harness:
    """Every step checks that each row reads its own tokens and that the block accounting agrees."""

    def __init__(
        self, *, num_blocks: int = 64, block_size: int = 4, async_scheduling=False, **config
    ) -> None:
        config = {"max_model_len": 1024, "vocab_size": VOCAB, "watermark": 0.0, **config}
        self.scheduler = Scheduler(
            SchedulerConfig(num_gpu_blocks=num_blocks, block_size=block_size, **config)
        )
        self.runner = ShadowRunner(block_size, self.scheduler.config.sliding_window)
        self.engine = Engine(
            self.scheduler, self.runner, check=True, async_scheduling=async_scheduling
        )
        self.finished: dict[str, Request] = {}

    @property
    def blocks(self):
        return self.scheduler.blocks

    @property
    def num_used_blocks(self) -> int:
        return self.blocks.num_used_blocks

    def add(
        self,
        request_id: str,
        prompt,
        max_tokens: int = 8,
        n: int = 1,
        params: SamplingParams | None = None,
        **kwargs,
    ) -> Request:
        params = params or SamplingParams(n=n, max_tokens=max_tokens)
        self.runner.spans[request_id] = tuple(kwargs.get("multi_modal_spans", ()))
        return self.engine.add_request(request_id, list(prompt), params, **kwargs)

    def step_until(self, condition, max_steps: int = 500) -> None:
        for _ in range(max_steps):
            if condition():
                return
            self.step()
        raise AssertionError("it never came to that")

    def step(self) -> list[Request]:
        changed = self.engine.step()
        for request in changed:
            if request.finished:
                name = request.group.request_id
                assert name not in self.finished, f"{name} ended twice"
                self.finished[name] = request
        return changed

    def drain(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_unfinished():
                assert self.num_used_blocks == 0
                return
            self.step()
        raise AssertionError("not drained")

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return self.finished[request_id].group.seqs[index].output_token_ids.tolist()
