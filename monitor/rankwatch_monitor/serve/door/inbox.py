"""What a ROUTER receives: messages with their senders, and the ends of connections.

A message has one part. A peer that sends another part is deaf from then on, until its connection ends: what it sends is dropped.
A ROUTER hands over the next message when all parts of this one were taken, so they are dropped a few at a time.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import NamedTuple, TypeAlias

import zmq

from rankwatch.shared.link import sockets

LOOK_AROUND = 0.002
"""Seconds after which connections with a first message are looked for. libzmq itself looks for them at every 100th part that is
received, however long that takes, as long as other connections have more."""


DROPPED_AT_ONCE = 256
"""Parts that are dropped, in less than a millisecond, before the clock is looked at."""


class Letter(NamedTuple):
    """A message, the peer it came from, and that peer's public key."""

    peer: bytes
    key: str
    body: memoryview


class Parted(NamedTuple):
    """A message of this peer had several parts: nothing more is taken of it."""

    peer: bytes
    key: str


class Dropped(NamedTuple):
    """Something of a deaf peer was dropped."""


class Ended(NamedTuple):
    """A peer's connection has ended."""

    peer: bytes


Item: TypeAlias = Letter | Ended
Found: TypeAlias = Item | Parted | Dropped


class Inbox:
    """Receives from a ROUTER without blocking."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._monitor = sockets.watch_disconnections(socket)
        self._keys: dict[bytes, str] = {}
        self._peers: dict[int, bytes] = {}
        """The peer behind each connection's file descriptor."""
        self._reused: Counter[int] = Counter()
        """Descriptors that belong to a new connection, while the end of the earlier one is not reported yet."""
        self._gone: deque[int] = deque()
        """Descriptors whose connections have ended. What their peers had sent is in the socket by then, and comes first."""
        self._ends: deque[Ended] = deque()
        self._put_back: Found | None = None
        self._deaf: set[bytes] = set()
        self._has_more = False
        """Whether parts of the last message are still in the socket, to be dropped."""
        self._looked_at = 0.0

    def take(self) -> Found | None:
        """The next item; None when there is none. A peer's messages come before the end of its connection."""
        if (found := self._put_back) is not None:
            self._put_back = None
            return found
        if self._has_more:
            self._drop_parts()
            return Dropped()
        if (now := time.monotonic()) - self._looked_at > LOOK_AROUND:
            self._looked_at = now
            self._socket.getsockopt(zmq.EVENTS)
        try:
            peer = self._receive_peer()
        except zmq.Again:
            return self._next_end()
        part = self._socket.recv(copy=False)  # a ROUTER puts the peer before each message, which has at least one part
        self._has_more = part.more
        if peer in self._deaf:
            return Dropped()
        key = self._keys.get(peer)
        # A name that the ROUTER gave begins with a 0 and is never given again. Any other name was chosen by a peer, and
        # another peer may choose the same one: there the key is asked for again.
        if key is not None and peer[:1] == b"\0":
            return self._hear(peer, key, part)
        return self._meet(self._hear(peer, _key_of(part), part), part)

    def _hear(self, peer: bytes, key: str, part: zmq.Frame) -> Letter | Parted:
        if not part.more:
            return Letter(peer, key, part.buffer)
        self._deaf.add(peer)
        return Parted(peer, key)

    def _drop_parts(self) -> None:
        for _ in range(DROPPED_AT_ONCE):
            self._has_more = self._socket.recv(copy=False).more
            if not self._has_more:
                return

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)

    def _meet(self, letter: Letter | Parted, part: zmq.Frame) -> Found:
        # libzmq calls SRCFD deprecated, but only it tells which connection a peer has.
        descriptor = int(part.get(zmq.SRCFD))
        before = self._peers.get(descriptor, letter.peer)
        self._peers[descriptor] = letter.peer
        self._keys[letter.peer] = letter.key
        if before == letter.peer:
            return letter
        self._reused[descriptor] += 1
        self._keys.pop(before, None)
        self._deaf.discard(before)
        self._put_back = letter
        return Ended(before)

    def _receive_peer(self) -> bytes:
        """The peer of the next message. Raises zmq.Again when there is none, also after the ends of connections were read.

        A peer may send, and end, between a look into the socket and a look at the ends. If its message were taken after its end,
        its descriptor would stay its own, and the end of the next connection with this descriptor would be taken for its end.
        """
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            while (descriptor := sockets.next_disconnection(self._monitor)) is not None:
                self._gone.append(descriptor)
            if not self._gone:
                raise
            return self._socket.recv(zmq.NOBLOCK)

    def _next_end(self) -> Ended | None:
        """Call this when all that the peers of ``_gone`` had sent was taken."""
        while self._gone:
            descriptor = self._gone.popleft()
            if self._reused[descriptor]:
                self._reused[descriptor] -= 1
            elif descriptor in self._peers:
                peer = self._peers.pop(descriptor)
                self._keys.pop(peer, None)
                self._deaf.discard(peer)
                self._ends.append(Ended(peer))
        return self._ends.popleft() if self._ends else None


def _key_of(part: zmq.Frame) -> str:
    """The public key that the peer has proved to own; empty where the link is in plain text."""
    try:
        return str(part.get("User-Id"))
    except zmq.ZMQError:
        return ""
