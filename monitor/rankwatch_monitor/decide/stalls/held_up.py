"""One rank takes far longer between its batches than the others do, which wait for it in each of them. Pure.

Between two batches a rank loads data, logs, evaluates and saves. Medians of its last batches: what it does now and then does not
count. Only of ranks on a CPU: on a device, the time that a rank waits for its kernels is where its code happens to wait, such
as a log of the loss on one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from rankwatch.shared.types.spent import OF, Spent

from ..core.rank import Rank

SHARE = 0.5
"""Of the time of a batch: so much longer than the others, a rank makes each batch take twice as long."""

LASTS = 32
"""Batches for which it must be so before it is told, beyond those of the medians."""

EVERY = 2.0
"""Seconds between two looks: of thousands of ranks, one takes milliseconds."""


@dataclass(slots=True)
class HeldUp:
    """``told``: the batch since which it is so, and the sentence; empty: no rank holds up the others."""

    told: tuple[int, str] = -1, ""
    _rank: int = -1
    _since: int = -1
    _looked_at: float = float("-inf")

    def is_due(self, now: float) -> bool:
        is_due = now - self._looked_at >= EVERY
        self._looked_at = now if is_due else self._looked_at
        return is_due

    def look(self, ranks: Mapping[int, Rank], running: Iterable[int]) -> tuple[int, str] | None:
        """What is to be told from now on; None: nothing is new. Once a rank has ended, the others say nothing of how it was."""
        running = list(running)
        if len(running) < len(ranks):
            return None
        found = _slowest([ranks[number] for number in running])
        if found is None:
            self._rank = -1
            return (-1, "") if self.told[1] else None
        rank, usual = found
        if rank.number != self._rank:
            self._rank, self._since = rank.number, max(0, rank.last_batch - OF)
        if self.told[1] or rank.last_batch - OF - self._since < LASTS:
            return None
        spent = rank.spent
        return self._since, (
            f"{rank.name} takes {seconds(spent.between)} of {seconds(spent.whole)} between two batches, the others "
            f"{seconds(usual)}: they wait for it since about batch {self._since}; look at its data, host and disk"
        )


def _slowest(ranks: list[Rank]) -> tuple[Rank, float] | None:
    """The rank that the others wait for, and what these take between two batches."""
    known = [rank for rank in ranks if rank.spent.batches == OF and rank.hello.device == "cpu"]
    if len(known) < 2 or len(known) < len(ranks) or len({rank.hello.stage for rank in known}) > 1:
        return None
    slowest = max(known, key=lambda rank: rank.spent.between)
    usual = median([rank.spent.between for rank in known if rank is not slowest])
    is_waited_for = slowest.spent.between - usual >= SHARE * slowest.spent.whole > 0.0
    return (slowest, usual) if is_waited_for else None


def describe_spent(spent: Spent) -> str:
    """``0.8 s a batch: between 710 ms, forward 20 ms, backward 60 ms, step 5 ms``."""
    parts = ", ".join(f"{name} {seconds(getattr(spent, name))}" for name in ("between", "forward", "backward", "step"))
    return f"{seconds(spent.whole)} a batch: {parts} (medians of the last {spent.batches})"


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1.0 else f"{1000 * value:.3g} ms"
