"""Which run a process belongs to: that of its own launch. Names are for show."""

from __future__ import annotations

from collections import defaultdict
from typing import TypeAlias

from rankwatch.shared.types import messages

from ..core.journal import Left, Opened
from ..core.report import RankState
from ..core.run import Run

Kind: TypeAlias = tuple[str, int]


class Launches:
    """The runs of one collector, by what they are runs of."""

    def __init__(self) -> None:
        self._alike = defaultdict[Kind, list[Run]](list)

    def add(self, run: Run) -> None:
        self._alike[_kind_of(run.opened)].append(run)

    def forget(self, run: Run) -> None:
        kind = _kind_of(run.opened)
        self._alike[kind].remove(run)
        if not self._alike[kind]:
            del self._alike[kind]

    def run_of(self, hello: messages.Hello, now: float) -> Run | None:
        """The run this rank belongs to; None: it begins a new one."""
        alike = [run for run in self._alike.get(_kind_of(hello), ()) if _key_of(run.opened) == _key_of(hello)]
        for known in reversed(alike):
            rank = known.ranks.get(hello.rank)
            if rank is not None and rank.hello.incarnation == hello.incarnation:
                if known.later is not None and moves(known, hello.rank, known.later):
                    return known.later
                return known  # even when it is over: a process that was stopped for a while must still be aborted
        under_way = [run for run in reversed(alike) if not run.over]
        if same := [run for run in under_way if _is_one_launch(run.opened, hello)]:
            return next((run for run in same if _may_join(run, hello, now)), None)
        # Of an unknown start, the names alone are known.
        unsure = (run for run in under_way if bool(run.opened.start) != bool(hello.start))
        return next((run for run in unsure if hello.rank not in run.ranks and _may_join(run, hello, now)), None)

    def let_go(self, run: Run, hello: messages.Hello, now: float) -> None:
        """The run of an earlier launch, in which this process was, waits for it no more."""
        for earlier in self._alike[_kind_of(hello)]:
            rank = earlier.ranks.get(hello.rank) if earlier.later is run else None
            if rank is not None and rank.is_running and rank.hello.incarnation == hello.incarnation:
                earlier.books.find(now, Left(RankState.ENDED), hello.rank)

    def note_successors(self, run: Run) -> None:
        """Of two runs of one job, the one whose processes are older is told of the other one."""
        for other in self._alike[_kind_of(run.opened)]:
            if other is not run and not other.over:
                older, newer = (run, other) if run.born_at < other.born_at else (other, run)
                older.successor = newer.id

    def note_later(self, new: Run) -> None:
        """Of the runs with an id in common, the new one is that of the launch now under way."""
        for run in self._alike[_kind_of(new.opened)]:
            is_earlier = run is not new and not run.over and _key_of(run.opened) == _key_of(new.opened)
            if is_earlier and new.opened.start and _is_one_launch(run.opened, new.opened):
                run.later = new


def _kind_of(who: messages.Hello | Opened) -> Kind:
    """What successive runs of a job have in common."""
    return who.job, who.model


def _key_of(who: messages.Hello | Opened) -> tuple[str, int, int]:
    """What the ranks of a run have in common, beside their start. Agents count restarts differently: those are for show."""
    return who.job, who.world_size, who.model


def _is_one_launch(opened: Opened, other: messages.Hello | Opened) -> bool:
    """Whether their starts may be one: they are the same, or one took over from the other.

    A rank that never asked in an earlier launch has its id (see ``tell/agreement.py``); the others know both.
    """
    if not (opened.start and other.start):
        return opened.start == other.start and opened.restart == other.restart  # names are all there is
    return other.start in (opened.start, opened.earlier) or opened.start == other.earlier


def moves(run: Run, number: int, later: Run) -> bool:
    """Whether this rank, which is heard of, belongs to the later launch."""
    return run.may_leave(number) and not later.over and number not in later.ranks


def _may_join(run: Run, hello: messages.Hello, now: float) -> bool:
    """Whether a process that is new in this run may be one of its ranks, or has at least to wait for the one that is."""
    rank = run.ranks.get(hello.rank)
    if rank is None:
        born_at = now - hello.age
        is_younger = hello.age > 0 and (run.was_decided_before(born_at) or run.lost_one_before(born_at))
        return not is_younger  # it belongs to what comes after that end
    if hello.earlier and hello.earlier == rank.hello.start:
        return False  # it takes over from this one, which is dead
    # A rank that has ended does not come back: the same job was started anew.
    if rank.connected or not rank.is_running:
        return rank.is_running
    is_same_process = (rank.hello.host, rank.hello.pid) == (hello.host, hello.pid)  # after an exec
    return not is_same_process and now - rank.heard_at <= run.options.lost_after
