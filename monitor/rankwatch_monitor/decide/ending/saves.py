"""Ranks that hold work, such as a save, while their run is stopped; and until when each stopped rank stays.

torchrun ends all ranks of a node as soon as one of them has ended. So no rank that was stopped ends before the last hold does,
neither by itself nor by its deadline, when it waits for the saving rank in a collective. And one that has closed its watch stays
until all others have closed theirs or have ended, at most until the grace is over: they may have caught the exception, and save.
Pure, the clock passed in.

| the rank           | work is held                           | another rank has yet to close  | else      |
| ------------------ | -------------------------------------- | ------------------------------ | --------- |
| runs               | no deadline until the limit of holds   | has its deadline               |           |
| closed its watch   | stays: the limit of holds, the grace   | stays until the grace is over  | may leave |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rankwatch.shared.types.messages import Stay

from ..core.effects import Effect, Note, SendAll
from ..core.rank import Rank
from ..core.report import RankState

CLOSED = frozenset({RankState.ABORTED, RankState.FAILED})
"""States of a rank whose end would cut the others: it was stopped, or failed, and has closed its watch."""

GO = float("-inf")
"""Of a rank that need not stay."""


@dataclass(slots=True)
class Holding:
    """``limit``: seconds after the abort in which holds are waited for; ``grace``: those after it, or after the last hold."""

    limit: float
    grace: float = 0.0
    until: float = GO
    """When holds are no longer waited for; long ago while no rank is stopped."""
    freed_at: float = GO
    """When the last of them ended."""
    _began_at: float = GO
    _holders: set[int] = field(default_factory=set)
    _noted: set[int] = field(default_factory=set)
    _told: dict[int, tuple[bytes, float]] = field(default_factory=dict)
    """By rank: to which of its connections was told until when it stays. One that was told nothing may leave."""
    _before: tuple[bool, bool] = False, False
    """Whether holds were waited for, and ranks ran, at the last look."""

    def begin(self, now: float) -> None:
        """The ranks are being stopped."""
        self._began_at, self.until = now, now + self.limit

    @property
    def has_begun(self) -> bool:
        return self._began_at > GO

    def take(self, rank: Rank, *, holds: bool) -> None:
        if holds:
            self._holders.add(rank.number)
        elif rank.number in self._holders:
            self._holders.discard(rank.number)
            self.freed_at = rank.heard_at

    def leave(self, rank: Rank) -> None:
        """The rank has ended. Of one that has only closed its watch, another thread may hold yet."""
        if not (rank.connected and rank.state in CLOSED):
            self.take(rank, holds=False)

    def free_at(self, aborted_at: float) -> float:
        """When the grace of the ranks begins."""
        return self.until if self._holders else max(aborted_at, min(self.freed_at, self.until))

    def is_waited_for(self, now: float) -> bool:
        return bool(self._holders) and now < self.until

    def stays_until(self, rank: Rank, now: float, *, others_run: bool) -> float:
        """Until when this rank is not ended, or does not end: see the table."""
        is_held = self.is_waited_for(now)
        if rank.is_running:
            return self.until if is_held else GO
        end = self.free_at(self._began_at) + self.grace
        return end if rank.state in CLOSED and (is_held or others_run) and now < end else GO

    def look(self, ranks: Mapping[int, Rank], now: float, *, others_run: bool) -> Iterator[Effect]:
        """At each message: all ranks are told where this changes for all."""
        is_held = self.is_waited_for(now)
        if is_held:
            for number in sorted(self._holders - self._noted):
                yield Note(f"{ranks[number].name} is saving: the abort waits up to {self.limit:g} s")
            self._noted |= self._holders
        before, self._before = self._before, (is_held, others_run)
        if self._before != before:
            yield from self.tell(ranks.values(), now, others_run=others_run)

    def tell(self, ranks: Iterable[Rank], now: float, *, others_run: bool) -> Iterator[Effect]:
        """Tells these ranks what they have not been told, if ranks are being stopped."""
        news: dict[float, list[bytes]] = {}
        for rank in ranks if self.has_begun else ():
            until = self.stays_until(rank, now, others_run=others_run)
            if rank.connected and self._told.get(rank.number, (rank.peer, GO)) != (rank.peer, until):
                self._told[rank.number] = rank.peer, until
                news.setdefault(until, []).append(rank.peer)
        for until, peers in news.items():
            yield SendAll(peers, Stay(max(0.0, until - now)))
