"""Stalled ranks: which rank makes no progress while the others wait for it. A pure decision over the ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from rankwatch.shared.types.frame import Moment
from rankwatch.shared.words.text import name_spans

from ..core.rank import Rank
from ..core.report import RankState, Stall

PHASE_ORDER = {"forward": 0, "backward": 1, "optimizer": 2, "idle": 3}
"""The phases of a batch, in their order."""


Reached: TypeAlias = tuple[Moment, int]

NAMED = 64
"""Ranks of a stall that are named."""


NO_RANK_BEHIND = "no rank is behind another"


class StallNews(NamedTuple):
    """``began``: the stall in a sentence, if it is a new one. ``notes``: what is worth a line in the log.

    ``is_other``: whether there is another stall than before, which is ``stall``, or none any more.
    """

    began: str = ""
    notes: tuple[str, ...] = ()
    is_other: bool = False
    stall: Stall | None = None


@dataclass(slots=True)
class StallWatch:
    """Which stall there is now, if there is one. ``after`` is in seconds; 0: stalls are not looked for."""

    after: float
    stall: Stall | None = None
    _ranks: frozenset[int] = frozenset()
    """All of the stalled ranks."""
    _reached: Reached | None = None
    """Where they are; None: only the record knows."""
    _found: Stall | None = None
    """The last one that was found here, and not only in the record."""
    _resumed_at: float = float("-inf")
    """When ranks that had stalled went on. Those that had waited for them may be heard of a heartbeat later."""

    def look(self, ranks: Mapping[int, Rank], running: Collection[int], now: float) -> StallNews:
        if not self.after:
            return StallNews()
        live = [ranks[number] for number in running]
        if self._went_on(ranks):
            self._resumed_at = now
        has_left = not self._ranks.issubset(running)
        if has_left and not self._went_on(ranks) and all(now - rank.moved_at > self.after / 2 for rank in live):
            return StallNews()  # by the stall, or by what ended it: the others wait for a rank that is gone
        # A rank whose watch has switched itself off shows no progress.
        still_since = {
            rank.number: rank.moved_at if rank.number in self._ranks else max(rank.moved_at, self._resumed_at)
            for rank in live
        }
        found = find_stall([rank for rank in live if not rank.fault], now, self.after, still_since)
        if found is None:
            return self._end(is_known=self._reached is not None and (not has_left or self._went_on(ranks)))
        is_same, self._ranks, self._reached = self._ranks == found.ranks, found.ranks, found.reached
        self._found = found.stall
        if not is_same:
            return StallNews(found.stall.text, (found.stall.text,), is_other=True, stall=found.stall)
        if self.stall is not None and set(self.stall.waiting) >= set(found.stall.waiting):
            return StallNews()
        return StallNews(is_other=True, stall=found.stall)

    def retell(self, text: str) -> Stall:
        """The same stall in another sentence, to be applied."""
        assert self.stall is not None
        self._found = replace(self.stall, text=text)
        return self._found

    def _went_on(self, ranks: Mapping[int, Rank]) -> bool:
        stalled = [ranks[number] for number in self._ranks if number in ranks]
        if any(rank.state in (RankState.FINISHED, RankState.ENDED) for rank in stalled):
            return True
        return self._reached is not None and any(reached(rank) > self._reached for rank in stalled)

    def _end(self, *, is_known: bool) -> StallNews:
        """``is_known``: whether it is known that its ranks went on."""
        if self.stall is None:
            return StallNews()
        return StallNews(notes=(f"{name_spans(self._ranks)} went on",) if is_known else (), is_other=True)

    def apply(self, stall: Stall | None) -> None:
        """From now on there is this stall. Where the ranks are of one from the record is not known: the next looks begin anew."""
        self.stall = stall
        if stall is None or stall is not self._found:
            self._ranks, self._reached = frozenset(stall.ranks if stall is not None else ()), None


class FoundStall(NamedTuple):
    """``ranks``: all that are stalled; ``reached``: where."""

    ranks: frozenset[int]
    reached: Reached
    stall: Stall


def find_stall(running: Collection[Rank], now: float, after: float, still_since: Mapping[int, float]) -> FoundStall | None:
    """The ranks that made no progress for ``after`` seconds while no other rank is behind them; None: there are none.

    ``still_since``: by rank, since when it could have made progress. Ranks that wait in a collective make no progress either, but
    they are further on. A rank that is behind all others and still moves is slow, not stalled.
    """
    still = [rank for rank in running if now - still_since[rank.number] > after]
    if not still:
        return None
    last = min(map(reached, running))
    stalled = [rank for rank in still if reached(rank) == last]
    if not stalled:
        return None
    # They stopped later than the stalled ranks: how much later depends on what they still had to do.
    waiting = [rank for rank in running if reached(rank) > last and now - rank.moved_at > after / 2]
    first = min(stalled, key=lambda rank: rank.number)
    who = first.name if len(stalled) == 1 else name_spans(_ranks(stalled))
    text = f"{who} stalled: no progress for {after:g} s, {_life(stalled, now)}; {first.last_seen}"
    if waiting:
        text += f"; {name_spans(_ranks(waiting))} wait{'s' if len(waiting) == 1 else ''}, from {_nearest(waiting)} on"
    elif len(stalled) == len(running) > 1:
        text += f"; {NO_RANK_BEHIND}"
    ranks, others = _ranks(stalled), _ranks(waiting)
    return FoundStall(
        frozenset(ranks), last, Stall(tuple(ranks[:NAMED]), tuple(others[:NAMED]), text, len(ranks), len(others))
    )


def reached(rank: Rank) -> Reached:
    return rank.progress, PHASE_ORDER.get(rank.phase, 0)


def _ranks(ranks: Iterable[Rank]) -> list[int]:
    return sorted(rank.number for rank in ranks)


def _life(stalled: list[Rank], now: float) -> str:
    silent = [rank for rank in stalled if rank.quiet]
    if not silent:
        return "though its heartbeat comes" if len(stalled) == 1 else "though their heartbeats come"
    longest = max(now - rank.heard_at for rank in silent)
    which = "and" if len(silent) == len(stalled) else f"and of {name_spans(_ranks(silent))}"
    return f"{which} no heartbeat for {longest:.0f} s (its process is stopped, or busy outside of Python)"


def _nearest(waiting: list[Rank]) -> str:
    nearest = min(waiting, key=reached)
    return f"batch {nearest.progress.position.batch}, frame {nearest.progress.position.frame}, phase {nearest.phase}"
