"""How this process leaves the others: it destroys its process group, or it was stopped, and ends.

torchrun ends all ranks of a node with the first one that ends. So a rank that was stopped stays at its end, until the collector
says that no other one can save any more, or until the grace is over. A rank whose torchrun has ended does not stay:
nobody ends the others with it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from ..shared.types import messages

log = logging.getLogger(__name__)

IDLE_SHARE, IDLE_LOOKS = 0.05, 0.02
"""What a process whose training only waits uses of a core, for threads such as ours: of the time, and seconds beside it."""

STUCK_AFTER = 1.0
"""Seconds in which a training that waits in a collective uses no core, before it counts as stuck: a collective that is under way
has the threads of its group work."""

STAY_INTERVAL = 0.5
"""Seconds between looks at whether this rank may leave, while it stays for another one and is told nothing."""

STAY_UNTOLD = 2.0
"""Seconds after which a rank that stays says so: most leave before."""

ORPHAN_GRACE, ORPHAN_HOLD_LIMIT = 10.0, 300.0
"""Of the abort of a rank whose torchrun and collector have both ended: what a collector's options are by default."""


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


class LastStay:
    """The stay of one link's rank, once its watch is closed. For any thread."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._leave = Leave()
        self._may_go = threading.Event()
        self._torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        """The process that started this one and is to end it. Another launcher may end and leave its ranks behind."""

    @property
    def is_orphaned(self) -> bool:
        """Whether the torchrun that started this process has ended."""
        return self._torchrun not in (None, os.getppid())

    def stop(self, grace: float) -> None:
        """ABORT came."""
        self._leave.stop(grace, time.monotonic())

    def tell(self, seconds: float) -> None:
        """STAY came."""
        self._leave.tell(seconds, time.monotonic())
        (self._may_go.clear if seconds else self._may_go.set)()

    def hear_nothing(self) -> None:
        """The collector has the BYE."""
        self._leave.hear_nothing()

    def lose(self) -> None:
        """The collector fell silent."""
        self._leave.lose(time.monotonic())

    def left(self) -> float:
        """Seconds for which the end of the process waits yet. Without a torchrun, nobody ends the other ranks with this one."""
        return 0.0 if self.is_orphaned else self._leave.left(time.monotonic())

    def wait(self) -> None:
        """Waits until this rank may leave."""
        untold: float | None = time.monotonic() + STAY_UNTOLD
        while left := self.left():
            if untold is not None and time.monotonic() > untold:
                log.warning(
                    "%s: stays up to %.0f s: another rank may save, and torchrun would end it after this one",
                    self._who,
                    left,
                )
                untold = None
            self._may_go.wait(min(left, STAY_INTERVAL))


def abort_of_orphan(rank: int) -> messages.Abort:
    """What stops a rank whose torchrun has ended, where no collector says so."""
    text = f"the torchrun that started rank {rank} has ended, no collector answers, and the rank trained on"
    return messages.Abort(text, -1, 0.0, ORPHAN_GRACE, ORPHAN_HOLD_LIMIT)


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
