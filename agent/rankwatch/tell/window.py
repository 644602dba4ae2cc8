"""How much a rank may stream: the collector's socket stays nearly empty, so nothing waits there behind batches. Pure."""

from __future__ import annotations

from collections import deque

from ..shared.types.stream_limit import LEAST, WINDOW, charge

PUSH = 8
"""A trip pushes the batches before it through a closed window, if they are no more than this many windows of short ones: of few
ranks 32, of 1,024 eight, of 16,384 none."""

MOST_STILL = 10
"""Acknowledgements that leave the first message of a closed window unhandled, until it counts as lost: the collector may have
refused it. It answers each heartbeat."""


class Window:
    """What was sent and not yet handled. What finds no room stays in the spool.

    Attributes:
        size: bytes. With fewer on their way, one more message may be sent, however long.
    """

    def __init__(self) -> None:
        self.size = WINDOW
        self._under_way: deque[tuple[int, int]] = deque()
        """The sequence number of each message, and what it takes."""
        self._bytes = 0
        self._still = 0

    @property
    def push(self) -> int:
        """How many batches a trip may push through, however full the window is."""
        return PUSH * self.size // LEAST

    @property
    def is_open(self) -> bool:
        """Whether one more message may be sent."""
        return self._bytes < self.size

    def renew(self, size: int) -> None:
        """After a WELCOME: nothing is under way."""
        self.size, self._bytes, self._still = size, 0, 0
        self._under_way.clear()

    def send(self, seq: int, size: int) -> None:
        """A message was sent."""
        self._under_way.append((seq, charge(size)))
        self._bytes += charge(size)

    def handle(self, seq: int) -> None:
        """The collector has handled all messages up to this number."""
        before = self._bytes
        while self._under_way and self._under_way[0][0] <= seq:
            self._bytes -= self._under_way.popleft()[1]
        self._still = 0 if self._bytes < before or self.is_open else self._still + 1
        if self._still == MOST_STILL:
            self.renew(self.size)
