"""Whether this process has left the others: it has destroyed its process group. Then its owner may end it at any time."""

from __future__ import annotations

from collections.abc import Callable


class Departure:
    def __init__(self) -> None:
        self.has_left = False
        self._listeners: list[Callable[[], None]] = []

    def listen(self, changed: Callable[[], None]) -> None:
        """Has ``changed`` called, in the thread that leaves or joins."""
        self._listeners = [*self._listeners, changed]

    def forget(self, changed: Callable[[], None]) -> None:
        self._listeners = [listener for listener in self._listeners if listener != changed]

    def note(self, has_left: bool) -> None:
        if has_left is not self.has_left:
            self.has_left = has_left
            for changed in self._listeners:
                changed()


DEPARTURE = Departure()
"""That of this process."""
