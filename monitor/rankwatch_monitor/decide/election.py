"""From a run's first trip to its verdict: who is waited for, and until when. ``verdict.py`` has the rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .rank import Rank
from .verdict import LogicalTime, Verdict, describe_waiting, elect, is_waited_for


@dataclass(slots=True)
class Election:
    """One run's; ``window`` is in seconds, and ``target`` the smallest tripped place so far."""

    world_size: int
    window: float
    target: LogicalTime | None = None
    _began_at: float = 0.0
    _waited_for: set[int] = field(default_factory=set)
    """Kept answer by answer, so that a message costs the same at 16 ranks and at 16,384."""
    _unsure: set[int] = field(default_factory=set)
    """Those that were not past it, in any order of stages, when it was aimed at: what they told since is yet to be looked at."""

    @property
    def has_begun(self) -> bool:
        return self.target is not None

    @property
    def waiting(self) -> str:
        """``waiting for ranks 1, 2 to pass frame 7 of batch 3``; empty when no rank is waited for."""
        return describe_waiting(sorted(self._waited_for), self.target) if self.target and self._waited_for else ""

    def is_lowered_by(self, place: LogicalTime) -> bool:
        return self.target is None or place < self.target

    def aim(self, target: LogicalTime, ranks: Mapping[int, Rank], now: float) -> list[Rank]:
        """A rank has tripped, earlier than any before; returns those that may trip earlier still."""
        if self.target is None:
            self._began_at = now
        self.target = target
        at, stage, after = target.position, target.stage, (target.batch, target.eval + 1)
        # The abort waits for this: of thousands of ranks most are past it in any order of stages, and need no closer look.
        unsure = [r for r in ranks.values() if r.progress <= at or (r.progress < after and r.hello.stage != stage)]
        asked = [record for record in unsure if is_waited_for(record.witness(), target)]
        missing = set(range(self.world_size)) - ranks.keys()
        self._unsure = {record.hello.rank for record in unsure} | missing
        self._waited_for = {record.hello.rank for record in asked} | missing
        return asked

    def takes_answer(self, record: Rank) -> bool:
        """Whether the rank has answered with what it has now told, or left; it is not waited for any longer then."""
        rank = record.hello.rank
        if self.target is None or rank not in self._waited_for or is_waited_for(record.witness(), self.target):
            return False
        self._waited_for.discard(rank)
        return True

    def is_due(self, now: float) -> bool:
        """Whether nobody is waited for any longer, or the window is over."""
        return not self._waited_for or now - self._began_at >= self.window

    def hold(self, ranks: Mapping[int, Rank], now: float, *, final: bool) -> tuple[Verdict | None, str]:
        """The verdict and why it can be given; None when it cannot yet. ``final``: nobody will say anything any more."""
        unsure = self._unsure
        witnesses = {rank: record.witness() for rank, record in ranks.items() if record.trip or rank in unsure}
        return elect(witnesses, self.world_size, now - self._began_at, 0.0 if final else self.window, unsure)
