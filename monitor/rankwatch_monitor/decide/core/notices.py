"""The notices of one run: the last one of each rank and reading, up to a limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rankwatch.shared.types.notice import Notice, NoticeKind

from .report import RankNotice

MAX_NOTICES = 256
"""Notices retained per run; those of further ranks and readings are only counted."""

FOLLOWS = 32
"""Batches after a jump in which further jumps come from it."""


def told(notices: Iterable[RankNotice], last_batches: Mapping[int, int]) -> tuple[RankNotice, ...]:
    """Without the skipped batches that all ranks skipped alike, and the further forwards of a rank that logs, say.

    ``last_batches``: by rank.
    """
    found = tuple(notices)
    skips = {one.rank: (one.notice.since, one.notice.value) for one in found if one.notice.kind is NoticeKind.SKIPPED}

    def is_single(rank: int) -> bool:
        others = [other for other in last_batches if skips.get(other) != skips[rank]]
        return any(last_batches[other] >= last_batches[rank] for other in others)

    return tuple(one for one in found if one.notice.kind is not NoticeKind.SKIPPED or is_single(one.rank))


class Notices:
    def __init__(self) -> None:
        self._kept: dict[tuple[NoticeKind, str, str], dict[int, Notice]] = {}
        self._count = 0
        self.unkept = 0
        """How many notices found no room."""

    def take(self, rank: int, notice: Notice) -> bool:
        """Replaces the rank's earlier notice of the same reading; returns whether it is the first of its group."""
        if notice.kind is NoticeKind.JUMP and self._follows(notice):
            return False
        of_ranks = self._kept.get(notice.key, {})
        if rank not in of_ranks:
            if self._count == MAX_NOTICES:
                self.unkept += 1
                return False
            self._count += 1
        is_new = all(other.group != notice.group for other in of_ranks.values())
        of_ranks[rank] = notice
        self._kept[notice.key] = of_ranks
        return is_new and notice.kind is not NoticeKind.SKIPPED  # whether others skipped it too is not known yet

    def _follows(self, notice: Notice) -> bool:
        """Whether another reading, of any rank, jumped shortly before: a jump of the loss spreads with the gradients."""
        return any(
            0 < notice.batch - other.batch <= FOLLOWS
            for key, ranks in self._kept.items()
            if key[0] is NoticeKind.JUMP
            for other in ranks.values()
        )

    def all(self) -> tuple[RankNotice, ...]:
        """The most urgent first."""
        found = [RankNotice(rank, notice) for ranks in self._kept.values() for rank, notice in ranks.items()]
        return tuple(sorted(found, key=lambda kept: (kept.notice.urgency, kept.notice.key, kept.rank)))
