"""`octavo bench` from end to end on tiny shapes: what it writes, what it refuses and with which exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from octavo.__main__ import app
from octavo.bench import peers, suite
from octavo.bench.attention_problem import AttentionProblem
from octavo.bench.peers import Unsupported
from octavo.bench.results import read_results
from octavo.bench.traces import problems_of
from octavo.runtime.params import SamplingParams
from octavo.runtime.recording import Recording, read_recording
from octavo.tests.bench.fabricated import changed, full_run, results, row, write
from octavo.tests.models.test_replay import record
from octavo.tests.models.tiny import VOCAB, TinyModel, run

SMALL = ("--heads", "4/2", "--head-size", "16", "--dtype", "float32", "--seconds", "0")


def bench(*arguments: object, small: bool = True):
    return CliRunner().invoke(app, ["bench", *(SMALL if small else ()), *map(str, arguments)])


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of small tensors: what they are is not looked at here."""
    from octavo.bench import kernel_run, machine

    def small(device: str, dtype: torch.dtype, **_: object) -> machine.Ceilings:
        return machine.measure_ceilings(device, dtype, seconds=0, small=True)

    monkeypatch.setattr(kernel_run, "measure_ceilings", small)


# ---------------------------------------------------------------- what it writes


def test_a_table_a_file_and_a_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found, report = tmp_path / "a.json", tmp_path / "deep" / "report"
    done = bench("--batch", "2q1s40", "--batch", "2q1s80", "--batch", "q9", "--peer", "sdpa", "--json", found, "--report", report)  # fmt: skip
    assert done.exit_code == 0, done.output
    measured = read_results(found).measurements
    assert [(each.batch, each.implementation) for each in measured] == [
        (batch, name) for batch in ("2q1s40", "2q1s80", "q9") for name in ("octavo", "sdpa")
    ]
    for each in measured:
        assert each.best_us and each.error is not None and each.error < 1e-4 and each.note is None
        assert f"{each.op}  {each.batch}" in done.stdout
    assert read_results(report / "results.json") == read_results(found)
    files = {path.name for path in report.iterdir()}
    assert files == {"report.html", "report.md", "results.json", "roofline.png", "latency_by_context.png"}  # fmt: skip
    assert "2q1s80" in (report / "report.html").read_text()
    assert str(report / "report.html") in done.stderr


def test_every_op_and_a_batch_that_one_of_them_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """A prompt has no shared prefix: that is a note, and the others are measured."""
    monkeypatch.setattr("octavo.bench.kernel_cases.sampling.VOCAB_SIZE", 500)
    done = bench("--op", "all", "--batch", "q9", "--json", tmp_path / "a.json")
    assert done.exit_code == 0, done.output
    own = [each for each in read_results(tmp_path / "a.json").measurements if each.is_own_choice]
    assert len({each.op for each in own}) == len(own) > 12
    (not_timed,) = (each for each in own if each.best_us is None)
    assert not_timed.op == "cascade_attention" and not not_timed.is_fault
    assert "cascade_attention  q9" in done.stdout and "not measured: batch: expected two" in done.stdout  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        ("--heads", "7/1", "--head-size", "33", "--block-size", "1"),
        ("--heads", "16/1", "--head-size", "96", "--block-size", "7", "--window", "5"),
        ("--heads", "3/3", "--head-size", "8", "--block-size", "256", "--softcap", "20"),
        ("--dtype", "bfloat16", "--cache-dtype", "float8_e4m3fn"),
        ("--dtype", "float16", "--cache-dtype", "float8_e5m2", "--window", "1"),
    ],
    ids=" ".join,
)
def test_odd_shapes(options: tuple[str, ...]) -> None:
    done = bench("--batch", "q1", "--batch", "300q1s3", "--batch", "q5s9_q1s4", *options)
    assert done.exit_code == 0, done.output
    assert "wrong" not in done.output and "failed" not in done.output


def test_what_is_asked_for_twice_is_measured_once(tmp_path: Path) -> None:
    """`8q1s1k` and `8q1s1024` are one batch."""
    batches = ("--batch", "q1s1k", "--batch", "1q1s1024", "--batch", "q9_q1", "--batch", "q1_q9")
    done = bench(*batches, "--op", "rms_norm", "--op", "rms_norm", "--json", tmp_path / "a.json")
    assert done.exit_code == 0, done.output
    keys = [each.key for each in read_results(tmp_path / "a.json").measurements]
    assert len(keys) == len(set(keys)) == 4


def test_piped_output_is_not_folded(tmp_path: Path) -> None:
    done = bench("--batch", "2q1s40", "--peer", "flashinfer", "--json", tmp_path / "a.json")
    *_, missing = read_results(tmp_path / "a.json").measurements
    assert missing.note and f"flashinfer: {missing.note}" in done.stdout


# ---------------------------------------------------------------- what goes wrong


class _Peer:
    def __init__(self, name: str, prepare) -> None:
        self.name = name
        self.prepare = prepare

    def unavailable(self) -> str | None:
        return None


@pytest.fixture
def strange_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of real ones: one that raises, one that is wrong, slow, unable, and one that fails while it is timed."""

    def raises(problem: AttentionProblem):
        raise IndexError("list[/x] out of [bold]range\nand more")

    def unable(problem: AttentionProblem):
        raise Unsupported("it knows\nno heads")

    def fails_late(problem: AttentionProblem):
        count = iter(range(100))

        def call() -> torch.Tensor:
            if next(count) > 4:
                raise RuntimeError("worn out")
            return problem.run()

        return call

    def slow(problem: AttentionProblem):
        def call() -> torch.Tensor:
            time.sleep(0.01)
            return problem.run()

        return call

    def tires(problem: AttentionProblem):
        count = iter(range(10**9))
        return lambda: problem.run() if next(count) < 4 else problem.run() * 1.1

    def unfinished(problem: AttentionProblem):
        def call() -> torch.Tensor:
            out = problem.run()
            if len(out) == 9:
                out[3] = torch.nan  # of nine new tokens eight are compared
            return out

        return call

    made = {
        "raises": raises,
        "tires": tires,
        "unfinished": unfinished,
        "wrong": lambda problem: lambda: problem.run() * 1.1,
        "slow": slow,
        "unable": unable,
        "late": fails_late,
    }
    fakes = {
        name: (lambda _, name=name, make=make: _Peer(name, make)) for name, make in made.items()
    }
    monkeypatch.setattr(peers, "ATTENTION_PEERS", fakes)


def test_peers_that_are_of_no_use_harm_nobody(tmp_path: Path, strange_peers: None) -> None:
    names = ("raises", "wrong", "slow", "unable", "late", "tires", "unfinished")
    asked = [part for name in names for part in ("--peer", name)]
    done = bench("--batch", "2q1s40", "--batch", "q9", *asked, "--json", tmp_path / "a.json")
    assert done.exit_code == 0, done.output
    rows = {(each.batch, each.implementation): each for each in read_results(tmp_path / "a.json").measurements}  # fmt: skip
    for batch in ("2q1s40", "q9"):
        notes = {name: rows[batch, name].note for name in names}
        assert notes == {
            "raises": "failed: IndexError: list[/x] out of [bold]range",
            "wrong": notes["wrong"],
            "slow": None,
            "unable": "it knows no heads",
            "late": "failed while timed: RuntimeError: worn out",
            "tires": notes["tires"],
            "unfinished": None
            if batch == "2q1s40"
            else "wrong result, not timed: out: expected finite numbers, got others",
        }
        assert (notes["tires"] or "").startswith(
            "wrong result after it was timed: relative error 0.1,"
        )
        assert rows[batch, "tires"].is_fault and rows[batch, "tires"].best_us is None
        assert (notes["wrong"] or "").startswith("wrong result, not timed: relative error 0.1,")
        assert rows[batch, "octavo"].best_us and (rows[batch, "slow"].best_us or 0) > 10_000
        assert rows[batch, "raises"].is_fault and not rows[batch, "unable"].is_fault
    assert "raises: failed: IndexError: list[/x] out of [bold]range" in done.stdout


def test_octavo_wrong_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    real = AttentionProblem.run
    monkeypatch.setattr(AttentionProblem, "run", lambda self, plan=None: real(self) * 1.1)
    done = bench("--batch", "2q1s40")
    assert done.exit_code == 1
    assert "octavo: wrong result, not timed" in done.stdout


def test_octavo_out_of_memory_is_a_note_and_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    from octavo.bench import kernel_run

    real = kernel_run.make_case

    def sometimes(op: str, batch, *rest):
        if batch.num_seqs == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return real(op, batch, *rest)

    monkeypatch.setattr(kernel_run, "make_case", sometimes)
    done = bench("--batch", "2q1s40", "--batch", "q9", "--json", tmp_path / "a.json")
    assert done.exit_code == 1
    first, second, *_ = read_results(tmp_path / "a.json").measurements
    assert (
        first.note == "could not be made: OutOfMemoryError: CUDA out of memory. Tried to allocate"
    )
    assert second.best_us


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch", "8x1"], "batch: expected parts such as"),
        (["--batch", "q99999999999k"], "batch: expected parts such as"),
        (["--batch", "q1s9000000k"], "batch: expected at most"),
        (["--batch", "q1s1000000k"], "GiB of free memory"),
        (["--batch", "q5s4"], "1 <= q <= s"),
        (["--op", "softmax"], "op: expected one of"),
        (["--op", "rms_norm", "--op", "softmax"], "op: expected one of"),
        (["--op", "cascade_attention", "--batch", "q9"], "batch: expected two sequences"),
        (["--heads", "4"], "heads: expected QUERY/KV"),
        (["--heads", "4/0"], "num_kv_heads: expected at least 1"),
        (["--heads", "4/3"], "num_q_heads: expected a multiple"),
        (["--head-size", "0"], "head_size: expected"),
        (["--block-size", "-1"], "block_size: expected"),
        (["--window", "0"], "window: expected"),
        (["--softcap", "0"], "softcap: expected"),
        (["--softcap", "nan"], "softcap: expected"),
        (["--peer", "sdpa", "--peer", "sdpa"], "peer: expected each once, got sdpa, sdpa"),
        (["--peer", "nobody"], "peer: expected one of"),
        (["--peer", "sdpa=/tmp"], "peer: sdpa is part of torch"),
        (["--device", "tpu"], "device: expected"),
        (["--seconds", "inf"], "seconds: expected"),
        (["--trace", "missing.oct"], "missing.oct"),
        (["--trace", "missing.oct", "--batch", "q9"], "batch: expected none beside --trace"),
        (["--trace", "missing.oct", "--op", "rms_norm"], "op: expected paged_attention"),
        (["--json", "no/such/folder/a.json"], "json: expected a file in a folder"),
        (["--json", "."], "json: expected a file in a folder"),
        (["--report", "/dev/null/report"], "report: /dev/null/report cannot be written"),
        (["--plan", "tile_kv=32"], "plan: expected a GPU, or OCTAVO_BACKEND=interpret"),
        (["--sweep"], "plan: expected a GPU, or OCTAVO_BACKEND=interpret"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_refusals_are_one_line_and_exit_code_2(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if torch.cuda.is_available() and said.startswith("plan:"):
        pytest.skip("there is a GPU")
    monkeypatch.setattr(suite, "time_in_turns", lambda *_, **__: pytest.fail("something was timed"))
    done = bench(*arguments)
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and said in line
    assert done.stdout == ""


@pytest.mark.parametrize("option", ["--seconds=-1", "--seconds=nan", "--traced=0", "--dtype=int4", "--cache-dtype=int8", "--head-size=x"])  # fmt: skip
def test_options_of_the_wrong_kind(option: str) -> None:
    assert bench(option).exit_code == 2


# ---------------------------------------------------------------- plans and interrupts, in processes of their own


def _started(*arguments: object, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "octavo", "bench", *SMALL, *map(str, arguments)]
    return subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
def test_plans_by_the_interpreter(tmp_path: Path) -> None:
    """A plan of the decode kernel is not one of a prompt, nor of a batch of both: that is a note, not silence."""
    found = tmp_path / "a.json"
    batches = [part for text in ("2q1s20", "q2", "q3_q1s5") for part in ("--batch", text)]
    process = _started(*batches, "--heads", "1/1", "--plan", "num_splits=2,num_warps=2", "--peer", "sdpa", "--json", found, OCTAVO_BACKEND="interpret")  # fmt: skip
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, output + errors
    rows = {(each.batch, each.plan): each for each in read_results(found).measurements if each.implementation == "octavo"}  # fmt: skip
    planned = next(each for (batch, plan), each in rows.items() if batch == "2q1s20" and plan)
    assert planned.plan and planned.best_us and "num_splits=2" in planned.plan
    assert rows["2q1s20", None].chosen_plan
    for batch in ("q2", "q1s5_q3"):
        (refused,) = (each for (name, plan), each in rows.items() if name == batch and plan)
        assert refused.best_us is None and (refused.note or "").startswith("not measured: ")
        assert rows[batch, None].best_us
    assert "Times of an interpreter say nothing" in output


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    found = tmp_path / "a.json"
    many = [part for n in range(200) for part in ("--batch", f"q1s{n + 1}")]
    process = _started(*many, "--peer", "sdpa", "--json", found)
    until = time.monotonic() + 60
    while not found.exists() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    kept = read_results(found).measurements
    assert 2 <= len(kept) < 400
    assert all(f"{each.op}  {each.batch}  " in output for each in kept)
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


# ---------------------------------------------------------------- a recorded run


def _recorded(folder: Path, window: int | None) -> Path:
    """Requests with a common beginning, and one with several samples; prompts in chunks."""
    engine, writer = record(folder, TinyModel(window=window), num_gpu_blocks=60, max_num_batched_tokens=16)  # fmt: skip
    shared = torch.randint(4, VOCAB, (21,)).tolist()
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    for number in range(3):
        engine.add_request(f"r{number}", [*shared, 5 + number, 7], params)
        engine.step()
    engine.add_request("n", shared[:5], SamplingParams(n=2, seed=1, max_tokens=5, ignore_eos=True))
    run(engine)
    writer.close()
    return writer.path


@pytest.fixture(scope="module", params=[None, 6], ids=["full", "window"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return read_recording(_recorded(tmp_path_factory.mktemp("run"), request.param))


def test_problems_of_a_recording(recorded: Recording) -> None:
    """Lengths, sharing and windows as they were launched; numbers of the step and of those alike."""
    found = list(problems_of(recorded, most=100))
    window = recorded.header.layers[0].window
    assert {each.problem.shape.window for each in found} == {window}
    assert sum(each.num_alike for each in found) >= len(recorded) - 1
    assert [each.num_alike for each in found] == sorted((each.num_alike for each in found), reverse=True)  # fmt: skip
    for each in found:
        each.problem.verify(each.problem.run())
    if window is None:
        tables = [each.problem.block_tables for each in found if each.problem.batch.num_seqs > 2]
        assert any(len(set(table[:, 0].tolist())) < len(table) for table in tables)


def test_a_recording_from_the_command_line(recorded: Recording, tmp_path: Path) -> None:
    done = bench("--trace", recorded.path, "--traced", "3", "--peer", "sdpa", "--json", tmp_path / "a.json")  # fmt: skip
    assert done.exit_code == 0, done.output
    measured = read_results(tmp_path / "a.json").measurements
    assert len({each.shape for each in measured}) == 3
    assert all(re.search(r", step \d+ of \d+ alike$", each.shape) for each in measured)
    assert all(each.best_us for each in measured if each.implementation == "octavo")


def test_what_is_no_recording(tmp_path: Path) -> None:
    path = tmp_path / "run.oct"
    path.write_bytes(b"something else")
    for place in (path, tmp_path):
        done = bench("--trace", place)
        assert done.exit_code == 2 and str(place) in done.stderr, done.output


# ---------------------------------------------------------------- compare


def _compare(old: Path, new: Path, *arguments: str):
    return CliRunner().invoke(app, ["bench", "compare", str(old), str(new), *arguments])


def test_compare(tmp_path: Path) -> None:
    run = full_run()
    first = write(tmp_path, "first.json", run)
    same = _compare(first, first)
    assert same.exit_code == 0 and "slower" not in same.stdout and same.stderr == ""
    worse = write(tmp_path, "worse.json", results(row(us=150.0), *run.measurements[1:]))
    done = _compare(first, worse)
    assert done.exit_code == 1 and "slower" in done.stdout and "1.50" in done.stdout
    assert _compare(first, worse, "--tolerance", "0.6").exit_code == 0
    assert "faster" in _compare(worse, first).stdout
    lost = write(tmp_path, "lost.json", results(row(us=None, note="failed"), *run.measurements[1:]))
    done = _compare(first, lost)
    assert done.exit_code == 1 and "lost" in done.stdout
    elsewhere = write(tmp_path, "elsewhere.json", changed(run, device="Another", commit="other"))
    done = _compare(first, elsewhere)
    assert done.exit_code == 0
    assert done.stderr.strip() == "notice: device: Some CPU before, Another now"
    assert f"old: {first}, commit abcdef1" in done.stdout and "commit other" in done.stdout


def test_runs_with_nothing_in_common_are_no_success(tmp_path: Path) -> None:
    """One of the two is of another shape, or empty: nothing was compared, so nothing was seen not to be slower."""
    run = write(tmp_path, "run.json", full_run())
    for name, of in (("other", results(row(shape="other"))), ("nothing", results())):
        other = write(tmp_path, f"{name}.json", of)
        for pair in ((run, other), (other, run), (other, other)):
            if pair == (other, other) and name == "other":
                continue
            done = _compare(*pair)
            assert done.exit_code == 2 and "expected two runs of the same cases" in done.stderr


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    good = write(tmp_path, "good.json", full_run())
    content = json.loads(good.read_text()) | {"version": 9}
    (tmp_path / "later.json").write_text(json.dumps(content))
    (tmp_path / "bad.json").write_text("{")
    for other, said in (("later.json", "expected version 1, got 9"), ("bad.json", "expected what"), ("none.json", "cannot be read")):  # fmt: skip
        for pair in ((good, tmp_path / other), (tmp_path / other, good)):
            done = _compare(*pair)
            assert done.exit_code == 2
            (line,) = done.stderr.strip().splitlines()
            assert line.startswith("error: ") and said in line and done.stdout == ""
    done = _compare(good, good, "--tolerance", "inf")
    assert done.exit_code == 2 and "tolerance: expected" in done.stderr
    for tolerance in ("nan", "-1"):
        assert _compare(good, good, "--tolerance", tolerance).exit_code == 2
