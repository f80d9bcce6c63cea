"""Imports go one way: models -> scheduler -> runtime -> kernels. Read from the source, not from a running program."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import octavo

ROOT = Path(octavo.__file__).parent
LAYERS = ("kernels", "runtime", "scheduler", "models")  # each may import those before it
TORCH_FREE = {
    "runtime.metadata",
    "runtime.params",
    "runtime.sampling_params",
    "runtime.snapshots",
}  # all that scheduler may import of runtime
HEAVY = {"torch", "triton", "transformers"}
FILES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def imports(path: Path, source: str | None = None) -> list[tuple[str, bool]]:
    """(absolute module name, is inside the package) of every import, those in functions and under `if` too.

    Inside the package the name is relative to the root, so `from ..runtime.params import X` is `runtime.params`.
    """
    package = path.relative_to(ROOT).parent.parts
    found = []
    for node in ast.walk(ast.parse(path.read_text() if source is None else source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, False) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append((str(node.module), False))
        elif isinstance(node, ast.ImportFrom):
            parts = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            base = ".".join(filter(None, parts))
            if node.module and (len(parts) > 1 or base not in LAYERS):
                found.append((base, True))
            else:  # `from .. import kernels`, `from ..runtime import params`: the names may be modules
                found += [(f"{base}.{alias.name}".strip("."), True) for alias in node.names]
    return found


def faults(path: Path, source: str | None = None) -> list[str]:
    layer = path.relative_to(ROOT).parts[0]
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    wrong = []
    for name, is_ours in imports(path, source):
        if not is_ours:
            if name.split(".")[0] == "octavo":
                wrong.append(f"{name}: imports inside the package are relative")
            elif layer == "scheduler" and name.split(".")[0] in HEAVY:
                wrong.append(f"{name}: scheduler is torch-free")
            continue
        target = name.split(".")[0]
        if target not in allowed:
            wrong.append(f"{name}: {layer} may import {', '.join(allowed)}")
        elif (
            layer == "scheduler"
            and target != layer
            and ".".join(name.split(".")[:2]) not in TORCH_FREE
        ):
            wrong.append(f"{name}: scheduler may import {', '.join(sorted(TORCH_FREE))}")
    return wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_go_one_way(path: Path) -> None:
    assert faults(path) == []


@pytest.mark.parametrize("path", sorted(TORCH_FREE | {"runtime.__init__"}))
def test_torch_free_part_of_runtime(path: str) -> None:
    names = imports(ROOT / (path.replace(".", "/") + ".py"))
    assert not [name for name, is_ours in names if not is_ours and name.split(".")[0] in HEAVY]
    assert {".".join(name.split(".")[:2]) for name, is_ours in names if is_ours} <= TORCH_FREE


@pytest.mark.parametrize(
    ("file", "source", "fault"),
    [
        ("kernels/a.py", "from ..runtime import metadata", "runtime.metadata: kernels may import"),
        (
            "kernels/a.py",
            "from ..runtime.metadata import X",
            "runtime.metadata: kernels may import",
        ),
        (
            "runtime/a.py",
            "def f():\n    from ..scheduler.engine import Engine",
            "scheduler.engine: runtime may",
        ),
        ("runtime/a.py", "from .. import models", "models: runtime may import"),
        (
            "scheduler/a.py",
            "from ..runtime.runner import ModelRunner",
            "runtime.runner: scheduler may import",
        ),
        (
            "scheduler/a.py",
            "from ..runtime import kv_pool",
            "runtime.kv_pool: scheduler may import",
        ),
        ("scheduler/a.py", "from .. import kernels", "kernels: scheduler may import"),
        ("scheduler/a.py", "if True:\n    import torch.nn", "torch.nn: scheduler is torch-free"),
        ("models/a.py", "from octavo.runtime import params", "octavo.runtime: imports inside"),
        ("models/a.py", "import octavo.kernels", "octavo.kernels: imports inside"),
        ("models/a.py", "from .. import LLM", "LLM: models may import"),
    ],
)
def test_faults_are_found(file: str, source: str, fault: str) -> None:
    (found,) = faults(ROOT / file, source)
    assert found.startswith(fault)


def test_right_imports_pass() -> None:
    source = "from ..runtime.params import X\nfrom ..runtime import metadata\nfrom . import y\nfrom .y import z\nimport numpy"
    assert faults(ROOT / "scheduler/a.py", source) == []
    source = "import torch\nfrom .. import kernels\nfrom ..kernels import paged_attention\nfrom ..scheduler import Engine"
    assert faults(ROOT / "models/a.py", source) == []
