"""What was found of a run's replicas: origins, each with the parameters that came apart with it. Bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from .desync import OF_SINGLE_RANKS, Desync, DesyncPattern
from .patterns import NEVER, CameApart, Extent, pattern_of

MAX_DESYNC = 256
"""Entries retained per run; those of further parameters are only counted."""

MAX_FRESH = 8192
"""Findings that wait to be told: one for each group of ranks, or a few."""

MAX_ORIGINS = 32
"""Origins of one run: each is a line."""

MAX_ALIKE = 4
"""Origins of one pattern on the same ranks: what follows belongs to the last of them."""

SPREADS = 64
"""Steps in which a value that differs may make others differ, and each parameter is looked at."""


@dataclass(slots=True)
class DesyncOrigin:
    """What one line tells: of one pattern, and on the same ranks where the pattern is about single ranks.

    ``began``: what was found first, which gives the pattern again each time that news is told. None: an earlier collector
    found it.
    """

    number: int
    pattern: DesyncPattern
    is_declared: bool
    source: str
    has_majority: bool
    last_step: int
    began: CameApart | None = None
    ranks: set[int] = field(default_factory=set)
    noted: dict[str, Desync] = field(default_factory=dict)
    """The entries as the journal has them, by parameter."""


class DesyncFindings:
    """Args: ``locate``: the host and the GPU of a rank."""

    def __init__(self, locate: Callable[[int], tuple[str, str]]) -> None:
        self.origins: list[DesyncOrigin] = []
        self.unkept = 0
        self._fresh: list[CameApart] = []
        """What is not told yet."""
        self._locate = locate

    @property
    def is_news(self) -> bool:
        return bool(self._fresh)

    @property
    def noted(self) -> tuple[Desync, ...]:
        """All entries as the journal has them, the earliest origin first."""
        return tuple([one for origin in self.origins for one in origin.noted.values()])

    def add(self, found: CameApart) -> None:
        if any(_has(origin, found) for origin in self.origins):
            return
        if len(self._fresh) < MAX_FRESH:
            self._fresh.append(found)
        else:
            self.unkept += len(found.equal_at)

    def news(self, extent: Extent) -> tuple[tuple[Desync, ...], list[DesyncOrigin]]:
        """The entries that the journal does not have as they are, which the caller notes down now, and the origins of which
        nothing was told before.
        """
        before, known = set(self.noted), len(self.origins)
        for origin in self.origins:
            if origin.began is not None:
                origin.pattern = pattern_of(origin.began, extent)
                origin.noted = {name: replace(one, pattern=origin.pattern) for name, one in origin.noted.items()}
        # What was equal longest comes first: what came apart after that belongs to its origin.
        for found in sorted(self._fresh, key=lambda one: (one.step, min(one.equal_at.values()))):
            origin = self._origin_of(found, pattern_of(found, extent))
            origin.last_step = max(origin.last_step, found.step)
            origin.ranks |= set(found.split.ranks)
            for parameter, equal_at in found.equal_at.items():
                self._enter(origin, found, parameter, equal_at)
        self._fresh = []
        entries = tuple([one for one in self.noted if one not in before])
        return entries, [origin for origin in self.origins[known:] if origin.noted]

    def restore(self, entries: Iterable[Desync]) -> None:
        """Takes entries from the journal: they replace those of the same origin and parameter."""
        for one in entries:
            origin = next((known for known in self.origins if known.number == one.origin), None)
            if origin is None:
                has_majority = len(one.ranks) < one.replicas
                origin = DesyncOrigin(one.origin, one.pattern, one.is_declared, one.source, has_majority, one.step)
                self.origins.append(origin)
            origin.pattern = one.pattern
            origin.ranks |= set(one.ranks)
            origin.noted[one.parameter] = one

    def _enter(self, origin: DesyncOrigin, found: CameApart, parameter: str, equal_at: int) -> None:
        known = origin.noted.get(parameter)
        if known is None:
            if sum(len(one.noted) for one in self.origins) == MAX_DESYNC:
                self.unkept += 1
                return
            known = Desync(
                found.step, parameter, (), found.split.replicas, origin.pattern, "", "", max(equal_at, NEVER),
                found.is_declared, found.source, origin.number,
            )  # fmt: skip
        ranks = tuple(sorted({*known.ranks, *found.split.ranks}))
        host, gpu = self._locate(ranks[0]) if len(ranks) == 1 else ("", "")
        step, replicas = min(known.step, found.step), max(known.replicas, found.split.replicas, len(ranks))
        origin.noted[parameter] = replace(known, step=step, ranks=ranks, replicas=replicas, host=host, gpu=gpu)

    def _origin_of(self, found: CameApart, pattern: DesyncPattern) -> DesyncOrigin:
        """The origin to which this belongs, which may be a new one."""
        alike = [origin for origin in self.origins if _is_alike(origin, found, pattern)]
        # What was equal when the origin was last seen to spread came apart after it.
        together = [origin for origin in alike if min(found.equal_at.values()) < origin.last_step]
        together += [origin for origin in self.origins if _spreads(origin, found, pattern) and origin not in together]
        if together or len(alike) >= MAX_ALIKE:
            return (together or alike)[-1]
        if len(self.origins) == MAX_ORIGINS:
            return self.origins[-1]
        number = 1 + max((origin.number for origin in self.origins), default=0)
        has_majority = found.split.has_majority
        self.origins.append(DesyncOrigin(number, pattern, found.is_declared, found.source, has_majority, found.step, found))
        return self.origins[-1]


def _has(origin: DesyncOrigin, found: CameApart) -> bool:
    """Whether an earlier collector found all of these."""
    ranks = set(found.split.ranks)
    return origin.began is None and all(
        (one := origin.noted.get(parameter)) is not None and ranks <= set(one.ranks) for parameter in found.equal_at
    )


def _is_alike(origin: DesyncOrigin, found: CameApart, pattern: DesyncPattern) -> bool:
    if (origin.pattern, origin.is_declared) != (pattern, found.is_declared):
        return False
    if pattern is DesyncPattern.INITIALISATION and found.is_declared:
        return True  # it is everybody's, whichever ranks agree by chance
    is_of_ranks = found.split.has_majority or pattern in OF_SINGLE_RANKS
    if origin.has_majority != found.split.has_majority or (is_of_ranks and origin.ranks != set(found.split.ranks)):
        return False
    return origin.source == found.source or (found.is_declared and not is_of_ranks)


def _spreads(origin: DesyncOrigin, found: CameApart, pattern: DesyncPattern) -> bool:
    """Whether one value that differs may have led to another, in another group of ranks: tensor-parallel ranks compute with both.

    Where a majority names the rank, it says where each happened.
    """
    return (
        origin.pattern is pattern is DesyncPattern.ONE_RANK
        and origin.is_declared and found.is_declared
        and not found.split.has_majority and not origin.has_majority
        and 0 <= found.step - origin.last_step <= SPREADS
    )  # fmt: skip


def in_order(entries: Sequence[Desync]) -> tuple[Desync, ...]:
    """For the report: the earliest origin first, and in each the parameter that differed first.

    At the same step, the lowest ranks: which of them was heard first is chance.
    """
    first: dict[int, tuple[int, tuple[int, ...]]] = {}
    for one in entries:
        first[one.origin] = min(first.get(one.origin, (one.step, one.ranks)), (one.step, one.ranks))
    return tuple(sorted(entries, key=lambda one: (first[one.origin], one.origin, one.step, one.ranks)))
