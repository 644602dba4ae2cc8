"""Which batches all ranks of a run measure in full: a K by what they say it costs, and all for a while after something odd.

Each rank obeys from a batch on that no rank has come to. One that comes to it before it hears of it has its full batches
elsewhere for a moment: a batch is full if K divides its number, since whenever K holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rankwatch.shared.types.notice import Notice, Oddities, describe_oddity
from rankwatch.shared.types.spent import Cost
from rankwatch.shared.types.tuning import NO_CHANGE, Tuning

from ..core.books import Books, Desk
from ..core.journal import Entry, LookedClosely, Paced, Skipped
from ..core.rank import Rank

WAIT = 5.0
"""Seconds after the first rank told what it costs, within which the others do: their 30th batches are not far apart."""

LEAD = 4
"""Heartbeats that a proposal lies ahead: one until a rank says where it is, one until it hears of it, and as many to spare."""

CLOSELY = 50
"""Batches that are all measured after something odd; see the agent's ``full_batches``."""

AT_FIRST = "every batch at first, then every second"
"""What ranks measure in full until they obey: see the agent's ``full_batches``."""

MOST_TOLD = 3
"""Spans of batches that a line names: the last ones."""


@dataclass(slots=True)
class PaceDesk(Desk):
    books: Books = field(repr=False)
    paced: Paced | None = None
    """The last proposal; None: there is none yet, or no budget."""
    looked: list[LookedClosely] = field(default_factory=list)
    """Spans of batches that were all measured because something was odd; one that goes on is one."""
    _costs: dict[int, Cost] = field(default_factory=dict)
    _since: float = math.inf
    _odd: str = ""
    """What is odd, of which no rank was told yet."""
    _oddities: dict[int, Oddities] = field(default_factory=dict)
    """By rank."""

    @property
    def tuning(self) -> Tuning:
        """What ranks are to do by now."""
        if self.paced is None:
            return NO_CHANGE
        until = self.looked[-1].last if self.looked else None
        return Tuning(pace=self.paced.every, pace_from=self.paced.first, closely_until=until)

    @property
    def text(self) -> str:
        """For people, up to the batch that the ranks have come to. Empty: there is no budget."""
        if self.paced is None:
            return ""
        every, first, why = self.paced.every, self.paced.first, self.paced.why
        last = max((rank.furthest_batch for rank in self.books.ranks.values()), default=0)
        text = f"every batch{f': {why}' if why else ''}"
        if every > 1:
            text = f"every {_ordinal(every)}batch since {first}" if first <= last else AT_FIRST
        spans = [f"all of {one.first}-{min(one.last, last)}: {one.why}" for one in self.looked[-MOST_TOLD:]]
        more = len(self.looked) - len(spans)
        return "; ".join([text, *([f"{more} earlier spans"] if more else []), *spans])

    # --- what is heard ------------------------------------------------------------------------------------------------

    def take(self, rank: Rank, cost: Cost, now: float) -> None:
        """What watching costs a rank."""
        if cost.every and self.paced is None:
            self._costs[rank.number] = cost
            self._since = min(self._since, now)

    def take_notice(self, rank: int, notice: Notice) -> None:
        if self._oddities.setdefault(rank, Oddities()).is_news(notice):
            self.take_odd(f"{describe_oddity(notice)} on rank {rank}")

    def take_odd(self, text: str) -> None:
        """Something is odd, for which all ranks look closely."""
        self._odd = self._odd or text

    def forget(self) -> None:
        """After a replay: what was odd was odd before."""
        self._odd = ""
        self._costs.clear()

    # --- what is to be done -------------------------------------------------------------------------------------------

    def look(self, now: float, *, is_given: bool) -> bool:
        """Whether ranks are to be told something. ``is_given``: ``every`` was given for all of them."""
        odd, self._odd = self._odd, ""
        running = [self.books.ranks[number] for number in self.books.running]
        if is_given or not running or len(running) < self.books.world_size:
            return False
        if self.paced is None:
            if not self._costs or (len(self._costs) < len(running) and now < self._since + WAIT):
                return False
            whys = [f"{cost.why} (rank {number})" for number, cost in sorted(self._costs.items()) if cost.why]
            every = 1 if whys else max(cost.every for cost in self._costs.values())
            self.books.find(now, Paced(every, self._ahead(running), whys[0] if whys else ""))
            return True
        if not odd or self.paced.every == 1:
            return False
        first, last = max(rank.furthest_batch for rank in running), self._ahead(running) + CLOSELY
        before = self.looked[-1] if self.looked else None
        if before is not None and first <= before.last:
            first, odd = before.first, before.why
        self.books.find(now, LookedClosely(first, last, odd))
        return True

    def _ahead(self, running: list[Rank]) -> int:
        """A batch that no rank comes to before it hears of it."""
        fastest = min((rank.spent.whole for rank in running if rank.spent.batches), default=1.0)
        seconds = LEAD * self.books.options.heartbeat
        return max(rank.furthest_batch for rank in running) + 2 + math.ceil(seconds / max(fastest, 1e-4))

    # --- findings -----------------------------------------------------------------------------------------------------

    def apply(self, entry: Entry) -> None:
        match entry.fact:
            case Paced() as paced:
                self.paced = paced
            case LookedClosely(first) as looked:
                if self.looked and self.looked[-1].first == first:
                    self.looked.pop()
                self.looked.append(looked)
            case Skipped():
                self.take_odd("a step was left out")


def _ordinal(every: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    end = "th" if every % 100 in (11, 12, 13) else ends.get(every % 10, "th")
    return "second " if every == 2 else "third " if every == 3 else f"{every}{end} "
