"""The reader returns the readings that the ranks sent: by reading, by rank, by batch."""

from __future__ import annotations

from pathlib import Path

import pytest

import records
from rankwatch.shared.types.frame import State
from rankwatch_monitor.decide.core.journal import NO_RANK, Closed, Entry
from rankwatch_monitor.record import reader, store
from rankwatch_monitor.record.numbers.digest import Columns
from rankwatch_monitor.record.numbers.rows import Point
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.schema import FILE

HIGHS = (2.0, 3.0, 5.0)


@pytest.fixture(params=[False, True], ids=["float32", "float64"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Two ranks and three batches; rank 1 has twice the abs max of rank 0 in the output of the first module."""
    parts = [
        records.part(rank, *records.frames(batch, high * (1 + rank), wide=request.param), step=batch, ended=11.0 + batch)
        for batch, high in enumerate(HIGHS)
        for rank in (0, 1)
    ]
    return records.write(tmp_path, *parts) / FILE


def test_a_series_is_one_row_of_every_batch(run: Path) -> None:
    with RunRecord(run) as record:
        columns = Columns(1, record.table(1))
        output = 1  # the second reading of the first frame
        of_0, of_1 = ([Point(n, 0.25, by * high, State.FINITE) for n, high in enumerate(HIGHS)] for by in (1, 2))
        assert record.series(0, columns, output).points() == of_0
        assert record.series(1, columns, output, (1, 2)).points() == of_1[1:]
        assert record.series(None, columns, output).points() == of_1
        states = [point.state for point in record.series(None, columns, 4).points()]  # an input that is None
        assert states == [State.NONE] * 3
        assert record.series(2, columns, output).points() == []


def test_extremes_are_all_rows_of_every_part(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunRecord(run) as record:
        tables = {number: Columns(number, table) for number, table in record.tables().items()}
        for rank, factor in ((0, 1), (1, 2), (None, 2)):
            (parts,) = record.extremes(rank, tables, (1, 2))
            assert (parts.table, parts.batches.tolist()) == (1, [1, 2])
            assert parts.abs_max[:, 1].tolist() == [factor * HIGHS[batch] for batch in (1, 2)]
            assert [State(state) for state in parts.states[0, 2:5]] == [State.FINITE, State.NOT_FLOAT, State.NONE]
            monkeypatch.setattr(reader, "AT_ONCE", 1)
            assert [part.batches.tolist() for part in record.extremes(rank, tables)] == [[0], [1], [2]]
            assert [part.batches.tolist() for part in record.extremes(rank, tables, most=1)] == [[0]]
            monkeypatch.undo()
            assert list(record.extremes(rank, {})) == []


def test_the_last_digests_of_a_rank_come_in_order_over_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SEGMENT", 2)
    parts = [records.part(rank, *records.frames(batch)) for batch in range(6) for rank in (0, 1)]
    with RunRecord(records.write(tmp_path, *parts) / FILE) as record:
        assert record.last_digests(1, 4).digests["batch"].tolist() == [2, 3, 4, 5]
        assert record.digests_of(1, 3).digests[["rank", "batch"]].tolist() == [(1, 3)]
        assert [number for number, _ in record.segments(("batch",), batches=(2, 3))] == [3, 4]


def test_a_reader_sees_the_record_as_it_was_opened(run: Path) -> None:
    with RunRecord(run) as record:
        before = record.mark()
        writer = store.Store(run)
        writer.write([records.part(0, *records.frames(7))], 200.0)
        assert (record.mark(), record.last_batch(), record.sent_batches(0)) == (before, 2, [0, 1, 2])
        with RunRecord(run) as later:
            assert (later.mark() != before, later.last_batch(), later.sent_batches(0)) == (True, 7, [0, 1, 2, 7])
            writer.write([Entry(3.0, NO_RANK, Closed())], 201.0)
            with RunRecord(run) as last:
                assert last.mark() != later.mark()
        writer.close()
