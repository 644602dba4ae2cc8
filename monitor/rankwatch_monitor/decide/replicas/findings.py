"""What was found of a run's replicas: origins, each with the parameters that came apart with it. Bounded."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .desync import Desync, DesyncPattern

MAX_DESYNC = 256
"""Entries retained per run; those of further parameters are only counted."""

MAX_ORIGINS = 32
"""Origins of one run: each is a line."""

MAX_ALIKE = 4
"""Origins of one pattern on the same ranks: what follows belongs to the last of them."""

SPREADS = 64
"""Steps in which a value that differs may make others differ, and each parameter is looked at."""

NEVER = -1
INHERITED = -2
"""In the place of the last step at which a parameter was equal: an earlier collector found so, at a step that is not known."""


class Onset(enum.Enum):
    """When parameters came apart, where the pattern depends on how many did: groups of ranks, and slots, follow each other."""

    BEGINNING = enum.auto()
    """Before the first step: they were never equal."""
    EARLY = enum.auto()
    """Nothing had changed by a step when they were last equal: what is wrong is wrong from the first steps on."""
    LATE = enum.auto()


class CameApart(NamedTuple):
    """These parameters, at the fingerprint of ``step``. ``equal_at`` has of each the last step at which it was equal.

    ``onset`` None: the pattern is certain.
    """

    step: int
    pattern: DesyncPattern
    ranks: tuple[int, ...]
    replicas: int
    onset: Onset | None
    is_declared: bool
    source: str
    equal_at: dict[str, int]

    @property
    def names_rank(self) -> bool:
        """Whether a majority of the replicas is equal, so that ``ranks`` say where it happened."""
        return len(self.ranks) < self.replicas


@dataclass(slots=True)
class DesyncOrigin:
    number: int
    pattern: DesyncPattern
    names_rank: bool
    onset: Onset | None
    is_declared: bool
    source: str
    ranks: set[int]
    last_step: int
    entries: dict[str, Desync] = field(default_factory=dict)
    noted: dict[str, Desync] = field(default_factory=dict)
    """The entries as the journal has them."""
    is_told: bool = False
    is_restored: bool = False


class DesyncFindings:
    """Args: ``locate``: the host and the GPU of a rank."""

    def __init__(self, locate: Callable[[int], tuple[str, str]]) -> None:
        self.origins: list[DesyncOrigin] = []
        self.unkept = 0
        self.is_news = False
        """Whether there may be entries that the journal does not have."""
        self._locate = locate
        self._count = 0

    def add(self, found: CameApart) -> DesyncOrigin:
        """Adds to the origin to which these belong, or makes one."""
        known = self._restored(found)
        if known is not None:
            return known
        self.is_news = True
        origin = self._origin_of(found)
        origin.last_step = max(origin.last_step, found.step)
        origin.ranks |= set(found.ranks)
        for parameter, equal_at in found.equal_at.items():
            self._enter(origin, found, parameter, equal_at)
        return origin

    def restore(self, entries: Iterable[Desync]) -> None:
        """Takes entries from the journal: they replace those of the same origin and parameter."""
        for one in entries:
            origin = next((known for known in self.origins if known.number == one.origin), None)
            if origin is None:
                names_rank = len(one.ranks) < one.replicas
                origin = DesyncOrigin(
                    one.origin, one.pattern, names_rank, None, one.is_declared, one.source, set(), one.step,
                    is_told=True, is_restored=True,
                )  # fmt: skip
                self.origins.append(origin)
            self._count += one.parameter not in origin.entries
            origin.pattern = one.pattern
            origin.ranks |= set(one.ranks)
            origin.entries[one.parameter] = origin.noted[one.parameter] = one

    def news(self) -> tuple[Desync, ...]:
        """The entries that the journal does not have as they are, which the caller notes down now."""
        found = []
        self.is_news = False
        for origin in self.origins:
            for parameter, one in origin.entries.items():
                current = replace(one, pattern=origin.pattern)
                if origin.noted.get(parameter) != current:
                    origin.noted[parameter] = origin.entries[parameter] = current
                    found.append(current)
        return tuple(found)

    @property
    def noted(self) -> tuple[Desync, ...]:
        """All entries as the journal has them, the earliest origin first."""
        return tuple([one for origin in self.origins for one in origin.noted.values()])

    def _restored(self, found: CameApart) -> DesyncOrigin | None:
        """The origin that an earlier collector found, if it has all of these."""
        for origin in self.origins:
            if origin.is_restored and all(
                parameter in origin.entries and set(found.ranks) <= set(origin.entries[parameter].ranks)
                for parameter in found.equal_at
            ):
                return origin
        return None

    def _enter(self, origin: DesyncOrigin, found: CameApart, parameter: str, equal_at: int) -> None:
        known = origin.entries.get(parameter)
        if known is None:
            if self._count == MAX_DESYNC:
                self.unkept += 1
                return
            self._count += 1
            known = Desync(
                found.step, parameter, (), found.replicas, origin.pattern, "", "", max(equal_at, NEVER),
                origin.is_declared, origin.source, origin.number,
            )  # fmt: skip
        ranks = tuple(sorted({*known.ranks, *found.ranks}))
        host, gpu = self._locate(ranks[0]) if len(ranks) == 1 else ("", "")
        step, replicas = min(known.step, found.step), max(known.replicas, found.replicas, len(ranks))
        origin.entries[parameter] = replace(known, step=step, ranks=ranks, replicas=replicas, host=host, gpu=gpu)

    def _origin_of(self, found: CameApart) -> DesyncOrigin:
        alike = [origin for origin in self.origins if _is_alike(origin, found)]
        # What was equal when the origin was last seen to spread came apart after it.
        together = [origin for origin in alike if min(found.equal_at.values()) < origin.last_step]
        together += [origin for origin in self.origins if _spreads(origin, found) and origin not in together]
        if together or len(alike) >= MAX_ALIKE:
            return (together or alike)[-1]
        if len(self.origins) == MAX_ORIGINS:
            return self.origins[-1]
        number = 1 + max((origin.number for origin in self.origins), default=0)
        origin = DesyncOrigin(
            number, found.pattern, found.names_rank, found.onset, found.is_declared, found.source, set(), found.step
        )
        self.origins.append(origin)
        return origin


def _is_alike(origin: DesyncOrigin, found: CameApart) -> bool:
    if (origin.is_declared, origin.names_rank) != (found.is_declared, found.names_rank):
        return False
    if origin.onset is not None and found.onset is not None:
        return origin.onset is found.onset
    is_same = origin.pattern is found.pattern and origin.source == found.source
    return is_same and (not _is_of_ranks(found) or origin.ranks == set(found.ranks))


def _spreads(origin: DesyncOrigin, found: CameApart) -> bool:
    """Whether one value that differs may have led to another, in another group of ranks: tensor-parallel ranks compute with both.

    Where a majority names the rank, it says where each happened.
    """
    are_pairs = origin.pattern is found.pattern is DesyncPattern.ONE_RANK and not origin.names_rank and not found.names_rank
    return are_pairs and origin.is_declared and found.is_declared and 0 <= found.step - origin.last_step <= SPREADS


def _is_of_ranks(found: CameApart) -> bool:
    """Whether other ranks mean another origin: a corrupted value is one rank's, what was never synchronised is everybody's."""
    if found.pattern in (DesyncPattern.SAME_INPUT, DesyncPattern.GATHER, DesyncPattern.ONE_RANK, DesyncPattern.UNKNOWN):
        return True
    return found.names_rank


def in_order(entries: Sequence[Desync]) -> tuple[Desync, ...]:
    """For the report: the earliest origin first, and in each the parameter that differed first.

    At the same step, the lowest ranks: which of them was heard first is chance.
    """
    first: dict[int, tuple[int, tuple[int, ...]]] = {}
    for one in entries:
        first[one.origin] = min(first.get(one.origin, (one.step, one.ranks)), (one.step, one.ranks))
    return tuple(sorted(entries, key=lambda one: (first[one.origin], one.origin, one.step, one.ranks)))
