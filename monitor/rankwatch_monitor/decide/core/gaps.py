"""Which batches of which ranks are not on record, and why. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from rankwatch.shared.words.text import name_spans

from .fact import Finding

SPOOL_FULL = "the spool of the rank was full"
CUT_SHORT = "the rank was ended before it had sent them"
CAME_LATE = "the rank trained before it came to this collector"

MAX_RANGES = 1024
"""Ranges of one run that are told apart. More of them join the last range of their rank."""

END = -1
"""The batch of a gap that is no batch: facts at the end of a run."""


@dataclass(frozen=True, slots=True)
class Gap(Finding):
    """The batches from ``first`` to ``last`` of these ranks are not on record, all or in part, because ``why``.

    ``first`` is END where the last facts of the run are not.
    """

    ranks: tuple[int, ...]
    first: int
    last: int
    why: str

    def describe(self, rank: int) -> str:
        return describe_gap(self, len(self.ranks))


@dataclass(slots=True)
class Gaps:
    """Ranges of batches by rank and cause; what is added twice counts once."""

    _ranges: dict[tuple[int, str], list[tuple[int, int]]] = field(default_factory=dict)
    _count: int = 0

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def add(self, rank: int, first: int, last: int, why: str) -> None:
        ranges = self._ranges.setdefault((rank, why), [])
        follows = bool(ranges) and ranges[-1][0] <= first <= ranges[-1][1] + 1  # by far the most frequent
        if not follows and any(begin <= first and last <= end for begin, end in ranges):
            return
        if follows or (ranges and self._count >= MAX_RANGES):
            ranges[-1] = min(first, ranges[-1][0]), max(last, ranges[-1][1])
            return
        merged = _merged([*ranges, (first, last)])
        self._count += len(merged) - len(ranges)
        ranges[:] = merged

    def take(self, gaps: Iterable[Gap]) -> None:
        for gap in gaps:
            for rank in gap.ranks:
                self.add(rank, gap.first, gap.last, gap.why)

    def all(self) -> tuple[Gap, ...]:
        """The gaps, the earliest first; ranks that miss the same batches share one."""
        ranks: dict[tuple[int, int, str], list[int]] = {}
        for (rank, why), ranges in self._ranges.items():
            for first, last in ranges:
                ranks.setdefault((first, last, why), []).append(rank)
        found = [Gap(tuple(sorted(of)), first, last, why) for (first, last, why), of in ranks.items()]
        return tuple(sorted(found, key=lambda gap: (gap.first == END, gap.first, gap.last, gap.ranks)))


def joined(*some: Iterable[Gap]) -> tuple[Gap, ...]:
    """All of these gaps, each once."""
    gaps = Gaps()
    for each in some:
        gaps.take(each)
    return gaps.all()


def describe_gap(gap: Gap, world_size: int) -> str:
    """``batches 50 to 249 are not on record: the disk was full``, with the ranks where it is not all of them."""
    if gap.first == END:
        return f"what came last is not on record: {gap.why}"
    one = gap.first == gap.last
    batches = f"batch {gap.first}" if one else f"batches {gap.first} to {gap.last}"
    of = "" if len(gap.ranks) == world_size else f" of {name_spans(gap.ranks)}"
    return f"{batches}{of} {'is' if one else 'are'} not on record: {gap.why}"


def _merged(ranges: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found
