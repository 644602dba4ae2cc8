"""Records on a real disk: written data is read back, within the limits."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import makers
import records
import standings
from rankwatch.shared.link import wire
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import NO_LOSS, FrameTable, Moment
from rankwatch.shared.types.tuning import Tuning
from rankwatch_monitor.decide.core.gaps import Gap
from rankwatch_monitor.decide.core.journal import (
    NO_RANK,
    Closed,
    Decided,
    Entry,
    Fact,
    JobEnded,
    JobInterrupted,
    Left,
    Opened,
    Progress,
    Reached,
    Trained,
    Waited,
)
from rankwatch_monitor.decide.core.report import Outcome, RankState
from rankwatch_monitor.decide.core.standing import RankStanding
from rankwatch_monitor.record import replay, store
from rankwatch_monitor.record.numbers.layout import DIGEST
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.runs import RunRow, is_unfinished, read_row, read_rows
from rankwatch_monitor.record.schema import FILE, SCHEMA, StoreError
from rankwatch_monitor.record.store import Limits, Store
from rankwatch_monitor.views.export import json_lines

TABLE = makers.table()
SUMMARY_BYTES = 9 * TABLE.rows

EVENTS: list[tuple[int, Fact]] = [
    (NO_RANK, Opened("train", 1, 2)),
    (0, makers.hello(0, 2, minor=0)),
    (0, makers.beat(1, 0, 3)),
    (0, messages.Tripped(4, makers.trip())),
    (0, messages.Noticed(5, makers.notice())),
    (1, Left(RankState.LOST)),
    (NO_RANK, Reached((0, 3), ((1, 1, 0, 3), (0, -1, 0, 0)), (1, -1))),
    (NO_RANK, messages.Tune("train-1", Tuning(every=3, ignore=("*.rotary",)))),
    (NO_RANK, Waited()),
    (NO_RANK, Decided(Outcome.ABORTED, "because", True)),
    (0, messages.Ack(5, abort=True)),
    (0, messages.Bye(6, "aborted", "")),
    (NO_RANK, JobInterrupted("SIGTERM")),
    (0, Reached((0,), ((1, 1, 0, 3),), (1,))),
    (NO_RANK, JobEnded(1, "SIGTERM")),
    (NO_RANK, JobEnded(None, "")),
    (NO_RANK, Gap((0, 1), 50, 249, "the disk was full")),
    (NO_RANK, Closed()),
]


def entries(facts: Sequence[tuple[int, Fact]]) -> list[Entry]:
    return [Entry(float(now), rank, fact) for now, (rank, fact) in enumerate(facts)]


def trained(rank: int, batch: int, *, seq: int = 0, traced: bool = False, table: FrameTable = TABLE) -> Entry:
    return Entry(1.0, rank, Trained(seq or batch + 1, makers.summary(batch, traced=traced, of=table), table))


def query(path: Path, text: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as database:
        return [row[0] if len(row) == 1 else row for row in database.execute(text)]


def dumped(path: Path, *, frames: bool) -> list[str]:
    return records.read(path, lambda record: list(json_lines.lines(record, frames=frames)))


def opened(path: Path, *, world_size: int = 2, **limits: int) -> Store:
    begun = Store(path, replace(Limits(), **limits))
    begun.write(entries([(NO_RANK, Opened("train", 0, world_size))]), 100.0)
    return begun


def test_every_fact_is_read_as_it_was_written(tmp_path: Path) -> None:
    begun = Store(tmp_path / FILE)
    for entry in entries(EVENTS):
        begun.write([entry], 100.0)
    begun.close()
    assert sorted(tmp_path.iterdir()) == [tmp_path / FILE]  # one file, fit to be copied
    assert records.read(tmp_path / FILE, RunRecord.entries) == entries(EVENTS)


def test_the_standings_are_the_last_written_ones(tmp_path: Path) -> None:
    begun = opened(tmp_path / FILE)
    assert records.read(tmp_path / FILE, RunRecord.standings) == (0.0, None, [])
    for batch in (3, 4):
        ranks = [RankStanding(rank, RankState.RUNNING, batch, 0, 2, "[a], b", 0.5, 1.5, "", 3, 0) for rank in range(100)]
        shown = standings.shown(*ranks, heartbeat=2.5, waiting="waiting for rank 3", outcome=Outcome.ABORTED)
        begun.write([], 100.0 + batch, shown)
    assert records.read(tmp_path / FILE, RunRecord.standings) == (104.0, shown.standing, ranks)
    begun.close()


def test_a_dump_is_complete_and_strict_json(tmp_path: Path) -> None:
    records.add(tmp_path, *entries(EVENTS), trained(0, 0), trained(1, 0), run="train-1")
    lines = [json.loads(line, parse_constant=pytest.fail) for line in dumped(tmp_path / FILE, frames=True)]
    assert lines[0] == {"what": "record", "run": "train-1"}
    whats = Counter(line["what"] for line in lines)
    assert whats == {"record": 1, "event": len(EVENTS), "table": 1, "batch": 2, "envelope": 1, "frame": 2 * len(TABLE.specs)}
    by_what = {line["what"]: line for line in lines}
    assert (by_what["batch"]["rank"], by_what["batch"]["seq"], by_what["batch"]["bad_row"]) == (1, 1, None)
    assert by_what["envelope"]["ranks"] == 2
    assert by_what["envelope"]["rows"][0] == [1.0, 0, 1.0, 0, "finite", 0]
    tripped = next(line for line in lines if line.get("kind") == "tripped")
    assert tripped["fact"]["trip"]["frames"][-1]["abs_max"][1] is None  # null stands for inf
    assert len(dumped(tmp_path / FILE, frames=False)) == len(lines) - 2 * len(TABLE.specs)


def test_a_record_is_read_while_it_is_written(tmp_path: Path) -> None:
    begun = opened(tmp_path / FILE)
    begun.write([trained(0, 0)], 100.0)
    with closing(sqlite3.connect(tmp_path / FILE)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT COUNT(*) FROM digests").fetchone() == (1,)
        begun.write([trained(0, 1), *entries([(0, makers.hello(0, 2))])], 100.0)
        assert reader.execute("SELECT SUM(count) FROM digests").fetchone() == (1,)  # the state when reading began
    assert records.read(tmp_path / FILE, RunRecord.digests)["batch"].tolist() == [0, 1]
    begun.close()


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = opened(tmp_path / FILE)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "_trim", lambda self: self._database.execute("INSERT INTO no_such_table VALUES (1)"))
        with pytest.raises(StoreError, match=r"run\.db: no such table"):
            begun.write([trained(0, 0), *entries([(0, makers.hello(0, 2))])], 100.0)
    assert len(records.read(tmp_path / FILE, RunRecord.digests)) == 0
    assert len(records.read(tmp_path / FILE, RunRecord.entries)) == 1


def test_an_abandoned_record_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SEGMENT", 3)
    for batch in range(5):
        begun = Store(tmp_path / FILE) if batch else opened(tmp_path / FILE)
        for rank in (0, 1):
            begun.write([trained(rank, batch), *entries([(rank, makers.hello(rank, 2))])], 100.0)
        # No close(), as when a collector is killed.
        del begun
    digests = records.read(tmp_path / FILE, RunRecord.digests)
    parts = [(rank, batch) for batch in range(5) for rank in (0, 1)]
    assert list(zip(digests["rank"], digests["batch"], strict=True)) == parts
    assert query(tmp_path / FILE, "SELECT count FROM digests") == [3, 3, 3, 1]
    assert query(tmp_path / FILE, "SELECT ranks FROM envelopes") == [2] * 5  # merged from two transactions
    assert query(tmp_path / FILE, "SELECT COUNT(*) FROM tables") == [1]
    last = [
        Progress(rank, batch + 1, batch, batch, 0, len(TABLE.specs), NO_LOSS) for rank in (0, 1) for batch in range(1, 5)
    ]
    assert records.read(tmp_path / FILE, RunRecord.progress) == last


def test_a_rank_that_went_silent_long_ago_is_found_in_an_old_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SEGMENT", 2)
    begun = opened(tmp_path / FILE, world_size=3)
    begun.write(entries([(rank, makers.hello(rank, 3)) for rank in range(3)]), 100.0)
    begun.write([trained(0, 0), *(trained(1, batch) for batch in range(9))], 100.0)
    begun.close()
    progress = {(part.rank, part.seq) for part in records.read(tmp_path / FILE, RunRecord.progress)}
    assert progress == {(0, 1), *((1, seq) for seq in range(6, 10))}


def test_summaries_are_what_the_ranks_sent(tmp_path: Path) -> None:
    begun = opened(tmp_path / FILE)
    begun.write([trained(1, 3)], 100.0)
    sent = makers.summary(3)
    assert query(tmp_path / FILE, "SELECT batch, rank, first_frame, tbl, traced, body FROM summaries") == [
        (3, 1, 0, 1, 0, sent.abs_min + sent.abs_max + sent.states)
    ]
    assert query(tmp_path / FILE, "SELECT body FROM tables") == [wire.encode(messages.Table(TABLE))]


def test_a_large_world_stores_the_summaries_of_some_batches_and_of_every_traced_one(tmp_path: Path) -> None:
    begun = opened(tmp_path / FILE, world_size=100, batch=30 * SUMMARY_BYTES)  # a fourth would do, and so does 1 in 4
    begun.write([trained(0, batch, traced=batch == 6) for batch in range(10)], 100.0)
    assert query(tmp_path / FILE, "SELECT batch FROM summaries") == [0, 4, 6, 8]
    assert query(tmp_path / FILE, "SELECT batch FROM envelopes") == list(range(10))


def test_old_summaries_go_first_and_traced_ones_last(tmp_path: Path) -> None:
    begun = opened(tmp_path / FILE, summaries=10 * SUMMARY_BYTES)
    for batch in range(50):
        begun.write([trained(0, batch, traced=batch in (3, 5))], 100.0)
        kept = query(tmp_path / FILE, "SELECT batch FROM summaries ORDER BY batch")
        assert len(kept) <= 10
        assert kept[-1] == batch
        assert {3, 5} & set(kept) == {3, 5} & set(range(batch + 1))
    for batch in range(50, 80):
        begun.write([trained(0, batch, traced=True)], 100.0)
        assert len(query(tmp_path / FILE, "SELECT batch FROM summaries")) <= 10


def test_old_envelopes_are_retained_at_growing_distances(tmp_path: Path) -> None:
    begun = opened(tmp_path / FILE)
    begun.write([trained(0, 0)], 100.0)
    (size,) = query(tmp_path / FILE, "SELECT LENGTH(body) FROM envelopes")
    begun.close()
    begun = Store(tmp_path / FILE, Limits(envelopes=40 * size))
    for batch in range(1, 1000):
        begun.write([trained(0, batch)], 100.0)
    kept = query(tmp_path / FILE, "SELECT batch FROM envelopes ORDER BY batch")
    assert 20 <= len(kept) <= 40
    assert (kept[0], kept[-10:]) == (0, list(range(990, 1000)))
    gaps = [later - earlier for earlier, later in pairwise(kept)]
    assert min(gaps[:5]) >= 4 * max(gaps[-10:])


def test_an_envelope_over_the_limit_is_dropped(tmp_path: Path) -> None:
    begun = opened(tmp_path / FILE, envelopes=1)
    begun.write([trained(0, 7)], 100.0)
    assert query(tmp_path / FILE, "SELECT batch FROM envelopes") == []


def test_old_digests_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SEGMENT", 4)
    begun = opened(tmp_path / FILE, digests=3 * 4 * DIGEST.itemsize)
    for batch in range(50):
        begun.write([trained(0, batch)], 100.0)
    assert records.read(tmp_path / FILE, RunRecord.digests)["batch"].tolist() == list(range(40, 50))


def test_frame_tables_beyond_the_limit_leave_digests_alone(tmp_path: Path) -> None:
    begun = opened(tmp_path / FILE, tables=len(wire.encode(messages.Table(TABLE))))
    other = FrameTable((makers.frame(module="another").spec,))
    begun.write([trained(0, 0), trained(0, 1, table=other)], 100.0)
    assert records.read(tmp_path / FILE, RunRecord.digests)["table"].tolist() == [1, 0]
    assert query(tmp_path / FILE, "SELECT batch FROM envelopes") == [0]
    assert query(tmp_path / FILE, "SELECT batch FROM summaries") == [0]


def test_notices_beyond_the_limit_are_not_recorded_and_all_else_is(tmp_path: Path) -> None:
    begun = opened(tmp_path / FILE, events=3)
    notices = [(0, messages.Noticed(seq, makers.notice())) for seq in range(1, 6)]
    begun.write(entries([*notices, (0, messages.Bye(6, "finished", ""))]), 100.0)
    assert query(tmp_path / FILE, "SELECT kind FROM events") == ["opened", "noticed", "noticed", "bye"]


def test_unfinished_are_the_runs_of_this_collector_that_are_not_closed(tmp_path: Path) -> None:
    begun = opened(tmp_path / FILE)
    for facts, unfinished in (
        ([], False),  # a run without known ranks cannot be continued
        ([(0, makers.hello())], True),
        ([(NO_RANK, Closed())], False),
        ([(0, makers.hello())], True),  # it came back
    ):
        begun.write(entries(facts), 100.0, collector="ours")
        assert is_unfinished(tmp_path / FILE, "ours") is unfinished
        assert not is_unfinished(tmp_path / FILE, "theirs")


@pytest.mark.parametrize("body", [b"", b"no database", b"SQLite format 3\0" + bytes(5000)])
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / FILE
    path.write_bytes(body)
    with pytest.raises(StoreError, match=r"the record .*run\.db: "):
        RunRecord(path)
    with pytest.raises(StoreError, match=r"the record .*run\.db: "):
        is_unfinished(path, "ours")


def test_a_record_with_a_broken_middle_is_refused(tmp_path: Path) -> None:
    begun = opened(tmp_path / FILE)
    begun.write([trained(0, 0), *entries([(0, makers.hello())])], 100.0)
    begun.close()
    for change, complaint in (
        ("UPDATE events SET body = x'00' WHERE kind = 'hello'", "not a message"),
        ("UPDATE events SET body = '[]', kind = 'surprise'", "surprise"),
        ("UPDATE events SET body = '{\"state\": \"asleep\"}', kind = 'left'", "asleep"),
    ):
        records.execute(tmp_path, change)
        with pytest.raises(StoreError, match=complaint):
            records.read(tmp_path / FILE, RunRecord.entries)


@pytest.mark.parametrize("schema", [-1, SCHEMA - 1, SCHEMA + 1])
def test_a_record_of_another_version_is_refused_and_left_alone(tmp_path: Path, schema: int) -> None:
    opened(tmp_path / FILE).close()
    records.execute(tmp_path, f"PRAGMA user_version = {schema}")
    before = (tmp_path / FILE).read_bytes()
    complaint = rf"run\.db: written by another rankwatch \(schema {schema}; known here: {SCHEMA}\): use that one"
    openers: list[Callable[[Path], object]] = [RunRecord, Store, lambda path: read_row(path.parent)]
    for read in openers:
        with pytest.raises(StoreError, match=complaint):
            read(tmp_path / FILE)
    assert (tmp_path / FILE).read_bytes() == before


# --- what a list of runs shows ------------------------------------------------------------------------------------------

HELLO, TRIPPED, END = makers.hello(0, 2), messages.Tripped(4, makers.trip(at=(6, 0, 3))), Closed()
FINISHED, FAILED = Decided(Outcome.FINISHED, "", False), Decided(Outcome.FAILED, "rank 0 failed", True)


@pytest.mark.parametrize(
    ("facts", "row"),
    [
        ([], RunRow("", batches=3)),
        ([(NO_RANK, FAILED)], RunRow("", batches=3, outcome="failed", reason="rank 0 failed", is_final=True)),
        (
            [(0, Left(RankState.LOST)), (NO_RANK, FINISHED), (NO_RANK, END)],
            RunRow("", batches=3, outcome="finished", is_over=True),
        ),
        # A lost rank returns: the run continues, unless an abort was decided or a rank tripped.
        ([(0, Left(RankState.LOST)), (NO_RANK, FINISHED), (NO_RANK, END), (0, HELLO)], RunRow("", batches=3)),
        (
            [(NO_RANK, FAILED), (0, Left(RankState.LOST)), (NO_RANK, END), (0, HELLO)],
            RunRow("", batches=3, outcome="failed", reason="rank 0 failed", is_over=True, is_final=True),
        ),
        (
            [(0, TRIPPED), (0, Left(RankState.LOST)), (NO_RANK, FINISHED), (NO_RANK, END), (0, HELLO)],
            RunRow("", batches=7, outcome="finished", is_over=True, is_final=True),
        ),
        # A trip after the decision begins no election.
        ([(NO_RANK, FINISHED), (0, TRIPPED), (0, Left(RankState.LOST)), (NO_RANK, END), (0, HELLO)], RunRow("", batches=7)),
        ([(NO_RANK, Reached((0, 1), ((0, -1, 0, 0), (4, 4, 0, 3)), (-1, 4)))], RunRow("", batches=5)),
        # What a rank was in when it was stopped is in no batch that it sent.
        ([(0, messages.Bye(4, "aborted", "", Moment(4, 4, 0, 3)))], RunRow("", batches=5)),
    ],
)
def test_a_list_shows_what_a_replay_gives(tmp_path: Path, facts: list[tuple[int, Fact]], row: RunRow) -> None:
    run = tmp_path / "train-1"
    run.mkdir()
    opened(run / FILE).close()
    for entry in [*entries([(0, HELLO), (1, makers.hello(1, 2))]), trained(0, 2), trained(1, 1), *entries(facts)]:
        Store(run / FILE).write([entry], 200.0)  # no close(), as when a collector is killed
    ended = 200.0 if row.is_over else 100.0  # nobody wrote where a running one is
    assert read_row(run) == row._replace(run="train-1", began=100.0, job="train", world_size=2, ended=ended)
    report, is_over = records.read(run / FILE, replay.take)
    found = read_row(run)
    assert (found.is_over, found.batches, found.reason) == (is_over, report.batches, report.reason)
    assert found.outcome == report.outcome if is_over else True


def test_runs_are_listed_by_their_beginning_and_the_unreadable_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, began in (("b", 3.0), ("a", 5.0), ("c", 4.0)):
        (tmp_path / name).mkdir()
        Store(tmp_path / name / FILE).write(entries([(NO_RANK, Opened("train", 0, 1))]), began)
    for name, body in (("empty", b""), ("other", b"no database")):
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).write_bytes(body)
    (tmp_path / "begun").mkdir()
    Store(tmp_path / "begun" / FILE).close()
    assert [row.run for row in read_rows(tmp_path)] == ["b", "c", "a"]
    assert sorted(line.rpartition(": ")[2] for line in caplog.messages) == [
        "file is not a database", "it does not begin with a run's beginning", "nothing was written to it yet",
    ]  # fmt: skip
