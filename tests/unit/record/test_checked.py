"""A column with a value of another type, in each table of one run's file, for everything that reads it."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

import records
import standings
from commands import run as rankwatch
from rankwatch_monitor.decide.calls.differs import Callers, How, UnequalCalls
from rankwatch_monitor.decide.core.journal import NO_RANK, CollectivesDiffer, Desynced, Entry, Skipped
from rankwatch_monitor.decide.replicas.desync import Desync, DesyncPattern
from rankwatch_monitor.record import replay
from rankwatch_monitor.record.follow import Follower
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.runs import read_rows
from rankwatch_monitor.record.schema import FILE, RecordConnection, StoreError
from rankwatch_monitor.record.store import Store
from rankwatch_monitor.views.export import json_lines
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
    parts = [records.part(rank, *records.frames(batch), seq=batch + 1) for batch in range(4) for rank in (0, 1)]
    records.write(folder, *parts)
    records.add(folder, records.tripped(0, *records.frames(4)), at=101.0, shown=standings.shown())
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
    "json lines": lambda run: records.read(run / FILE, lambda record: list(json_lines.lines(record, frames=True))),
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


def rewrite(path: Path, kind: str, change: Callable[[Any], None]) -> None:
    """Changes the JSON of the last fact of this kind, or of the standings."""
    table, where = ("standing", "1") if kind == "standing" else ("events", f"kind = '{kind}'")
    with closing(sqlite3.connect(path)) as database, database:
        row, body = database.execute(f"SELECT id, body FROM {table} WHERE {where} ORDER BY id DESC").fetchone()
        change(found := json.loads(body))
        database.execute(f"UPDATE {table} SET body = ? WHERE id = ?", (json.dumps(found), row))


def put(value: object, *place: Any) -> Callable[[Any], None]:
    def change(body: Any) -> None:
        for step in place[:-1]:
            body = body[step]
        body[place[-1]] = value

    return change


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("opened", put(1 << 40, "world_size")),
        ("opened", put(-1, "world_size")),
        ("opened", put("x", "restart")),
        ("desynced", put(None, "entries", 0, "ranks", 0)),
        ("desynced", put("x", "entries", 0, "equal_at")),
        ("desynced", put([1], "entries", 0, "source")),
        ("desynced", put({}, "unkept")),
        ("desynced", put(10**30, "entries", 0, "step")),
        ("skipped", put("x", "step")),
        ("skipped", put(1, "so_far")),
        ("collectivesdiffer", put("x", "found", "number")),
        ("collectivesdiffer", put(1, "found", "sides", 0, "what")),
        ("standing", put("x", "run", 3)),
        ("standing", put(None, "ranks", 0, 6)),
        ("standing", put([], "ranks", 0)),
    ],
)
def test_json_of_a_wrong_type_is_an_error_that_names_the_file(
    tmp_path: Path, whole: Path, kind: str, change: Callable[[Any], None]
) -> None:
    shutil.copytree(whole, tmp_path / "damaged")
    records.add(
        tmp_path / "damaged",
        Entry(0.0, NO_RANK, Desynced((Desync(1, "w", (0, 1), 2, DesyncPattern.UNKNOWN),), 0)),
        Entry(0.0, NO_RANK, Skipped(4, 0, "step 4 was left out", "1 step was left out")),
        Entry(0.0, NO_RANK, CollectivesDiffer(UnequalCalls("7", "it", 2, How.OTHER, (Callers((0,), 1, "a", ""),) * 2))),
        at=102.0,
        shown=standings.shown(standings.standing(0)),
    )
    rewrite(tmp_path / "damaged" / FILE, kind, change)
    for command in (("report", "--rank", "0"), ("top", "--once")):
        done = rankwatch(command[0], str(tmp_path / "damaged"), *command[1:])
        assert f"the record {tmp_path}/damaged/run.db: " in done.stderr
        assert "Traceback" not in done.stderr


def endless(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        columns = ", ".join(f"0 AS {name}" for name in RecordConnection.columns["run"])
        database.execute("DROP TABLE run")
        count = "WITH RECURSIVE count(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM count)"
        database.execute(f"CREATE VIEW run AS {count} SELECT {columns} FROM count WHERE n < 0")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def long(path: Path) -> None:
    records.execute(path.parent, "UPDATE run SET reason = ?", "x" * (1 << 24))


@pytest.mark.parametrize("harm", [endless, pipe, long])
def test_no_record_holds_up_a_list(tmp_path: Path, whole: Path, harm: Callable[[Path], None]) -> None:
    for name in ("damaged", "other"):
        shutil.copytree(whole, tmp_path / name)
    harm(tmp_path / "damaged" / FILE)
    assert [row.run for row in read_rows(tmp_path)] == ["other"]
    assert [run["run"] for run in Pages(tmp_path).list() if "unreadable" in run] == ["damaged"]


def test_a_time_to_come_does_not_keep_a_run_going(tmp_path: Path, whole: Path) -> None:
    shutil.copytree(whole, tmp_path / "damaged")
    shown = standings.shown(standings.standing(0))
    records.add(tmp_path / "damaged", at=time.time() + 86400, shown=shown, boot="of another host")
    assert [row.is_alive for row in read_rows(tmp_path)] == [False]
