"""The first collective of a group that its members did not call alike, and its words. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from rankwatch.shared.str_enum import StrEnum
from rankwatch.shared.types.calls import CollectiveCall
from rankwatch.shared.words.text import name_spans

NAMED = 64
"""Ranks of a side that are named."""

SHOWN = 3
"""Sides that a sentence shows."""

IN_STEP = 2
"""Calls that must be alike again after one call more, before it is said that it was one more."""


class How(StrEnum):
    """In what way the members of a group differ."""

    OTHER = "other"
    """They called different collectives."""
    MORE = "more"
    """The odd side called one that the others did not, and then the same as they."""
    FEWER = "fewer"
    """The odd side left out one that the others called."""
    AWAITED = "awaited"
    """All called the same, as far as each has come: the odd side has not called the next one yet."""


@dataclass(frozen=True, slots=True)
class Callers:
    """``count`` ranks that did the same, of which the first are named.

    ``what`` is empty where they have not called it. ``site`` then says where they are instead, if that is known.
    """

    ranks: tuple[int, ...]
    count: int
    what: str
    site: str

    @property
    def call(self) -> str:
        return f"{self.what} at {self.site}" if self.site else self.what


@dataclass(frozen=True, slots=True)
class UnequalCalls:
    """The call of this ``number`` in the group is not the same on all members. ``sides``: the odd one first.

    ``group`` is its key as text: no record, and no JavaScript, holds a number of 63 bits. ``is_first``: all before were equal;
    else earlier ones are not known any more.
    """

    group: str
    name: str
    number: int
    how: How
    sides: tuple[Callers, ...]
    is_first: bool = True

    @property
    def odd(self) -> Callers:
        return self.sides[0]

    @property
    def has_odd(self) -> bool:
        """Whether one side is smaller than all others, or has not called what the others have."""
        return self.is_awaited or all(self.odd.count < other.count for other in self.sides[1:])

    @property
    def text(self) -> str:
        return describe(self)

    @property
    def elsewhere(self) -> str:
        """The same, for a sentence that says where the ranks are."""
        return describe(replace(self, sides=(replace(self.odd, site=""), *self.sides[1:]))) if self.is_awaited else self.text

    @property
    def is_awaited(self) -> bool:
        return self.how is How.AWAITED


Explain: TypeAlias = Callable[[Collection[int]], UnequalCalls | None]
"""Why these ranks wait or have failed, as far as the collectives say."""


class Tail(NamedTuple):
    """What a rank has called: ``calls`` from the number ``first`` on, of ``total`` in all."""

    first: int
    total: int
    calls: Sequence[CollectiveCall]

    @property
    def end(self) -> int:
        """The number of the last call that is told."""
        return self.first + len(self.calls) - 1

    def at(self, number: int) -> CollectiveCall | None:
        place = number - self.first
        return self.calls[place] if 0 <= place < len(self.calls) else None


def key_of(group: int) -> str:
    return f"{group:016x}"


class Overlap(NamedTuple):
    """``number``: of the first call that differs; 0: none does. ``begin`` and ``end``: what all have told."""

    number: int
    begin: int
    end: int


def compare(tails: Collection[Tail]) -> Overlap:
    """Of two tails or more."""
    begin, end = max(tail.first for tail in tails), min(tail.end for tail in tails)
    for number in range(begin, end + 1):
        if len({call.signature for tail in tails if (call := tail.at(number)) is not None}) > 1:
            return Overlap(number, begin, end)
    return Overlap(0, begin, end)


def sides_at(number: int, tails: Mapping[int, Tail], also: Mapping[int, Collection[int]]) -> tuple[Callers, ...]:
    """By what they called at this number, the smallest side first. ``also``: by a rank, others that called the same."""
    found: dict[int, tuple[CollectiveCall, set[int]]] = {}
    for rank, tail in sorted(tails.items()):
        if (call := tail.at(number)) is not None:
            found.setdefault(call.signature, (call, set()))[1].update({rank}, also.get(rank, ()))
    sides = [side_of(ranks, call.what, call.site) for call, ranks in found.values()]
    return tuple(sorted(sides, key=lambda side: (side.count, side.ranks)))


def side_of(ranks: Iterable[int], what: str, site: str) -> Callers:
    ordered = sorted(ranks)
    return Callers(tuple(ordered[:NAMED]), len(ordered), what, site)


def how_they_differ(number: int, odd: Tail, other: Tail, *, are_as_many: bool) -> How:
    """Whether one of two that differ at this number goes on as the other one does, but for one call.

    ``are_as_many``: whether both had called as many at the end of a step.
    """
    if are_as_many and _goes_on(odd, number + 1, other, number + 1):
        return How.OTHER
    has_more, has_fewer = _goes_on(odd, number + 1, other, number), _goes_on(other, number + 1, odd, number)
    if has_more == has_fewer:  # where calls repeat themselves, both may be so
        return How.OTHER
    return How.MORE if has_more else How.FEWER


def _goes_on(one: Tail, begin: int, other: Tail, at: int) -> bool:
    length = min(one.end - begin, other.end - at) + 1
    pairs = [(one.at(begin + step), other.at(at + step)) for step in range(length)]
    alike = [a is not None and b is not None and a.signature == b.signature for a, b in pairs]
    return len(alike) >= IN_STEP and all(alike)


_SAID = {
    How.OTHER: "called another collective than {others}",
    How.MORE: "called a collective that {others} did not",
    How.FEWER: "left out a collective that {others} called",
}


def describe(found: UnequalCalls) -> str:
    """The difference in a sentence."""
    odd, other = found.sides[:2]
    nth, others = ordinal(found.number), _name(other)
    if found.is_awaited:
        where = f": {odd.site}" if odd.site else ""
        has = "has" if odd.count == 1 else "have"
        return (
            f"all called the same; {_name(odd)} {has} not called the {nth} of {found.name} ({other.call} on {others}){where}"
        )
    before = f"they were equal up to the {ordinal(found.number - 1)}" if found.number > 1 else "it was the first one"
    before = before if found.is_first else "what they called before is not known any more"
    if len(found.sides) > 2:
        sides = "; ".join(f"{side.call} on {_name(side)}" for side in found.sides[:SHOWN])
        return f"ranks called different collectives: the {nth} of {found.name} is {sides}; {before}"
    what, its = _SAID[found.how].format(others=others), "its" if odd.count == 1 else "their"
    return f"{_name(odd)} {what}: {its} {nth} of {found.name} is {odd.call}; that of {others} is {other.call}; {before}"


def _name(side: Callers) -> str:
    more = side.count - len(side.ranks)
    return name_spans(side.ranks) + (f" and {more} more" if more else "")


def ordinal(number: int) -> str:
    """``5,128th``."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"
