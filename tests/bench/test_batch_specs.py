"""The grammar of batches: what it takes, that it reads what it writes, and what it refuses with which words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.batch_specs import BatchSpec


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("q1", [(1, 1)]),
        ("q7", [(7, 7)]),
        ("q2k", [(2048, 2048)]),
        ("8q1s1k", [(1, 1024)] * 8),
        ("3q5s9", [(5, 9)] * 3),
        ("q1ks2k", [(1024, 2048)]),
        ("2q2k_8q1s1k", [(1, 1024)] * 8 + [(2048, 2048)] * 2),
        ("q512s4k_q1s3_q2s4", [(1, 3), (512, 4096), (2, 4)]),
        ("008q01s0001k", [(1, 1024)] * 8),
        ("300q1s7", [(1, 7)] * 300),
    ],
)
def test_what_a_text_means(text: str, rows: list[tuple[int, int]]) -> None:
    """Decodes come first, as they do in a launch; otherwise the order stays."""
    batch = BatchSpec.parse(text)
    assert list(zip(batch.query_lens, batch.seq_lens, strict=True)) == rows
    assert batch.num_seqs == len(rows)
    assert batch.num_tokens == sum(query for query, _ in rows)
    assert batch.num_decodes == sum(query == 1 for query, _ in rows)


_row = st.tuples(st.integers(1, 5000), st.integers(0, 5000)).map(lambda row: (row[0], sum(row)))
_rows = st.lists(_row | st.just((1, 1024)) | st.just((2048, 2048)), min_size=1, max_size=12)


@given(_rows)
def test_reads_what_it_writes(rows: list[tuple[int, int]]) -> None:
    batch = BatchSpec.of(rows)
    assert BatchSpec.parse(str(batch)) == batch
    assert sorted(zip(batch.query_lens, batch.seq_lens, strict=True)) == sorted(rows)


def test_the_shortest_text_is_written() -> None:
    assert str(BatchSpec.of([(1, 1024)] * 8 + [(2048, 2048)] * 2)) == "8q1s1k_2q2k"
    assert str(BatchSpec.of([(3, 3)])) == "q3"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "''"),
        ("_", "''"),
        ("q", "'q'"),
        ("8", "'8'"),
        ("8s1k", "'8s1k'"),
        ("q1s", "'q1s'"),
        ("q-1", "'q-1'"),
        ("-1q1", "'-1q1'"),
        ("q1.5", "'q1.5'"),
        ("q1m", "'q1m'"),
        ("Q1", "'Q1'"),
        ("q1 s2", "'q1 s2'"),
        (" q1", "' q1'"),
        ("q1\n", r"'q1\n'"),
        ("8q1s1k_", "''"),
        ("8q1s1k__q2", "''"),
        ("8q1s1k-q2", "'8q1s1k-q2'"),
        ("q\N{ARABIC-INDIC DIGIT THREE}", "'q"),
        ("0q1", "'0q1'"),
        ("00q1", "'00q1'"),
        ("q2_000q1", "'000q1'"),
        ("q0", "'q0'"),
        ("q0s5", "'q0s5'"),
        ("q5s4", "'q5s4'"),
        ("q1ks1023", "'q1ks1023'"),
        ("q99999999999k", "'q99999999999k'"),
        ("q9999999k", "'q9999999k'"),
        ("999999999q1", "'999999999q1'"),
        ("1048576q1_q1", "'q1'"),
        ("q" + "9" * 5000, "'q999"),
    ],
)
def test_what_is_refused_names_it(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=r"^batch: expected .*got ") as caught:
        BatchSpec.parse(text)
    assert named in str(caught.value)


def test_no_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="batch: expected at least one sequence"):
        BatchSpec.of([])
