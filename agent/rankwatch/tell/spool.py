"""Messages that the collector has not acknowledged yet: appended by the training thread, sent by the link's thread."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from ..shared.types import messages
from ..shared.types.fingerprint import FingerprintTable
from ..shared.types.frame import FrameTable
from ..shared.types.notice import Notice

SPOOL_BATCHES = 1024
"""Most unacknowledged batch summaries; beyond it, the oldest are dropped and counted."""

SPOOL_NOTICES = 256
"""Most unacknowledged notices; beyond it, the oldest are dropped. A notice replaces the earlier one of its reading."""

SPOOL_FINGERPRINTS = 256
"""Most unacknowledged fingerprints; beyond it, the oldest are dropped. They are acknowledged with a later message."""


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
        self._batches = 0
        self._notices = 0
        self._fingerprints = 0
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
            if isinstance(message, messages.Noticed):
                self._make_room_for(message.notice)
            elif isinstance(message, messages.Batch):
                self._make_room_for_batch()
            elif isinstance(message, messages.Fingerprinted):
                self._make_room_for_fingerprint()
            elif isinstance(message, (messages.Tripped, messages.LookedCloser)):
                self._urgent.append(message)
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

    def _make_room_for_batch(self) -> None:
        self._batches += 1
        if self._batches > SPOOL_BATCHES:
            oldest = self._drop_first(lambda waiting: isinstance(waiting, messages.Batch))
            self.dropped += oldest is not None and oldest.seq > self.sent  # if not, it was sent, only not acknowledged

    def _make_room_for_fingerprint(self) -> None:
        self._fingerprints += 1
        if self._fingerprints > SPOOL_FINGERPRINTS:
            self._drop_first(lambda waiting: isinstance(waiting, messages.Fingerprinted))

    def _make_room_for(self, notice: Notice) -> None:
        self._notices += 1
        earlier = self._drop_first(
            lambda waiting: isinstance(waiting, messages.Noticed) and waiting.notice.key == notice.key
        )
        if earlier is None and self._notices > SPOOL_NOTICES:
            self._drop_first(lambda waiting: isinstance(waiting, messages.Noticed))

    def _drop_first(self, is_meant: Callable[[messages.Sequenced], bool]) -> messages.Sequenced | None:
        for index, spooled in enumerate(self._waiting):
            if is_meant(spooled.message):
                del self._waiting[index]
                self._forget(spooled.message)
                return spooled.message
        return None

    def _forget(self, message: messages.Sequenced) -> None:
        self._batches -= isinstance(message, messages.Batch)
        self._notices -= isinstance(message, messages.Noticed)
        self._fingerprints -= isinstance(message, messages.Fingerprinted)
        if isinstance(message, (messages.Tripped, messages.LookedCloser)):
            self._urgent.remove(message)
