"""The command line: text as the model wrote it on standard output, clear errors and exit code 2 otherwise."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from octavo.__main__ import app
from octavo.models.weights import FetchError, resolve_model


def run(*arguments: str):
    return CliRunner().invoke(app, ["generate", *arguments])


@pytest.fixture(scope="module", autouse=True)
def smollm2() -> None:
    try:
        resolve_model("smollm2-135m")
    except FetchError as error:
        pytest.skip(f"smollm2-135m could not be fetched: {error}")


def test_text_is_printed_as_it_is() -> None:
    """No markup, emoji codes or tab expansion: the prompt carries some."""
    prompt = "def f():\n\treturn [bold] :smile: \\"
    result = run("--max-tokens", "3", prompt)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(prompt)
    assert len(result.stdout) > len(prompt) + 1


def test_several_prompts_and_stats() -> None:
    result = run("--max-tokens", "4", "--stats", "--num-gpu-blocks", "64", "One two", "Three four")
    assert result.exit_code == 0, result.output
    assert "One two" in result.stdout and "Three four" in result.stdout
    assert re.search(r"8 tokens in .* tokens/s, 4 steps", result.stdout)
    assert "of 64 in use" in result.stdout


def test_chat_ends_by_itself() -> None:
    result = run("--chat", "--max-tokens", "60", "--stats", "Say hi.")
    assert result.exit_code == 0, result.output
    assert "stop" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "0", "hi"], "max_tokens: expected"),
        (["--top-p", "2", "hi"], "top_p: expected"),
        (["--top-k", "0", "hi"], "top_k: expected"),
        (["--dtype", "int4", "hi"], "dtype: expected"),
        (["--device", "tpu", "hi"], "device: expected"),
        (["--model", "[/x]", "hi"], "[/x]"),
        (["--num-gpu-blocks", "1", "a prompt of more than sixteen tokens " * 4], "do not fit"),
        ([""], "empty prompt"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_errors_are_one_clear_line(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_run_is_recorded_replayed_and_timed(tmp_path) -> None:
    run_file, report = tmp_path / "run.oct", tmp_path / "timings.json"
    prompts = ["The capital of France is", "1, 2, 3,"]
    options = ["--max-tokens", "3", "--num-gpu-blocks", "32"]
    result = CliRunner().invoke(app, ["record", "-o", str(run_file), *options, *prompts])
    assert result.exit_code == 0, result.output
    assert prompts[0] in result.stdout
    assert re.search(rf"3 steps, {run_file.stat().st_size} bytes in ", result.stderr)
    result = CliRunner().invoke(app, ["replay", str(run_file), "--backend", "cpu"])
    assert result.exit_code == 0, result.output
    assert "3 steps, 6 tokens on cpu: 0 tokens and 0 log probabilities differ" in result.stdout
    timing = ["--timing-only", "--backend", "cpu", "--repeats", "1", "--json", str(report)]
    result = CliRunner().invoke(app, ["replay", str(run_file), *timing])
    assert result.exit_code == 0, result.output
    assert "all 30 layers" in result.stdout and "cache write us" in result.stdout
    assert [timing["num_decodes"] for timing in json.loads(report.read_text())] == [0, 2, 2]


def test_recording_errors_are_one_clear_line(tmp_path) -> None:
    text = tmp_path / "text.oct"
    text.write_text("not one")
    commands = [
        (["replay", str(text)], "expected a recording, got b'not one'"),
        (["replay", str(tmp_path / "none.oct"), "--timing-only"], "cannot be read: No such file"),
        (["record", "-o", str(tmp_path / "no" / "run.oct"), "hi"], "record: expected a file in a"),
    ]
    for command, message in commands:
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2 and message in result.stderr, result.output
        assert "Traceback" not in result.output


def test_a_huge_top_k_acts_as_off() -> None:
    assert (
        run("--top-k", str(10**24), "--temperature", "1", "--max-tokens", "2", "hi").exit_code == 0
    )
