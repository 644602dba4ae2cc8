"""An archive: a run is in it once and whole, on each file system, and what is said of it is what the records say."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime, timezone
from glob import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec
import pyarrow as pa
import pyarrow.dataset as datasets
import pyarrow.parquet as pq
import pytest

import commands
import makers
import records
from makers import INF
from rankwatch.errors import UsageError
from rankwatch.shared.types import messages
from rankwatch_fleet import archive, as_json, page, query, text
from rankwatch_fleet.layout import MAX_DIGESTS, file_of, folder_of, id_of
from rankwatch_fleet.row import row_of
from rankwatch_monitor.decide.core.journal import NO_RANK, Closed, Decided, Desynced, Entry, Left, Opened
from rankwatch_monitor.decide.core.report import Outcome, RankState
from rankwatch_monitor.decide.replicas.desync import Desync, DesyncPattern
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.schema import FILE
from rankwatch_monitor.record.store import Limits, Store
from rankwatch_monitor.views.export import target


@pytest.fixture(params=["local", "file://", "memory://"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An archive that is still to be made, on each of three file systems."""
    place = f"{tmp_path}/of [all] runs" if request.param != "memory://" else f"/{uuid.uuid4().hex}/runs"
    return place if request.param == "local" else f"{request.param}{place}"


def write(folder: Path, *entries: Entry, job: str = "train", gpus: bool = True, incarnation: str = "first") -> Path:
    """A run of four ranks on two hosts that is over, with these entries."""
    folder.mkdir(parents=True)
    store = Store(folder / FILE, Limits())
    hellos = [makers.hello(rank, 4, job=job, incarnation=f"{incarnation}-{rank}") for rank in range(4)]
    hellos = [replace(one, gpu=makers.gpu(one.rank)) for one in hellos] if gpus else hellos
    beginning = [Entry(0.0, NO_RANK, Opened(job, 0, 4)), *(Entry(0.0, one.rank, one) for one in hellos)]
    store.write(beginning, 1_000_000.0, run=folder.name, rankwatch="0.1.0")
    for entry in entries:
        store.write([entry], 1_003_600.0)
    store.close()
    return folder


def finished() -> list[Entry]:
    byes = [Entry(3.0, rank, messages.Bye(2, "finished", "", makers.moment(0, 0, 2))) for rank in range(4)]
    return [records.part(0, *records.frames(0)), *byes, Entry(3.0, NO_RANK, Closed())]


def lost(rank: int = 1) -> list[Entry]:
    byes = [Entry(3.0, other, messages.Bye(2, "aborted", "", makers.moment(0, 0, 2))) for other in range(4) if other != rank]
    decided = Decided(Outcome.LOST, f"rank {rank} went silent", abort=True)
    left = [Entry(2.0, rank, Left(RankState.LOST)), Entry(2.0, NO_RANK, decided)]
    return [*left, *byes, Entry(3.0, NO_RANK, Closed())]


def put(run: Path, url: str) -> str:
    return records.read(run / FILE, lambda record: archive.archive(record, url))


def files(url: str) -> list[str]:
    file_system, root = fsspec.url_to_fs(url)
    return sorted(path.removeprefix(root) for path in file_system.find(root))


def test_a_run_is_there_once(url: str, tmp_path: Path) -> None:
    run = write(tmp_path / "train-0", *finished())
    put(run, url)
    (path,) = files(url)
    assert path.startswith("/date=1970-01-12/job=train/train-0-")
    put(run, url)
    assert files(url) == [path]
    put(write(tmp_path / "other" / "train-0", *finished(), incarnation="second"), url)  # of another folder, by the same name
    assert len(files(url)) == 2
    found = query.ask(url)
    assert (found.runs, found.outcomes, found.first_day) == (2, {"finished": 2}, "1970-01-12")


def test_whose_machines_are_suspected(url: str, tmp_path: Path) -> None:
    put(write(tmp_path / "train-0", *lost()), url)
    put(write(tmp_path / "train-1", *finished(), incarnation="b"), url)
    found = query.ask(url)
    assert (found.hosts.count, found.gpus.count, found.hosts.hours) == (2, 4, 8.0)
    (host,), (gpu,) = found.hosts.found, found.gpus.found
    assert (host.name, host.incidents, host.kinds, host.stands_out) == ("node0", 1, {"lost": 1}, False)
    assert (gpu.name, gpu.where, gpu.hours, gpu.last_run) == (makers.gpu(1).uuid, "node0, NVIDIA H200", 2.0, "train-0")
    (version,) = found.versions
    assert (version.torch, version.driver, version.runs, version.suspects) == ("2.13.0", "550.54.15", 2, 1)


def test_runs_without_a_gpu_have_hosts(url: str, tmp_path: Path) -> None:
    put(write(tmp_path / "train-0", *lost(), gpus=False), url)
    found = query.ask(url)
    assert (found.gpus.count, found.hosts.found[0].name) == (0, "node0")
    assert "GPUs       0, 0 hours" in text.render(found)


def test_all_that_a_row_has(url: str, tmp_path: Path) -> None:
    entries = [
        records.part(1, *records.frames(0, 3.0)),
        records.tripped(1, *records.frames(1, INF)),
        Entry(2.0, 0, messages.Noticed(3, makers.notice())),
        Entry(2.0, NO_RANK, Desynced((FLIPPED,), 0)),
    ]
    path = put(write(tmp_path / "train-0", *entries, *finished()[1:]), url)
    rows = read(url)
    assert len(rows) == 1
    row = rows[0]
    assert path.endswith(f"{row['id']}.parquet")
    assert (row["run"], row["job"], row["date"], row["world_size"]) == ("train-0", "train", date(1970, 1, 12), 4)
    assert row["began"] == datetime(1970, 1, 12, 13, 46, 40, tzinfo=timezone.utc)
    assert [one["hours"] for one in row["ranks"]] == [1.0] * 4
    assert row["ranks"][1] | {"farewell": None} == {
        "rank": 1, "local_rank": 1, "stage": None, "host": "node0", "gpu": makers.gpu(1).uuid, "gpu_name": "NVIDIA H200",
        "gpu_uuid": makers.gpu(1).uuid, "pci_bus": "0000:01:00.0", "driver": "550.54.15", "torch": "2.13.0",
        "state": row["ranks"][1]["state"], "last_batch": 1, "hours": 1.0, "farewell": None,
    }  # fmt: skip
    assert [(one["kind"], one["module"]) for one in row["notices"]] == [("headroom", "layer")]
    assert [(one["parameter"], one["ranks"], one["pattern"]) for one in row["desync"]] == [("w", [2], "one-rank")]
    assert [(one["kind"], one["rank"], one["host"]) for one in row["suspects"]] == [("one-replica", 2, "node1")]
    (digest,) = row["digests"]
    assert (digest["batch"], digest["batches"], digest["parts"], digest["bad"]) == (0, 1, 1, 0)


FLIPPED = Desync(8, "w", (2,), 4, DesyncPattern.ONE_RANK, "node1", makers.gpu(2).uuid, equal_at=4)


def read(url: str) -> list[dict[str, Any]]:
    """All rows, as pyarrow reads a partitioned data set."""
    file_system, root = fsspec.url_to_fs(url)
    keys = datasets.partitioning(pa.schema([("date", pa.date32()), ("job", pa.string())]), flavor="hive")
    rows: list[dict[str, Any]] = datasets.dataset(root, filesystem=file_system, partitioning=keys).to_table().to_pylist()
    return rows


def test_many_batches_are_summed_up(tmp_path: Path) -> None:
    many = [records.part(rank, *records.frames(batch, 2.0 + batch), seq=1 + batch) for batch in range(40) for rank in (0, 1)]
    run = write(tmp_path / "train-0", *many, *finished()[1:])
    rows = records.read(run / FILE, row_of).columns["digests"]
    assert [(row["batch"], row["batches"], row["parts"]) for row in rows] == [(batch, 1, 2) for batch in range(40)]


def test_a_run_whose_collector_was_killed_has_the_hours_of_its_batches(url: str, tmp_path: Path) -> None:
    put(write(tmp_path / "train-0", records.part(0, *records.frames(0), ended=1_007_200.0)), url)
    (row,) = read(url)
    assert (row["outcome"], row["suspects"], {one["hours"] for one in row["ranks"]}) == ("unfinished", [], {2.0})


def test_digests_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rankwatch_fleet import row

    monkeypatch.setattr(row, "MAX_DIGESTS", 8)
    assert MAX_DIGESTS > 8
    many = [records.part(0, *records.frames(batch, 2.0 + batch), seq=1 + batch) for batch in range(1000, 1050)]
    run = write(tmp_path / "train-0", *many, *finished()[1:])
    rows = records.read(run / FILE, row_of).columns["digests"]
    assert [(row["batch"], row["batches"], row["parts"]) for row in rows] == [
        *((batch, 8, 8) for batch in range(1000, 1048, 8)),
        (1048, 8, 2),
    ]
    assert all(math.isfinite(row["headroom"]) for row in rows)


def test_a_write_that_fails_leaves_nothing_to_read(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(write(tmp_path / "train-0", *finished()), url)
    before = files(url)

    def broken(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(target, "_rename", broken)
    with pytest.raises(UsageError, match=r"cannot write to .*: the disk is full"):
        put(write(tmp_path / "train-1", *finished(), incarnation="b"), url)
    assert files(url) == before


def test_files_of_days_that_are_over_are_merged(url: str, tmp_path: Path) -> None:
    for number in range(3):
        put(write(tmp_path / f"train-{number}", *lost(), incarnation=f"{number}"), url)
    before = query.ask(url)
    assert archive.merge(url, date(1970, 1, 12)) == (0, 0)  # the day is not over
    assert archive.merge(url, date(1970, 1, 13)) == (3, 1)
    (path,) = files(url)
    assert path.startswith("/date=1970-01-12/job=train/merged-")
    assert query.ask(url) == before
    put(tmp_path / "train-1", url)  # again, after its day was merged: it counts once
    assert len(files(url)) == 2
    assert query.ask(url) == before
    assert archive.merge(url, date(1970, 1, 13)) == (2, 1)
    assert query.ask(url) == before
    assert len(read(url)) == 3


@pytest.mark.parametrize(
    "job",
    [
        "a/b", "a b", "100%", "=", "..", "12", "ümläut", "x" * 400, "%" * 400, "é" * 99, "丰" * 40, "\udce4", "__HIVE__",
        "'; --",
    ],
)  # fmt: skip
def test_any_name_of_a_job(job: str, tmp_path: Path) -> None:
    url = str(tmp_path / "archive")
    row = records.read(write(tmp_path / "train-0", *lost()) / FILE, row_of)
    archive.put(url, folder_of(row.day, job), file_of(row.id), [row.columns])
    (path,) = files(url)
    assert path.count("/") == 3
    (found,) = read(url)
    assert len(quote(job, errors="replace")) > 150 or job == "\udce4" or found["job"] == job
    assert query.ask(url).runs == 1


def test_the_days_that_are_asked_for(tmp_path: Path) -> None:
    url = str(tmp_path / "archive")
    put(write(tmp_path / "train-0", *lost()), url)
    assert query.ask(url, since="1970-01-12", until="1970-01-12").runs == 1
    empty = query.ask(url, since="1970-01-13")
    assert (empty.runs, empty.hosts.count) == (0, 0)
    assert "runs       none" in text.render(empty)
    assert json.loads(as_json.render(empty))["first_day"] is None
    assert "<h1>" in page.render(empty)


def test_what_is_no_archive(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no archive at"):
        query.ask(str(tmp_path))
    (tmp_path / "date=2026-01-01" / "job=x").mkdir(parents=True)
    (tmp_path / "date=2026-01-01" / "job=x" / "y.parquet").write_text("no Parquet")
    with pytest.raises(UsageError, match="cannot read the archive"):
        query.ask(str(tmp_path))
    with pytest.raises(UsageError, match=r"^cannot use no-such-protocol://x: Protocol not known"):
        query.ask("no-such-protocol://x")
    with pytest.raises(UsageError, match=r"^cannot use oci://x: Install ocifs"):
        query.ask("oci://x")
    with pytest.raises(UsageError, match=r"no archive at .*: it has no folder date="):
        archive.merge(str(tmp_path / "mistyped"), date(1970, 1, 13))


def test_ids_differ_where_runs_do() -> None:
    assert id_of("train-0", "a") != id_of("train-0", "b")
    assert folder_of(date(2026, 1, 31), "train") == "date=2026-01-31/job=train"
    assert len(file_of(id_of("x" * 1000, "a"))) < 200
    assert file_of(id_of("x" * 1000, "a")) != file_of(id_of("x" * 1000, "b"))


def test_hostile_names_do_no_harm_to_the_page(tmp_path: Path) -> None:
    url = str(tmp_path / "archive")
    run = write(tmp_path / "train-0", *lost(), job="<script>alert(1)</script>")
    put(run, url)
    found = query.ask(url)
    evil = replace(found.hosts.found[0], name="<b>x</b>")
    rendered = page.render(replace(found, hosts=replace(found.hosts, found=(evil,))))
    assert "<script" not in rendered
    assert "<b>x" not in rendered


def test_a_record_without_a_rank_is_refused(tmp_path: Path) -> None:
    records.add(tmp_path, Entry(0.0, NO_RANK, Opened("train", 0, 2)), at=1.0, run="train-0")
    with RunRecord(tmp_path / FILE) as record, pytest.raises(Exception, match="no rank has connected"):
        row_of(record)


def test_a_merge_replaces_nothing_that_another_merge_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two merges at once, the later one has read what the earlier one removes; a run that only this one saw stays."""
    url = str(tmp_path / "archive")
    for number in range(2):
        put(write(tmp_path / f"train-{number}", *lost(), incarnation=f"{number}"), url)

    def write_slowly(*arguments: Any) -> str:
        monkeypatch.undo()
        put(write(tmp_path / "train-2", *lost(), incarnation="2"), url)
        assert archive.merge(url, date(1970, 1, 13)) == (3, 1)
        return archive._write(*arguments)

    monkeypatch.setattr(archive, "_write", write_slowly)
    with pytest.raises(UsageError, match="cannot merge"):  # the other one has removed its files
        archive.merge(url, date(1970, 1, 13))
    assert query.ask(url).runs == 3
    assert archive.merge(url, date(1970, 1, 13)) == (2, 1)
    assert query.ask(url).runs == len(read(url)) == 3


def test_a_merge_names_the_file_that_it_cannot_read(tmp_path: Path) -> None:
    url = str(tmp_path / "archive")
    put(write(tmp_path / "train-0", *lost()), url)
    (tmp_path / "archive" / "date=1970-01-12" / "job=train" / "cut.parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match=r"cannot merge .*/job=train/cut.parquet, which is no file of an archive"):
        archive.merge(url, date(1970, 1, 13))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda whole: whole[:-50],
    "its pages": lambda whole: whole[:4] + bytes(200) + whole[204:],
    "its footer": lambda whole: whole[:-300] + b"\xff" * 200 + whole[-100:],
    "not of an archive": lambda _: parquet_of({"x": [1]}),
}


def parquet_of(columns: dict[str, list[int]]) -> bytes:
    pq.write_table(pa.table(columns), sink := pa.BufferOutputStream())
    return bytes(sink.getvalue())


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_left_out_and_named(damage: str, place: int, url: str, tmp_path: Path) -> None:
    for number in range(3):
        put(write(tmp_path / f"train-{number}", *lost(), incarnation=str(number)), url)
    file_system, root = fsspec.url_to_fs(url)
    path = sorted(file_system.glob(f"{escape(root)}/*/*/*.parquet"))[place]
    file_system.pipe_file(path, DAMAGES[damage](file_system.cat_file(path)))
    found = query.ask(url)
    assert found.runs == 2
    assert [file.rpartition("/")[2] for file in found.damaged] == [path.rpartition("/")[2]]
    assert "left out   1 damaged file" in text.render(found)
    assert json.loads(as_json.render(found))["damaged"] == list(found.damaged)
    file_system.rm_file(path)
    found = query.ask(url)
    assert (found.runs, found.damaged) == (2, ())


def test_several_damaged_files_are_found_and_an_archive_of_these_alone_is_none(tmp_path: Path) -> None:
    url = str(tmp_path / "archive")
    for number in range(9):
        put(write(tmp_path / f"train-{number}", *lost(), incarnation=str(number)), url)
    files = sorted((tmp_path / "archive").glob("*/*/*.parquet"))
    for file in files[::2]:
        file.write_bytes(b"PAR1")
    assert (query.ask(url).runs, query.ask(url).damaged) == (4, tuple(map(str, files[::2])))
    done = commands.run("fleet", url)
    assert (done.returncode, done.stderr.count(" is damaged, or no file of an archive, and is left out: move it")) == (3, 5)
    for file in files:
        file.write_bytes(b"PAR1")
    with pytest.raises(UsageError) as raised:
        query.ask(url)
    said = str(raised.value)
    assert said.startswith(f"cannot read the archive {url}: {files[0]} is damaged, or no file of an archive (")
    assert "\n" not in said


@pytest.mark.parametrize("ask", [target.folder_at, query.ask, lambda url: archive.merge(url, date(1970, 1, 13))])
def test_an_error_does_not_tell_a_password(ask: Any) -> None:
    with pytest.raises(UsageError, match=r"\*\*\*@host") as told:
        ask("no-such-protocol://me:pass/word@host/runs")
    assert "word" not in str(told.value)


def test_a_report_does_not_tell_a_password(tmp_path: Path) -> None:
    url = f"memory://me:word@{uuid.uuid4().hex}/runs"
    put(write(tmp_path / "train-0", *lost()), url)
    found = query.ask(url)
    assert not any("word" in told for told in (text.render(found), as_json.render(found), page.render(found)))
