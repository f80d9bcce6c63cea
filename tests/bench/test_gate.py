"""Each gate trips when its subject is made worse, and when it has become better; and the file keeps its comments."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from octavo.bench import gate
from octavo.bench.gate import Gate, Verdict, judge, read_gates, with_values
from octavo.kernels import block_swap
from octavo.kernels.report.machine_code import MachineCode
from octavo.kernels.report.table import Row
from octavo.runtime.block_mover import BlockMover
from octavo.runtime.kv_pool import LayerKV
from octavo.runtime.launch_buffers import LaunchBuffers
from octavo.runtime.recording import encoder
from octavo.scheduler import Scheduler


def tripped(measured: dict[str, float]) -> set[str]:
    gates = {name: each for name, each in read_gates().items() if name in measured}
    return {verdict.name for verdict in judge(measured, gates) if verdict.has_tripped}


@pytest.mark.parametrize(
    ("measured", "trips"),
    [(100, False), (110, False), (111, True), (90, False), (89, True)],
)
def test_a_gate_trips_in_both_directions(measured, trips):
    assert Verdict("x", measured, Gate(100, 0.1)).has_tripped is trips


def test_nothing_is_left_out():
    """A number without a gate, and a gate without a number, are faults too."""
    verdicts = judge({"new": 1.0}, {"old": Gate(1, 0.1)})
    assert [(verdict.name, verdict.has_tripped) for verdict in verdicts] == [("old", True), ("new", True)]  # fmt: skip
    assert Verdict("spill", 0, Gate(0, 0.1)).has_tripped is False
    assert Verdict("spill", 8, Gate(0, 0.1)).has_tripped


def test_all_measured_here_are_at_their_gates():
    """The counts, that is; the ratio of times and the compiled kernels are for `make gate`."""
    assert not tripped(gate.uploads() | gate.moves() | gate.memory() | gate.host_calls())


@pytest.mark.parametrize("name", read_gates())
def test_every_gate_of_the_file_can_trip(name):
    """No band is so wide that a number twice as large, or half of it, passes; nor one that is not a number."""
    value = read_gates()[name].value
    for worse in (2 * value + 8, value / 2 - 1, float("nan"), float("inf")):
        assert tripped({name: worse}) == {name}
    assert not tripped({name: value})


def test_host_work_for_each_step(monkeypatch):
    update = Scheduler.update

    def looks(self, outputs):
        for _ in range(30):
            self.has_unfinished()
        return update(self, outputs)

    monkeypatch.setattr(Scheduler, "update", looks)
    assert tripped(gate.host_calls()) == {"host_step.calls"}


def test_a_pool_of_wider_numbers(monkeypatch):
    monkeypatch.setattr(gate, "LayerKV", lambda heads, size, _: LayerKV(heads, size, torch.float32))
    assert tripped(gate.memory()) == {"pool.bytes_per_token"}


def test_one_more_launch(monkeypatch):
    move = BlockMover.move

    def by_one(self, swap_out=(), swap_in=(), copies=(), written=()):
        for pair in copies:
            move(self, swap_out, swap_in, [pair], written)

    monkeypatch.setattr(BlockMover, "move", by_one)
    assert tripped(gate.moves()) == {"copy_on_write.launches"}


def test_an_extra_copy(monkeypatch):
    swap = block_swap.swap_blocks

    def twice(source, destination, pairs, **kwargs):
        swap(source, destination, pairs, **kwargs)
        swap(source, destination, pairs[:1], **kwargs)

    monkeypatch.setattr(block_swap, "swap_blocks", twice)
    assert tripped(gate.moves()) == {"swap.copies_per_block"}


def test_one_more_upload(monkeypatch):
    tables = LaunchBuffers.block_tables

    def eagerly(self, rows, *args):
        self.upload([rows.num_tokens])
        return tables(self, rows, *args)

    monkeypatch.setattr(LaunchBuffers, "block_tables", eagerly)
    assert tripped(gate.uploads()) == {"host_step.uploads"}


def test_host_work_for_each_row(monkeypatch):
    update = Scheduler.update

    def looks(self, outputs):
        for group in self.running:
            group.live.copy()
        return update(self, outputs)

    monkeypatch.setattr(Scheduler, "update", looks)
    assert "host_step.calls_per_row" in tripped(gate.host_calls())


def test_a_sleep(monkeypatch):
    update = Scheduler.update

    def sleeps(self, outputs):
        time.sleep(0.001)
        return update(self, outputs)

    monkeypatch.setattr(Scheduler, "update", sleeps)
    assert tripped(gate.host_ratio()) == {"host_step.over_floor"}


def test_larger_frames(monkeypatch):
    token_ids = encoder._token_ids
    monkeypatch.setattr(encoder, "_token_ids", lambda values: token_ids(values) + bytes(200))
    assert tripped(gate.memory()) == {"recording.bytes_per_row"}


def row(case: str, **changes) -> Row:
    code = MachineCode(
        registers=100, spill_bytes=0, spill_accesses=0, scalar_spills=0, shared=0, occupancy=0.5, limit="warps",
        mma="HMMA", loads={}, stores={}, barriers=2, loop_instructions=100, instructions_per_token=13.78,
    )  # fmt: skip
    return Row("sm_90", "3.9", case, "k", None, 1, 32, dataclasses.replace(code, **changes))


@pytest.mark.parametrize(
    ("spill_bytes", "factor", "name"),
    [
        (0, 1.0, None),
        (8, 1.0, "spill_bytes"),
        (0, 1.15, "instructions_per_token"),
        (0, 0.85, "instructions_per_token"),
    ],
    ids=["as it is", "a spill", "more instructions", "fewer instructions"],
)
@pytest.mark.parametrize("case", gate.KERNELS)
def test_machine_code(case, spill_bytes, factor, name):
    issued = read_gates()[f"{case}.instructions_per_token"].value * factor
    code = row(case, spill_bytes=spill_bytes, instructions_per_token=issued)
    assert tripped(gate.of_rows([code])) == ({f"{case}.{name}"} if name else set())


def test_a_kernel_that_does_not_compile_is_no_gate_passed():
    with pytest.raises(RuntimeError, match="decode-d128-whole: broken"):
        gate.of_rows([dataclasses.replace(row("decode-d128-whole"), error="broken")])


def test_new_values_keep_comments_and_bands():
    text = '# why\n["a.b"]\nvalue = 1\ntolerance = 0.3\n'
    assert with_values(text, {"a.b": 2.5}) == text.replace("value = 1", "value = 2.5")
    assert with_values(text, {"c": 7.0}).endswith('["c"]\nvalue = 7\ntolerance = 0.1\n')
