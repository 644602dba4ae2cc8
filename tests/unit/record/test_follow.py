"""A record that grows while it is followed; each look equals the look of a new follower."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import crowds
import makers
import records
from desk import connected
from rankwatch.shared.types import messages
from rankwatch_monitor.decide.core.journal import NO_RANK, Closed, Decided, Entry, JobEnded, JobInterrupted, Opened
from rankwatch_monitor.decide.core.report import Outcome
from rankwatch_monitor.record import replay
from rankwatch_monitor.record.follow import Follower, Newest
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.schema import FILE, StoreError
from rankwatch_monitor.record.store import Store


def test_a_record_is_replayed_once_and_then_only_its_new_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = crowds.write(tmp_path, 4, 3, trouble=False)
    follower = Follower(run)
    first = follower.look()
    assert len(first.report.notices) == 4
    assert not first.is_decided
    asked: list[int] = []
    events_after = RunRecord.events_after

    def note(record: RunRecord, last: int) -> list[tuple[int, float, Entry]]:
        asked.append(last)
        return events_after(record, last)

    monkeypatch.setattr(RunRecord, "events_after", note)
    store = Store(run / FILE)
    store.write([Entry(9.0, 1, messages.Noticed(9, makers.notice(module="another")))], 200.0)
    assert len(follower.look().report.notices) == 5
    assert follower.look().report is follower.look().report  # nothing is new
    store.write([Entry(10.0, NO_RANK, Decided(Outcome.ABORTED, "because", True)), Entry(10.0, NO_RANK, Closed())], 201.0)
    last = follower.look()
    assert (last.is_over, last.report.outcome, last.report.reason, last.last) == (True, Outcome.ABORTED, "because", 201.0)
    assert last.report == records.read(run / FILE, replay.take).report == Follower(run).look().report
    assert asked[:2] == [9, 10]
    store.close()


def test_a_look_leaves_no_transaction_open(tmp_path: Path) -> None:
    run = crowds.write(tmp_path, 2, 3, trouble=False)
    follower, store = Follower(run), Store(run / FILE)
    for batch in (3, 4):
        view = follower.look()
        store.write(list(crowds.trained(2, batch, 0.0)), 3.0)
    with closing(sqlite3.connect(run / FILE)) as database:
        is_busy, *_ = database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    assert not is_busy  # an open transaction would make the database's log grow without end
    assert view.batches == {0: 3, 1: 3}
    store.close()


def test_headroom_is_read_anew_when_there_is_a_new_batch(tmp_path: Path) -> None:
    run = crowds.write(tmp_path, 2, 3, trouble=False)
    follower = Follower(run)
    first = follower.look()
    assert (first.headroom[0].module, first.headroom[0].batch) == ("decoder.layers.11.feed_forward", 2)
    assert first.headroom[0].growth == pytest.approx(crowds.GROWTH, rel=1e-3)
    assert follower.look().headroom is first.headroom
    records.add(run, *crowds.trained(2, 3, 0.0), at=3.0)
    assert follower.look().headroom[0].batch == 3


def test_the_culprits_batch_is_counted_before_the_run_is_over(tmp_path: Path) -> None:
    view = Follower(crowds.write(tmp_path, 8, 3, trouble=False, verdict=True)).look()
    assert not view.is_over
    assert view.report.verdict is not None
    assert view.report.frames_in_batch == 24


def test_the_newest_run_is_followed(tmp_path: Path) -> None:
    newest = Newest(tmp_path / "latest")
    with pytest.raises(StoreError, match=r"no run in .*latest yet"):
        newest.look()
    crowds.write(tmp_path, 2, 1)
    assert newest.look().report.run == "crowd-0"
    (tmp_path / "crowd-1").mkdir()
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("crowd-1")
    with pytest.raises(StoreError, match=r"no run in .*crowd-1 yet"):
        newest.look()
    store = Store(tmp_path / "crowd-1" / FILE)
    with pytest.raises(StoreError, match=r"no run in .*crowd-1 yet"):
        newest.look()  # a record without entries
    store.write([Entry(0.0, NO_RANK, Opened("crowd", 1, 2))], 1.0)
    store.close()
    assert newest.look().report.run == Newest(tmp_path).look().report.run == "crowd-1"
    assert newest.look().headroom == []


def test_an_inconsistent_record_raises_only_a_store_error(tmp_path: Path) -> None:
    noticed = Entry(1.0, 1, messages.Noticed(1, makers.notice()))
    records.add(tmp_path, Entry(0.0, NO_RANK, Opened("job", 0, 2)), noticed, at=1.0)
    with pytest.raises(StoreError, match=r"the record .*run\.db: 1"):
        Follower(tmp_path).look()
    other = tmp_path / "other"
    other.mkdir()
    records.add(other, Entry(0.0, NO_RANK, Closed()), at=1.0)
    with pytest.raises(StoreError, match="does not begin with a run's beginning"):
        Follower(other).look()


@pytest.mark.parametrize("goodbye", ["finished", "ended", "failed", "aborted"])
@pytest.mark.parametrize("signal_first", [True, False])
def test_a_run_that_is_interrupted_never_looks_finished(tmp_path: Path, goodbye: str, signal_first: bool) -> None:
    """Whoever looks at its record at any moment, as ``top``, the page and ``report`` do, sees no end before the command's."""
    desk = connected(2, expects_job_end=True)
    byes = [(rank, messages.Bye(1, goodbye, "KeyboardInterrupt" if goodbye == "failed" else "")) for rank in range(2)]
    if signal_first:
        desk.handle(JobInterrupted("SIGINT"))
    for rank, bye in byes:
        desk.receive(rank, bye)
        desk.disconnect(rank)
        desk.wait(1)
    if not signal_first:
        desk.handle(JobInterrupted("SIGINT"))
    desk.handle(JobEnded(130, "SIGINT"))
    store, follower = Store(tmp_path / FILE), Follower(tmp_path)
    for entry in desk.records["train-0"]:
        store.write([entry], entry.now)
        view = follower.look()
        with RunRecord(tmp_path / FILE) as record:
            assert replay.take(record).is_over == view.is_over
        assert not view.is_decided or view.report.outcome is not Outcome.FINISHED, entry
    store.close()
    assert view.is_over
    assert view.report.reason.startswith("stopped by SIGINT")
