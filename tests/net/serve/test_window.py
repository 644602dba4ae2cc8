"""Ranks send more batches than the collector handles: trips, answers and ends do not wait behind them, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import makers
import records
from collectors import PATIENCE, Running, until
from links import Rank
from rankwatch.shared.link import wire
from rankwatch.shared.types import messages
from rankwatch.shared.types.stream_limit import LEAST
from rankwatch.shared.types.stream_limit import WINDOW as WINDOW_BYTES
from rankwatch.tell import link as link_module
from rankwatch.tell.spool import MOST
from rankwatch_monitor.decide.core.rank import Rank as RankOfRun
from rankwatch_monitor.decide.core.report import RankState
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.schema import FILE
from rankwatch_monitor.serve.collector import Collector
from rankwatch_monitor.serve.door import backlog as backlog_module

TABLE = makers.table()
SIZE = len(wire.encode(messages.Batch(1, makers.summary(0))))
WINDOW = WINDOW_BYTES // LEAST * SIZE
"""Bytes of the batches that a rank may have sent."""


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A collector that handles no batch that waits, until the patch is undone."""
    monkeypatch.setattr(Collector, "_handle_batches", lambda self: None, raising=False)
    running = Running(tmp_path)
    yield running
    running.stop()


def seen(running: Running, rank: int) -> RankOfRun:
    (run,) = running.collector.ledger.runs.values()
    return run.ranks[rank]


def started(running: Running, world_size: int) -> list[Rank]:
    ranks = [Rank(running.collector.connection, rank, world_size) for rank in range(world_size)]
    assert all([rank.link.start() for rank in ranks])
    return ranks


def train(rank: Rank, batches: int, first: int = 0) -> None:
    for batch in range(first, first + batches):
        rank.link.send_batch(TABLE, makers.summary(batch))


def recorded(running: Running, rank: int) -> list[int]:
    digests = records.read(running.folder / "runs" / "train-0" / FILE, RunRecord.digests)
    return [int(batch) for batch in digests["batch"][digests["rank"] == rank]]


@pytest.mark.parametrize(("batches", "handled"), [(3, 3), (30, 30), (500, 4)])
@pytest.mark.parametrize("is_short", [True, False])
def test_an_abort_comes_before_the_batches_that_wait_are_handled_but_few_of_the_culprits_own(
    batches: int, handled: int, is_short: bool, held: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trip brings 30 of its rank's batches with it; of 500, most stay in the rank. Few are handled before the trip is."""
    if not is_short:
        monkeypatch.setattr(backlog_module, "SHORT", 0)
    culprit, other = ranks = started(held, 2)
    for rank in ranks:
        train(rank, batches)
    until(lambda: held.collector._backlog.size >= 2 * min(WINDOW, batches * SIZE))
    other.moment = makers.moment(batches + 9, 0, 0)  # for which the collector has to ask
    culprit.link.send_trip(makers.trip(at=(batches, 0, 1)))
    assert culprit.aborted.wait(PATIENCE)
    assert other.aborted.wait(PATIENCE)
    last = batches if handled == batches else handled - 1  # the trip's own, if it came in its turn
    assert [seen(held, rank).last_batch for rank in (0, 1)] == ([last, -1] if is_short else [-1, -1])
    assert held.collector._backlog.size < 2 * (WINDOW + 30 * SIZE) + 10_000  # and the trip
    monkeypatch.undo()
    until(lambda: not any(rank.link._spool for rank in ranks))
    for rank in ranks:
        rank.link.close("aborted")
    until(lambda: [sorted(recorded(held, rank)) for rank in (0, 1)] == [list(range(batches))] * 2)


def test_a_rank_is_told_at_once_that_it_may_send_more(tmp_path: Path) -> None:
    """Many windows of batches are handled between two heartbeats."""
    running = Running(tmp_path, heartbeat=1000.0)
    (rank,) = started(running, 1)
    train(rank, 1000)
    until(lambda: seen(running, 0).last_batch == 999)
    assert rank.link._spool.dropped == 0
    rank.link.close("finished")
    running.stop()
    assert recorded(running, 0) == list(range(1000))


def test_what_the_window_holds_back_survives_a_reconnect(held: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    (rank,) = started(held, 1)
    train(rank, 200)
    until(lambda: held.collector._backlog.size >= WINDOW)
    rank.link._online.clear()  # as after a silence: it says HELLO again
    until(lambda: seen(held, 0).last_batch >= 0 and rank.link.is_online)  # what a peer said before its HELLO was handled
    train(rank, 200, first=200)
    monkeypatch.undo()
    until(lambda: seen(held, 0).last_batch == 399)
    rank.link.close("finished")
    until(lambda: held.reports)
    until(lambda: recorded(held, 0) == list(range(400)))


def test_a_rank_that_ends_is_not_lost_although_its_last_batches_are_not_taken(
    held: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "FAREWELL_TIMEOUT", 0.1)
    (rank,) = started(held, 1)
    train(rank, 300)
    until(lambda: held.collector._backlog.size >= WINDOW)
    rank.link.close("finished")
    until(lambda: held.reports)
    (row,) = held.reports[0].ranks
    assert row.state is RankState.FINISHED
    assert row.dropped == 300 - (row.last_batch + 1) > 0


def test_a_full_spool_drops_its_oldest_and_counts_them(held: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOST, messages.Batch, 100)
    (rank,) = started(held, 1)
    train(rank, 60)
    until(lambda: held.collector._backlog.size >= WINDOW)
    train(rank, 300, first=60)
    sent = held.collector._backlog.size // SIZE
    monkeypatch.undo()
    until(lambda: (seen(held, 0).last_batch, seen(held, 0).dropped) == (359, rank.link._spool.dropped))  # by a beat
    rank.link.close("finished")
    until(lambda: held.reports)
    (row,) = held.reports[0].ranks
    found = recorded(held, 0)
    assert row.dropped == 360 - len(found) == 260 - sent
    assert found == [*range(sent), *range(260, 360)]
    (gap,) = held.reports[0].gaps
    assert (gap.first, gap.last) == (sent, 259)
