"""The rounds of ranks that count alike: what each has reported at the same moment, and when a round is complete. Pure.

A round is complete when each of its ranks has reported it or a later one, has left, or is so late that it is not waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

MAX_ROUNDS = 256
"""Rounds of the same ranks that wait: the collector may hear of one rank long before it hears of another."""

_MEMBER_BYTES, _ROUND_BYTES = 32, 1024
"""What a round holds for each rank that it waits for, and for itself."""


class At(NamedTuple):
    """A moment that all ranks count alike: the optimizer steps since the era began."""

    era: int
    ordinal: int


class Memory:
    """What one run holds, or all runs of a key: bytes of rounds, or rows of tables. While the bytes are full, no further round
    begins and none takes more.

    Args:
        most: bytes, or rows.
        of_all: what all runs of the key hold.
    """

    def __init__(self, most: int, of_all: Memory | None = None) -> None:
        self.held = 0
        self._most = most
        self._of_all = of_all

    @property
    def is_full(self) -> bool:
        return not self.has(1)

    def has(self, size: int) -> bool:
        """Whether there is room for this."""
        return self.held + size <= self._most and (self._of_all is None or self._of_all.has(size))

    def add(self, size: int) -> None:
        """``size``: below 0 it is free again."""
        self.held += size
        if self._of_all is not None:
            self._of_all.add(size)


@dataclass(slots=True)
class Round:
    """What ranks reported at one moment.

    ``missing``: those that are waited for. ``before``: the ordinal that its ranks reported last; None: that is not known, or was
    in another era. ``held``: the bytes that it holds, of which ``counted`` are in the memory.
    """

    step: int = 0
    held: int = 0
    counted: int = 0
    missing: set[int] = field(default_factory=set)
    before: int | None = None


R = TypeVar("R", bound=Round)


class Lockstep(Generic[R]):
    """The rounds of ``ranks``.

    Args:
        gone: the ranks of the run that have left, kept by the caller.
        make: makes an empty round.
    """

    def __init__(self, ranks: tuple[int, ...], gone: set[int], memory: Memory, make: Callable[[], R]) -> None:
        self.ranks = ranks
        self.times = 0
        """Rounds that were compared."""
        self.last_step = -1
        self._gone = gone
        self._memory = memory
        self._make = make
        self._late: set[int] = set()
        """Not waited for until they report a round that is not complete yet."""
        self._reached: dict[int, At] = {}
        self._waiting: dict[At, R] = {}
        self._done = At(-1, -1)

    def judge(self, at: At, round_: R) -> None:
        """Takes a round that is complete; of several, the earliest first."""
        raise NotImplementedError

    def count(self, step: int) -> None:
        """A round was compared."""
        self.times += 1
        self.last_step = max(self.last_step, step)

    def enter(self, rank: int, at: At) -> R | None:
        """The round to which this rank's report belongs. None: it is complete or too far from the others, or memory is full.

        Ranks that reported another moment last do not count alike: one of them may have an optimizer more.
        """
        if at <= self._done or at <= self._reached.get(rank, self._done) or self._memory.is_full:
            return None
        round_ = self._waiting.get(at)
        if round_ is None:
            if len(self._waiting) >= 2 * MAX_ROUNDS:
                return None
            round_ = self._waiting[at] = self._make()
            round_.missing = {
                other
                for other in self.ranks
                if other not in self._gone and other not in self._late and self._reached.get(other, self._done) < at
            }
            round_.held = _MEMBER_BYTES * len(round_.missing) + _ROUND_BYTES
            self._hold(round_)
        reached = self._reached.get(rank)
        if reached is not None and reached.era == at.era:
            if round_.before is None:
                round_.before = reached.ordinal
            if round_.before != reached.ordinal:
                return None
        return round_

    def arrive(self, rank: int, at: At) -> None:
        """The rank has reported all that it says of this moment."""
        before = self._reached.get(rank, self._done)
        if at <= before:
            return
        self._reached[rank] = at
        if at > self._done:
            self._late.discard(rank)
        if not self._waiting:
            return
        if (own := self._waiting.get(at)) is not None and own.held != own.counted:
            self._hold(own)
        for moment, round_ in self._waiting.items():
            if before < moment <= at:
                round_.missing.discard(rank)
        if len(self._waiting) > MAX_ROUNDS:
            self._leave_behind()
        self._complete()

    def leave(self, rank: int) -> None:
        """The rank is gone. It may come back."""
        for round_ in self._waiting.values():
            round_.missing.discard(rank)
        self._complete()

    def end(self) -> None:
        """Nothing more will be reported."""
        for round_ in self._waiting.values():
            round_.missing.clear()
        self._complete()

    def _leave_behind(self) -> None:
        """Stops waiting for the ranks that are too late; where they are the most, forgets the rounds of those that run ahead."""
        late = self._waiting[min(self._waiting)].missing
        here = sum(rank not in self._gone and rank not in self._late for rank in self.ranks)
        if 2 * len(late) > here:
            self._memory.add(-self._waiting.pop(max(self._waiting)).counted)
            return
        self._late |= late
        for round_ in self._waiting.values():
            round_.missing -= self._late

    def _complete(self) -> None:
        if all(round_.missing for round_ in self._waiting.values()):
            return
        last = max(at for at, round_ in self._waiting.items() if not round_.missing)
        for at in sorted(at for at in self._waiting if at <= last):
            round_ = self._waiting.pop(at)
            self._memory.add(-round_.counted)
            self.judge(at, round_)
        self._done = max(self._done, last)

    def _hold(self, round_: R) -> None:
        self._memory.add(round_.held - round_.counted)
        round_.counted = round_.held
