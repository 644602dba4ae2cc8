"""Whether the members of one process group call the same collectives, one after the other. Pure, the clock passed in.

Each member tells how many it has called by now, with a digest over them all: a point. The points of one rank are what the others
are compared with: it is the reference. At a count at which both have a point, equal digests say that both have called the same up
to there, and unequal ones that they have not. Points may also never meet: one rank that called one more has them at 11, 21 and
31, the others at 10, 20 and 30; and so has a healthy group that its members use at different moments.

Whether they differ, the calls themselves decide. Up to ``ASKED`` members tell theirs, from the last number up to which they are
known to be equal; again from where these end, until the first call is found that is not the same on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from rankwatch.shared.bounded import BoundedDict

from .differs import How, Overlap, Tail, UnequalCalls, compare, how_they_differ, key_of, side_of, sides_at

MOST_POINTS, MOST_OF_REFERENCE = 64, 512
"""Points of a member since it was last known to be equal, and of the reference. A rank whose messages come that much later than
those of another one is asked."""

MOST_ENDS = 16
"""Batches of a member whose ends are remembered: a difference is mostly found two steps later."""

ASKED = 8
"""Members that tell their calls."""

ANSWERS_WITHIN, NO_HURRY = 2.0, 10.0
"""Seconds for which answers are waited for; while the run goes on, nobody waits for them. A rank gives its answer at once,
unless something keeps its GIL, or its machine is busy."""

UNMET, MOST_UNMET = 2, 256
"""Steps of a member whose points met none of the reference's before members are asked. It doubles each time that they were equal,
up to the most: some groups are healthy so."""


NO_BATCH = -1

NOTHING = Overlap(0, 0, 0)


class Question(NamedTuple):
    """Ask a rank for its calls from the number ``first`` on."""

    rank: int
    first: int


@dataclass(slots=True)
class Member:
    """``count``: calls by now. ``equal``: up to which number they are known to be those of the reference.

    ``points``: digests by count, since then. ``unmet``: how many of these are of the ends of steps, and ``first`` is the first.
    """

    count: int = 0
    equal: int = 0
    points: BoundedDict[int, int] = field(default_factory=lambda: BoundedDict(MOST_POINTS))
    last_words: Tail | None = None
    """What it told as it ended, perhaps with its last calls: it answers no more."""
    unmet: int = 0
    first: int = 0
    passed: int = 0
    """Its count at the end of its last step."""
    ends: BoundedDict[int, int] = field(default_factory=lambda: BoundedDict(MOST_ENDS))
    """Its counts at the ends of its last batches."""

    def is_equal(self, count: int) -> None:
        self.equal = max(self.equal, count)
        for earlier in [one for one in self.points if one <= self.equal]:
            del self.points[earlier]
        self.unmet = self.first = 0


@dataclass(slots=True)
class Inquiry:
    """``is_pressed``: ranks stall, so that the calls up to the last one count, and who has not called the next one."""

    first: int
    asked: set[int]
    begun_at: float
    is_pressed: bool = False
    silent: tuple[int, ...] = ()
    """Members that have called nothing yet."""
    tails: dict[int, Tail] = field(default_factory=dict)
    are_as_many: list[bool | None] = field(default_factory=list)
    """Whether both sides had called as many at the end of a step; empty: no difference was found yet."""

    def is_over(self, now: float) -> bool:
        return not self.asked or now - self.begun_at > (ANSWERS_WITHIN if self.is_pressed else NO_HURRY)


@dataclass(slots=True)
class Sequence:
    """One process group; ``group`` is its key."""

    group: int
    members: dict[int, Member] = field(default_factory=dict)
    name: str = ""
    size: int = 0
    reference: int = -1
    found: UnequalCalls | None = None
    inquiry: Inquiry | None = None
    _digests: BoundedDict[int, int] = field(default_factory=lambda: BoundedDict(MOST_OF_REFERENCE))
    """The reference's, by count."""
    _ahead: dict[int, set[int]] = field(default_factory=dict)
    """By a count at which the reference has no point yet, the members that have."""
    _odd: dict[int, int] = field(default_factory=dict)
    """Members whose digest is another one at the same count, and the first such count."""
    _odd_since: float = float("inf")
    _unmet: dict[int, None] = field(default_factory=dict)
    """Members of which some steps met no point of the reference."""
    _apart: set[int] = field(default_factory=set)
    """Members whose digests differ, and whose calls that did are not known any more."""
    _patience: int = UNMET
    _rests_until: float = float("-inf")

    # --- what ranks tell ----------------------------------------------------------------------------------------------

    def take(self, rank: int, count: int, digest: int, batch: int = NO_BATCH) -> None:
        """A point of a member, when this batch was over, or a part of it; NO_BATCH: at any time."""
        member = self.members.setdefault(rank, Member())
        member.count = max(member.count, count)
        if ends_step := batch != NO_BATCH:
            member.passed = max(member.passed, count)
            member.ends[batch] = count
        if self.found is not None:
            return
        if self.reference not in self.members:
            self.reference = rank
        if rank == self.reference:
            self._take_reference(member, count, digest)
        elif count > member.equal and count not in member.points and rank not in self._apart:
            self._take_other(rank, member, count, digest, ends_step=ends_step)

    def _take_reference(self, member: Member, count: int, digest: int) -> None:
        self._digests[count] = digest
        member.equal = max(member.equal, count)
        for other in sorted(self._ahead.pop(count, ())):
            self._meet(other, count)

    def _take_other(self, rank: int, member: Member, count: int, digest: int, *, ends_step: bool) -> None:
        if len(member.points) >= MOST_POINTS:
            self._forget_ahead(rank, next(iter(member.points)))
        member.points[count] = digest
        if count in self._digests:
            self._meet(rank, count)
            return
        self._ahead.setdefault(count, set()).add(rank)
        if ends_step:
            member.unmet += 1
            member.first = member.first or count
            if member.unmet >= self._patience:
                self._unmet[rank] = None

    def _meet(self, rank: int, count: int) -> None:
        member = self.members[rank]
        if member.points.get(count) == self._digests[count]:
            self._set_equal(rank, count)
            self._patience = UNMET
        else:
            self._odd.setdefault(rank, count)

    def _set_equal(self, rank: int, count: int) -> None:
        member = self.members[rank]
        for earlier in member.points:
            if earlier <= count:
                self._forget_ahead(rank, earlier)
        member.is_equal(count)
        self._unmet.pop(rank, None)

    def _forget_ahead(self, rank: int, count: int) -> None:
        ranks = self._ahead.get(count)
        if ranks is not None:
            ranks.discard(rank)
            if not ranks:
                del self._ahead[count]

    def forget(self, rank: int) -> None:
        """The rank is not compared any more."""
        member = self.members.pop(rank, None)
        if member is None:
            return
        for count in member.points:
            self._forget_ahead(rank, count)
        self._odd.pop(rank, None)
        self._unmet.pop(rank, None)
        self._apart.discard(rank)
        if self.inquiry is not None:
            self.inquiry.asked.discard(rank)
            self.inquiry.tails.pop(rank, None)
        if rank == self.reference:
            self.resign(rank, lambda _: True)

    def resign(self, rank: int, goes_on: Callable[[int], bool]) -> None:
        """The rank calls nothing more: if it is the reference, another one is from now on, of those that go on."""
        others = [other for other in self.members if other != rank and goes_on(other)]
        if rank == self.reference and others:
            self._refer_to(max(others, key=lambda other: (self.members[other].equal, -other)))

    def _refer_to(self, rank: int) -> None:
        """No other member is known to be equal to the old reference beyond this one."""
        self.reference, member = rank, self.members[rank]
        points = dict(member.points)
        self._odd.pop(rank, None)
        self._unmet.pop(rank, None)
        for count in [count for count in self._digests if count > member.equal]:
            del self._digests[count]
        for count, digest in points.items():
            self._forget_ahead(rank, count)
            self._take_reference(member, count, digest)
        member.points.clear()
        member.unmet = member.first = 0

    # --- who is asked -------------------------------------------------------------------------------------------------

    def wants(self, now: float) -> bool:
        """Whether members are to be asked."""
        self._odd_since = min(self._odd_since, now) if self._odd else float("inf")
        is_free = self.inquiry is None and self.found is None and now >= self._rests_until
        return is_free and self._suspect(now) is not None

    def _suspect(self, now: float) -> int | None:
        """A member that may differ from the reference.

        Before both have ended the step in which their digests differ, their calls may not say yet how they differ.
        """
        passed = self.members[self.reference].passed if self._odd or self._unmet else 0
        for rank, count in self._odd.items():
            if min(self.members[rank].passed, passed) >= count or now - self._odd_since > NO_HURRY:
                return rank
        # The reference is beyond its first point, and had none there.
        return next((rank for rank in self._unmet if 0 < self.members[rank].first < passed), None)

    def ask(self, can_answer: Callable[[int], bool], now: float) -> list[Question]:
        """Begins to ask, because of a member that may differ."""
        suspect = self._suspect(now)
        return [] if suspect is None else self._begin((self.reference, suspect), can_answer, now, is_pressed=False)

    def press(
        self, first: Collection[int], can_answer: Callable[[int], bool], now: float, everyone: Collection[int] = ()
    ) -> list[Question]:
        """Begins to ask because ranks stall or have failed: these first, and those that are behind.

        ``everyone``: all ranks, if each that has called anything has told so.
        """
        last = sorted(self.members, key=lambda rank: self.members[rank].count)
        wanted = self.reference, *last[:2], *last[-1:], *first, *last
        questions = self._begin(wanted, can_answer, now, is_pressed=True)
        if self.inquiry is not None:
            self.inquiry.silent = tuple(rank for rank in everyone if rank not in self.members)
        return questions

    def _begin(
        self, first: Collection[int], can_answer: Callable[[int], bool], now: float, *, is_pressed: bool
    ) -> list[Question]:
        needed = [rank for rank in dict.fromkeys(first) if rank in self.members and can_answer(rank)][:ASKED]
        known = [*needed, *(rank for rank, member in self.members.items() if member.last_words is not None)]
        if not known:
            return []
        base = min((self.members[rank].equal for rank in known if rank != self.reference), default=self._least_equal)
        rest = (rank for rank in self.members if rank not in needed and can_answer(rank))
        also = islice((rank for rank in rest if self.members[rank].equal >= base), ASKED - len(needed))
        self.inquiry = Inquiry(base + 1, {*needed, *also}, now, is_pressed)
        return [Question(rank, base + 1) for rank in sorted(self.inquiry.asked)]

    @property
    def _least_equal(self) -> int:
        """Up to which number all members are known to be equal; 0, if none but the reference has told anything."""
        return min((member.equal for rank, member in self.members.items() if rank != self.reference), default=0)

    @property
    def is_pressed(self) -> bool:
        """Whether members are being asked because ranks stall or have failed."""
        return self.inquiry is not None and self.inquiry.is_pressed

    @property
    def is_even(self) -> bool:
        """Whether all members are known to have called the same, all of it."""
        last = self.members[self.reference].count
        return len(self.members) == self.size and all(one.count == one.equal == last for one in self.members.values())

    def behind(self, rank: int) -> list[int]:
        """The members that have called less than this one."""
        count = self.members[rank].count
        return [other for other, member in self.members.items() if member.count < count]

    # --- what they answer ---------------------------------------------------------------------------------------------

    def answer(self, rank: int, name: str, size: int, tail: Tail) -> None:
        """A member that was asked has answered."""
        if self.inquiry is not None and rank in self.inquiry.asked:
            self.inquiry.asked.discard(rank)
            self.inquiry.tails[rank] = tail
            self._learn(rank, name, size, tail)

    def take_last_words(self, rank: int, name: str, size: int, tail: Tail) -> None:
        """A member ends, and will answer no more."""
        self.members[rank].last_words = tail
        self._learn(rank, name, size, tail)

    def _learn(self, rank: int, name: str, size: int, tail: Tail) -> None:
        self.name, self.size = self.name or name, self.size or size
        self.members[rank].count = max(self.members[rank].count, tail.total)

    def conclude(self, now: float, *, ended: bool = False) -> Iterator[Question | UnequalCalls]:
        """What the answers say, once all are here or late: whom to ask for more, or that they differ. ``ended``: all are late."""
        inquiry = self.inquiry
        if inquiry is None or not (ended or inquiry.is_over(now)):
            return
        self.inquiry = None
        words = {rank: one.last_words for rank, one in self.members.items() if one.last_words is not None}
        known = inquiry.tails | words
        told = {rank: tail for rank, tail in known.items() if tail.end >= inquiry.first and tail.calls}
        compared = compare(told.values()) if len(told) > 1 else NOTHING
        if compared.number:
            differ = self._difference(inquiry, told, compared)
            is_late = ended or inquiry.is_pressed or now - inquiry.begun_at > NO_HURRY
            if is_late or sum(side.count for side in differ.sides) >= self.size:
                self.found = differ
                yield differ
            else:  # what the others have called, their next points will say
                self.inquiry = inquiry
            return
        if self.reference in told and compared.end >= compared.begin:
            for rank in told:
                if rank != self.reference:
                    self._set_equal(rank, compared.end)
        goes_on = {rank for rank, tail in told.items() if tail.total > compared.end and rank not in words}
        is_wanted = inquiry.is_pressed or any(rank in self._odd for rank in told)
        if not ended and is_wanted and len(goes_on) == len(told) > 1 and compared.end >= inquiry.first:
            self.inquiry = Inquiry(compared.end + 1, goes_on, now, inquiry.is_pressed)
            yield from (Question(rank, compared.end + 1) for rank in sorted(goes_on))
            return
        self._rest(told, now, is_complete=not inquiry.asked)
        if inquiry.is_pressed and (found := self._awaited(known, inquiry.silent)) is not None:
            yield found

    def _rest(self, told: Mapping[int, Tail], now: float, *, is_complete: bool) -> None:
        """No call was found that differs. If digests do, it is not known any more, and will not be."""
        self._patience = min(2 * self._patience, MOST_UNMET)
        for rank in self._unmet:
            self.members[rank].unmet = 0
        self._unmet.clear()
        if not is_complete:
            self._rests_until = now + self._patience * ANSWERS_WITHIN
            return
        for rank in [rank for rank in self._odd if rank in told]:
            del self._odd[rank]
            self._apart.add(rank)

    def _difference(self, inquiry: Inquiry, told: Mapping[int, Tail], compared: Overlap) -> UnequalCalls:
        number = compared.number
        sides = sides_at(number, told, self._alike(number, told))
        odd, other = (told[next(rank for rank in side.ranks if rank in told)] for side in sides[:2])
        how = How.OTHER
        if len(sides) == 2:
            if not inquiry.are_as_many:
                inquiry.are_as_many.append(self._are_as_many(number, *(side.ranks[0] for side in sides)))
            (are_as_many,) = inquiry.are_as_many
            how = How.OTHER if are_as_many is None else how_they_differ(number, odd, other, are_as_many=are_as_many)
        if how is How.FEWER and sides[0].count == sides[1].count:
            how, sides = How.MORE, sides[::-1]
        is_first = number > compared.begin or compared.begin <= inquiry.first
        return UnequalCalls(key_of(self.group), self.name, number, how, sides, is_first)

    def _are_as_many(self, number: int, one: int, other: int) -> bool | None:
        """Whether two members had called as many when a batch was over, the first one in which they had called this one.

        None: neither batches nor calls say so, as all batches are forgotten that were over on both.
        """
        ends, others = self.members[one].ends, self.members[other].ends
        known = (ends[batch] == others[batch] for batch in ends if min(ends[batch], others.get(batch, 0)) >= number)
        are_over = all(max(each.values(), default=0) >= number for each in (ends, others))
        return next(known, None if are_over else False)

    def _alike(self, number: int, told: Mapping[int, Tail]) -> dict[int, set[int]]:
        """By a rank that has told its calls, the others whose digests say that they called the same up to this number."""
        alike: dict[int, set[int]] = {rank: set() for rank in told}
        known = {
            (count, digest): rank
            for rank in told
            for count, digest in (self._digests if rank == self.reference else self.members[rank].points).items()
            if count >= number
        }
        for rank, member in self.members.items():
            if rank in told:
                continue
            points = self._digests if rank == self.reference else member.points
            like = next((known[point] for point in points.items() if point in known), None)
            if like is None and member.equal >= number and self.reference in told:
                like = self.reference
            if like is not None:
                alike[like].add(rank)
        return alike

    def _awaited(self, known: Mapping[int, Tail], silent: Collection[int]) -> UnequalCalls | None:
        """All called the same, as far as each has come: who is behind; None: nobody. What a rank told before may be old."""
        counts = {rank: tail.total for rank, tail in known.items()}
        if self.size == len(self.members) + len(silent):
            counts |= dict.fromkeys(silent, 0)
        if not counts or (least := min(counts.values())) == max(counts.values()):
            return None
        call = next((call for tail in known.values() if (call := tail.at(least + 1)) is not None), None)
        if call is None:
            return None
        behind = side_of((rank for rank, count in counts.items() if count == least), "", "")
        further = {rank for rank, count in counts.items() if count > least}
        further |= {rank for rank, member in self.members.items() if rank not in counts and member.count > least}
        return UnequalCalls(
            key_of(self.group), self.name, least + 1, How.AWAITED, (behind, side_of(further, call.what, call.site))
        )
