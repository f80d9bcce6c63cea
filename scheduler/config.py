"""Limits and policy of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits and policy. Raises ValueError naming the field, what was expected and what came.

    num_gpu_blocks          usable blocks of the pool, the null block not counted
    max_num_seqs            seats: sequences that may hold KV at once (prefills count their n future sequences)
    max_num_batched_tokens  most tokens fed in one step; also bounds the seats, so that every seat can be fed
    max_model_len           most tokens of one sequence, prompt and output
    vocab_size              prompt token ids must be below it; None skips the check
    watermark               share of the pool that admission leaves free while others run, against thrashing
    policy                  "fcfs"
    preemption_mode         "recompute" (and "auto", which means it)
    """

    num_gpu_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048
    vocab_size: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    sliding_window: int | None = None
    watermark: float = 0.01
    policy: str = "fcfs"
    preemption_mode: str = "auto"

    def __post_init__(self) -> None:
        for name in (
            "num_gpu_blocks",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: expected an integer >= 1, got {value!r}")
        for name in ("vocab_size", "sliding_window"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}: expected None or an integer >= 1, got {value!r}")
        if not isinstance(self.watermark, (int, float)) or not 0 <= self.watermark < 1:
            raise ValueError(f"watermark: expected a number in [0, 1), got {self.watermark!r}")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens: expected at least max_model_len = {self.max_model_len} without chunked "
                f"prefill, got {self.max_num_batched_tokens}"
            )
        for name, known in (("policy", ("fcfs",)), ("preemption_mode", ("auto", "recompute"))):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}"
                )

    @property
    def num_seats(self) -> int:
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_seq_len(self) -> int:
        """Most tokens one sequence can reach: the model's limit or the whole pool."""
        return min(self.max_model_len, self.num_gpu_blocks * self.block_size)
