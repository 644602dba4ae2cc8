"""Which batches are measured in full: all, one of K, or as many as a budget allows. Pure: numbers and seconds are passed in.

       FIRST --- 20 batches ---> TURNS --- the costs are known: alone, or by the collector ---> BUDGET
         |                         |                                                              |
         +--- a batch cannot be run again ---> ALL                                                |
         |                         |            |                                                 |
         +-------------------------+------------+------ `every` is given meanwhile ---------------+---> GIVEN

In FIRST and ALL each batch is full, in TURNS each second one, in GIVEN and BUDGET each K-th. Numbers count from 0 on, so that all
ranks have the same full batches. Where something is odd, each batch is full for a while, except in GIVEN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum, auto
from statistics import median
from typing import NamedTuple

from ...shared.types.notice import Notice, Oddities
from ...shared.types.spent import MOST_EVERY, Cost
from ...shared.types.tuning import Tuning

FIRST = 20
"""Batches that are measured in full before any is left out: most trainings that go wrong at once do so in them."""

TIMED_FIRST = 6
"""The last of them, whose cost is taken: the first ones allocate and compile."""

SAMPLES = 5
"""Full batches and others whose costs are taken, at least. The medians count: a busy host interrupts some."""

IN_MEDIANS = 0.9
"""The share of the budget for the medians. The rest is for the looks at an optimizer's state and at the weights: each 64th step
alone has them, so no median does. They are 0.2 % of all steps of GPT-2's shape."""

CLOSELY = 50
"""Batches after something odd that are all measured: what leads to an overflow mostly does so within some dozens."""

PATIENCE = 10.0
"""Seconds for which a rank with a collector awaits its proposal: ranks beat each second, very many more slowly."""


class Pacing(Enum):
    """See the module."""

    FIRST = auto()
    TURNS = auto()
    BUDGET = auto()
    ALL = auto()
    GIVEN = auto()


MOVES: dict[Pacing, tuple[Pacing, ...]] = {
    Pacing.FIRST: (Pacing.TURNS, Pacing.BUDGET, Pacing.ALL, Pacing.GIVEN),
    Pacing.TURNS: (Pacing.BUDGET, Pacing.ALL, Pacing.GIVEN),
    Pacing.BUDGET: (Pacing.ALL, Pacing.GIVEN),
    Pacing.ALL: (Pacing.GIVEN,),
    Pacing.GIVEN: (),
}


class Sample(NamedTuple):
    """What a batch took: ``own`` seconds of ``whole`` in hooks of ours.

    ``is_lean``: graphs without readings were run, and nobody knows how long those of a full batch take in its graphs.
    """

    is_full: bool
    own: float
    whole: float
    is_lean: bool = False


def fewest(full: float, between: float, bare: float, budget: float) -> int:
    """The smallest K with which the mean of a full batch and K - 1 between is within ``budget`` of a ``bare`` batch.

    ``MOST_EVERY`` where none of them is.
    """
    allowed = budget * bare
    if full <= allowed:
        return 1
    return min(MOST_EVERY, math.ceil((full - between) / (allowed - between))) if between < allowed else MOST_EVERY


class FullBatches:
    """Decides which batches of one rank are full.

    Args:
        every: K, if it is given.
        budget: the share of a batch's time that may be ours; 0: there is none.
        patience: seconds for which a proposal is awaited, once the costs are known.
    """

    def __init__(self, every: int | None = None, budget: float = 0.0, patience: float = 0.0) -> None:
        self.pacing = Pacing.GIVEN if every is not None or not budget else Pacing.FIRST
        self.cost = Cost()
        """What this rank tells the others. For any thread."""
        self._every = every or 1
        self._next: tuple[int, int] | None = None
        """K and the batch from which it holds."""
        self._budget = budget
        self._patience = patience
        self._known_at = math.inf
        self._first = -1
        self._closely_until = -1
        self._samples: list[Sample] = []
        self._oddities = Oddities()

    def is_full(self, number: int) -> bool:
        """Whether the batch of this number, which begins, is measured in full."""
        self._reach(number)
        if self.pacing is Pacing.GIVEN:
            return number % self._every == 0
        if self.pacing in (Pacing.FIRST, Pacing.ALL) or number <= self._closely_until:
            return True
        return number % (2 if self.pacing is Pacing.TURNS else self._every) == 0

    def _reach(self, number: int) -> None:
        self._first = number if self._first < 0 else self._first
        if self._next is not None and number >= self._next[1] and self.pacing is not Pacing.ALL:
            self._every, self._next = self._next[0], None
            self._move(Pacing.BUDGET)
        elif self.pacing is Pacing.FIRST and number >= self._first + FIRST:
            self._move(Pacing.TURNS)

    def _move(self, pacing: Pacing) -> None:
        if pacing is not self.pacing:
            assert pacing in MOVES[self.pacing], (self.pacing, pacing)
            self.pacing = pacing

    # --- what it costs ------------------------------------------------------------------------------------------------

    @property
    def is_measuring(self) -> bool:
        """Whether it still has to be found out what a batch costs, or whether it can be run again."""
        return self.pacing in (Pacing.FIRST, Pacing.TURNS)

    def is_timed(self, number: int) -> bool:
        """Whether the cost of this batch, which has begun, is wanted."""
        is_due = self.pacing is Pacing.TURNS or number >= self._first + FIRST - TIMED_FIRST
        return self.is_measuring and is_due and not self.cost.every

    def take(self, sample: Sample, now: float) -> None:
        """A batch whose cost was wanted is over."""
        self._samples.append(sample)
        full, between = ([one for one in self._samples if one.is_full is is_full] for is_full in (True, False))
        if not self.is_measuring or self.cost.every or min(len(full), len(between)) < SAMPLES:
            return
        high, low = (median(one.own for one in same) for same in (full, between))
        bare = median(one.whole - one.own for one in self._samples)
        every = MOST_EVERY if any(one.is_lean for one in between) else fewest(high, low, bare, IN_MEDIANS * self._budget)
        self.cost = Cost(every, high, low, bare)
        self._known_at = now
        self._samples.clear()

    def wait(self, now: float) -> None:
        """Time has passed. Nobody has proposed a K: this rank decides alone."""
        if self.pacing is Pacing.TURNS and self._next is None and now >= self._known_at + self._patience:
            self._next = self.cost.every, 0

    def refuse(self, why: str) -> None:
        """A batch cannot be run again: the report of an overflow would have no module, if not all of it was measured."""
        if self.pacing is not Pacing.GIVEN:
            self._move(Pacing.ALL)
            self.cost = Cost(1, why=why)

    # --- what others say ----------------------------------------------------------------------------------------------

    def notice(self, notice: Notice) -> None:
        """This rank has noticed something."""
        if self._oddities.is_news(notice):
            self.look_closely(notice.batch)

    def noticing(self, notify: Callable[[Notice], None]) -> Callable[[Notice], None]:
        """``notify``, of which this rank takes note."""

        def both(notice: Notice) -> None:
            self.notice(notice)
            notify(notice)

        return both

    def look_closely(self, number: int) -> None:
        """Something odd was noticed in the batch of this number."""
        self._closely_until = max(self._closely_until, number + CLOSELY)

    def tune(self, tuning: Tuning) -> None:
        if tuning.every is not None:
            self._every, self._next = tuning.every, None
            self._move(Pacing.GIVEN)
        if tuning.pace is not None and self.pacing is not Pacing.GIVEN:
            self._next = tuning.pace, tuning.pace_from or 0
        if tuning.closely_until is not None:
            self._closely_until = max(self._closely_until, tuning.closely_until)
