"""Ranks that stand still: which of them the others wait for. A pure decision over the ranks' records."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from rankwatch.shared.frame import Position
from rankwatch.shared.text import name_spans

from .rank import Rank

PHASE_ORDER = {"forward": 0, "backward": 1, "optimizer": 2, "idle": 3}
"""The phases of a batch as they follow each other."""


class Stall(NamedTuple):
    """The ranks that stand still and are furthest behind, those that wait for them, and the whole in a sentence."""

    ranks: list[int]
    waiting: list[int]
    text: str


def find_stall(running: Collection[Rank], now: float, after: float) -> Stall | None:
    """The stall at ``now``, if there is one: a rank that made no progress for ``after`` seconds, and no other is behind it.

    Ranks that wait in a collective stand still too, but further on. One that is behind all others and moves is slow, and no
    stall.
    """
    standing = [record for record in running if now - record.moved_at > after]
    if not standing:
        return None
    last = min(map(_place, running))
    stalled = [record for record in standing if _place(record) == last]
    if not stalled:
        return None
    # They came to a halt after the first did: how long after depends on what they still had to do.
    waiting = [record for record in running if _place(record) > last and now - record.moved_at > after / 2]
    first = min(stalled, key=lambda record: record.hello.rank)
    who = first.name if len(stalled) == 1 else name_spans(_ranks(stalled))
    text = f"{who} stalled: no progress for {after:g} s, {_life(stalled, now)}; {first.last_seen}"
    if waiting:
        text += f"; {name_spans(_ranks(waiting))} wait{'s' if len(waiting) == 1 else ''}, from {_nearest(waiting)} on"
    elif len(stalled) == len(running) > 1:
        text += "; no rank is behind another: they may wait for each other in a collective"
    return Stall(_ranks(stalled), _ranks(waiting), text)


def _place(record: Rank) -> tuple[Position, int]:
    return record.progress, PHASE_ORDER.get(record.phase, 0)


def _ranks(records: Iterable[Rank]) -> list[int]:
    return sorted(record.hello.rank for record in records)


def _life(stalled: list[Rank], now: float) -> str:
    silent = [record for record in stalled if record.quiet]
    if not silent:
        return "though its heartbeat comes" if len(stalled) == 1 else "though their heartbeats come"
    longest = max(now - record.heard_at for record in silent)
    which = "and" if len(silent) == len(stalled) else f"and of {name_spans(_ranks(silent))}"
    return f"{which} no heartbeat for {longest:.0f} s (its process is stopped, or busy outside of Python)"


def _nearest(waiting: list[Rank]) -> str:
    nearest = min(waiting, key=_place)
    return f"batch {nearest.progress.batch}, frame {nearest.progress.frame}, phase {nearest.phase}"
