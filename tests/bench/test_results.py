"""Files of results: read back as they were, refused when they are something else, compared with what has become of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.compare import changes, changes_table, differences_of_machines
from octavo.bench.results import BenchResults, Measurement, read_results
from octavo.tests.bench.fabricated import CEILINGS, MACHINE, changed, full_run, results, row, write

_numbers = st.none() | st.floats(1e-3, 1e9)
_texts = st.text(max_size=20)


@given(
    st.lists(
        st.builds(
            Measurement, op=_texts, batch=_texts, shape=_texts, implementation=_texts, plan=st.none() | _texts,
            median_us=_numbers, graph_us=_numbers, error=_numbers, note=st.none() | _texts, flops=st.integers(0, 2**60),
        ),
        max_size=4,
    )
)  # fmt: skip
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, rows) -> None:
    path = tmp_path_factory.mktemp("results") / "a.json"
    written = results(*rows)
    written.write(path)
    assert read_results(path) == written


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """A process that is killed while it writes leaves what was there; nothing else is left in the folder."""
    path = write(tmp_path, "a.json", results(row()))
    before = path.read_bytes()

    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ValueError, match=r"json: .*a\.json cannot be written: No space left"):
        full_run().write(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.skipif(not os.path.exists("/dev/null"), reason="no /dev/null")
def test_what_is_no_file_is_written_to_and_stays() -> None:
    results(row()).write(Path("/dev/null"))
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize("place", ["nowhere/a.json", "."])
def test_places_that_cannot_be_written(tmp_path: Path, place: str) -> None:
    with pytest.raises(ValueError, match=r"json: .* cannot be written: "):
        results().write(tmp_path / place)


def _edited(change) -> bytes:
    content = msgspec.to_builtins(full_run())
    change(content)
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "expected what `octavo bench --json` writes"),
        (b"\xff\xfe\x00", "expected what `octavo bench --json` writes"),
        (b"[]", "expected what `octavo bench --json` writes"),
        (b"{}", "expected what `octavo bench --json` writes"),
        (_edited(lambda x: x)[:-9], "expected what `octavo bench --json` writes"),
        (b'{"version": 2, "all": "else"}', "expected version 1, got 2"),
        (_edited(lambda x: x.update(version=0)), "expected version 1, got 0"),
        (_edited(lambda x: x.pop("machine")), "`machine`"),
        (_edited(lambda x: x["measurements"][0].update(median_us="fast")), r"measurements\[0\].median_us"),
        (_edited(lambda x: x["ceilings"].update(copy_bytes_per_s=0)), "ceilings.copy_bytes_per_s"),
        (_edited(lambda x: x["host_costs"][0].update(floor_us=0)), r"host_costs\[0\].floor_us"),
    ],
)  # fmt: skip
def test_files_of_another_kind(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said) as caught:
        read_results(path)
    assert str(caught.value).startswith(str(path))


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(ValueError, match="cannot be read: "):
            read_results(path)


def test_rates_come_from_time_bytes_and_flops() -> None:
    """100 us for 1e8 bytes is 1e12 a second, all of the ceiling; the graph's time counts where there is one."""
    measured = row(us=100.0)
    assert (measured.bytes_per_s, measured.flops_per_s) == (1e12, 1e13)
    assert measured.share_of(CEILINGS) == pytest.approx(1.0)
    assert row(us=100.0, flops=10**10).share_of(CEILINGS) == pytest.approx(1.0)
    assert row(us=100.0, flops=10**10, bytes_moved=0).share_of(CEILINGS) == pytest.approx(1.0)
    faster = row(us=100.0, graph_us=50.0)
    assert (faster.best_us, faster.bytes_per_s) == (50.0, 2e12)
    none = row(us=None, note="missing")
    assert none.bytes_per_s is none.flops_per_s is none.best_us is none.share_of(CEILINGS) is None


# ---------------------------------------------------------------- compare


def _verdicts(old: BenchResults, new: BenchResults, tolerance: float = 0.1) -> list[str]:
    table = changes_table(changes(old, new), tolerance)
    return [str(cell) for cell in table.columns[-1].cells]


@pytest.mark.parametrize(
    ("before", "after", "verdict", "fails"),
    [
        (row(us=100.0), row(us=100.0), "", False),
        (row(us=100.0), row(us=109.0), "", False),
        (row(us=100.0), row(us=111.0), "slower", True),
        (row(us=100.0), row(us=91.0), "", False),
        (row(us=100.0), row(us=80.0), "faster", False),
        (row(us=100.0), row(us=None, note="failed", is_fault=True), "lost", True),
        (row(us=None, note="failed"), row(us=100.0), "", False),
        (row(us=None, note="failed"), row(us=None, note="failed"), "", False),
        (row(us=100.0, graph_us=50.0), row(us=80.0, graph_us=60.0), "slower", True),
        (row(us=100.0), row(us=300.0, graph_us=90.0), "", False),
        (row(us=100.0), None, "only before", False),
        (None, row(us=100.0), "new", False),
    ],
)  # fmt: skip
def test_what_has_become_of_a_time(before, after, verdict: str, fails: bool) -> None:
    old, new = (results(*([each] if each else [])) for each in (before, after))
    assert _verdicts(old, new) == [verdict]
    assert [change.is_slower(0.1) for change in changes(old, new)] == [fails]


def test_only_the_same_is_compared() -> None:
    """Another op, batch, shape, implementation or plan is another thing."""
    others = [
        row(op="rms_norm"), row("8q1s2k"), row(shape="other"), row(implementation="sdpa"), row(plan="tile_kv=16"),
    ]  # fmt: skip
    for other in others:
        assert [each.ratio for each in changes(results(row()), results(other))] == [None, None]
    assert _verdicts(results(row(), *others), results(*others, row())) == [""] * 6


def test_the_order_is_that_of_the_old_run() -> None:
    old, new = results(row("q1"), row("q2")), results(row("q3"), row("q2"), row("q1"))
    found = [(each.new or each.old).batch for each in changes(old, new)]  # pyright: ignore[reportOptionalMemberAccess]
    assert found == ["q1", "q2", "q3"]


def test_runs_without_measurements() -> None:
    assert changes(results(), results()) == []
    assert _verdicts(results(), full_run()).count("new") == len(full_run().measurements)


def test_machines_that_differ_are_named_and_commits_are_not() -> None:
    run = results(row())
    assert differences_of_machines(run, changed(run, commit="1234567+")) == []
    notes = differences_of_machines(run, changed(run, device="Another", num_threads=2))
    assert notes == ["device: Some CPU before, Another now", "num_threads: 1 before, 2 now"]
    slower = BenchResults(MACHINE, msgspec.structs.replace(CEILINGS, copy_bytes_per_s=8e11), [])
    (note,) = differences_of_machines(run, slower)
    assert note.startswith("copy_bytes_per_s: 1e+12 before, 8e+11 now")
