"""What a caller may ask of one request: adapters, images; `SamplingParams` is in `sampling_params`. Torch-free."""

from __future__ import annotations

from typing import Any

import msgspec

from .sampling_params import Guided, SamplingParams, is_int, require

__all__ = ["Guided", "LoRARequest", "MultiModalSpan", "SamplingParams"]


class LoRARequest(msgspec.Struct, frozen=True):
    """A loaded LoRA adapter. Loading it again, from the same path even, is another adapter with another id.

    lora_name    what users call it
    lora_int_id  >= 1, one for each load: cached prefixes are shared within one id only
    lora_path    where its weights are
    Raises ValueError naming the field, what was expected and what came.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        require(
            isinstance(self.lora_name, str)
            and bool(self.lora_name)
            and self.lora_name.isprintable(),
            "lora_name",
            "a printable name",
            self.lora_name,
        )
        id_ok = is_int(self.lora_int_id) and self.lora_int_id >= 1
        require(id_ok, "lora_int_id", "an integer >= 1", self.lora_int_id)
        require(isinstance(self.lora_path, str), "lora_path", "a path", self.lora_path)


class MultiModalSpan(msgspec.Struct, frozen=True):
    """An image, a sound or the like, in place of `length` placeholder tokens of the prompt.

    offset    index of its first placeholder in the prompt's tokens
    length    placeholders, one for each of its embeddings; they count as tokens everywhere
    digest    8 to 64 bytes that identify the content: prefixes are shared only where the digests are equal
    data      what the model makes the embeddings from, or the embeddings themselves
    is_whole  the model needs the span in one step (for example with attention both ways): it is never split into chunks
    Raises ValueError naming the field, what was expected and what came.
    """

    offset: int
    length: int
    digest: bytes
    data: Any = None
    is_whole: bool = False

    def __post_init__(self) -> None:
        require(is_int(self.offset) and self.offset >= 0, "offset", "an integer >= 0", self.offset)
        require(is_int(self.length) and self.length >= 1, "length", "an integer >= 1", self.length)
        digest_ok = isinstance(self.digest, bytes) and 8 <= len(self.digest) <= 64
        require(digest_ok, "digest", "8 to 64 bytes", self.digest)

    @property
    def stop(self) -> int:
        return self.offset + self.length
