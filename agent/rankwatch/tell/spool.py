"""Messages that the collector has not acknowledged yet: appended by the training thread, sent by the link's thread."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from ..shared.types import messages
from ..shared.types.fingerprint import FingerprintTable
from ..shared.types.frame import FrameTable

MOST: dict[type, int] = {messages.Batch: 1024, messages.Noticed: 256, messages.Fingerprinted: 256}
"""Most unacknowledged messages of a kind; beyond it, the oldest is dropped. Fingerprints are acknowledged with a later one."""

DUE_AT_ONCE = 64
"""Messages that are looked at in a row: while the window is closed, a thousand may be due, again and again."""


@dataclass(frozen=True, slots=True)
class Spooled:
    """A message, and the table that it needs if it is streamed: a batch summary or a fingerprint."""

    message: messages.Sequenced
    table: FrameTable | FingerprintTable | None


class Spool:
    """A bounded queue of numbered messages. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may close the watch in the middle of an append
        self._waiting: deque[Spooled] = deque()
        self._empty = threading.Event()
        self._last = 0
        self._counts: Counter[type] = Counter()
        """How many messages of a kind wait."""
        self._urgent: list[messages.Tripped | messages.LookedCloser] = []
        self.sent = 0
        """The sequence number of the last message that was sent."""
        self.dropped = 0
        """The number of batch summaries that were dropped before they were sent."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Spooled]:
        with self._lock:
            return iter(tuple(self._waiting))

    @property
    def is_behind(self) -> bool:
        """Whether there are messages to send."""
        return self.sent < self._last

    def append(self, make: Callable[[int], messages.Sequenced], table: FrameTable | FingerprintTable | None = None) -> None:
        """Appends the message that ``make`` returns for its sequence number."""
        with self._lock:
            self._last += 1
            message = make(self._last)
            self._empty.clear()
            self._make_room_for(message)
            if isinstance(message, (messages.Tripped, messages.LookedCloser)):
                self._urgent.append(message)
            self._counts[type(message)] += 1
            self._waiting.append(Spooled(message, table))

    def due(self) -> list[Spooled]:
        """The first messages that were not sent yet, in order; empty when there are none."""
        with self._lock:
            first = bisect_right(self._waiting, self.sent, key=lambda spooled: spooled.message.seq)
            return list(islice(self._waiting, first, first + DUE_AT_ONCE))

    def urgent(self) -> list[messages.Tripped | messages.LookedCloser]:
        """The TRIPs and CLOSEUPs that were not sent yet, in order."""
        with self._lock:
            return [message for message in self._urgent if message.seq > self.sent]

    def give_up(self) -> None:
        """Drops all batch summaries and fingerprints that were not sent yet."""
        with self._lock:
            unsent = [spooled for spooled in self._waiting if spooled.table is not None and spooled.message.seq > self.sent]
            for spooled in unsent:
                self._waiting.remove(spooled)
                self._forget(spooled.message)
                self.dropped += isinstance(spooled.message, messages.Batch)

    def acknowledge(self, seq: int) -> None:
        """Removes all messages up to this number: the collector has received them."""
        with self._lock:
            while self._waiting and self._waiting[0].message.seq <= seq:
                self._forget(self._waiting.popleft().message)
            if not self._waiting:
                self._empty.set()

    def wait_until_empty(self, timeout: float) -> bool:
        return self._empty.wait(timeout)

    def _make_room_for(self, message: messages.Sequenced) -> None:
        """A notice replaces the earlier one of its reading. A batch that is dropped before it was sent is counted."""
        kind = type(message)
        if isinstance(message, messages.Noticed):
            key = message.notice.key
            self._drop_first(lambda waiting: isinstance(waiting, messages.Noticed) and waiting.notice.key == key)
        if kind in MOST and self._counts[kind] >= MOST[kind]:
            oldest = self._drop_first(lambda waiting: type(waiting) is kind)
            self.dropped += kind is messages.Batch and oldest > self.sent

    def _drop_first(self, is_meant: Callable[[messages.Sequenced], bool]) -> int:
        """Returns its sequence number; 0: there is none."""
        for index, spooled in enumerate(self._waiting):
            if is_meant(spooled.message):
                del self._waiting[index]
                self._forget(spooled.message)
                return spooled.message.seq
        return 0

    def _forget(self, message: messages.Sequenced) -> None:
        self._counts[type(message)] -= 1
        if isinstance(message, (messages.Tripped, messages.LookedCloser)):
            self._urgent.remove(message)
