"""A recorded run again on the CPU and through the interpreted kernels: the same tokens, whatever happened in it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from octavo.__main__ import app
from octavo.models.async_llm import AsyncLLM
from octavo.models.loader import load_model
from octavo.models.replay import config_digest, header_of, load_runner, recording_path
from octavo.models.weights import resolve_model
from octavo.runtime.metadata import SamplerOutput
from octavo.runtime.params import LoRARequest, SamplingParams
from octavo.runtime.recording import (
    Recording,
    RecordingError,
    RecordingRunner,
    RecordingWriter,
    read_recording,
    replay,
)
from octavo.runtime.recording.launches import launch_args_of
from octavo.scheduler import Engine
from octavo.tests.models.test_adapters import KINDS, save
from octavo.tests.models.test_async_llm import TinyLLM
from octavo.tests.models.tiny import VOCAB, TinyModel, run


def record(directory: Path, tiny: TinyModel, **config) -> tuple[Engine, RecordingWriter]:
    """An engine whose runs are recorded, of a model that lies in the directory."""
    tiny.reference.save_pretrained(directory)
    engine = tiny.engine(**config)
    runner = engine._runner
    source = resolve_model(str(directory))
    header = header_of(
        source, tiny.model, source.config(), runner.pool, engine.scheduler.config, tiny.adapters
    )  # fmt: skip
    writer = RecordingWriter(directory / "run.oct", header)
    engine._runner = RecordingRunner(runner, writer)
    return engine, writer


def eventful_run(engine: Engine) -> None:
    """Beams, samples, seeds, chunks, prefix hits, swaps, a recomputed and an aborted request."""
    generator = np.random.default_rng(3)
    shared = generator.integers(4, VOCAB, 13).tolist()
    common = {"max_tokens": 7, "ignore_eos": True}
    kinds = [
        SamplingParams(temperature=0, **common),
        SamplingParams(use_beam_search=True, n=3, temperature=0, **common),
        SamplingParams(n=2, seed=5, top_k=9, **common),
        SamplingParams(
            seed=11,
            temperature=0.7,
            top_p=0.9,
            repetition_penalty=1.3,
            presence_penalty=0.5,
            logit_bias={5: 1.5},
            min_tokens=3,
            logprobs=2,
            **common,
        ),
    ]
    for number, params in enumerate(kinds):
        prompt = shared + generator.integers(4, VOCAB, 3 + number).tolist()
        engine.add_request(f"r{number}", prompt, params)
        engine.step()
    for number in range(7):
        engine.step()
        if number == 2:
            assert engine.scheduler.preempt("r1")  # several sequences are swapped
        if number == 3:
            assert engine.scheduler.preempt("r0") or engine.scheduler.preempt("r3")
            engine.add_request("late", [*shared, 5, 6], kinds[0])
            engine.add_request("gone", [*shared, 7], kinds[0])
        if number == 5:
            assert engine.abort("gone")
    run(engine)


def happenings(recording: Recording) -> Counter[str]:
    found: Counter[str] = Counter(steps=len(recording))
    for step in recording:
        found["swapped out"] += len(step.blocks_to_swap_out)
        found["swapped in"] += len(step.blocks_to_swap_in)
        found["copies"] += len(step.blocks_to_copy)
        for metadata in step.snapshots:
            found["beams"] += metadata.sampling_params.use_beam_search
            found["samples"] += len(metadata.seq_data) > 1
            found["chunks"] += metadata.is_prompt and not metadata.do_sample
            begins = metadata.request_id == "late" and metadata.is_prompt
            found["hits"] += begins and len(metadata.computed_block_nums) > 0
            found["aborted"] += metadata.request_id == "gone"
    return found


CONFIG = {"num_gpu_blocks": 40, "num_cpu_blocks": 30, "max_num_batched_tokens": 12}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Recording:
    directory = tmp_path_factory.mktemp("recorded")
    engine, writer = record(directory, TinyModel(seed=2), **CONFIG)
    eventful_run(engine)
    stats = engine.scheduler.stats()
    writer.close()
    assert stats.num_swapped_out > 0 and stats.num_recomputed > 0 and stats.num_cached_tokens > 0
    return read_recording(writer.path)


def test_the_run_has_everything(recorded) -> None:
    found = happenings(recorded)
    kinds = ("swapped out", "swapped in", "copies", "beams", "samples", "chunks", "hits", "aborted")
    assert all(found[kind] > 0 for kind in kinds), found


def test_replay_on_the_cpu_gives_equal_tokens(recorded) -> None:
    """Every launch through the shadow cache as well."""
    result = replay(recorded, load_runner(recorded.header, check=True))
    assert result.is_equal and result.num_steps == len(recorded)
    assert result.num_tokens > 40 and result.largest_error == 0


def test_replay_of_an_overlapped_run(tmp_path) -> None:
    engine, writer = record(tmp_path, TinyModel(seed=2), async_scheduling=True, **CONFIG)
    eventful_run(engine)
    writer.close()
    recording = read_recording(writer.path)
    result = replay(recording, load_runner(recording.header, check=True))
    assert result.is_equal and result.num_tokens > 40


def test_an_llm_ends_its_recording_and_refuses_what_cannot_be_recorded(tmp_path) -> None:
    tiny = TinyModel(seed=2)
    llm = TinyLLM(tiny)
    llm.engine, llm.recording = record(tmp_path, tiny, **CONFIG)
    llm.close()
    assert read_recording(llm.recording.path).notice is None
    llm.engine, llm.recording = record(tmp_path, tiny, **CONFIG)
    params = SamplingParams(temperature=0, max_tokens=3)
    odd = msgspec.structs.replace(params, logits_processors=[lambda ids, logits: logits])
    with pytest.raises(ValueError, match="logits_processors, guided: expected none while"):
        llm.generate([[5, 6]], odd)

    async def ask() -> None:
        async with AsyncLLM(llm) as served:
            async for _ in served.generate([5, 6, 7], params):
                pass

    asyncio.run(ask())
    recording = read_recording(llm.recording.path)
    assert recording.notice is None and len(recording) >= 1


def test_replay_reads_the_adapters_that_were_used(tmp_path) -> None:
    """More than have a place at once, each where its request said it was."""
    tiny = TinyModel(seed=2)
    engine, writer = record(tmp_path, tiny, max_loras=2, async_scheduling=True, **CONFIG)
    assert tiny.adapters is not None
    for number, kind in enumerate(KINDS, 1):
        save(tiny.reference, kind, tmp_path / kind)
        adapter = LoRARequest(kind, number, str(tmp_path / kind))
        tiny.adapters.register(adapter)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        engine.add_request(kind, [5, 6, 7, 8, 9], params, lora_request=adapter)
    engine.add_request("none", [5, 6, 7, 8, 9], params)
    tokens = {request.group.request_id: request.output().outputs[0].token_ids for request in run(engine)}  # fmt: skip
    assert len({tuple(each) for each in tokens.values()}) > 2, "adapters matter"
    writer.close()
    recording = read_recording(writer.path)
    assert (recording.header.max_loras, recording.header.max_lora_rank) == (2, 8)
    assert replay(recording, load_runner(recording.header, check=True)).is_equal
    (tmp_path / "wide" / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lora_path: expected adapter_model\.safetensors"):
        replay(recording, load_runner(recording.header))


def test_replay_through_the_interpreter_gives_equal_tokens(recorded, tmp_path) -> None:
    """By the command line, which gives the backend to a process before the kernels are imported."""
    report = tmp_path / "replay.json"
    command = [sys.executable, "-m", "octavo", "replay", str(recorded.path)]
    done = subprocess.run(
        [*command, "--backend", "interpret", "--json", str(report)],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "OCTAVO_CHECK": "1"},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(report.read_text())
    assert result["num_token_differences"] == result["num_logprob_differences"] == 0
    assert result["num_steps"] == len(recorded) and result["num_tokens"] > 40
    assert 0 < result["largest_error"] < 1e-4, "other kernels added up the same numbers"


class Planted:
    """A runner whose weights change before one step."""

    def __init__(self, runner, step: int) -> None:
        self.runner, self.step, self.number = runner, step, 0

    def execute(self, *args, **kwargs) -> SamplerOutput:
        if self.number == self.step:
            with torch.no_grad():
                self.runner.model.lm_head.weight.mul_(-1)
        self.number += 1
        return self.runner.execute(*args, **kwargs)


def test_a_planted_difference_is_reported_where_it_is(recorded) -> None:
    step = next(i for i, s in enumerate(recorded) if i > 6 and len(s.output.token_ids))
    model, _ = load_model(resolve_model(str(recorded.path.parent)), torch.float32, pack=False)
    runner = load_runner(recorded.header)
    runner.model = model
    result = replay(recorded, Planted(runner, step))
    first = result.first
    assert first is not None and first.step == step
    snapshots = list(recorded)[step].snapshots
    owners = [m.request_id for m in snapshots for _ in range(m.num_samples)]
    assert first.request_id == owners[first.row]
    assert result.num_token_differences > 10


def test_a_spoilt_token_is_reported_by_the_command_line(recorded, tmp_path) -> None:
    steps, spoilt = list(recorded), 5
    path = tmp_path / "spoilt.oct"
    writer = RecordingWriter(path, recorded.header)
    for number, (snapshots, out, into, copies, output) in enumerate(steps[: spoilt + 1]):
        if number == spoilt:
            output = SamplerOutput(output.token_ids ^ 1, output.logprobs)
        writer.write(
            snapshots, output, blocks_to_swap_out=out, blocks_to_swap_in=into, blocks_to_copy=copies
        )  # fmt: skip
    done = CliRunner().invoke(app, ["replay", str(path), "--backend", "cpu"])  # not closed
    assert done.exit_code == 1, done.stderr
    assert "notice: " in done.stderr and f"{spoilt + 1} steps can be read" in done.stderr
    assert f"first difference: step {spoilt}, row 0, request 'r0'" in done.stdout


def test_another_model_is_refused(recorded, tmp_path) -> None:
    other = TinyModel(seed=1, window=8)
    other.reference.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model: expected the recorded one, whose configuration"):
        load_runner(recorded.header, str(tmp_path))
    fewer = msgspec.structs.replace(recorded.header, layers=recorded.header.layers[:1])
    with pytest.raises(ValueError, match=r"keeps what the recorded one kept, got 2 layers instead"):
        load_runner(fewer)
    nameless = msgspec.structs.replace(recorded.header, model=None)
    with pytest.raises(ValueError, match="model: expected the name of the recorded model"):
        load_runner(nameless)
    for field in ("num_gpu_blocks", "num_cpu_blocks"):
        huge = msgspec.structs.replace(recorded.header, **{field: 2**42})
        with pytest.raises(ValueError, match=f"{field}: expected a pool that fits the memory"):
            load_runner(huge)
    for changes in ({"dtype": "float31"}, {"kv_layout": "HDN"}):
        with pytest.raises(ValueError):
            load_runner(msgspec.structs.replace(recorded.header, **changes))


def test_a_header_says_what_the_engine_was(recorded) -> None:
    header = recorded.header
    assert (header.block_size, header.num_gpu_blocks, header.num_cpu_blocks) == (4, 40, 30)
    assert header.architecture == "LlamaForCausalLM" and header.vocab_size == VOCAB
    (first, second) = header.layers
    assert first == second and (first.num_heads, first.num_kv_heads, first.head_size) == (4, 2, 8)
    assert header.model_digest == config_digest(resolve_model(str(recorded.path.parent)).config())
    assert header.max_num_batched_tokens == 12 and header.kv_layout == "NHD"


def test_launches_of_the_recording_are_numbered_as_they_ran(recorded) -> None:
    fed = [len(args.input_ids) for args in launch_args_of(recorded)]
    expected = [
        sum(m.token_chunk_size * len(m.seq_data) for m in step.snapshots)
        for step in recorded
        if step.snapshots
    ]
    assert fed == expected


def test_where_a_recording_can_be_written(tmp_path) -> None:
    assert recording_path(tmp_path / "run.oct") == tmp_path / "run.oct"
    for wrong in (tmp_path, tmp_path / "none" / "run.oct"):
        with pytest.raises(ValueError, match="record: expected a file in a folder that exists"):
            recording_path(wrong)
    with pytest.raises(RecordingError, match="cannot be read"):
        read_recording(tmp_path)
