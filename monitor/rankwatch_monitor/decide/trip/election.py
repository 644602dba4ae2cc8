"""From a run's first trip to its verdict: which ranks are waited for, and until when. ``verdict.py`` has the rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rankwatch.shared.types.frame import NO_STAGE, Moment
from rankwatch.shared.types.trip import MAX_RERUN, Trip

from ..core.rank import Rank
from .verdict import END, LogicalTime, Verdict, describe_waiting, elect, is_waited_for


@dataclass(slots=True)
class Election:
    """``window`` is in seconds; ``target`` is the earliest trip so far, and ``trips`` are those that it is held over, by rank."""

    world_size: int
    window: float
    target: LogicalTime | None = None
    trips: dict[int, Trip] = field(default_factory=dict)
    _began_at: float = 0.0
    _waited_for: set[int] = field(default_factory=set)
    """Updated answer by answer, so that a message costs the same at 16 ranks and at 16,384."""
    _unsure: set[int] = field(default_factory=set)
    """The ranks that may not have been past the target when it was set: only these are looked at again."""

    @property
    def waiting(self) -> str:
        """``waiting for ranks 1, 2 to pass frame 7 of batch 3``; empty when no rank is waited for."""
        return describe_waiting(sorted(self._waited_for), self.target) if self.target and self._waited_for else ""

    @property
    def _limit(self) -> float:
        """A bad gradient that its own rank has not made is another one's, which may still run its batches again."""
        return self.window + MAX_RERUN if self.target is not None and self.target.is_unfound else self.window

    def is_lowered_by(self, trip: LogicalTime) -> bool:
        return self.target is None or trip.order < self.target.order

    def aim(self, target: LogicalTime, ranks: Mapping[int, Rank], now: float) -> list[Rank]:
        """Takes a trip that is earlier than any before; returns the ranks that may still trip earlier than this one."""
        if self.target is None:
            self._began_at = now
        self.target = target
        at, stage, first = target.passed, target.stage, target.first_of_step
        is_near = stage == NO_STAGE or target.settles
        after = Moment(at.step, END, 0, 0) if is_near else Moment(at.step, target.batch, target.eval + 1, 0)
        counts = (at.step, first) if first >= 0 else None
        # The abort waits for this: most of thousands of ranks are past the target in any stage and need no closer look.
        unsure = [
            r
            for r in ranks.values()
            if r.progress <= at
            or (r.progress < after and (r.hello.stage != stage or target.settles or counts not in (None, r.first_of_step)))
        ]
        asked = [rank for rank in unsure if self._is_waited_for(rank, target)]
        missing = set(range(self.world_size)) - ranks.keys()
        self._unsure = {rank.number for rank in unsure} | missing
        self._waited_for = {rank.number for rank in asked} | missing
        return asked

    def expect(self, rank: Rank) -> None:
        """A lost rank has connected again: it may still trip earlier."""
        if self.target is not None and rank.number in self._unsure and self._is_waited_for(rank, self.target):
            self._waited_for.add(rank.number)

    def has_answer(self, rank: Rank) -> bool:
        """Whether the rank, by its last report or by leaving, need not be waited for any longer."""
        is_asked = self.target is not None and rank.number in self._waited_for
        return self.target is not None and is_asked and not self._is_waited_for(rank, self.target)

    def take_answer(self, rank: int) -> None:
        self._waited_for.discard(rank)

    def is_due(self, now: float) -> bool:
        """Whether no rank is waited for, or the window is over."""
        return not self._waited_for or now - self._began_at >= self._limit

    def hold(self, ranks: Mapping[int, Rank], now: float, *, final: bool, uneven: str = "") -> tuple[Verdict | None, str]:
        """The verdict, or None while ranks are waited for; and why. ``final``: no rank can report anything any more."""
        unsure = self._unsure
        witnesses = {n: rank.witness(self.trips.get(n)) for n, rank in ranks.items() if n in self.trips or n in unsure}
        return elect(witnesses, self.world_size, now - self._began_at, 0.0 if final else self._limit, unsure, uneven)

    def _is_waited_for(self, rank: Rank, target: LogicalTime) -> bool:
        return is_waited_for(rank.witness(self.trips.get(rank.number)), target)
