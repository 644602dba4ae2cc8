"""A hostile client that has the key, beside a healthy rank of another run: real sockets, a real collector."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import zmq

import makers
from collectors import PATIENCE, Running, until
from fuzz import make_corpus
from links import link_to
from rankwatch.shared.link import wire
from rankwatch.shared.link.sockets import dealer, watch_disconnections
from rankwatch.shared.types import messages
from rankwatch.tell.link import Link
from rankwatch_monitor.decide.core.report import Outcome

REFUSED = list(make_corpus.read("refused").values())
READ = list(make_corpus.read("read").values())

AT_ONCE = 32

FLAT = 24 * 1024 * 1024
"""Bytes that a process may grow by and still count as flat: less than 5 KB for each bad message below."""


class Hostile:
    """A client with the key that sends anything. It reads the answers, so that the collector can send more."""

    def __init__(self, running: Running, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._ledger = running.collector.ledger
        self.socket = dealer(context, running.collector.connection)
        self.answers = 0

    def send(self, *messages: bytes) -> None:
        for message in messages:
            self.socket.send(message)
            self.read_answers()

    def read_answers(self) -> None:
        while self.socket.poll(0):
            wire.decode(self.socket.recv())
            self.answers += 1

    def send_refused(self, *messages: bytes) -> None:
        """Sends messages that are to be refused, and waits until they are.

        Few at a time: a kernel ends a connection whose peer reads nothing for some seconds, and what is in it is lost.
        """
        for first in range(0, len(messages), AT_ONCE):
            some = messages[first : first + AT_ONCE]
            expected = self._ledger.refused + len(some)
            self.send(*some)
            until(partial(self._has_refused, expected))

    def _has_refused(self, expected: int) -> bool:
        return self._ledger.refused == expected


@pytest.fixture
def hostile(collector: Running, context: zmq.Context[zmq.Socket[bytes]]) -> Hostile:
    return Hostile(collector, context)


@pytest.fixture
def healthy(collector: Running) -> Iterator[Link]:
    stopped = "the healthy rank was stopped: "
    link = link_to(collector.collector.connection, job="healthy", on_abort=lambda abort: pytest.fail(f"{stopped}{abort}"))
    assert link.start()
    yield link
    link.close("finished")


def resident() -> int:
    """The memory of this process, collector and client included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_bad_messages_are_counted_and_the_other_run_goes_on(collector: Running, hostile: Hostile, healthy: Link) -> None:
    run = collector.collector.ledger.runs["healthy-0"]
    for batch in range(10):
        healthy.send_batch(makers.table(), makers.summary(batch))
        hostile.send_refused(*REFUSED)
        until(lambda: not healthy._spool)
        assert (run.ranks[0].last_batch, run.ranks[0].seq) == (batch, batch + 1)
    assert collector.collector.ledger.refused == 10 * len(REFUSED)
    assert list(collector.collector.ledger.runs) == ["healthy-0"]
    healthy.close("finished")
    until(lambda: collector.reports)
    (report,) = collector.reports
    assert (report.run, report.outcome, report.batches) == ("healthy-0", Outcome.FINISHED, 10)


def test_a_client_that_lies_leaves_the_other_run_alone(collector: Running, hostile: Hostile, healthy: Link) -> None:
    ledger = collector.collector.ledger
    run = ledger.runs["healthy-0"]
    tuning = run.tuning
    lies = [data for data in READ if not isinstance(wire.decode(data), messages.Tune)]  # a client with the key may tune
    for batch in range(3):
        healthy.send_batch(makers.table(), makers.summary(batch))
        hostile.send(*lies)
        hostile.send_refused(b"")  # when this is refused, all messages before it were handled
        until(lambda: not healthy._spool)
    assert (run.ranks[0].last_batch, run.verdict, run.over, run.tuning) == (2, None, False, tuning)
    assert len(ledger.runs) > 1
    healthy.close("finished")
    until(lambda: run.over)
    assert run.report().outcome is Outcome.FINISHED


@pytest.mark.slow
def test_memory_stays_flat_over_thousands_of_bad_messages(collector: Running, hostile: Hostile) -> None:
    for _ in range(3):  # loads and caches what is needed once
        hostile.send_refused(*REFUSED)
    before = resident()
    rounds = 5000 // len(REFUSED) + 1
    for _ in range(rounds):
        hostile.send_refused(*REFUSED)
    assert resident() - before < FLAT
    hostile.read_answers()
    assert hostile.answers > 0


def test_a_second_part_makes_its_peer_deaf_until_it_connects_anew(
    collector: Running,
    hostile: Hostile,
    healthy: Link,
    context: zmq.Context[zmq.Socket[bytes]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    ack = wire.encode(messages.Ack(1, abort=True))
    for count in (2, 20_000, 2):
        hostile.socket.send_multipart([ack] * count)
    hostile.socket.send(wire.encode(makers.hello(job="deaf")))
    until(lambda: collector.collector.ledger.refused == 1)
    healthy.send_batch(makers.table(), makers.summary(0))
    until(lambda: not healthy._spool)
    assert "a message of several parts, which no message has" in caplog.text
    hostile.socket.close(0)
    until(lambda: not collector.collector._inbox._deaf)
    assert (collector.collector.ledger.refused, list(collector.collector.ledger.runs)) == (1, ["healthy-0"])
    Hostile(collector, context).send(wire.encode(makers.hello(job="heard")))
    until(lambda: "heard-0" in collector.collector.ledger.runs)


def test_what_is_over_the_limit_costs_its_sender_the_connection(collector: Running, hostile: Hostile, healthy: Link) -> None:
    hostile.send_refused(b"\xc1")
    disconnections = watch_disconnections(hostile.socket)
    hostile.socket.send(bytes(wire.MAX_MESSAGE_BYTES + 1))
    assert disconnections.poll(1000 * PATIENCE)  # by the socket: what `decode` refuses costs no connection
    assert collector.collector.ledger.refused == 1
    healthy.send_batch(makers.table(), makers.summary(0))
    until(lambda: not healthy._spool)

    def is_heard() -> bool:  # over a new connection; messages of the old one are lost with it
        with suppress(zmq.Again):
            hostile.socket.send(b"\xc1", zmq.NOBLOCK)
        return collector.collector.ledger.refused > 1

    until(is_heard)
