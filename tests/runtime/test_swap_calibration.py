"""Calibration: what is timed is right, and thresholds follow from timings."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from octavo.__main__ import app
from octavo.kernels.swap_costs import Crossover, SwapCosts
from octavo.runtime import swap_calibration
from octavo.runtime.swap_calibration import Timing, find_costs, find_crossover, measure_swaps

SIZES, COUNTS = (4096, 8192, 65536), (1, 16, 64)


def timings(kernel_wins, margin: float = 1.5, to_device: bool = True) -> list[Timing]:
    """Where the kernel wins it does so by `margin`; elsewhere it takes twice as long as copies."""
    return [
        Timing(to_device, size, count, 100.0, 100 / margin if kernel_wins(size, count) else 200.0)
        for size in SIZES
        for count in COUNTS
    ]


@pytest.mark.parametrize(
    ("kernel_wins", "expected"),
    [
        (lambda size, count: size <= 8192 and count >= 16, Crossover(8193, 16)),
        (lambda size, count: size == 4096, Crossover(4097, 1)),
        (lambda size, count: True, Crossover(65537, 1)),
        (lambda size, count: False, Crossover(0, 1)),
        (lambda size, count: count == 64, Crossover(65537, 64)),
        # one place out of line is given up rather than two lost
        (lambda size, count: (size <= 8192 and count >= 16) or (size, count) == (65536, 1), Crossover(8193, 16)),
    ],
)  # fmt: skip
def test_thresholds_are_where_the_winner_changes(kernel_wins, expected) -> None:
    assert find_crossover(timings(kernel_wins)) == expected
    for timing in timings(kernel_wins):
        if (timing.block_bytes, timing.num_pairs) != (65536, 1):
            taken = expected.takes_kernel(timing.block_bytes, timing.num_pairs)
            assert taken is kernel_wins(timing.block_bytes, timing.num_pairs)


def test_the_kernel_has_to_win_by_more_than_it_takes_from_the_model() -> None:
    assert find_crossover(timings(lambda *_: True, margin=1.05)) == Crossover(0, 1)
    assert find_crossover(timings(lambda *_: True, margin=1.1)) == Crossover(0, 1)  # as good
    assert find_crossover(timings(lambda *_: True, margin=1.2)) == Crossover(65537, 1)


def test_each_direction_has_thresholds_of_its_own() -> None:
    there = timings(lambda size, count: size == 4096)
    back = timings(lambda *_: False, to_device=False)
    costs = find_costs(there + back, "a machine")
    assert costs == SwapCosts(Crossover(4097, 1), Crossover(0, 1), "a machine")


def test_a_cpu_times_plain_copies_only() -> None:
    found = list(measure_swaps(torch.device("cpu"), (4096, 8192, 2**20), (1, 4), 8192 * 4))
    assert [(t.to_device, t.block_bytes, t.num_pairs) for t in found] == [
        (side, size, count) for size in (4096, 8192) for side in (True, False) for count in (1, 4)
    ]
    assert all(t.copies_us > 0 and t.kernel_us is None for t in found)


@pytest.mark.parametrize("fault", ["missing", "astray"])
def test_bytes_that_arrive_wrong_are_never_timed(monkeypatch, fault) -> None:
    real = swap_calibration.swap_blocks

    def faulty(source, destination, pairs, plan):
        real(source, destination, pairs[1:] if fault == "missing" else pairs, plan=plan)
        if fault == "astray":
            destination[0, 5] = 1  # of a block that no pair names

    monkeypatch.setattr(swap_calibration, "swap_blocks", faulty)
    with pytest.raises(RuntimeError, match="swap of 4 blocks of 4096 bytes by copies: bytes"):
        list(measure_swaps(torch.device("cpu"), (4096,), (4,)))


def test_the_command_says_why_a_cpu_gives_no_thresholds(tmp_path) -> None:
    result = CliRunner().invoke(app, ["kernels", "calibrate", "--device", "cpu", "--most-mib", "1"])
    assert result.exit_code == 0, result.output
    assert "256 KiB" in result.stdout and "4096 KiB" not in result.stdout
    assert "Only plain copies were timed" in result.stdout
    output = tmp_path / "costs.json"
    result = CliRunner().invoke(
        app, ["kernels", "calibrate", "--device", "cpu", "--output", str(output)]
    )
    assert result.exit_code == 2
    assert "output: expected a GPU" in result.stderr
    assert not output.exists()


@pytest.mark.gpu
def test_the_command_writes_what_the_model_reads(tmp_path) -> None:
    output = tmp_path / "costs.json"
    result = CliRunner().invoke(
        app, ["kernels", "calibrate", "--most-mib", "4", "--output", str(output)]
    )
    assert result.exit_code == 0, result.output
    assert SwapCosts.from_json(output).machine == torch.cuda.get_device_name()
    assert json.loads(output.read_text()).keys() == {"to_device", "to_host", "machine"}
