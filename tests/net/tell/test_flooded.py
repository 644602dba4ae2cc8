"""A collector that floods a rank: the work that it causes there is bounded, and an abort still gets through."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import zmq

import makers
from collectors import PATIENCE
from links import link_to
from rankwatch.shared.link import sockets, wire
from rankwatch.shared.link.connection import Connection
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import BEGINNING
from rankwatch.shared.types.tuning import Tuning
from rankwatch.tell import link as link_module
from rankwatch.tell.link import TUNES_AT_ONCE, WELCOMES_PER_SECOND
from rankwatch.tell.reception import BURST, SHARE

MESSAGES = 12_000
OWN_WORK = 0.3
"""CPU seconds of the thread for its start, its beats and the end."""

WELCOME = messages.Welcome("train-0", 1.0, 2.0, 0)
FLOODS = {
    "garbage": b"\xc1 no msgpack " + bytes(100),
    "tunes": wire.encode(messages.Tune(tuning=Tuning(ignore=tuple(f"layer.{number}" for number in range(50))))),
    "probes": wire.encode(messages.Probe(BEGINNING)),
    "inspects": wire.encode(messages.Inspect(1)),
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

    def welcome(self) -> None:
        assert self.socket.poll(PATIENCE * 1000)
        self.peer, _ = self.socket.recv_multipart()
        self.send(wire.encode(WELCOME))

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
