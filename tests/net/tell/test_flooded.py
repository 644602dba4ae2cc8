"""A collector that floods a rank: the work that it causes there is bounded, and an abort still gets through."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import zmq

import makers
from collectors import PATIENCE
from links import link_to
from rankwatch.measure.ledger import LEDGER, DistinctCall, Signature
from rankwatch.shared.link import sockets, wire
from rankwatch.shared.link.connection import Connection
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import BEGINNING, Whereabouts
from rankwatch.shared.types.tuning import Tuning
from rankwatch.tell import link as link_module
from rankwatch.tell.link import WELCOMES_PER_SECOND
from rankwatch.tell.reception import BURST, SHARE, TUNES_AT_ONCE

M = TypeVar("M")

MESSAGES = 12_000
OWN_WORK = 0.3
"""CPU seconds of the thread for its start, its beats and the end."""

WELCOME = messages.Welcome("train-0", 1.0, 2.0, 0)
FLOODS = {
    "garbage": b"\xc1 no msgpack " + bytes(100),
    "tunes": wire.encode(messages.Tune(tuning=Tuning(ignore=tuple(f"layer.{number}" for number in range(50))))),
    "probes": wire.encode(messages.Probe(BEGINNING)),
    "inspects": wire.encode(messages.Inspect(1)),
    "recounts": wire.encode(messages.Recount(1, 77, 1)),
    "acks": wire.encode(messages.Ack(1 << 40, abort=False)),
    "welcomes": wire.encode(WELCOME),
    "errors": wire.encode(messages.Error("x" * 500, "drop")),
    "hellos": wire.encode(messages.Error("who are you?", "hello")),
}


class Hostile:
    """A collector that is the test."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        server, client = sockets.new_key_pair(), sockets.new_key_pair()
        self.socket, address = sockets.router(context, "tcp://127.0.0.1:0", server)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # what finds no room waits
        self.connection = Connection(address, server.public, client.public, client.secret)
        self.peer = b""

    def welcome(self, message: messages.Welcome = WELCOME) -> None:
        assert self.socket.poll(PATIENCE * 1000)
        self.peer, _ = self.socket.recv_multipart()
        self.send(wire.encode(message))

    def next(self, kind: type[M]) -> M:
        """The next message of this kind; those before it are dropped."""
        while True:
            assert self.socket.poll(PATIENCE * 1000)
            message = wire.decode(self.socket.recv_multipart()[1])
            if isinstance(message, kind):
                return message

    def send(self, data: bytes) -> None:
        self.socket.send_multipart([self.peer, data])


@pytest.fixture
def hostile(context: zmq.Context[zmq.Socket[bytes]]) -> Hostile:
    return Hostile(context)


@pytest.mark.parametrize(
    "kind", [kind if kind == "garbage" else pytest.param(kind, marks=pytest.mark.slow) for kind in FLOODS]
)
def test_a_flood_costs_a_bounded_share_and_the_abort_gets_through(
    kind: str, hostile: Hostile, caplog: pytest.LogCaptureFixture
) -> None:
    aborted, tunings = threading.Event(), list[messages.Tune]()
    link = link_to(hostile.connection, on_abort=lambda abort: aborted.set(), on_tune=tunings.append)
    starting = threading.Thread(target=link.start)
    starting.start()
    hostile.welcome()
    starting.join()
    clock = time.pthread_getcpuclockid(link._thread.ident or 0)
    with caplog.at_level(logging.WARNING):
        before, cpu = time.monotonic(), time.clock_gettime(clock)
        for _ in range(MESSAGES):
            hostile.send(FLOODS[kind])
        hostile.send(wire.encode(messages.Abort("stop", 0, 0.0, 60.0)))
        assert aborted.wait(PATIENCE)
        used, elapsed = time.clock_gettime(clock) - cpu, time.monotonic() - before
    assert used < BURST + 2 * SHARE * elapsed + OWN_WORK
    assert len(tunings) <= TUNES_AT_ONCE + elapsed + 1
    assert len(caplog.records) <= 3
    link.release()


def test_a_collector_that_asks_for_everything_again_and_again_gets_it_within_bounds(
    hostile: Hostile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "HELLO_INTERVAL", 0.0)
    monkeypatch.setattr(link_module, "WELCOMES_AT_ONCE", 2.0)
    link = link_to(hostile.connection)
    threading.Thread(target=link.start).start()
    asked, begun = 1, time.monotonic()
    hostile.welcome()
    while asked < 4:
        hostile.send(wire.encode(messages.Error("once more", "hello")))
        while not wire.is_hello(hostile.socket.recv_multipart()[1]):
            pass
        asked += 1
        hostile.send(wire.encode(WELCOME))
    assert time.monotonic() - begun > (asked - 2) / WELCOMES_PER_SECOND - 0.1
    link.release()


class Group:
    """A process group."""


def test_counts_of_collectives_are_told_once_and_the_calls_when_they_are_asked_for(hostile: Hostile) -> None:
    link, group = link_to(hostile.connection), Group()
    facts: Any = SimpleNamespace(name="0", title="", ranks=(0, 1), is_default=True, has_two_orders=False)
    calls = LEDGER.meet(group, facts).calls
    assert calls is not None
    calls.add(DistinctCall(Signature("barrier"), None, 0))
    starting = threading.Thread(target=link.start)
    starting.start()
    told = link.calls.news()
    link.send_batch(makers.table(), makers.summary(0), told)
    hostile.welcome(replace(WELCOME, heartbeat=0.05))
    starting.join()
    assert hostile.next(messages.Batch).calls in (told, ())  # if a beat went before, it has told them
    calls.add(DistinctCall(Signature("all_reduce", 8, "float32", "sum"), None, 0))
    while not (beat := hostile.next(messages.Beat)).calls or beat.calls == told:
        pass
    assert beat.calls == (calls.count(),)
    assert hostile.next(messages.Beat).calls == ()
    hostile.send(wire.encode(messages.Recount(3, calls.key, 2)))
    answer = hostile.next(messages.Recounted)
    assert (answer.number, answer.first, answer.count, answer.name) == (3, 2, 2, "the default group")
    assert [call.what for call in answer.calls] == ["all_reduce of 8 float32 (sum)"]
    hostile.send(wire.encode(messages.Error("once more", "hello")))
    hostile.next(messages.Hello)
    hostile.send(wire.encode(WELCOME))
    assert hostile.next(messages.Beat).calls == (calls.count(),), "another collector may have been told nothing"
    link.release()


def test_a_welcome_for_which_the_rank_has_not_asked_changes_nothing(hostile: Hostile) -> None:
    told = threading.Event()
    link = link_to(hostile.connection, on_tune=lambda tune: told.set())
    starting = threading.Thread(target=link.start)
    starting.start()
    hostile.welcome()
    starting.join()
    hostile.send(wire.encode(replace(WELCOME, run="stranger-0", folder="/elsewhere")))
    hostile.send(wire.encode(messages.Tune(tuning=Tuning(every=2))))
    assert told.wait(PATIENCE)
    assert (link.run, link.folder) == ("train-0", "")
    link.release()


def test_a_rank_that_hears_nothing_ends_its_connection_once_another_one_is_welcome(hostile: Hostile) -> None:
    """The end of the last one is how the collector sees that a process is dead."""
    ends = sockets.watch_disconnections(hostile.socket)
    link = link_to(hostile.connection)
    starting = threading.Thread(target=link.start)
    starting.start()
    hostile.welcome(replace(WELCOME, heartbeat=0.05))
    starting.join()
    first, again = hostile.peer, hostile.peer
    while again == first:
        assert hostile.socket.poll(PATIENCE * 1000)
        again, _ = hostile.socket.recv_multipart()
    hostile.send(wire.encode(messages.Ack(0, abort=False)))  # the first one is still there
    assert sockets.next_disconnection(ends) is None
    hostile.peer = again
    hostile.send(wire.encode(WELCOME))
    assert ends.poll(PATIENCE * 1000)
    link.release()
    hostile.socket.disable_monitor()
    ends.close(0)


def test_a_trip_that_comes_while_a_beat_is_made_goes_before_it(hostile: Hostile) -> None:
    """The beat says that the rank has come further: an election would no longer wait for its trip."""

    def look() -> Whereabouts:
        if link.is_online and not link._spool:
            link._append(lambda seq: messages.Tripped(seq, makers.trip(at=(7, 0, 1))))
        return Whereabouts(makers.moment(8, 0, 0), "forward", BEGINNING)

    link = link_to(hostile.connection, progress=look)
    starting = threading.Thread(target=link.start)
    starting.start()
    hostile.welcome()
    starting.join()
    told = [type(wire.decode(hostile.socket.recv_multipart()[1])) for _ in range(2) if hostile.socket.poll(PATIENCE * 1000)]
    assert told == [messages.Tripped, messages.Beat]
    link.release()


def test_a_moment_that_is_never_passed_is_looked_at_ever_less_often(hostile: Hostile) -> None:
    link = link_to(hostile.connection)
    link._online.set()
    now = time.monotonic()
    link._next_beat, link._probe = now + 1000, BEGINNING
    waits = []
    for waited in (0.0, 1.0, 100.0):
        link._probed_at = now - waited
        waits.append(link._next_event() - now)
    assert waits[0] < 1 <= 100 * waits[1] / 5 <= waits[2]


def test_a_message_of_several_parts_ends_the_link_and_nothing_else(
    hostile: Hostile, caplog: pytest.LogCaptureFixture
) -> None:
    link = link_to(hostile.connection, on_abort=lambda abort: pytest.fail("stopped"))
    threading.Thread(target=link.start).start()
    hostile.welcome()
    assert link._online.wait(PATIENCE)
    abort = wire.encode(messages.Abort("stop", 0, 0.0, 60.0))
    hostile.socket.send_multipart([hostile.peer, *[abort] * 1000])
    link._thread.join(PATIENCE)
    assert not link._thread.is_alive()
    assert not link.is_online
    (line,) = caplog.messages
    assert "sent a message of several parts, which no message has; training goes on without it" in line
    link.send_batch(makers.table(), makers.summary(0))
    link.close("finished")


def test_an_oversize_message_is_not_taken(hostile: Hostile, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """ZeroMQ ends the connection; the link makes another one, and says HELLO when it is asked to."""
    peer = sockets.dealer(context, hostile.connection, 1000)
    assert peer.poll(PATIENCE * 1000, zmq.POLLOUT)
    peer.send(b"hello")
    hostile.peer, _ = hostile.socket.recv_multipart()
    events = sockets.watch_disconnections(peer)
    hostile.send(bytes(2000))
    assert events.poll(PATIENCE * 1000)
    assert not peer.poll(0)
