"""Whose message is next: what a key has beyond its share of the loop waits while other keys have messages.

ZeroMQ hands over one message of each connection in turn, so a key with a thousand connections would have a thousand turns for
one of another key. And another thread decodes long messages (``decoder.py``): what the peer of one sent after it waits.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from rankwatch.shared.link import wire
from rankwatch.shared.link.allowance import Allowance

from ...decide.keys.budget import WORK_AT_ONCE, WORK_PER_SECOND
from .inbox import Ended, Item, Letter

MAX_WAITING = 64 * 2**20
"""Bytes of one key that wait. What is over is not taken: its peer says HELLO again, and repeats what is not on record."""

OVERHEAD = 1024
"""Bytes of a waiting item, and again of its message, beside those of the message."""

SLICE = 0.005
"""Seconds for which messages are received, and then for which those are handled that wait for their turn. A key has no more of
the former: a thousand connections that were quiet may all send at once."""

CONTEST = 10.0
"""Seconds for which a key counts as present after its last message. A key that is alone may use the whole loop."""

DEBT = 4.0
"""How far a key can be in debt, in units of its share: what a rush of an hour left over does not count for hours."""

LONG = 32 * 2**10
"""Bytes of a message, unless it has columns, that takes some milliseconds to decode: a table, or a trip with many frames."""


@dataclass(slots=True)
class _OfKey:
    """What waits of one key. ``deaf``: peers of which a message was not taken; until their next HELLO, none is."""

    name: str
    work: Allowance = field(default_factory=lambda: Allowance(WORK_PER_SECOND, WORK_AT_ONCE))
    in_row: float = 0.0
    """Seconds that it had in the row of messages under way."""
    heard_at: float = float("-inf")
    peers: OrderedDict[bytes, deque[Item]] = field(default_factory=OrderedDict)
    size: int = 0
    deaf: set[bytes] = field(default_factory=set)
    decoded: bytes = b""
    """The peer whose message is being decoded."""


class Turns:
    """The messages that wait for their turn. The time is passed in."""

    def __init__(self) -> None:
        self._keys: dict[str, _OfKey] = {}
        self._waiting: dict[str, _OfKey] = {}
        self._by_peer: dict[bytes, _OfKey] = {}
        self.is_contested = False
        """Whether several keys are present: only then their work is counted."""

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting)

    @property
    def is_ready(self) -> bool:
        """Whether ``next`` has one."""
        return any(not own.decoded for own in self._waiting.values())

    def begin(self, now: float) -> None:
        """A row of messages is about to be received."""
        self.is_contested = sum(now - own.heard_at < CONTEST for own in self._keys.values()) > 1
        for own in self._keys.values():
            own.in_row = 0.0

    def waits(self, item: Item, now: float) -> bool:
        """Whether this may not be handled at once."""
        if isinstance(item, Ended):
            return item.peer in self._by_peer
        own = self._keys.get(item.key)
        if own is None:
            own = self._keys[item.key] = _OfKey(item.key)
        own.heard_at = now
        is_over = self.is_contested and (own.in_row >= SLICE or own.work.left(now) <= 0)
        return is_over or item.peer in self._by_peer or item.peer in own.deaf or is_long(item)

    def add(self, item: Item, before: Iterable[Letter] = ()) -> bool:
        """Has it wait, after ``before``, which came from its peer earlier. False: it is not taken, and the peer has to say
        HELLO again; True for all further messages until then."""
        own = self._keys[item.key] if isinstance(item, Letter) else self._by_peer[item.peer]
        if isinstance(item, Letter):
            is_deaf = item.peer in own.deaf
            if own.size > MAX_WAITING or (is_deaf and not wire.is_hello(item.body)):
                own.deaf.add(item.peer)
                return is_deaf
            own.deaf.discard(item.peer)
        items = own.peers.setdefault(item.peer, deque())
        for each in (*before, item):
            items.append(each)
            own.size += _size(each)
        self._by_peer[item.peer] = self._waiting[own.name] = own
        return True

    def next(self, now: float) -> Item | None:
        """Takes an item of the key that has the most left of its share. None: all keys that wait do so for the decoder.

        A long message is for the decoder: until ``decoded``, nothing more comes of its key.
        """
        ready = [own for own in self._waiting.values() if not own.decoded]
        if not ready:
            return None
        own = max(ready, key=lambda own: own.work.left(now))
        peer, items = next(iter(own.peers.items()))
        item = items.popleft()
        own.size -= _size(item)
        if isinstance(item, Letter) and is_long(item):
            own.decoded = peer
        else:
            self._pass_on(own, peer)
        return item

    def decoded(self, letter: Letter) -> None:
        """The decoder is done with this one."""
        own = self._keys[letter.key]
        own.decoded = b""
        self._pass_on(own, letter.peer)

    def spend(self, key: str, seconds: float, now: float) -> None:
        """A message of this key took this long."""
        own = self._keys.get(key)
        if own is not None:
            own.in_row += seconds
            if own.work.left(now) > -DEBT:
                own.work.spend(seconds)

    def forget(self, peer: bytes) -> None:
        """The connection of this peer has ended."""
        for own in self._keys.values():
            own.deaf.discard(peer)

    def _pass_on(self, own: _OfKey, peer: bytes) -> None:
        """It is the next peer's turn."""
        if own.peers[peer]:
            own.peers.move_to_end(peer)
            return
        del own.peers[peer], self._by_peer[peer]
        if not own.peers:
            del self._waiting[own.name]


def is_long(letter: Letter) -> bool:
    """Whether another thread is to decode it. In FINGERPRINTS, a few bytes may stand for half a million ranks."""
    body = letter.body
    return (len(body) > LONG and not wire.is_columns(body)) or wire.is_fingerprints(body)


def _size(item: Item) -> int:
    return 2 * OVERHEAD + len(item.body) if isinstance(item, Letter) else OVERHEAD
