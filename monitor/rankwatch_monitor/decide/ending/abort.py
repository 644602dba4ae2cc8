"""The abort of one run on its way to the ranks: sent to all, and again until each has acknowledged it or is gone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rankwatch.shared.types.messages import Abort

from ..core.effects import Effect, EndProcess, Note, SendAll
from ..core.rank import Rank
from .saves import Holding

DEAF_MARGIN = 1.0
"""Seconds after the grace for which a rank that has not acknowledged the abort may yet end by itself."""


@dataclass(slots=True)
class AbortDelivery:
    """``repeat`` and ``window`` are in seconds: from one sending to the next, and for all ranks to acknowledge."""

    repeat: float
    window: float
    message: Abort | None = None
    unacknowledged: set[int] = field(default_factory=set)
    """The running ranks that have not acknowledged an abort, whether or not there is one yet."""
    _ended: set[int] = field(default_factory=set)
    """The ranks that were to be ended because they are deaf to it."""
    _decided_at: float = 0.0
    _sent_at: float = 0.0

    def begin(self, message: Abort, now: float) -> None:
        self.message, self._decided_at = message, now

    def send(self, ranks: Mapping[int, Rank], now: float) -> SendAll:
        assert self.message is not None
        self._sent_at = now
        culprit = self.message.rank
        first = [culprit] if culprit in self.unacknowledged else []  # it blocks in its hook until the abort arrives
        others = [number for number in self.unacknowledged if number != culprit]
        return SendAll([ranks[number].peer for number in (*first, *others)], self.message)

    def end_deaf(self, ranks: Mapping[int, Rank], holding: Holding, now: float) -> Iterator[Effect]:
        """Ranks that are connected, and silent since before their grace began: a C extension may keep their GIL."""
        if self.message is None:
            return
        free_at = holding.free_at(self._decided_at)
        for number in sorted(self.unacknowledged - self._ended):
            rank = ranks[number]
            is_due = now - max(free_at, rank.heard_at) > self.message.grace + DEAF_MARGIN
            if is_due and rank.connected and rank.is_running:
                self._ended.add(number)
                yield Note(f"{rank.name} does not hear the abort, and is ended if it is on the collector's host")
                yield EndProcess(rank.hello.host, rank.hello.pid, rank.hello.incarnation)

    def is_due(self, now: float) -> bool:
        """Whether it is time to send the abort again."""
        return self.message is not None and now - self._sent_at >= self.repeat

    def is_answered(self, now: float) -> bool:
        """Whether every rank has acknowledged, is gone, or has had the time to acknowledge."""
        return not self.unacknowledged or now - self._decided_at > self.window

    def answered_in(self, ranks: Mapping[int, Rank]) -> float | None:
        """Seconds from the decision to the last acknowledgement so far."""
        times = [rank.acknowledged_at for rank in ranks.values() if rank.acknowledged_at is not None]
        return max(times) - self._decided_at if times else None
