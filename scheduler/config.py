"""Limits and policy of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

_CHOICES = {
    "policy": ("fcfs", "priority"),
    "order": ("decode-first", "prefill-first"),
    "admission": ("optimistic", "reserve"),
    "preemption_mode": ("auto", "recompute", "swap"),
}
_AT_LEAST = {
    "num_gpu_blocks": 1,
    "block_size": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 1,
    "num_cpu_blocks": 0,
    "max_loras": 0,
    "max_encoder_len": 0,
}


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits and policy. Raises ValueError naming the field, what was expected and what came.

    num_gpu_blocks          usable blocks of the pool, the null block not counted
    num_cpu_blocks          blocks in host memory to swap to; 0 for no swapping
    max_num_seqs            seats: sequences that may hold device KV at once (prefills count their future sequences)
    max_num_batched_tokens  most tokens fed in one step; also bounds the seats, so that every seat can be fed
    max_model_len           most tokens of one sequence, prompt and output
    max_encoder_len         most encoder tokens of one request, 0 for a model without an encoder
    max_loras               adapters that one step may use, 0 for a model without adapters
    is_multi_modal          requests may bring images or the like
    vocab_size              prompt token ids must be below it; None skips the check
    sliding_window          tokens that every layer sees at most, the newest included; None for all
    watermark               share of the pool that optimistic admission leaves free while others run, against thrashing
    policy                  "fcfs": first come, first served. "priority": lower `priority` first, then first come; an urgent
                            request takes the place of less urgent ones, be it for seats or for blocks
    order                   who takes from a step's budget first: "decode-first" or "prefill-first" (first tokens sooner,
                            running requests slower: every other step at the least)
    admission               "optimistic": requests come in while there is room now, and are preempted if it runs out.
                            "reserve": only if the blocks suffice until all have ended, at their longest; never preempts
    preemption_mode         what becomes of the KV of a preempted request. "recompute": given up and computed again. "swap":
                            moved to host memory. "auto": swap for several sequences, recompute for one. Where host memory
                            is full it is recompute
    """

    num_gpu_blocks: int
    block_size: int = 16
    num_cpu_blocks: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048
    max_encoder_len: int = 0
    max_loras: int = 0
    is_multi_modal: bool = False
    vocab_size: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    sliding_window: int | None = None
    watermark: float = 0.01
    policy: str = "fcfs"
    order: str = "decode-first"
    admission: str = "optimistic"
    preemption_mode: str = "auto"

    def __post_init__(self) -> None:
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")
        for name in ("vocab_size", "sliding_window"):
            value = getattr(self, name)
            is_int = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and (not is_int or value < 1):
                raise ValueError(f"{name}: expected None or an integer >= 1, got {value!r}")
        for name in ("is_multi_modal", "enable_prefix_caching", "enable_chunked_prefill"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        if not isinstance(self.watermark, (int, float)) or not 0 <= self.watermark < 1:
            raise ValueError(f"watermark: expected a number in [0, 1), got {self.watermark!r}")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}"
                )
        whole = self.max_model_len + self.max_encoder_len
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < whole:
            raise ValueError(
                f"max_num_batched_tokens: expected at least max_model_len + max_encoder_len = {whole} without chunked "
                f"prefill, got {self.max_num_batched_tokens}"
            )
        if self.admission == "reserve" and self.order != "decode-first":
            raise ValueError(
                f"order: expected 'decode-first' with admission 'reserve', got {self.order!r}"
            )

    @property
    def num_seats(self) -> int:
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    def max_seq_len(self, num_cross_blocks: int) -> int:
        """Most tokens one sequence can reach beside so many blocks of an encoder: the model's limit or the whole pool."""
        size, window = self.block_size, self.sliding_window
        num_blocks = self.num_gpu_blocks - num_cross_blocks
        if window is not None and self.enable_chunked_prefill:
            seen = -(-(window - 1) // size) + 1  # most blocks that a single query sees
            if seen <= num_blocks:
                return self.max_model_len
        return min(self.max_model_len, num_blocks * size)
