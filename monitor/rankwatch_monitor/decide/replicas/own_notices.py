"""Notices that say of a rank's own parameters what a desync says of replicas: they stand in the same list."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from rankwatch.shared.types.notice import Notice, NoticeKind

from ..core.report import RankNotice
from .comparison import TELL_AFTER
from .desync import Desync, DesyncPattern

_PATTERNS = {NoticeKind.NEVER_CHANGED: DesyncPattern.NEVER_CHANGED, NoticeKind.UNTIED: DesyncPattern.UNTIED}

BY_PRODUCT_KINDS = frozenset(_PATTERNS)

_ORIGINS = {DesyncPattern.NEVER_CHANGED: -1, DesyncPattern.UNTIED: -2}
"""One line for all that never changed, and one for all that came untied."""


def desync_of(
    notices: Iterable[RankNotice], world_size: int, locate: Callable[[int], tuple[str, str]]
) -> tuple[Desync, ...]:
    """An entry for each parameter, of all ranks that noticed it. ``locate``: the host and the GPU of a rank."""
    found: dict[tuple[DesyncPattern, str], list[RankNotice]] = {}
    for one in notices:
        pattern = _PATTERNS.get(one.notice.kind)
        if pattern is not None:
            name = f"{one.notice.module}.{one.notice.label}" if one.notice.module else one.notice.label
            found.setdefault((pattern, name), []).append(one)
    entries = []
    for (pattern, name), same in found.items():
        ranks = tuple(sorted({rank for rank, _ in same}))
        host, gpu = locate(ranks[0]) if len(ranks) == 1 else ("", "")
        step = min(_step_of(notice) for _, notice in same)
        entries.append(Desync(step, name, ranks, world_size, pattern, host, gpu, origin=_ORIGINS[pattern]))
    return tuple(entries)


class ByProducts:
    """Which patterns are to be told: parameters are noticed one by one, and one line tells those that belong together."""

    def __init__(self) -> None:
        self._fresh: set[DesyncPattern] = set()
        self._told: set[DesyncPattern] = set()
        self._since: float | None = None

    def take(self, kind: NoticeKind, now: float) -> bool:
        """Whether notices of this kind are told here."""
        pattern = _PATTERNS.get(kind)
        if pattern is not None and pattern not in self._told:
            self._fresh.add(pattern)
            self._since = now if self._since is None else self._since
        return pattern is not None

    def is_due(self, now: float) -> bool:
        return self._since is not None and now - self._since >= TELL_AFTER

    def origins(self, entries: Iterable[Desync]) -> Iterator[tuple[Desync, ...]]:
        """The entries of each pattern that was not told yet."""
        found = tuple(entries)
        for pattern in sorted(self._fresh):
            yield tuple([one for one in found if one.pattern is pattern])
        self._told |= self._fresh
        self._fresh.clear()
        self._since = None


def _step_of(notice: Notice) -> int:
    """The optimizer step at which it was noticed."""
    return int(notice.value) if math.isfinite(notice.value) and notice.value >= 0 else notice.batch
