"""The parts of `bench/on_gpu.sh`: each a process of its own with a time limit, so that one that fails or hangs costs only itself.

A part writes `<name>.json` (or, of the tests, a log) and is done when `<name>.done` is there; a later run goes on with the rest.
`summary.md` is written anew after each part. Only the standard library is imported here: it must run to say what is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_REHEARSAL = 3
ROOT = Path(__file__).resolve().parent.parent
_TORCH = ("torch", "triton", "numpy")
_BENCH = (*_TORCH, "msgspec", "rich")
_ENGINE = ("transformers", "safetensors", "tokenizers", "gguf", "huggingface_hub", "filelock")  # fmt: skip


@dataclass(frozen=True)
class Part:
    """`limit_s` on a GPU; a rehearsal may take `_REHEARSAL` times as long on its slow interpreter."""

    name: str
    limit_s: int
    needs: tuple[str, ...] = _BENCH


# The sum is the budget of a whole run, eight minutes, but for what starting and the summary take.
PARTS = (
    Part("machine", 20),
    Part("tests", 160, (*_TORCH, "pytest")),
    Part("kernels", 70),
    Part("ops", 40),
    Part("sweep", 70),
    Part("host_step", 20),
    Part("end_to_end", 90, (*_BENCH, *_ENGINE)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument(
        "--dry-run", action="store_true", help="small shapes on a CPU, in a folder of their own"
    )
    parser.add_argument("--only", action="append", choices=[part.name for part in PARTS])
    parser.add_argument("--again", action="store_true", help="repeat what is done")
    asked = parser.parse_args()
    # parts run in another folder; what was rehearsed is not done
    results: Path = asked.results.resolve() / ("rehearsal" if asked.dry_run else "")
    try:
        results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"{results}: {error.strerror}")
    # so that the part that runs is stopped, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen = [part for part in PARTS if asked.only is None or part.name in asked.only]
    states = {}
    for part in chosen:
        states[part.name] = run_part(part, results, asked.dry_run, asked.again)
        print(f"{part.name}: {states[part.name]}", flush=True)
        summarise(results, states, asked.dry_run)
    if any(state.startswith(("failed", "stopped")) for state in states.values()):
        sys.exit(1)


def run_part(part: Part, results: Path, dry_run: bool, again: bool) -> str:
    """What became of it, in words: done, done before, skipped, failed or stopped, and why."""
    done = results / f"{part.name}.done"
    if done.exists() and not again:
        return "done before"
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing:
        return f"skipped: needs {', '.join(missing)}"
    done.unlink(missing_ok=True)
    limit_s = part.limit_s * (_REHEARSAL if dry_run else 1)
    command = _command(part, results, dry_run)
    log = results / f"{part.name}.log"
    started = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(part, dry_run),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _stop(process)
    seconds = time.monotonic() - started
    if code is None:
        return f"stopped at its limit of {limit_s} s; what it had is kept ({log.name})"
    if code != 0:
        return f"failed with exit code {code} after {seconds:.0f} s ({log.name})"
    done.write_text(f"{seconds:.0f} s\n")
    return f"done in {seconds:.0f} s"


def _stop(process: subprocess.Popen) -> None:
    """The part and all its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _command(part: Part, results: Path, dry_run: bool) -> list[str]:
    if part.name != "tests":
        options = ["--dry-run"] if dry_run else []
        return [sys.executable, "-m", "octavo.bench.gpu_parts", part.name, str(results), *options]
    tests = ["tests/kernels", "tests/runtime/test_block_mover.py"]
    if all(importlib.util.find_spec(name) for name in _ENGINE):
        tests = ["tests/kernels", "tests/runtime", "tests/models/test_pools.py"]
    workers = ["-n", str(min(12, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") else []
    count = (
        "2" if dry_run else "60"
    )  # random combinations of features, each of which compiles kernels
    # with no GPU the same tests are collected, and none is selected
    return [
        sys.executable, "-m", "pytest", "-c", "pyproject.toml", "--rootdir", ".", "-q", "-p", "no:cacheprovider",
        "-m", "gpu", "--count", count, f"--junitxml={results / 'tests.xml'}", *([] if dry_run else workers), *tests,
    ]  # fmt: skip


def _environment(part: Part, dry_run: bool) -> dict[str, str]:
    environment = dict(os.environ)
    if dry_run and part.name == "sweep":  # plans are of the Triton kernels alone
        environment["OCTAVO_BACKEND"] = "interpret"
    return environment


def summarise(results: Path, states: dict[str, str], dry_run: bool) -> None:
    """`summary.md`: what became of each part, the budgets, and all tables."""
    title = "A rehearsal on a CPU: its times mean nothing" if dry_run else "One run on a GPU"
    lines = [f"# {title}", "", "| part | |", "|---|---|"]
    lines += [f"| {name} | {state} |" for name, state in states.items()]
    if all(importlib.util.find_spec(name) for name in _BENCH):
        from .gpu_summary import sections

        try:
            lines += ["", *sections(results)]
        except Exception as error:  # the parts that are left matter more than how they are shown
            lines += ["", f"The results could not be shown: {type(error).__name__}: {error}"]
    (results / "summary.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
