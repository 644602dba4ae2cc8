"""Ranks that hold work, such as a save, while their run is stopped, and the ranks that stay until it is done.

torchrun ends all ranks of a node as soon as one of them has ended. So no rank that was stopped ends before the last hold does:
neither by itself, when it is through with the abort, nor by its deadline, when it waits for the saving rank in a collective.
Pure, the clock passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rankwatch.shared.types.messages import Stay

from ..core.effects import Effect, Note, SendAll
from ..core.rank import Rank
from ..core.report import RankState

THROUGH = frozenset({RankState.FINISHED, RankState.ENDED, RankState.LOST})
"""States of a rank that no end of another one can cut."""


@dataclass(slots=True)
class Holding:
    """``limit``: seconds after the abort in which holds are waited for."""

    limit: float
    until: float = float("-inf")
    """When holds are no longer waited for; long ago while no rank is stopped."""
    freed_at: float = float("-inf")
    """When the last of them ended."""
    _holders: set[int] = field(default_factory=set)
    _noted: set[int] = field(default_factory=set)
    _staying: dict[bytes, None] = field(default_factory=dict)
    """The peers that were told to stay."""

    def begin(self, now: float) -> None:
        """The ranks are being stopped."""
        self.until = now + self.limit

    def take(self, rank: Rank, *, holds: bool) -> None:
        if holds:
            self._holders.add(rank.number)
        elif rank.number in self._holders:
            self._holders.discard(rank.number)
            self.freed_at = rank.heard_at

    def free_at(self, aborted_at: float) -> float:
        """When the grace of the ranks begins."""
        return self.until if self._holders else max(aborted_at, self.freed_at)

    def is_waited_for(self, now: float) -> bool:
        return bool(self._holders) and now < self.until

    def look(self, ranks: dict[int, Rank], now: float) -> Iterator[Effect]:
        if self.is_waited_for(now):
            for number in sorted(self._holders - self._noted):
                yield Note(f"{ranks[number].name} is saving: the abort waits up to {self.limit:g} s")
            self._noted |= self._holders
        elif self._staying:
            yield SendAll(list(self._staying), Stay(0.0))
            self._staying = {}

    def keep(self, ranks: Iterable[Rank], now: float) -> Iterator[Effect]:
        """Ranks that are being stopped, or have been."""
        if self.is_waited_for(now):
            able = (rank.peer for rank in ranks if rank.connected and rank.state not in THROUGH)
            if new := [peer for peer in able if peer not in self._staying]:
                self._staying |= dict.fromkeys(new)
                yield SendAll(new, Stay(self.until - now))
