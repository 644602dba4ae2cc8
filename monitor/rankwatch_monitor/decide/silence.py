"""Ranks that fell silent: which of them are dead, and which cut off or held up. Decisions over the ranks' records.

A process that dies is silent and its connection ends. One that is stopped keeps its connection. Where the network is cut,
silence comes first and the end of the connection after it; and if not one rank was heard, it is rather the collector that
was cut off, and they train on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .rank import Rank, describe_several

CUT_OFF, HELD_UP = "silent and cut off, as are all others", "silent, but still connected"


class Silent(NamedTuple):
    """``dead``: in the order in which their connections ended. ``notes``: what is new of those that are silent and live."""

    dead: list[Rank]
    notes: list[str]


@dataclass(slots=True)
class Silence:
    """What is known of silence in a run; all in seconds.

    ``lost_after``: a rank that is silent for so long, and whose connection has ended, is dead. ``cut_off_after``: the same
    where all fell silent at once. ``return_window``: what those have to come back, once one of them is heard again.
    """

    lost_after: float
    cut_off_after: float
    return_window: float
    heard_at: float = float("-inf")
    """When any rank was heard, also of those that have ended."""
    deaf_at: float = float("-inf")
    """When no rank was heard at all, for long enough to be noticed."""

    def look(self, running: Sequence[Rank], now: float) -> Silent:
        heard_at = max((record.heard_at for record in running), default=now)
        # Ranks that have ended since, and were heard long after these, show that the collector was not deaf.
        fell_silent_with_all = self.heard_at - heard_at <= self.lost_after
        if self.lost_after < now - heard_at < self.cut_off_after and fell_silent_with_all:
            self.deaf_at = now
        is_deaf = now - self.deaf_at <= self.return_window
        quiet = [record for record in running if now - _silent_since(record) > self.lost_after]
        cut_off = [record for record in quiet if record.cut_off and is_deaf]
        # Its process lives: a long call into C that keeps the interpreter to itself must not cost a healthy run.
        held_up = [record for record in quiet if record.connected]
        notes = []
        for records, how in ((cut_off, CUT_OFF), (held_up, HELD_UP)):
            if news := [record for record in records if record.quiet != how]:
                notes.append(f"{describe_several(news)} {how}; {news[0].last_seen}")
            for record in news:
                record.quiet = how
        # In the order in which their connections ended, and not their beats: the first to die took the others along.
        dead = (record for record in quiet if not record.connected and not (record.cut_off and is_deaf))
        return Silent(sorted(dead, key=lambda record: record.gone_at), notes)


def _silent_since(record: Rank) -> float:
    return record.heard_at if record.cut_off else max(record.heard_at, record.gone_at)
