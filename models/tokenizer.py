"""Text to token ids: transformers' tokenizer of the model, and the ids that end its answers."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .weights import ModelSource, cache_dir, read_json

if TYPE_CHECKING:
    import tokenizers


class Tokenizer:
    """A model's tokenizer.

    hf             the transformers tokenizer
    eos_token_ids  ids that end a completion
    """

    def __init__(self, hf: Any, eos_token_ids: frozenset[int]) -> None:
        if getattr(hf, "backend_tokenizer", None) is None:
            raise ValueError(
                f"tokenizer: expected one backed by the tokenizers library, got {type(hf).__name__}"
            )
        self.hf = hf
        self.eos_token_ids = eos_token_ids

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer:
        return self.hf.backend_tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of the text, with the special tokens that the model expects around it."""
        return self._encode("prompt", text, add_special_tokens=True)

    def _encode(self, name: str, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return self.hf.encode(text, add_special_tokens=add_special_tokens)
        except TypeError:  # the library's word for a str that no UTF-8 can hold
            raise ValueError(
                f"{name}: expected text that UTF-8 can hold, got {text!r:.80}"
            ) from None

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation in the model's chat format, up to where the assistant is to speak."""
        if not self.hf.chat_template:
            raise ValueError("messages: the model has no chat template")
        if not isinstance(messages, (list, tuple)) or not messages:
            raise ValueError(f"messages: expected at least one message, got {messages!r:.80}")
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise ValueError(
                    f"messages: expected role and content in each, got {message!r:.80}"
                )
        try:
            text = self.hf.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # the model's own program, which raises what it likes
            raise ValueError(
                f"messages: expected what the model's chat template takes, got {messages!r:.80}: {error}"
            ) from error
        # the template wrote special tokens already
        return self._encode("messages", text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend_tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens
        )


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer beside the model's weights. Raises ValueError when there is none that can be read."""
    from transformers import AutoTokenizer

    directory = _converted(source.path) if source.is_gguf else source.path
    try:
        hf = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"tokenizer: none could be read for the model {source.name!r}: {error}"
        ) from error
    return Tokenizer(hf, _eos_token_ids(source, hf))


def _eos_token_ids(source: ModelSource, hf: Any) -> frozenset[int]:
    """As generation_config.json has them, else the model's configuration, else the tokenizer."""
    if source.is_gguf:
        declared = source.config().eos_token_id
    else:
        declared = read_json(source.path / "generation_config.json").get("eos_token_id")
        if declared is None:
            declared = read_json(source.path / "config.json").get("eos_token_id")
    if declared is None:
        declared = hf.eos_token_id
    if declared is None:
        return frozenset()
    return frozenset([declared] if isinstance(declared, int) else declared)


def _converted(path: Path) -> Path:
    """The tokenizer of a GGUF file as a Hugging Face directory in the cache: converting one takes seconds."""
    from transformers import AutoTokenizer

    target = cache_dir() / "tokenizers" / _identity(path)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(scratch)
        os.rename(scratch, target)  # whole or not at all
    except OSError:
        if not target.is_dir():  # else another process was first
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _identity(path: Path) -> str:
    import transformers

    status = path.stat()
    with path.open("rb") as file:
        head = file.read(1 << 20)
    facts = f"{status.st_size} {status.st_mtime_ns} {transformers.__version__}".encode()
    return hashlib.sha256(head + facts).hexdigest()[:32]
