"""Records on a real disk: what was written is read again, within the limits."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import gauges
import makers
from rankwatch.shared import messages, wire
from rankwatch.shared.frame import FrameTable
from rankwatch.shared.tuning import Tuning
from rankwatch_monitor.decide.journal import (
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
from rankwatch_monitor.decide.report import Outcome, RankStanding, RankState
from rankwatch_monitor.record import digest, store
from rankwatch_monitor.record import reader as record
from rankwatch_monitor.record.store import FILE, Limits, Store, StoreError
from rankwatch_monitor.views import dump

OLD = Path(__file__).parent / "data"
TABLE = makers.table()
SUMMARY_BYTES = 9 * TABLE.rows

EVENTS: list[tuple[int, Fact]] = [
    (NO_RANK, Opened("train", 1, 2)),
    (0, makers.hello(0, 2, minor=0)),
    (0, makers.beat(1, 0, 3)),
    (0, messages.Tripped(4, makers.trip())),
    (0, messages.Noticed(5, makers.notice())),
    (1, Left(RankState.LOST)),
    (NO_RANK, Reached((0, 3), ((1, 0, 3), (-1, 0, 0)), (1, -1))),
    (NO_RANK, messages.Tune("train-1", Tuning(every=3, ignore=("*.rotary",)))),
    (NO_RANK, Waited()),
    (NO_RANK, Decided(Outcome.ABORTED, "because", True)),
    (0, messages.Ack(5, abort=True)),
    (0, messages.Bye(6, "aborted", "")),
    (NO_RANK, JobInterrupted("SIGTERM")),
    (0, Reached((0,), ((1, 0, 3),), (1,))),
    (NO_RANK, JobEnded(1, "SIGTERM")),
    (NO_RANK, JobEnded(None, "")),
    (NO_RANK, Closed()),
]


LATER = EVENTS[12:14]
"""What the records of earlier schemas do not have in them."""


def entries(facts: Sequence[tuple[int, Fact]]) -> list[Entry]:
    return [Entry(float(now), rank, fact) for now, (rank, fact) in enumerate(facts)]


def trained(rank: int, batch: int, *, seq: int = 0, traced: bool = False, table: FrameTable = TABLE) -> Entry:
    return Entry(1.0, rank, Trained(seq or batch + 1, makers.summary(batch, traced=traced, of=table), table))


def query(path: Path, text: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as database:
        return [row[0] if len(row) == 1 else row for row in database.execute(text)]


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
    assert record.read(tmp_path / FILE).entries == entries(EVENTS)


@pytest.mark.parametrize("old", sorted(OLD.glob("schema-*.db")), ids=lambda path: path.stem)
def test_a_record_of_an_earlier_schema_is_read_and_gone_on_with(tmp_path: Path, old: Path) -> None:
    shutil.copy(old, tmp_path / FILE)
    (tmp_path / FILE).chmod(0o444)

    def check() -> None:
        old = entries([event for event in EVENTS if event not in LATER])
        assert record.read(tmp_path / FILE).entries[: len(old)] == old
        told = record.read_digests(tmp_path / FILE)
        assert [tuple(part) for part in told[["rank", "batch", "seq", "started"]].tolist()][:6] == [
            (rank, batch, batch + 1, 10.0) for batch in range(3) for rank in range(2)
        ]
        assert len(record.read_batch(tmp_path / FILE, 1, 2)) == len(TABLE.specs)

    check()
    assert (tmp_path / FILE).read_bytes() == old.read_bytes()
    (tmp_path / FILE).chmod(0o644)
    again = Store(tmp_path / FILE)
    again.write([trained(0, 3), *entries([(0, makers.hello(0, 2))])], 200.0)
    again.close()
    check()
    assert query(tmp_path / FILE, "PRAGMA user_version") == [store.SCHEMA]
    assert record.read_digests(tmp_path / FILE)["batch"].tolist() == [0, 0, 1, 1, 2, 2, 3]


def test_where_the_ranks_are_is_what_was_last_written(tmp_path: Path) -> None:
    begun = opened(tmp_path / FILE)
    assert record.read_standings(tmp_path / FILE) == (0.0, None, [])
    for batch in (3, 4):
        ranks = [RankStanding(rank, RankState.RUNNING, batch, 0, 2, "[a], b", 0.5, 1.5, "", 3, 0) for rank in range(100)]
        shown = gauges.shown(*ranks, heartbeat=2.5, waiting="waiting for rank 3", outcome=Outcome.ABORTED)
        begun.write([], 100.0 + batch, shown)
    assert record.read_standings(tmp_path / FILE) == (104.0, shown.standing, ranks)
    begun.close()


def test_a_dump_is_strict_json_and_has_all_of_it(tmp_path: Path) -> None:
    begun = Store(tmp_path / FILE)
    begun.write([*entries(EVENTS), trained(0, 0), trained(1, 0)], 100.0, run="train-1")
    begun.close()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in dump.lines(tmp_path / FILE, frames=True)]
    assert lines[0] == {"what": "record", "run": "train-1"}
    whats = Counter(line["what"] for line in lines)
    assert whats == {"record": 1, "event": len(EVENTS), "table": 1, "batch": 2, "envelope": 1, "frame": 2 * len(TABLE.specs)}
    by_what = {line["what"]: line for line in lines}
    assert (by_what["batch"]["rank"], by_what["batch"]["seq"], by_what["batch"]["bad_row"]) == (1, 1, None)
    assert by_what["envelope"]["ranks"] == 2
    assert by_what["envelope"]["rows"][0] == [1.0, 0, 1.0, 0, "finite", 0]
    tripped = next(line for line in lines if line.get("kind") == "tripped")
    assert tripped["fact"]["trip"]["frames"][-1]["abs_max"][1] is None  # it is inf
    assert len(list(dump.lines(tmp_path / FILE, frames=False))) == len(lines) - 2 * len(TABLE.specs)


def test_a_record_is_read_while_it_is_written(tmp_path: Path) -> None:
    begun = opened(tmp_path / FILE)
    begun.write([trained(0, 0)], 100.0)
    with closing(sqlite3.connect(tmp_path / FILE)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT COUNT(*) FROM digests").fetchone() == (1,)
        begun.write([trained(0, 1), *entries([(0, makers.hello(0, 2))])], 100.0)
        assert reader.execute("SELECT SUM(count) FROM digests").fetchone() == (1,)  # as it was when reading began
    assert record.read_digests(tmp_path / FILE)["batch"].tolist() == [0, 1]
    begun.close()


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = opened(tmp_path / FILE)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "_trim", lambda self: self._database.execute("INSERT INTO no_such_table VALUES (1)"))
        with pytest.raises(StoreError, match=r"run\.db: no such table"):
            begun.write([trained(0, 0), *entries([(0, makers.hello(0, 2))])], 100.0)
    assert len(record.read_digests(tmp_path / FILE)) == 0
    assert len(record.read(tmp_path / FILE).entries) == 1


def test_a_record_that_was_left_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SEGMENT", 3)
    for batch in range(5):
        begun = Store(tmp_path / FILE) if batch else opened(tmp_path / FILE)
        for rank in (0, 1):
            begun.write([trained(rank, batch), *entries([(rank, makers.hello(rank, 2))])], 100.0)
        # No close(): so a collector that is killed leaves it.
        del begun
    digests = record.read_digests(tmp_path / FILE)
    assert list(zip(digests["rank"], digests["batch"], strict=True)) == [
        (rank, batch) for batch in range(5) for rank in (0, 1)
    ]
    assert query(tmp_path / FILE, "SELECT count FROM digests") == [3, 3, 3, 1]
    assert query(tmp_path / FILE, "SELECT ranks FROM envelopes") == [2] * 5  # merged over two transactions
    assert query(tmp_path / FILE, "SELECT COUNT(*) FROM tables") == [1]
    last = [Progress(rank, batch + 1, batch, 0, len(TABLE.specs)) for rank in (0, 1) for batch in range(1, 5)]
    assert record.read(tmp_path / FILE).progress == last


def test_a_rank_that_went_silent_long_ago_is_found_in_an_old_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SEGMENT", 2)
    begun = opened(tmp_path / FILE, world_size=3)
    begun.write(entries([(rank, makers.hello(rank, 3)) for rank in range(3)]), 100.0)
    begun.write([trained(0, 0), *(trained(1, batch) for batch in range(9))], 100.0)
    begun.close()
    assert {(part.rank, part.seq) for part in record.read(tmp_path / FILE).progress} == {
        (0, 1),
        (1, 6),
        (1, 7),
        (1, 8),
        (1, 9),
    }


def test_summaries_are_what_the_ranks_sent(tmp_path: Path) -> None:
    begun = opened(tmp_path / FILE)
    begun.write([trained(1, 3)], 100.0)
    sent = makers.summary(3)
    assert query(tmp_path / FILE, "SELECT batch, rank, first_frame, tbl, traced, body FROM summaries") == [
        (3, 1, 0, 1, 0, sent.abs_min + sent.abs_max + sent.states)
    ]
    assert query(tmp_path / FILE, "SELECT body FROM tables") == [wire.encode(messages.Table(TABLE))]


def test_of_a_large_world_the_summaries_of_some_batches_are_kept_and_of_traced_ones(tmp_path: Path) -> None:
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


def test_old_envelopes_are_kept_at_a_growing_distance(tmp_path: Path) -> None:
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


def test_one_envelope_that_is_over_the_limit_is_forgone(tmp_path: Path) -> None:
    begun = opened(tmp_path / FILE, envelopes=1)
    begun.write([trained(0, 7)], 100.0)
    assert query(tmp_path / FILE, "SELECT batch FROM envelopes") == []


def test_old_digests_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SEGMENT", 4)
    begun = opened(tmp_path / FILE, digests=3 * 4 * digest.DIGEST.itemsize)
    for batch in range(50):
        begun.write([trained(0, batch)], 100.0)
    assert record.read_digests(tmp_path / FILE)["batch"].tolist() == list(range(40, 50))


def test_frame_tables_beyond_the_limit_leave_digests_alone(tmp_path: Path) -> None:
    begun = opened(tmp_path / FILE, tables=len(wire.encode(messages.Table(TABLE))))
    other = FrameTable((makers.frame(module="another").spec,))
    begun.write([trained(0, 0), trained(0, 1, table=other)], 100.0)
    assert record.read_digests(tmp_path / FILE)["table"].tolist() == [1, 0]
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
        ([], False),  # a run of which no rank is known is none to come back to
        ([(0, makers.hello())], True),
        ([(NO_RANK, Closed())], False),
        ([(0, makers.hello())], True),  # it came back
    ):
        begun.write(entries(facts), 100.0, collector="ours")
        assert record.is_unfinished(tmp_path / FILE, "ours") is unfinished
        assert not record.is_unfinished(tmp_path / FILE, "theirs")


@pytest.mark.parametrize("body", [b"", b"no database", b"SQLite format 3\0" + bytes(5000)])
def test_what_is_no_record_is_told(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / FILE
    path.write_bytes(body)
    with pytest.raises(StoreError, match=r"the record .*run\.db: "):
        record.read(path)
    with pytest.raises(StoreError, match=r"the record .*run\.db: "):
        record.is_unfinished(path, "ours")


def test_a_record_that_is_broken_in_the_middle_is_told(tmp_path: Path) -> None:
    begun = opened(tmp_path / FILE)
    begun.write([trained(0, 0), *entries([(0, makers.hello())])], 100.0)
    begun.close()
    for change, complaint in (
        ("UPDATE events SET body = x'00' WHERE kind = 'hello'", "not a message"),
        ("UPDATE events SET body = '[]', kind = 'surprise'", "surprise"),
        ("UPDATE events SET body = '{\"state\": \"asleep\"}', kind = 'left'", "asleep"),
    ):
        with closing(sqlite3.connect(tmp_path / FILE)) as database, database:
            database.execute(change)
        with pytest.raises(StoreError, match=complaint):
            record.read(tmp_path / FILE)


def test_a_record_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    opened(tmp_path / FILE).close()
    with closing(sqlite3.connect(tmp_path / FILE)) as database, database:
        database.execute(f"PRAGMA user_version = {store.SCHEMA + 1}")
    with pytest.raises(StoreError, match="written by a newer rankwatch"):
        record.read(tmp_path / FILE)
    with pytest.raises(StoreError, match="written by a newer rankwatch"):
        Store(tmp_path / FILE)
