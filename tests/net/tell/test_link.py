"""A real link and a real collector over loopback sockets."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

import makers
import ports
import records
from cables import Cable
from collectors import PATIENCE, Running, until
from links import Rank, link_to
from rankwatch.errors import ProtocolError, UsageError
from rankwatch.shared.link import sockets, wire
from rankwatch.shared.types import messages
from rankwatch.shared.types.tuning import Check, Tuning
from rankwatch.tell import contact as contact_module
from rankwatch.tell import link as link_module
from rankwatch.tell.spool import MOST
from rankwatch_monitor.decide.core.journal import Closed
from rankwatch_monitor.decide.core.ledger import Disconnected, Received
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.schema import FILE
from rankwatch_monitor.serve import collector as collector_module
from rankwatch_monitor.serve.collector import Collector
from rankwatch_monitor.serve.door import backlog, control, fair_queue
from rankwatch_monitor.serve.door.inbox import Ended, Item, Letter
from rankwatch_monitor.serve.files.run_folder import RunsFolder
from rankwatch_monitor.serve.settings import Settings


@pytest.fixture
def ranks(collector: Running) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(rank: int = 0, world_size: int = 1, *, starts: bool = True) -> Rank:
        made.append(Rank(collector.collector.connection, rank, world_size))
        assert not starts or made[-1].link.start()
        return made[-1]

    yield make
    for one in made:
        one.link.close("finished")


def test_batches_arrive_once_and_are_acknowledged(collector: Running, ranks: Callable[..., Rank]) -> None:
    rank = ranks()
    assert rank.link.run == "train-0"
    table = makers.table()
    for batch in range(50):
        rank.link.send_batch(table, makers.summary(batch))
    until(lambda: not rank.link._spool)
    (run,) = collector.collector.ledger.runs.values()
    assert (run.ranks[0].last_batch, run.ranks[0].seq) == (49, 50)


def test_parts_and_notices_arrive_and_are_acknowledged(collector: Running, ranks: Callable[..., Rank]) -> None:
    rank = ranks()
    rank.link.send_batch(makers.table(), makers.summary(7))
    rank.link.send_batch(makers.table(), makers.summary(7, first=2))
    rank.link.send_notice(makers.notice(batch=7))
    until(lambda: not rank.link._spool)
    rank.link.close("finished")
    until(lambda: collector.reports)
    (run,) = collector.collector.ledger.runs.values()
    assert run.ranks[0].progress == makers.moment(7, 0, 4)
    assert collector.reports[0].notices == ((0, makers.notice(batch=7)),)


def test_a_trip_brings_the_abort_to_every_rank(collector: Running, ranks: Callable[..., Rank]) -> None:
    culprit, other = ranks(0, 2), ranks(1, 2)
    other.moment = makers.moment(3, 0, 9)
    culprit.link.send_trip(makers.trip(at=(3, 0, 5)))
    assert culprit.link.wait_for_verdict()
    assert other.aborted.wait(PATIENCE)
    assert culprit.abort == other.abort is not None
    assert other.abort.rank == 0
    until(lambda: collector.reports)
    assert [row.acknowledged for row in collector.reports[0].ranks] == [True, True]


def test_a_probe_is_answered_when_the_position_is_passed(collector: Running, ranks: Callable[..., Rank]) -> None:
    culprit, other = ranks(0, 2), ranks(1, 2)
    other.moment = makers.moment(3, 0, 5)  # in the frame, and not past it
    culprit.link.send_trip(makers.trip(at=(3, 0, 5)))
    until(lambda: other.link._probe is not None)
    looks = other.looks
    until(lambda: other.looks > looks + 1)
    assert other.link._probe == other.moment
    other.moment = makers.moment(3, 0, 6)
    assert culprit.link.wait_for_verdict()
    (run,) = collector.collector.ledger.runs.values()
    assert run.verdict is not None
    assert run.verdict.missing == ()


def test_a_clean_end_is_reported(collector: Running, ranks: Callable[..., Rank]) -> None:
    rank = ranks()
    rank.link.close("failed", "KeyError: 'x'")
    until(lambda: collector.reports)
    assert collector.reports[0].ranks[0].farewell == "KeyError: 'x'"


def test_without_a_collector_the_spool_is_bounded_and_nothing_waits(
    collector: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "CONNECT_TIMEOUT", 0.1)
    monkeypatch.setitem(MOST, messages.Batch, 10)
    # No process listens at this address: port 1 is reserved.
    rank = Rank(replace(collector.collector.connection, address="tcp://127.0.0.1:1"))
    assert not rank.link.start()
    for batch in range(25):
        rank.link.send_batch(makers.table(), makers.summary(batch))
    rank.link.send_trip(makers.trip())
    assert not rank.link.wait_for_verdict()
    kept = [spooled.message for spooled in rank.link._spool]
    assert [message.summary.batch for message in kept if isinstance(message, messages.Batch)] == list(range(15, 25))
    assert isinstance(kept[-1], messages.Tripped)
    rank.link.close("aborted")


def test_a_restarted_collector_is_found_and_receives_what_it_missed(tmp_path: Path) -> None:
    first = Running(tmp_path)
    rank = Rank(first.collector.connection)
    assert rank.link.start()
    rank.link.send_batch(makers.table(), makers.summary(0))
    until(lambda: not rank.link._spool)
    first.stop(clean=False)
    rank.link.send_batch(makers.table(), makers.summary(1))
    second = Running(tmp_path, listen=None)  # takes its address and keys from the connection file
    assert second.collector.connection == first.collector.connection
    until(lambda: second.collector.ledger.runs and not rank.link._spool)
    (run,) = second.collector.ledger.runs.values()
    assert run.ranks[0].last_batch == 1
    rank.link.close("finished")
    second.stop()


def test_what_did_not_run_for_an_hour_misses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where this process, with the collector in it, was stopped, or had no core. What came meanwhile waits in the sockets."""
    running = Running(tmp_path, heartbeat=10)
    rank = Rank(running.collector.connection)
    rank.link.start()
    (run,) = running.collector.ledger.runs.values()
    hours, clock = 0, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600 * hours)

    def stop_for_an_hour() -> None:
        nonlocal hours
        ticked_at, hours = run.ticked_at, hours + 1
        until(lambda: run.ticked_at > ticked_at)
        rank.link.send_batch(makers.table(), makers.summary(hours))
        until(lambda: run.ranks[0].last_batch == hours)

    with caplog.at_level(logging.INFO):
        for _ in range(8):
            stop_for_an_hour()
        rank.link.close("finished")
    running.stop()
    assert not re.findall("silent|no progress", caplog.text)
    assert running.reports[-1].stall is None


def test_a_collector_with_new_keys_at_the_same_place_is_found(tmp_path: Path) -> None:
    first = Running(tmp_path)
    address = first.collector.address
    rank = Rank(first.collector.connection, source=str(tmp_path / "connection.json"))
    assert rank.link.start()
    rank.link.send_batch(makers.table(), makers.summary(0))
    until(lambda: not rank.link._spool)
    first.stop(clean=False)
    for path in tmp_path.glob("connection.json*"):
        path.unlink()
    rank.link.send_batch(makers.table(), makers.summary(1))
    until(lambda: not rank.link.is_online)
    second = Running(tmp_path, listen=address)
    assert second.collector.connection != first.collector.connection
    until(lambda: second.collector.ledger.runs and not rank.link._spool)
    assert rank.link.run == "train-0.2"
    assert rank.link._spool.sent == 2
    rank.link.send_trip(makers.trip(at=(2, 0, 5)))
    assert rank.link.wait_for_verdict()
    rank.link.close("aborted")
    until(lambda: second.reports)
    second.stop()


def test_an_end_is_reported_although_the_collector_is_briefly_away(tmp_path: Path) -> None:
    first = Running(tmp_path)
    rank = Rank(first.collector.connection)
    assert rank.link.start()
    first.stop(clean=False)
    until(lambda: not rank.link.is_online)
    closing = threading.Thread(target=rank.link.close, args=("finished",))
    closing.start()
    second = Running(tmp_path, listen=None)
    closing.join(PATIENCE)
    until(lambda: second.reports)
    assert [row.state.value for row in second.reports[0].ranks] == ["finished"]
    second.stop()


def test_a_rank_that_ends_while_the_network_stands_still_is_not_lost(
    collector: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "FAREWELL_TIMEOUT", 0.1)
    monkeypatch.setattr(contact_module, "TAKEN_FOR_LOST", PATIENCE)
    cable, goes_on = Cable(int(collector.collector.connection.address.rpartition(":")[2])), threading.Event()
    rank = Rank(replace(collector.collector.connection, address=cable.address))
    assert rank.link.start()
    cable.tamper = lambda data: data if goes_on.wait(PATIENCE) else b""
    until(lambda: not rank.link.is_online)
    closing = threading.Thread(target=rank.link.close, args=("finished",))
    closing.start()
    until(lambda: cable.connections > 2)  # the rank's, its new one, and its look at whether anybody listens still
    assert closing.is_alive()
    goes_on.set()
    closing.join(PATIENCE)
    until(lambda: collector.reports)
    assert [row.state.value for row in collector.reports[0].ranks] == ["finished"]
    cable.close()


def test_a_rank_that_ends_does_not_wait_where_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "FAREWELL_TIMEOUT", 0.1)
    monkeypatch.setattr(contact_module, "TAKEN_FOR_LOST", 1e6)
    running = Running(tmp_path)
    rank = Rank(running.collector.connection)
    assert rank.link.start()
    running.stop()
    rank.link.close("finished")
    assert not rank.link._thread.is_alive()


def test_an_internal_error_holds_back_no_other_effect(
    collector: Running, ranks: Callable[..., Rank], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = ranks()
    monkeypatch.setattr(collector.collector, "_show_ranks", lambda effect: 1 / 0)
    rank.link.close("finished")
    until(lambda: (collector.folder / "runs" / "train-0" / "report.json").exists())
    until(lambda: records.read(collector.folder / "runs" / "train-0" / FILE, RunRecord.entries)[-1].fact == Closed())
    assert "an error of ours after Received; the collector goes on" in caplog.text


def idle_collector(folder: Path) -> Collector:
    """A collector that does not serve: the test runs its turns."""
    runs = folder / "runs"
    settings = Settings(runs, listen="tcp://127.0.0.1:0")
    return Collector(settings, folder / "connection.json", RunsFolder(runs), lambda report, news: None)


def test_a_run_that_begins_and_ends_in_one_turn_of_the_collector_has_a_record(tmp_path: Path) -> None:
    collector = idle_collector(tmp_path)
    run = tmp_path / "runs" / "train-0"
    for message in (makers.hello(), messages.Bye(1, "finished", "")):
        collector._perform(Received(b"a", message))
    until((run / "report.json").exists)  # by the writer, before this turn's end hands over the entries
    collector._record()
    collector.close()
    assert records.read(run / FILE, RunRecord.entries)[-1].fact == Closed()


@pytest.mark.parametrize("is_short", [True, False])
def test_batches_wait_for_all_else_and_beats_and_acks_overtake_those_of_their_peer_and_trips_do_if_many_wait(
    is_short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_short:
        monkeypatch.setattr(backlog, "SHORT", 0)
    collector = idle_collector(tmp_path)
    batches = [memoryview(wire.encode(messages.Batch(seq, makers.summary(seq)))) for seq in range(1, 4)]
    others = messages.Tripped(9, makers.trip()), makers.beat(1, 0, 0), messages.Ack(3, abort=True)
    trip, beat, ack = (memoryview(wire.encode(message)) for message in others)
    waiting: list[Item] = [
        *(Letter(b"a", "", batch) for batch in batches),
        Letter(b"a", "", beat),
        Letter(b"a", "", ack),
        Letter(b"b", "", batches[0]),
        Letter(b"b", "", trip),
        Letter(b"c", "", beat),
        Letter(b"d", "", batches[0]),
        Ended(b"d"),
    ]
    handled: list[tuple[bytes, object]] = []

    def take(letter: Letter, message: messages.Message | None, error: str) -> None:
        handled.append((letter.peer, message.seq if isinstance(message, messages.Sequenced) else type(message)))

    monkeypatch.setattr(collector._inbox, "take", lambda: waiting.pop(0) if waiting else None)
    monkeypatch.setattr(collector, "_take", take)
    monkeypatch.setattr(collector, "_perform", lambda event: handled.append((event.peer, type(event))))
    collector._drain()
    assert handled == [
        (b"a", messages.Beat),
        (b"a", messages.Ack),
        *([(b"b", 1), (b"b", 9)] if is_short else [(b"b", messages.AHEAD)]),
        (b"c", messages.Beat),
        (b"d", 1),
        (b"d", Disconnected),
        *([(b"a", 1), (b"a", 2)] if is_short else [(b"a", 1), (b"b", 1), (b"a", 2), (b"b", 9)]),
        (b"a", 3),
    ]
    assert (bool(collector._backlog), collector._backlog.size) == (False, 0)
    collector.close()


def test_a_peer_that_takes_the_name_of_one_that_is_gone_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waited of the one before was too much, so that nothing more was taken of it until its next HELLO."""
    monkeypatch.setattr(fair_queue, "MAX_WAITING", -1)
    collector = idle_collector(tmp_path)
    long = memoryview(bytes(2 * fair_queue.LONG))
    tune = Letter(b"a", "", memoryview(wire.encode(messages.Tune())))
    waiting: list[Item] = [Letter(b"a", "", long), tune, Ended(b"a"), tune]
    handled: list[Letter] = []
    monkeypatch.setattr(collector._inbox, "take", lambda: waiting.pop(0) if waiting else None)
    monkeypatch.setattr(collector, "_take", lambda letter, message, error: handled.append(letter))
    collector._drain()
    assert handled == [tune]
    collector.close()


def test_a_trip_waits_for_a_slice_of_another_keys_messages_however_many_connections_send_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message takes a millisecond, and its key has been quiet: a quarter of a second is its own."""
    collector = idle_collector(tmp_path)
    beat, trip = (memoryview(wire.encode(one)) for one in (makers.beat(1, 0, 0), messages.Tripped(1, makers.trip())))
    many: list[Item] = [Letter(b"%d" % number, "greedy", beat) for number in range(200)]
    waiting: list[Item] = [Letter(b"v", "victim", beat), many[0]]
    handled, now = list[str](), [1000.0]

    def take(letter: Letter, message: messages.Message | None, error: str) -> None:
        now[0] += 0.001
        handled.append(letter.key)

    monkeypatch.setattr(collector, "_take", take)
    monkeypatch.setattr(collector._inbox, "take", lambda: waiting.pop(0) if waiting else None)
    monkeypatch.setattr(collector_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    collector._drain()  # both are known now
    handled.clear()
    waiting += [*many, Letter(b"v", "victim", trip)]
    while "victim" not in handled:
        collector._drain()
    assert handled.index("victim") <= 2 * 1000 * fair_queue.SLICE + 1
    while len(handled) < 201:
        collector._drain()
    collector.close()


def test_what_finds_no_room_counts_as_not_sent(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    collector = idle_collector(tmp_path)
    connection = replace(collector.connection, address=ports.address())  # where nobody listens
    assert link_to(connection)._send(sockets.dealer(context, connection), makers.beat(1, 0, 0)) == 0
    collector.close()


# --- options changed at run time ------------------------------------------------------------------------------------------


def test_a_tuning_is_sent_to_every_rank_and_to_the_client_that_asked(collector: Running, ranks: Callable[..., Rank]) -> None:
    connected = [ranks(0, 3), ranks(1, 3)]
    connection = collector.collector.connection
    assert control.tune(connection, messages.Tune(tuning=Tuning(every=10))) == messages.Tuned(("train-0",), 2)
    assert control.tune(connection, messages.Tune("train-0", Tuning(check=Check.ASYNC))) == messages.Tuned(("train-0",), 2)
    merged = messages.Tune("train-0", Tuning(every=10, check=Check.ASYNC))
    until(lambda: all(rank.tunings == [messages.Tune("train-0", Tuning(every=10)), merged] for rank in connected))
    late = ranks(2, 3)
    assert late.tunings == [merged]  # it already applies when start() returns


def test_a_tuning_is_sent_again_after_the_connection_broke(collector: Running, ranks: Callable[..., Rank]) -> None:
    rank = ranks()
    control.tune(collector.collector.connection, messages.Tune(tuning=Tuning(every=10)))
    until(lambda: len(rank.tunings) == 1)
    rank.link._online.clear()  # as after a silence: the link sends HELLO again
    until(lambda: rank.link.is_online and len(rank.tunings) == 2)
    assert rank.tunings[0] == rank.tunings[1]


def test_a_tuning_that_fails_does_not_cost_the_abort(
    collector: Running, ranks: Callable[..., Rank], caplog: pytest.LogCaptureFixture
) -> None:
    rank = ranks(starts=False)
    rank.link._watch.on_tune = lambda tune: [][1]  # type: ignore[method-assign]
    assert rank.link.start()
    with caplog.at_level(logging.CRITICAL, "rankwatch.tell.reception"):
        control.tune(collector.collector.connection, messages.Tune(tuning=Tuning(every=10)))
        rank.link.send_trip(makers.trip())
        assert rank.link.wait_for_verdict()


def test_a_collector_that_refuses_or_is_absent_is_reported_clearly(collector: Running) -> None:
    connection = collector.collector.connection
    with pytest.raises(UsageError, match="refused: no run train-7; no run is under way here"):
        control.tune(connection, messages.Tune("train-7", Tuning(every=1)))
    nobody = replace(connection, address="tcp://127.0.0.1:1")
    stranger = sockets.new_key_pair()
    keyless = replace(connection, client_public=stranger.public, client_secret=stranger.secret)
    for unreachable in (nobody, keyless):
        with pytest.raises(UsageError, match=r"no collector answers at .* within 0\.3 s: is it running"):
            control.tune(unreachable, messages.Tune(tuning=Tuning(every=1)), timeout=0.3)


def test_another_major_version_is_refused_at_the_start(ranks: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    rank = ranks(starts=False)
    rank.link._hello = replace(rank.link._hello, major=99)
    with pytest.raises(ProtocolError, match=r"the rank speaks protocol 99\.0, the collector 1\.0"):
        rank.link.start()
