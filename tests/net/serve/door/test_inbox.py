"""The order of messages and of the ends of connections, on real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from rankwatch.shared.link import sockets
from rankwatch.shared.link.connection import KeyPair
from rankwatch_monitor.serve.door.inbox import DROPPED_AT_ONCE, Dropped, Ended, Found, Inbox, Letter, Parted

SOON = 10_000


class Door:
    """A ROUTER; ``blinks``: how often a look into it finds nothing, although there is something; ``looks``: all looks."""

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        self.router = router
        self.blinks = 0
        self.looks = 0

    def recv(self, *args: Any, **named: Any) -> Any:
        self.looks += 1
        if self.blinks:
            self.blinks -= 1
            raise zmq.Again
        return self.router.recv(*args, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.router, name)


class Hall:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.context = context
        router = context.socket(zmq.ROUTER)
        self.port = router.bind_to_random_port("tcp://127.0.0.1")
        self.door = Door(router)
        self.inbox = Inbox(self.door)  # type: ignore[arg-type]

    def visit(self) -> zmq.Socket[bytes]:
        """A peer says something."""
        peer = self.context.socket(zmq.DEALER)
        peer.connect(f"tcp://127.0.0.1:{self.port}")
        peer.send(b"hello")
        return peer

    def leave(self, peer: zmq.Socket[bytes]) -> None:
        """Its connection ends, and the end is known."""
        peer.close(1000)
        assert self.inbox._monitor.poll(SOON)

    def await_message(self) -> None:
        assert self.door.router.poll(SOON)

    def all(self) -> list[Found]:
        items = []
        while (item := self.inbox.take()) is not None:
            items.append(item)
        return items


@pytest.fixture
def hall() -> Iterator[Hall]:
    with zmq.Context() as context:
        hall = Hall(context)
        yield hall
        hall.inbox.close()
        hall.door.router.close(0)


@pytest.mark.parametrize("blinks", [0, 1])
def test_each_of_many_visitors_is_heard_first_and_its_end_reported_once(hall: Hall, blinks: int) -> None:
    """They have one descriptor, one after the other. ``blinks``: each of them comes and goes between two looks."""
    for _ in range(5):
        peer = hall.visit()
        hall.await_message()
        hall.leave(peer)
        hall.door.blinks = blinks
        heard, ended = hall.all()
        assert isinstance(heard, Letter)
        assert ended == Ended(heard.peer)


def test_the_end_of_a_visitor_who_came_after_one_that_was_in_between_two_looks(hall: Hall) -> None:
    first = hall.visit()
    hall.await_message()
    hall.leave(first)
    hall.door.blinks = 1
    hall.all()
    second = hall.visit()
    hall.await_message()
    (heard,) = hall.all()
    assert isinstance(heard, Letter)
    hall.leave(second)
    assert hall.all() == [Ended(heard.peer)]


def test_an_end_that_is_known_late_is_not_that_of_the_next_one_with_its_descriptor(hall: Hall) -> None:
    """The kernel gives a descriptor again when it likes to: so the inbox is told of it, and of the ends."""
    part: Any = SimpleNamespace(get=lambda option: 99)
    inbox, (first, *others) = hall.inbox, [Letter(name, "", memoryview(b"")) for name in (b"first", b"second", b"third")]
    assert inbox._meet(first, part) == first
    for before, later in zip((b"first", b"second"), others, strict=True):
        inbox._deaf.add(before)  # who takes this name next is heard
        assert inbox._meet(later, part) == Ended(before)
        assert inbox.take() == later
    assert not inbox._deaf
    for _ in range(2):
        inbox._gone.append(99)
        assert inbox.take() is None
    inbox._gone.append(99)
    assert inbox.take() == Ended(b"third")


def test_a_name_that_peers_chose_is_not_taken_for_a_key(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """The second of two peers of one name comes before the end of the first one is known."""
    server, first, second = (sockets.new_key_pair() for _ in range(3))
    authenticator = sockets.authenticator(context, lambda key: True)
    router, address = sockets.router(context, "tcp://127.0.0.1:0", server)
    inbox = Inbox(router)

    def say(keys: KeyPair) -> zmq.Socket[bytes]:
        """Again until it is heard: a ROUTER ignores who takes a name that it does not know to be free."""
        while True:
            peer = context.socket(zmq.DEALER)
            peer.curve_serverkey = server.public.encode()
            peer.curve_publickey, peer.curve_secretkey = keys.public.encode(), keys.secret.encode()
            peer.setsockopt(zmq.ROUTING_ID, b"a name")
            peer.setsockopt(zmq.LINGER, 0)
            peer.connect(address)
            peer.send(b"hello")
            if router.poll(500):
                return peer
            peer.close(0)

    try:
        peer, heard = say(first), inbox.take()
        assert isinstance(heard, Letter)
        assert (heard.peer, heard.key) == (b"a name", first.public)
        peer.close(0)
        assert inbox._monitor.poll(SOON)
        say(second)
        heard = inbox.take()
        while isinstance(heard, Ended):  # where both have one descriptor
            heard = inbox.take()
        assert isinstance(heard, Letter)
        assert (heard.peer, heard.key) == (b"a name", second.public)
    finally:
        inbox.close()
        router.close(0)
        authenticator.stop()


def test_the_parts_of_a_message_are_dropped_a_few_at_a_time_and_nothing_more_of_its_peer_is_heard(hall: Hall) -> None:
    peer, another = hall.visit(), hall.visit()
    heard: list[Found] = []
    while len(heard) < 2:
        hall.await_message()
        heard += hall.all()
    peer.send_multipart([b"part"] * 10 * DROPPED_AT_ONCE)
    peer.send(b"one part")
    hall.await_message()
    parted = hall.inbox.take()
    assert isinstance(parted, Parted)
    looks = hall.door.looks
    found = hall.inbox.take()
    assert (found, hall.door.looks - looks) == (Dropped(), DROPPED_AT_ONCE)
    another.send(b"still heard")
    while not isinstance(found, Letter):
        if (found := hall.inbox.take()) is None:
            hall.await_message()
        assert not isinstance(found, (Parted, Ended))
    assert (found.peer != parted.peer, bytes(found.body)) == (True, b"still heard")
