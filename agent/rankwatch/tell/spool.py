"""What a rank has to tell and the collector has not acknowledged yet: appended by the training thread, sent by the link's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..shared import messages
from ..shared.frame import FrameTable
from ..shared.notice import Notice

SPOOL_BATCHES = 1024
"""Batch summaries that wait for an acknowledgement; beyond it the oldest are dropped and counted."""

SPOOL_NOTICES = 256
"""Notices that wait, of different readings; beyond it the oldest are dropped. A later one of the same reading replaces it."""


@dataclass(frozen=True, slots=True)
class Spooled:
    """A message and, for a batch, the frame table it needs."""

    message: messages.Sequenced
    table: FrameTable | None


class Spool:
    """A bounded queue of numbered messages; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may close the watch in the middle of an append
        self._waiting: deque[Spooled] = deque()
        self._empty = threading.Event()
        self._last = 0
        self._batches = 0
        self._notices = 0
        self.sent = 0
        """The number of the last message that is on its way."""
        self.dropped = 0
        """Batches that were dropped before they were sent."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Spooled]:
        with self._lock:
            return iter(tuple(self._waiting))

    @property
    def is_behind(self) -> bool:
        """Whether there is something to send."""
        return self.sent < self._last

    def append(self, make: Callable[[int], messages.Sequenced], table: FrameTable | None = None) -> None:
        """Numbers and keeps the message that ``make`` makes of its number."""
        with self._lock:
            self._last += 1
            message = make(self._last)
            self._empty.clear()
            if isinstance(message, messages.Noticed):
                self._make_room_for(message.notice)
            elif isinstance(message, messages.Batch):
                self._make_room_for_batch()
            self._waiting.append(Spooled(message, table))

    def due(self) -> list[Spooled]:
        """What has not been sent, in order."""
        with self._lock:
            return [spooled for spooled in self._waiting if spooled.message.seq > self.sent]

    def let_go(self, seq: int) -> None:
        """All up to this number has been received."""
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
            self.dropped += oldest is not None and oldest.seq > self.sent  # else it has been sent, if not acknowledged

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
