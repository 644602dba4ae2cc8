"""Batches that were received and wait to be handled. All other messages go first: no abort waits for thousands of batches."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterator

from .inbox import Letter

log = logging.getLogger(__name__)

MAX_BYTES = 256 * 2**20
"""Bytes of batches that may wait here. Beyond it the collector receives no more messages until some batches are handled: some
peers ignore their windows."""

SHORT = 2**20
"""Bytes of batches that all are handled within 25 ms, even if they are small."""

TOO_LONG = 5.0
"""Seconds for which some batches wait at all times until that is said; and for which they do not until it is over."""

SOON = 1.0
"""Seconds in which the backlog is empty now and then, if the collector keeps up: ranks may send their batches all at once."""


class Backlog:
    """The waiting batches of each peer. The peers take turns.

    Attributes:
        size: their bytes.
    """

    def __init__(self) -> None:
        self.size = 0
        self._letters: OrderedDict[bytes, deque[Letter]] = OrderedDict()  # taking the first of a dict is slow
        self._pressure = Pressure()

    def __bool__(self) -> bool:
        return bool(self._letters)

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._letters

    @property
    def is_full(self) -> bool:
        return self.size >= MAX_BYTES

    @property
    def is_short(self) -> bool:
        """Whether a trip can wait until its rank's batches are handled: it is judged by them."""
        return self.size < SHORT

    def add(self, letter: Letter) -> None:
        self._letters.setdefault(letter.peer, deque()).append(letter)
        self.size += len(letter.body)

    def next(self) -> Letter:
        """Takes the first batch of the next peer."""
        peer, letters = next(iter(self._letters.items()))
        letter = letters.popleft()
        self.size -= len(letter.body)
        if letters:
            self._letters.move_to_end(peer)
        else:
            del self._letters[peer]
        return letter

    def take(self, peer: bytes) -> Iterator[Letter]:
        """Takes the batches of one peer."""
        for letter in self._letters.pop(peer, ()):
            self.size -= len(letter.body)
            yield letter

    def log_pressure(self, now: float) -> None:
        """Says once that batches come too fast, and once that it is over. Call this again and again."""
        if not self._pressure.look(now, is_empty=not self._letters):
            return
        if self._pressure.is_high:
            log.warning(
                "batches come faster than they are handled: %d MiB of them wait here, and more in the ranks, which drop the "
                "oldest. An abort goes ahead of them. Give the collector a core of its own, or let the ranks send fewer: "
                "rankwatch tune --every 2",
                self.size >> 20,
            )
        else:
            log.info("the collector keeps up again")


class Pressure:
    """Whether batches come too fast. The windows keep the backlog short, so its length does not tell. Pure."""

    def __init__(self) -> None:
        self.is_high = False
        self._empty_at: float | None = None
        """When the backlog was empty last."""
        self._late_at = float("-inf")
        """When it had last not been empty for longer than SOON."""

    def look(self, now: float, *, is_empty: bool) -> bool:
        """Whether ``is_high`` has changed."""
        if is_empty or self._empty_at is None:
            self._empty_at = now
        waited = now - self._empty_at
        if waited > SOON:
            self._late_at = now
        before = self.is_high
        self.is_high = now - self._late_at <= TOO_LONG if before else waited > TOO_LONG
        return self.is_high is not before
