"""How this process leaves the others: it destroys its process group, or it was stopped, and ends.

torchrun ends all ranks of a node with the first one that ends. So a rank that was stopped stays at its end, until the collector
says that no other one can save any more, or until the grace is over.
"""

from __future__ import annotations

from collections.abc import Callable

IDLE_SHARE, IDLE_LOOKS = 0.05, 0.02
"""What a process whose training only waits uses of a core, for threads such as ours: of the time, and seconds beside it."""

STUCK_AFTER = 1.0
"""Seconds in which a training that waits in a collective uses no core, before it counts as stuck: a collective that is under way
has the threads of its group work."""


class Departure:
    """Whether this process has left the others: it has destroyed its process group. Then its owner may end it at any time."""

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


class Leave:
    """Until when a stopped rank stays once its watch is closed. Pure: the clock is passed in.

    | what happens                            | it stays                                 |
    | --------------------------------------- | ---------------------------------------- |
    | ABORT                                   | for the grace, if nobody tells otherwise |
    | STAY                                    | as long as the collector says            |
    | BYE, and the collector says nothing     | no longer                                |
    | the collector falls silent              | for the grace, at most                   |
    """

    def __init__(self) -> None:
        self.grace = 0.0
        self._until = float("-inf")
        self._is_told = False

    def stop(self, grace: float, now: float) -> None:
        self.grace = grace
        self._until = max(self._until, now + grace)

    def tell(self, seconds: float, now: float) -> None:
        self._until, self._is_told = now + seconds, True

    def hear_nothing(self) -> None:
        """The collector has the BYE."""
        if not self._is_told:
            self._until = float("-inf")

    def lose(self, now: float) -> None:
        """Nobody can tell any more."""
        self._until = min(self._until, now + self.grace)

    def left(self, now: float) -> float:
        return max(0.0, self._until - now)


class Stuck:
    """Whether a training waits for ranks that were stopped, and will not come back. Pure: times are passed in."""

    def __init__(self) -> None:
        self._since = self._cpu = float("inf")

    def look(self, now: float, cpu: float, *, waits: bool) -> bool:
        """``cpu``: seconds that the process has used of any core; ``waits``: whether its main thread is in a collective."""
        idle = IDLE_SHARE * (now - self._since) + IDLE_LOOKS
        if not waits or now < self._since or cpu - self._cpu > idle:
            self._since, self._cpu = (now, cpu) if waits else (float("inf"), 0.0)
        return now - self._since >= STUCK_AFTER


STAYING: list[Callable[[], None]] = []
"""What the end of this process waits for, of each link whose rank was stopped."""


def stay() -> None:
    """At the end of the process: waits until the stopped ranks of this process may leave."""
    while STAYING:
        STAYING.pop()()
