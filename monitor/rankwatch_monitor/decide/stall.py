"""Stalled ranks: which rank makes no progress while the others wait for it. A pure decision over the ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from rankwatch.shared.frame import Moment
from rankwatch.shared.text import name_spans

from .rank import Rank

PHASE_ORDER = {"forward": 0, "backward": 1, "optimizer": 2, "idle": 3}
"""The phases of a batch, in their order."""


class Stall(NamedTuple):
    """The stalled ranks, the ranks that wait for them, and both in a sentence."""

    ranks: list[int]
    waiting: list[int]
    text: str


class StallNews(NamedTuple):
    """``began``: the stall in a sentence, if it is a new one. ``notes``: what is worth a line in the log."""

    began: str = ""
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class StallWatch:
    """Which stall there is now, if there is one. ``after`` is in seconds; 0: stalls are not looked for."""

    after: float
    stall: Stall | None = None

    def look(self, running: Collection[Rank], now: float) -> StallNews:
        if not self.after:
            return StallNews()
        # A rank whose watch has switched itself off shows no progress.
        before, self.stall = self.stall, find_stall([rank for rank in running if not rank.fault], now, self.after)
        if self.stall is None:
            if before is None or not {rank.number for rank in running}.issuperset(before.ranks):
                return StallNews()
            return StallNews(notes=(f"{name_spans(before.ranks)} went on",))
        if before is not None and before.ranks == self.stall.ranks:
            return StallNews()
        return StallNews(self.stall.text, (self.stall.text,))


def find_stall(running: Collection[Rank], now: float, after: float) -> Stall | None:
    """The ranks that made no progress for ``after`` seconds while no other rank is behind them; None: there are none.

    Ranks that wait in a collective make no progress either, but they are further on. A rank that is behind all others and
    still moves is slow, not stalled.
    """
    still = [rank for rank in running if now - rank.moved_at > after]
    if not still:
        return None
    last = min(map(_reached, running))
    stalled = [rank for rank in still if _reached(rank) == last]
    if not stalled:
        return None
    # They stopped later than the stalled ranks: how much later depends on what they still had to do.
    waiting = [rank for rank in running if _reached(rank) > last and now - rank.moved_at > after / 2]
    first = min(stalled, key=lambda rank: rank.number)
    who = first.name if len(stalled) == 1 else name_spans(_ranks(stalled))
    text = f"{who} stalled: no progress for {after:g} s, {_life(stalled, now)}; {first.last_seen}"
    if waiting:
        text += f"; {name_spans(_ranks(waiting))} wait{'s' if len(waiting) == 1 else ''}, from {_nearest(waiting)} on"
    elif len(stalled) == len(running) > 1:
        text += "; no rank is behind another: they may wait for each other in a collective"
    return Stall(_ranks(stalled), _ranks(waiting), text)


def _reached(rank: Rank) -> tuple[Moment, int]:
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
    nearest = min(waiting, key=_reached)
    return f"batch {nearest.progress.position.batch}, frame {nearest.progress.position.frame}, phase {nearest.phase}"
