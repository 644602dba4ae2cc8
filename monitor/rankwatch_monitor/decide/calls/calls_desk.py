"""The collectives of a run, by process group: takes what ranks have called, asks them where that differs, and tells it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from rankwatch.shared.link.allowance import Allowance
from rankwatch.shared.types.calls import LAST_WORDS, GroupCount
from rankwatch.shared.types.messages import Recount, Recounted

from ..core.books import Books, Desk, Worry
from ..core.effects import Effect, Send, Trouble
from ..core.journal import NO_RANK, Closed, CollectivesDiffer, Entry, Stood
from ..core.rank import Rank
from ..core.report import RankState, Stall
from ..stalls.stacks import Stacks
from .differs import Tail, UnequalCalls, key_of
from .sequence import NO_BATCH, Question, Sequence

MOST_GROUPS = 16
"""Groups of a rank that are compared: those that it told of last."""

MOST_CALLS = 1 << 53
"""No rank calls as many, and JSON's numbers go no further."""

MOST_KEPT = 16
"""Groups of which a difference is told. One line of code may make thousands differ."""

QUESTIONS_PER_SECOND, QUESTIONS_AT_ONCE = 4.0, 256.0
"""To all ranks of a run. An answer has up to 16 KB."""


@dataclass(slots=True)
class CallsDesk(Desk):
    books: Books = field(repr=False)
    groups: dict[int, Sequence] = field(default_factory=dict)
    told: dict[str, UnequalCalls] = field(default_factory=dict)
    """By group."""
    unkept: int = 0
    """How many more differ."""
    _of_ranks: dict[int, dict[int, None]] = field(default_factory=dict)
    """The groups of each rank, the one that it told of last at the end."""
    _numbers: dict[int, int] = field(default_factory=dict)
    """Of the last question to each group."""
    _number: int = LAST_WORDS
    _questions: Allowance = field(default_factory=lambda: Allowance(QUESTIONS_PER_SECOND, QUESTIONS_AT_ONCE))
    _pressed: Stall | None = None
    """The stall because of which ranks were asked last."""
    _lost: list[int] = field(default_factory=list)
    """Ranks that were lost since: gloo ends a process for a collective that does not fit."""
    _has_waited: bool = False
    _awaited: list[UnequalCalls] = field(default_factory=list)
    """Of ranks that have not called what others wait in: these are told once it is known where the ranks are."""

    # --- what ranks send ----------------------------------------------------------------------------------------------

    def take(self, rank: Rank, counts: Iterable[GroupCount], now: float, batch: int = NO_BATCH) -> list[Effect]:
        """A rank has called so many. As frequent as batches, and mostly without an effect, so no generator is made for it.

        ``batch``: when this one was over; NO_BATCH: at any time.
        """
        effects: list[Effect] = []
        if rank.fault or self.books.over:
            return effects
        for group, calls, digest in counts:
            if calls > MOST_CALLS:
                continue
            sequence = self._sequence_of(rank.number, group)
            sequence.take(rank.number, calls, digest, batch)
            if sequence.wants(now) and self._questions.has(now):
                effects += self._send(sequence, sequence.ask(self._can_answer, now), now)
        return effects

    def answer(self, rank: Rank, told: Recounted, now: float) -> Iterator[Effect | Worry]:
        """A rank tells its calls."""
        sequence, tail = self.groups.get(told.group), Tail(told.first, told.count, told.calls)
        if sequence is None or rank.number not in sequence.members or max(told.count, told.first) > MOST_CALLS:
            return
        if told.number == LAST_WORDS:
            sequence.take_last_words(rank.number, told.name, told.size, tail)
        elif told.number == self._numbers.get(told.group):
            sequence.answer(rank.number, told.name, told.size, tail)
            yield from self._conclude(sequence, now)

    def leave(self, rank: Rank) -> None:
        if rank.state is RankState.LOST and not self.books.over:
            self._lost.append(rank.number)
        for group in self._of_ranks.get(rank.number, ()):
            self.groups[group].resign(rank.number, self._can_answer)

    def forget(self, rank: Rank) -> None:
        """The rank is watched no more: nobody knows what it calls."""
        for group in self._of_ranks.pop(rank.number, ()):
            self._forget(rank.number, group)

    def _sequence_of(self, rank: int, group: int) -> Sequence:
        groups = self._of_ranks.setdefault(rank, {})
        if group in groups:
            del groups[group]
        elif len(groups) >= MOST_GROUPS:
            oldest = next(iter(groups))
            del groups[oldest]
            self._forget(rank, oldest)
        groups[group] = None
        if group not in self.groups:
            known = self.told.get(key_of(group))  # by the collector before this one
            self.groups[group] = Sequence(group, found=None if known is None or known.is_awaited else known)
        return self.groups[group]

    def _forget(self, rank: int, group: int) -> None:
        self.groups[group].forget(rank)
        if not self.groups[group].members:
            del self.groups[group]
            self._numbers.pop(group, None)

    def _can_answer(self, number: int) -> bool:
        rank = self.books.ranks[number]
        return rank.is_running and rank.connected and not rank.fault

    # --- questions ----------------------------------------------------------------------------------------------------

    def _send(self, sequence: Sequence, questions: Collection[Question], now: float) -> Iterator[Effect]:
        if questions:
            self._number += 1
            self._numbers[sequence.group] = self._number
            self._questions.take(now)
            self._questions.spend(len(questions) - 1)
        for number, first in questions:
            yield Send(self.books.ranks[number].peer, Recount(self._number, sequence.group, first))

    def _conclude(self, sequence: Sequence, now: float, *, ended: bool = False) -> Iterator[Effect | Worry]:
        questions: list[Question] = []
        for one in sequence.conclude(now, ended=ended):
            if isinstance(one, Question):
                questions.append(one)
            elif one.is_awaited:
                self._awaited.append(one)
            else:
                yield from self._tell(one, now)
        yield from self._send(sequence, questions, now)

    def press(self, ranks: Collection[int], now: float, *, has_waited: bool) -> Iterator[Effect]:
        """Asks, because these ranks wait, have failed or were lost, who has called what in their groups.

        ``has_waited``: they have waited for long, so that all have told what they have called; else who runs may only be slower.
        """
        self._has_waited |= has_waited
        everyone = range(self.books.world_size) if has_waited else ()
        groups = dict.fromkeys(group for rank in ranks for group in self._of_ranks.get(rank, ()))
        for sequence in (self.groups[group] for group in groups):
            is_open = sequence.found is None and not sequence.is_pressed and not sequence.is_even
            if is_open and self._questions.has(now):
                yield from self._send(sequence, sequence.press(ranks, self._can_answer, now, everyone), now)

    @property
    def are_awaited(self) -> bool:
        """Whether answers of ranks that stall or have failed are still to come. They are not waited for long."""
        return any(one.is_pressed for one in self.groups.values())

    # --- as time passes -----------------------------------------------------------------------------------------------

    def look(self, now: float, stall: Stall | None, stacks: Stacks, *, ended: bool) -> Iterator[Effect | Worry]:
        """``stacks``: where the ranks of a stall are; ``ended``: no answer is waited for."""
        for sequence in list(self.groups.values()):
            if sequence.inquiry is not None:
                yield from self._conclude(sequence, now, ended=ended)
        if stall is not None and (self._pressed is None or self._pressed.ranks != stall.ranks):
            self._pressed = stall
            yield from self.press((*stall.ranks, *stall.waiting), now, has_waited=True)
        if self._lost:
            yield from self.press(self._lost, now, has_waited=False)
            self._lost.clear()
        if self._awaited and (ended or not (self.are_awaited or stacks.are_awaited(now))):
            where = {one.rank: f"it is at {one.waits}" for one in stacks.all() if one.waits}
            for one in self._awaited:
                if not self._has_waited and any(self.books.ranks[rank].state in _STOPPED for rank in one.odd.ranks):
                    continue
                odd = replace(one.odd, site=self._where(one.odd.ranks, where))
                yield from self._tell(replace(one, sides=(odd, *one.sides[1:])), now)
            self._awaited.clear()

    def _where(self, ranks: Collection[int], at: dict[int, str]) -> str:
        """Where ranks are that have not called what the others have."""
        first = self.books.ranks.get(min(ranks))
        if first is None:
            return "it never connected"
        if not first.is_running:
            after = f"after batch {first.furthest_batch}" if first.furthest_batch >= 0 else "before its first batch"
            return f"it {_ENDED.get(first.state, 'has ended')} {after}"
        return at.get(first.number, "") if len(ranks) == 1 else ""

    def _tell(self, found: UnequalCalls, now: float) -> Iterator[Effect | Worry]:
        self.books.find(now, CollectivesDiffer(found))
        if found.group in self.told:
            yield self.books.warn(found.text)
            if not found.is_awaited:
                yield Worry(Trouble.COLLECTIVES, found.text)

    # --- what is known ------------------------------------------------------------------------------------------------

    def explain(self, ranks: Collection[int]) -> UnequalCalls | None:
        """Why these ranks wait, or have failed, as far as the collectives say."""
        groups = dict.fromkeys(group for rank in ranks for group in self._of_ranks.get(rank, ()))
        known = [found for group in groups if (found := self.told.get(key_of(group))) is not None]
        return min(known, key=lambda one: one.is_awaited, default=None)

    def culprit_of(self, rank: int, *, has_waited: bool) -> int:
        """The one rank that called something else than the others, where this rank has failed in a collective; or less, if this
        one had waited for it."""
        found = self.explain([rank])
        if found is not None:
            return found.odd.ranks[0] if found.has_odd and found.odd.count == 1 else NO_RANK
        if not has_waited:
            return NO_RANK
        behind = {one for group in self._of_ranks.get(rank, ()) for one in self.groups[group].behind(rank)}
        return behind.pop() if len(behind) == 1 else NO_RANK

    @property
    def differ(self) -> int:
        """Groups whose members do not call the same."""
        return sum(not one.is_awaited for one in self.told.values()) + self.unkept

    def all(self) -> tuple[UnequalCalls, ...]:
        """For the report."""
        return tuple(self.told.values())

    # --- findings -----------------------------------------------------------------------------------------------------

    def apply(self, entry: Entry) -> None:
        match entry.fact:
            case CollectivesDiffer(found):
                if found.group in self.told or len(self.told) < MOST_KEPT:
                    self.told[found.group] = found
                else:
                    self.unkept += 1
            case Stood(None):
                self._pressed, self._has_waited = None, False
                self._awaited.clear()
                self.told = {group: one for group, one in self.told.items() if not one.is_awaited}
            case Closed():
                self.groups.clear()
                self._of_ranks.clear()


_STOPPED = RankState.RUNNING, RankState.ABORTED
"""Ranks that would have gone on."""

_ENDED = {RankState.FAILED: "has failed", RankState.LOST: "was lost", RankState.ABORTED: "was stopped"}
