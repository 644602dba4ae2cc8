"""Batches that were received and wait to be handled. All other messages go first: no abort waits for thousands of batches."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator

from .inbox import Letter

log = logging.getLogger(__name__)

MAX_BYTES = 256 * 2**20
"""Bytes of batches that may wait here. Beyond it the collector receives no more messages until some batches are handled."""


class Backlog:
    """The waiting batches of each peer, in the order in which the peers' first ones came.

    Attributes:
        size: their bytes.
    """

    def __init__(self) -> None:
        self.size = 0
        self._letters: OrderedDict[bytes, list[Letter]] = OrderedDict()  # taking the first of a dict is slow
        self._was_full = False
        """Since this was full, until it is empty."""

    def __len__(self) -> int:
        """The number of peers."""
        return len(self._letters)

    @property
    def is_full(self) -> bool:
        return self.size >= MAX_BYTES

    def add(self, letter: Letter) -> None:
        self._letters.setdefault(letter.peer, []).append(letter)
        self.size += len(letter.parts[0])

    def first(self, most: int) -> Iterator[Letter]:
        """Takes the batches of the first ``most`` peers."""
        for _ in range(min(most, len(self._letters))):
            yield from self.take(next(iter(self._letters)))

    def take(self, peer: bytes) -> Iterator[Letter]:
        """Takes the batches of one peer."""
        for letter in self._letters.pop(peer, ()):
            self.size -= len(letter.parts[0])
            yield letter

    def log_pressure(self, *, is_full: bool) -> None:
        """Says once that batches come too fast, and once that it is over."""
        if is_full and not self._was_full:
            log.warning(
                "batches come faster than they are handled: %d MiB of them wait here, more in the ranks, and an abort may come "
                "late. Give the collector a core of its own, or let the ranks send fewer: rankwatch tune --every 2",
                self.size >> 20,
            )
        elif self._was_full and not is_full:
            log.info("the collector keeps up again")
        self._was_full = is_full
