"""The abort of one run on its way to the ranks: sent to all, and again until each has acknowledged it or is gone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rankwatch.shared.messages import Abort

from .effects import SendAll
from .rank import Rank


@dataclass(slots=True)
class AbortDelivery:
    """``repeat`` and ``window`` are in seconds: from one sending to the next, and for all ranks to acknowledge."""

    repeat: float
    window: float
    message: Abort | None = None
    unacknowledged: set[int] = field(default_factory=set)
    """The running ranks that have not acknowledged an abort, whether or not there is one yet."""
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
