"""A column with a value of another type, in each table of one run's file, for everything that reads it."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

import records
import standings
from commands import run as rankwatch
from rankwatch_monitor.record import replay
from rankwatch_monitor.record.follow import Follower
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.runs import read_rows
from rankwatch_monitor.record.schema import FILE, RecordConnection, StoreError
from rankwatch_monitor.record.store import Store
from rankwatch_monitor.views import dump
from rankwatch_monitor.views.ui.pages import Pages

COLUMNS = [(table, column) for table, columns in RecordConnection.columns.items() for column in columns]

WRONG: dict[str, object] = {
    "text": "x",
    "a blob": b"\x00",
    "nothing": None,
    "below": -7,
    "a real": 0.5,
    "huge": (1 << 63) - 1,
}

SOME = {("run", "world_size", "text"), ("events", "rank", "text"), ("events", "body", "a blob"), ("digests", "body", "text")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a row in each table."""
    folder = tmp_path_factory.mktemp("whole") / "train-1"
    records.write(
        folder, *(records.part(rank, *records.frames(batch), seq=batch + 1) for batch in range(4) for rank in (0, 1))
    )
    store = Store(folder / FILE)
    store.write([records.tripped(0, *records.frames(4))], 101.0, standings.shown())
    store.close()
    return folder


def damage(path: Path, table: str, column: str, value: object) -> None:
    """Puts the value into the last row."""
    names = ", ".join(RecordConnection.columns[table])
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(f"ALTER TABLE {table} RENAME TO before")
        database.execute(f"CREATE TABLE {table} ({names})")  # without types and keys, it takes anything
        database.execute(f"INSERT INTO {table} SELECT * FROM before")
        database.execute("DROP TABLE before")
        database.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = (SELECT MAX(rowid) FROM {table})", (value,))


READERS: dict[str, Callable[[Path], object]] = {
    "replay": lambda run: records.read(run / FILE, replay.take),
    "dump": lambda run: records.read(run / FILE, lambda record: list(dump.lines(record, frames=True))),
    "top": lambda run: Follower(run).look(),
    "page": lambda run: records.read(run / FILE, Pages(run.parent).run(run.name).overview),
    "page events": lambda run: records.read(run / FILE, Pages(run.parent).run(run.name).events),
    "sent": lambda run: records.read(run / FILE, lambda record: list(record.sent())),
    "envelopes": lambda run: records.read(run / FILE, lambda record: list(record.envelopes())),
    "meta": lambda run: records.read(run / FILE, RunRecord.meta),
    "unfinished": lambda run: Store(run / FILE).close(),
}


@pytest.mark.parametrize(
    ("table", "column", "kind"),
    [
        pytest.param(table, column, kind, marks=[] if (table, column, kind) in SOME else pytest.mark.slow)
        for table, column in COLUMNS
        for kind in WRONG
    ],
)
def test_a_wrong_type_ends_nobody_else(tmp_path: Path, whole: Path, table: str, column: str, kind: str) -> None:
    for name in ("damaged", "other"):
        shutil.copytree(whole, tmp_path / name)
    damage(tmp_path / "damaged" / FILE, table, column, WRONG[kind])
    for read in READERS.values():
        with suppress(StoreError):
            read(tmp_path / "damaged")
    rows = {row.run: row for row in read_rows(tmp_path)}
    assert "other" in rows
    assert {run["run"] for run in Pages(tmp_path).list()} == {"damaged", "other"}


def test_an_error_names_file_table_and_column(tmp_path: Path, whole: Path) -> None:
    for name in ("damaged", "other"):
        shutil.copytree(whole, tmp_path / name)
    damage(tmp_path / "damaged" / FILE, "run", "world_size", "many")
    damage(tmp_path / "damaged" / FILE, "events", "now", b"x")
    done = rankwatch("list", str(tmp_path))
    complaint = f"{tmp_path}/damaged/run.db: table run, column world_size: text instead of an integer"
    assert complaint in done.stderr
    assert "other" in done.stdout
    for command in ("report", "dump", "top"):
        options = ["--rank", "0"] if command == "report" else ["--once"] if command == "top" else []
        done = rankwatch(command, *options, str(tmp_path / "damaged"))
        assert "table events, column now: a blob instead of a number" in done.stderr
        assert "Traceback" not in done.stderr
