"""The parts of a run on a GPU: one that fails, hangs or lacks a package costs only itself; what is done is not repeated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from octavo.bench import gpu_parts, on_gpu
from octavo.bench.attention_problem import AttentionShape
from octavo.bench.generation_results import GenerationResults, GenerationRow
from octavo.bench.gpu_summary import Budget, judge_budgets, read_budgets, regrets, sections
from octavo.bench.on_gpu import PARTS, Part, run_part, summarise
from octavo.bench.results import read_results
from octavo.tests.bench.fabricated import MACHINE, full_run, results, row, write

ROOT = Path(on_gpu.__file__).parent.parent
HERE = str(Path(on_gpu.__file__).parents[2])


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch):
    """Python that a part runs instead of its own."""

    def set_code(code: str) -> None:
        monkeypatch.setattr(on_gpu, "_command", lambda *_: [sys.executable, "-c", code])

    return set_code


PART = Part("kernels", 20, needs=())


def _gone(pid: int, within: float = 5.0) -> bool:
    """Whether the process has ended; one that nobody waited for counts as ended."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def _pid_in(path: Path, within: float = 20.0) -> int:
    until = time.monotonic() + within
    while time.monotonic() < until:
        if path.exists() and (text := path.read_text()).endswith("\n"):
            return int(text)
        time.sleep(0.02)
    raise AssertionError(f"{path} was not written")


def _with_a_child(path: Path) -> str:
    """A part that starts a process, tells its number and waits for it for ever."""
    return (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(path)!r}, 'w').write(f'{{child.pid}}\\n')\n"
        "print('begun', flush=True)\n"
        "child.wait()\n"
    )


def test_done_and_done_before(tmp_path: Path, runs) -> None:
    runs("print('hello')")
    assert run_part(PART, tmp_path, False, False) == "done in 0 s"
    assert (tmp_path / "kernels.log").read_text() == "hello\n"
    runs("raise SystemExit(3)")
    assert run_part(PART, tmp_path, False, False) == "done before"
    assert run_part(PART, tmp_path, False, True).startswith("failed with exit code 3")
    # what failed when it was repeated is not done
    assert run_part(PART, tmp_path, False, False).startswith("failed with exit code 3")


def test_a_part_that_fails(tmp_path: Path, runs) -> None:
    runs("raise RuntimeError('no luck')")
    assert run_part(PART, tmp_path, False, False).startswith("failed with exit code 1 after ")
    assert "no luck" in (tmp_path / "kernels.log").read_text()
    assert not (tmp_path / "kernels.done").exists()


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_part_that_hangs_is_stopped_with_its_children(
    tmp_path: Path, runs, dry_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_gpu, "_REHEARSAL", 2)
    runs(_with_a_child(tmp_path / "pid"))
    state = run_part(replace(PART, limit_s=1), tmp_path, dry_run, False)
    assert state.startswith(f"stopped at its limit of {2 if dry_run else 1} s")
    assert _gone(_pid_in(tmp_path / "pid"))
    assert (tmp_path / "kernels.log").read_text() == "begun\n"
    assert not (tmp_path / "kernels.done").exists()


def test_children_that_a_part_leaves_behind_are_stopped(tmp_path: Path, runs) -> None:
    code = _with_a_child(tmp_path / "pid").replace("child.wait()\n", "")
    runs(code)
    assert run_part(PART, tmp_path, False, False).startswith("done")
    assert _gone(_pid_in(tmp_path / "pid"))


def test_a_missing_package(tmp_path: Path, runs) -> None:
    runs("raise SystemExit(3)")
    part = replace(PART, needs=("torch", "no_such_package", "nor_this"))
    assert run_part(part, tmp_path, False, False) == "skipped: needs no_such_package, nor_this"
    assert not (tmp_path / "kernels.log").exists()


def _run_main(folder: Path, code: str, *arguments: str) -> subprocess.Popen:
    """`on_gpu.main` with one part, which runs this code."""
    program = (
        "import sys\n"
        "from octavo.bench import on_gpu\n"
        "on_gpu.PARTS = (on_gpu.Part('kernels', 60, ()), on_gpu.Part('ops', 60, ()))\n"
        "on_gpu._BENCH = ('no_such_package',)\n"  # no tables: torch need not be imported
        f"on_gpu._command = lambda *_: [sys.executable, '-c', {code!r}]\n"
        f"sys.argv = ['on_gpu', {str(folder)!r}, *{list(arguments)!r}]\n"
        "on_gpu.main()\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )  # fmt: skip


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_who_stops_the_run_stops_the_part(tmp_path: Path, kind: signal.Signals) -> None:
    """`timeout` ends the run with SIGTERM, which Python does not turn into an exception by itself."""
    process = _run_main(tmp_path, _with_a_child(tmp_path / "pid"))
    child = _pid_in(tmp_path / "pid")
    process.send_signal(kind)
    process.communicate(timeout=20)
    assert process.returncode != 0
    assert _gone(child)


def test_one_that_fails_does_not_keep_the_others(tmp_path: Path) -> None:
    process = _run_main(tmp_path, f"import os\nsys = os.listdir({str(tmp_path)!r})\nassert 'ops.log' in sys")  # fmt: skip
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "kernels: failed" in output and "ops: done" in output
    summary = (tmp_path / "summary.md").read_text()
    assert "| kernels | failed with exit code 1" in summary and "| ops | done in" in summary


def test_a_rehearsal_is_not_the_run(tmp_path: Path) -> None:
    """What was rehearsed is done again when there is a GPU, though the folder is the same."""
    for arguments, folder in ((["--dry-run"], tmp_path / "rehearsal"), ([], tmp_path)):
        output, _ = _run_main(tmp_path, "pass", *arguments).communicate(timeout=30)
        assert "kernels: done in" in output and "done before" not in output
        assert (folder / "kernels.done").exists()


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    process = _run_main(tmp_path / "file", "pass")
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 2 and "file: File exists" in output and "Traceback" not in output


def test_all_parts_fit_into_eight_minutes() -> None:
    assert sum(part.limit_s for part in PARTS) <= 480 - 10
    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    assert set(names) - {"tests"} == set(gpu_parts.PARTS)
    for part in PARTS:
        assert {"torch", "triton"} <= set(part.needs)
        command = on_gpu._command(part, Path("x"), True)
        assert command[0] == sys.executable


# ---------------------------------------------------------------- what is shown of it


def test_a_summary_of_everything(tmp_path: Path) -> None:
    for name in ("machine", "kernels", "ops", "sweep", "host_step"):
        write(tmp_path, f"{name}.json", full_run())
    rows = [GenerationRow(32, 512, 128, "async+graphs", 4321.0, 0.01)]
    found = GenerationResults(MACHINE, "a model", rows)
    (tmp_path / "end_to_end.json").write_bytes(msgspec.json.encode(found))
    summarise(tmp_path, {"kernels": "done in 3 s", "ops": "failed"}, False)
    text = (tmp_path / "summary.md").read_text()
    for part in (
        "# One run on a GPU", "| kernels | done in 3 s |", "| ops | failed |", "## Budgets", "Some CPU", "## kernels", "## ops",
        "## Plans", "## Host step", "| 256 | 8192 | 950 | 3.06 |", "## End to end", "| 4321 |",
    ):  # fmt: skip
        assert part in text
    summarise(tmp_path, {}, True)
    assert "A rehearsal" in (tmp_path / "summary.md").read_text()


def test_a_summary_of_nothing_and_of_broken_files(tmp_path: Path) -> None:
    """A part that was stopped while it wrote must not take the summary, and the parts behind it, with it."""
    assert sections(tmp_path) == []
    (tmp_path / "kernels.json").write_bytes(b'{"machine": ')
    (tmp_path / "end_to_end.json").write_bytes(b"[]")
    write(tmp_path, "ops.json", full_run())
    summarise(tmp_path, {"kernels": "stopped"}, False)
    text = (tmp_path / "summary.md").read_text()
    assert (
        "kernels.json: expected what" in text and "end_to_end.json: " in text and "## ops" in text
    )


def test_the_summary_needs_no_engine() -> None:
    """A machine without transformers still has its tables."""
    code = "import sys, octavo.bench.gpu_summary\nassert not {'transformers', 'octavo.models'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("budget", "us", "verdict"),
    [
        ({"at_most_us": 200.0}, 100.0, "met: 2.000 of it"),
        ({"at_most_us": 200.0}, 400.0, "MISSED: 0.500 of it"),
        ({"at_most_us": 200.0}, 200.1, "MISSED: 1.000 of it"),
        ({"bytes_per_s": 1e12}, 100.0, "met: 1.000 of it"),
        ({"bytes_per_s": 2e12}, 100.0, "MISSED: 0.500 of it"),
        ({"flops_per_s": 5e12}, 100.0, "met: 2.000 of it"),
        ({"flops_per_s": 5e13}, 100.0, "MISSED: 0.200 of it"),
        ({"bytes_per_s": 1e12}, None, "not measured"),
    ],
)
def test_budgets(budget: dict, us: float | None, verdict: str) -> None:
    own = row(us=us)
    held = Budget(own.op, own.batch, own.shape, **budget)
    others = [row(us=1.0, implementation="sdpa"), row(us=1.0, plan="tile_kv=16"), row("q9", us=1.0)]
    assert judge_budgets([*others, own], {"it": held}) == {"it": verdict}
    assert judge_budgets(others, {"it": held}) == {"it": "not measured"}


def test_a_budget_counts_the_graph() -> None:
    held = Budget("paged_attention", "8q1s1k", row().shape, at_most_us=60.0)
    assert judge_budgets([row(us=100.0, graph_us=50.0)], {"it": held})["it"].startswith("met")


def test_budgets_that_make_no_sense(tmp_path: Path) -> None:
    for given in ({}, {"at_most_us": 1.0, "flops_per_s": 1.0}):
        with pytest.raises(ValueError, match="budget: expected one of"):
            Budget("a", "b", "c", **given)
    path = tmp_path / "budgets.toml"
    path.write_text("[a]\nop='a'\nbatch='b'\nshape='c'\nshare=0.9\n")
    with pytest.raises(ValueError, match="share"):
        read_budgets(path)


def test_every_budget_is_for_something_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of cases come out of the parts as the budgets have them, or nobody would ever miss one."""
    asked = []
    monkeypatch.setattr(gpu_parts, "_run_all", lambda setting, name, runs: asked.extend(runs))
    setting = gpu_parts.Setting(Path("x"), False)
    gpu_parts.kernels(setting)
    gpu_parts.ops(setting)
    attention = {
        (op, batch, str(run.shape)) for run in asked for op in run.ops for batch in run.batches
    }
    layers, base = 8, str(AttentionShape(dtype=torch.bfloat16))
    moved = {
        ("copy_blocks", "256 blocks", f"{base} {layers} layers"),
        ("swap_blocks", f"{256 * 128 // 16} blocks", f"{base} {layers} layers"),
    }
    assert ("copy_blocks", "256q1s128", base) in attention
    for budget in read_budgets().values():
        assert (budget.op, budget.batch, budget.shape) in attention | moved
    # what is named twice would be in the file twice
    named = [
        (op, batch, str(run.shape)) for run in asked for op in run.ops for batch in run.batches
    ]
    assert len(named) == len(set(named))


def test_regret_of_the_chosen_plan() -> None:
    swept = [
        row(us=120.0, chosen_plan="a=1"),
        row(us=100.0, plan="a=2"),
        row(us=140.0, plan="a=1"),
        row(us=None, plan="a=3", note="failed"),
        row("q9", us=50.0),
        row(us=1.0, implementation="sdpa"),
    ]
    ((case, chosen, best, regret),) = regrets(swept)
    assert (case, chosen, best) == (f"8q1s1k {row().shape}", "a=1", "a=2")
    assert regret == pytest.approx(1.2)
    assert regrets([row(us=None, note="failed"), row(us=100.0, plan="a=2")]) == []


# ---------------------------------------------------------------- the real parts, rehearsed


def test_shares_of_a_sweep_are_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each plan is compiled by one process, and the command that starts it is one that it takes."""
    started = []

    class Process:
        def __init__(self, command: list[str]) -> None:
            started.append(command[command.index("sweep") :])

        def wait(self) -> None:
            pass

    monkeypatch.setattr(gpu_parts.subprocess, "Popen", Process)
    setting = gpu_parts.Setting(tmp_path, True)
    gpu_parts._compile_plans(setting, ("2q1s48", "q40"), processes=3)
    assert len(started) == 3
    run: list[object] = []
    monkeypatch.setattr("octavo.bench.attention_problem.AttentionProblem.run", lambda self, plan: run.append(plan))  # fmt: skip
    for command in started:
        monkeypatch.setattr(sys, "argv", ["gpu_parts", *command, "--dry-run"])
        gpu_parts.main()
    expected = [
        plan
        for text in ("2q1s48", "q40")
        for plan in gpu_parts.plan_grid(
            gpu_parts.make_problem(gpu_parts.BatchSpec.parse(text), setting.shape)
        )
    ]
    assert len(run) == len(expected) and set(run) == set(expected)


def test_a_mode_that_is_wrong_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole generations: transformers has as many rounds as Octavo, and the others go on; the part ends as failed."""
    from octavo.bench import end_to_end_random, random_engine

    real = random_engine.RandomEngine.generate
    asked: list[int] = []

    def generate(self, prompts: list[list[int]], max_tokens: int):
        seconds, outputs = real(self, prompts, max_tokens)
        asked.append(len(prompts))
        if len(asked) == 1:
            outputs = [[(token + 1) % 512 for token in output] for output in outputs]
        return seconds, outputs

    monkeypatch.setattr(random_engine.RandomEngine, "generate", generate)
    modes = {
        "async": {"async_scheduling": True},
        "plain": {},
        end_to_end_random._TRANSFORMERS: None,
    }
    monkeypatch.setattr(end_to_end_random, "_MODES", modes)
    path = tmp_path / "end_to_end.json"
    with pytest.raises(SystemExit) as caught:
        end_to_end_random.run(path, "cpu", True)
    assert caught.value.code == 1
    assert "async: Traceback" in (said := capsys.readouterr().out) and "WrongResult" in said
    found = msgspec.json.decode(path.read_bytes(), type=GenerationResults)
    assert [(each.mode, each.num_requests) for each in found.rows] == [
        (mode, count) for mode in ("plain", end_to_end_random._TRANSFORMERS) for count in (1, 4)
    ]
    assert all(each.tokens_per_s > 0 for each in found.rows)
    assert asked == [4, 4, 1, 1, 4, 4]  # two verified, then two rounds of each


def test_a_rehearsal_of_the_cheap_parts(tmp_path: Path) -> None:
    """The script itself, from another folder, with a relative place for its results."""
    environment = dict(os.environ, PYTHON=sys.executable)
    environment.pop("TRITON_INTERPRET", None)
    command = ["bash", str(ROOT / "bench/on_gpu.sh"), "here", "--dry-run", "--only", "machine", "--only", "host_step"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "here" / "rehearsal"
    assert {path.name for path in folder.iterdir()} >= {"machine.json", "host_step.json", "summary.md", "machine.done"}  # fmt: skip
    costs = read_results(folder / "host_step.json").host_costs
    assert [cost.context_len for cost in costs] == [64, 256]
    assert "## Host step" in (folder / "summary.md").read_text()
    assert results().machine != read_results(folder / "machine.json").machine
