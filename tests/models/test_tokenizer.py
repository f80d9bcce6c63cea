"""Tokenizers beside checkpoints and in GGUF files; the ids that end an answer."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from octavo.models import ModelSource, load_tokenizer
from octavo.models.tokenizer import Tokenizer

TEXT = "The capital of France is Paris; 1 + 1 = 2. Größe, 世界, 🎉!\n\n  indented"


@pytest.fixture(scope="module")
def tokenizer(smollm2: ModelSource) -> Tokenizer:
    return load_tokenizer(smollm2)


def test_gguf_tokenizer_equals_transformers(smollm2: ModelSource, tokenizer: Tokenizer) -> None:
    hf = AutoTokenizer.from_pretrained(smollm2.path.parent, gguf_file=smollm2.path.name)
    ids = tokenizer.encode(TEXT)
    assert ids == hf.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.backend_tokenizer.decode(ids) == TEXT


def test_gguf_ends_with_what_the_file_says(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.hf.convert_ids_to_tokens(2) == "<|im_end|>"


def test_chat_format(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert ids.count(1) == 3 and tokenizer.decode(ids).count("<|") == 0


@pytest.mark.parametrize(
    "messages",
    [
        [], "hi", [{"role": "user"}], ["hi"], [{"role": "user", "content": None}], [{"role": "user", "content": 5}],
        [{"role": "user", "content": "\ud800"}], [{"role": 1, "content": "a"}],
    ],
    ids=repr,
)  # fmt: skip
def test_what_the_chat_template_cannot_take_is_a_value_error(
    tokenizer: Tokenizer, messages
) -> None:
    with pytest.raises(ValueError, match=r"^messages: expected .* got"):
        tokenizer.encode_chat(messages)


def test_chat_templates_run_in_a_sandbox(tokenizer: Tokenizer) -> None:
    hf = copy.copy(tokenizer.hf)
    hf.chat_template = (
        "{{ messages.append.__globals__ or messages.__class__.__mro__[1].__subclasses__() }}"
    )
    with pytest.raises(ValueError, match=r"^messages: expected .* unsafe"):
        Tokenizer(hf, frozenset()).encode_chat([{"role": "user", "content": "a"}])


def test_converted_tokenizer_is_kept_and_found_again(
    smollm2: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    assert load_tokenizer(smollm2).encode("Hi") == [26843]
    (kept,) = (tmp_path / "tokenizers").iterdir()
    file = json.loads((kept / "tokenizer.json").read_text())
    file["model"]["vocab"]["Hi"], file["model"]["vocab"]["Hello"] = 19556, 26843
    (kept / "tokenizer.json").write_text(json.dumps(file))
    assert load_tokenizer(smollm2).encode("Hi") == [19556], "expected the kept tokenizer"
    assert list((tmp_path / "tokenizers").iterdir()) == [kept]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    backend = Backend(WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    backend.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 0}, {1, 2}),
        ({"eos_token_id": 1}, {"eos_token_id": 0}, {1}),
        (None, {"eos_token_id": 0}, {0}),
        ({}, {"eos_token_id": [0, 1]}, {0, 1}),
        (None, {}, {2}),
    ],
)
def test_eos_token_ids(
    directory: Path, generation_config, config: dict, expected: set[int]
) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if generation_config is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation_config))
    tokenizer = load_tokenizer(ModelSource("tiny", directory))
    assert tokenizer.eos_token_ids == expected
    assert tokenizer.encode("b a b") == [1, 0, 1]


def test_no_chat_template(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="no chat template"):
        load_tokenizer(ModelSource("tiny", directory)).encode_chat(
            [{"role": "user", "content": "a"}]
        )


def test_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="none could be read for the model 'tiny'"):
        load_tokenizer(ModelSource("tiny", tmp_path))
