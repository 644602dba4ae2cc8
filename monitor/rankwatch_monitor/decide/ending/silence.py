"""Silent ranks: which of them are dead, which are cut off from the collector, and which are held up.

A process that dies is silent, and its connection ends. A process that is stopped keeps its connection. Where the network is
cut, silence comes first and the end of the connection later; if no rank at all was heard, the collector was cut off rather
than the ranks, and they train on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rankwatch.shared.words.text import name_spans

from ..core.rank import Rank, describe_several

CUT_SEEN_AFTER = 4.0
"""Seconds: where the network is cut, the kernel ends a silent connection no sooner (``KEEPALIVE_IDLE`` in ``sockets.py``)."""

CUT_OFF, HELD_UP = "silent and cut off, as are all others", "silent, but still connected"


class Silent(NamedTuple):
    """``dead``: in the order in which their connections ended. ``cut_off``: not dead, as nobody was heard when they fell silent.
    ``notes``: news of the ranks that are silent but not dead."""

    dead: list[Rank]
    cut_off: list[Rank]
    notes: list[str]


@dataclass(slots=True)
class Silence:
    """The silence in one run; all in seconds.

    ``lost_after``: a rank whose connection has ended is dead after this silence; ``cut_off_after``: the same where all ranks
    fell silent at once. Once one of those is heard again, the others have ``return_window`` to reconnect.
    """

    lost_after: float
    cut_off_after: float
    return_window: float
    heard_at: float = float("-inf")
    """When any rank was last heard, also one that has ended since."""
    deaf_at: float = float("-inf")
    """When it was last seen that no rank at all was heard for ``lost_after``."""

    def look(self, running: Sequence[Rank], now: float) -> Silent:
        heard_at = max((rank.heard_at for rank in running), default=now)
        # A rank that has ended since, and was heard long after these, shows that the collector was not deaf.
        fell_silent_with_all = self.heard_at - heard_at <= self.lost_after
        if self.lost_after < now - heard_at < self.cut_off_after and fell_silent_with_all:
            self.deaf_at = now
        is_deaf = now - self.deaf_at <= self.return_window
        quiet = [rank for rank in running if now - _silent_since(rank) > self.lost_after]
        cut_off = [rank for rank in quiet if rank.cut_off and is_deaf]
        # Its process lives: a long call into C that holds the interpreter must not cost a healthy run.
        held_up = [rank for rank in quiet if rank.connected]
        notes = []
        for ranks, how in ((cut_off, CUT_OFF), (held_up, HELD_UP)):
            if news := [rank for rank in ranks if rank.quiet != how]:
                notes.append(f"{describe_several(news)} {how}; {news[0].last_seen}")
            for rank in news:
                rank.quiet = how
        # In the order of the ends of their connections, not of their last beats: the first to die took the others along.
        dead = (rank for rank in quiet if not rank.connected and not (rank.cut_off and is_deaf))
        return Silent(sorted(dead, key=lambda rank: rank.gone_at), cut_off, notes)


def is_cut_off(rank: Rank, now: float) -> bool:
    """Whether a connection that ends now was cut. A process that was held up and is then killed may be silent before, too."""
    return bool(rank.quiet) and now - rank.heard_at >= CUT_SEEN_AFTER


def describe_lost(lost: Sequence[Rank], after: float) -> str:
    """The ranks that were lost, the first one with what was last seen of it."""
    first, *others = lost
    text = f"{first.name} was lost: {first.death or f'nothing heard for {after:g} s'}; {first.last_seen}"
    return text + (f"; after it {name_spans([rank.number for rank in others])}" if others else "")


def _silent_since(rank: Rank) -> float:
    return rank.heard_at if rank.cut_off else max(rank.heard_at, rank.gone_at)
