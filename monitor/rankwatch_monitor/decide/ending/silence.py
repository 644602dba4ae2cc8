"""Silent ranks: which of them are dead, which are cut off from the collector, and which are held up.

A process that dies is silent, and its connection ends. A process that is stopped keeps its connection. Where the network is
cut, silence comes first and the end of the connection later; if no rank at all was heard, the collector was cut off rather
than the ranks, and they train on.

What a dead process leaves behind, its kernel tells: the connection ends while the rank was heard a moment ago. (A rank that lives
ends no connection before it has another one; ``link.py``.) A connection that ends after a silence was given up by a kernel: the
host is gone, or its network is cut, or loses packets. Nobody saw that rank die, and its peers in the process group may hear it
all the while. So it is lost after ``unseen_after``, though the others wait: their collectives are held up by the same packets.
And while the others make progress, none is lost that nobody saw die, as they wait for a dead rank in their next collective. Where
ranks never wait for each other it is so only later, and nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rankwatch.shared.words.text import name_spans

from ..core.rank import Rank, describe_several

CUT_SEEN_AFTER = 4.0
"""Seconds: where the network is cut, the kernel ends a silent connection no sooner (``KEEPALIVE_IDLE`` in ``sockets.py``)."""

STANDING = 3
"""Times ``lost_after`` for which the others make no progress, until they wait for a rank."""

CUT_OFF, HELD_UP = "silent and cut off, as are all others", "silent, but still connected"
UNHEARD = "silent and not connected, but the others go on: nothing says that they wait for it"
UNSEEN = "silent and cut off, and nobody saw its process end: it may come back within {after:g} s"


class Silent(NamedTuple):
    """``dead``: in the order in which their connections ended. ``cut_off``: not dead, as nobody was heard when they fell silent.
    ``notes``: news of the ranks that are silent but not dead."""

    dead: list[Rank]
    cut_off: list[Rank]
    notes: list[str]


@dataclass(slots=True)
class Silence:
    """The silence in one run; all in seconds.

    ``lost_after``: a rank whose connection has ended is dead after this silence; ``unseen_after``: the same where the connection
    ended of the silence; ``cut_off_after``: where all ranks fell silent at once, or the others go on. Once one of those is heard
    again, the others have ``return_window`` to reconnect.
    """

    lost_after: float
    unseen_after: float
    cut_off_after: float
    return_window: float
    heard_at: float = float("-inf")
    """When any rank was last heard, also one that has ended since."""
    deaf_at: float = float("-inf")
    """When it was last seen that no rank at all was heard for ``lost_after``."""
    quiet: list[Rank] = field(default_factory=list, repr=False)
    """The running ranks that were silent for so long at the last look."""

    def look(self, running: Sequence[Rank], now: float, *, is_open: bool) -> Silent:
        """``is_open``: nothing stops the others yet, and the loss of a rank would."""
        heard_at = max((rank.heard_at for rank in running), default=now)
        # A rank that has ended since, and was heard long after these, shows that the collector was not deaf.
        fell_silent_with_all = self.heard_at - heard_at <= self.lost_after
        if self.lost_after < now - heard_at < self.cut_off_after and fell_silent_with_all:
            self.deaf_at = now
        is_deaf = now - self.deaf_at <= self.return_window
        self.quiet = quiet = [rank for rank in running if now - _silent_since(rank) > self.lost_after]
        cut_off = [rank for rank in quiet if rank.cut_off and is_deaf]
        # Its process lives: a long call into C that holds the interpreter must not cost a healthy run.
        held_up = [rank for rank in quiet if rank.connected]
        alive = {rank.number for rank in (*cut_off, *held_up)}
        moved_at = max((rank.moved_at for rank in running if rank.connected and is_open), default=float("-inf"))
        unheard = [rank for rank in quiet if rank.number not in alive and self._do_others_go_on(rank, moved_at, now)]
        alive.update(rank.number for rank in unheard)
        unseen = [rank for rank in quiet if rank.number not in alive and is_open and self._may_return(rank, moved_at, now)]
        alive.update(rank.number for rank in unseen)
        notes = []
        hows = CUT_OFF, HELD_UP, UNHEARD, UNSEEN.format(after=self.unseen_after)
        for ranks, how in zip((cut_off, held_up, unheard, unseen), hows, strict=True):
            if news := [rank for rank in ranks if rank.quiet != how]:
                notes.append(f"{describe_several(news)} {how}; {news[0].last_seen}")
            for rank in news:
                rank.quiet = how
        # In the order of the ends of their connections, not of their last beats: the first to die took the others along.
        dead = (rank for rank in quiet if rank.number not in alive)
        return Silent(sorted(dead, key=lambda rank: rank.gone_at), cut_off, notes)

    @property
    def unseen(self) -> list[Rank]:
        """Those of the last look that may come back, though nobody else is waited for so long."""
        how = UNSEEN.format(after=self.unseen_after)
        return [rank for rank in self.quiet if rank.is_running and not rank.connected and rank.quiet == how]

    def describe_lost(self, lost: Sequence[Rank], now: float) -> str:
        """The ranks that were lost, the first one with what was last seen of it."""
        first, *others = lost
        limits = self.lost_after, self.unseen_after, self.cut_off_after
        silent = max((limit for limit in limits if now - first.heard_at > limit), default=self.lost_after)
        text = f"{first.name} was lost: {first.death or f'nothing heard for {silent:g} s'}; {first.end}"
        return text + (f"; after it {name_spans([rank.number for rank in others])}" if others else "")

    def _do_others_go_on(self, rank: Rank, moved_at: float, now: float) -> bool:
        """Whether the others go on, as far as they are heard, since this rank fell silent, and nobody saw its process end."""
        has_moved = moved_at > _silent_since(rank) and now - moved_at <= STANDING * self.lost_after
        return has_moved and not rank.death and now - rank.heard_at < self.cut_off_after

    def _may_return(self, rank: Rank, moved_at: float, now: float) -> bool:
        """Whether its network may only be bad. ``moved_at``: when the others last made progress."""
        is_unseen = rank.cut_off and not rank.death and now - rank.heard_at < self.cut_off_after
        return is_unseen and now - max(rank.heard_at, moved_at) <= self.unseen_after


def is_cut_off(rank: Rank, now: float) -> bool:
    """Whether a connection that ends now was cut. A process that was held up and is then killed may be silent before, too."""
    return bool(rank.quiet) and now - rank.heard_at >= CUT_SEEN_AFTER


def _silent_since(rank: Rank) -> float:
    return rank.heard_at if rank.cut_off else max(rank.heard_at, rank.gone_at)
