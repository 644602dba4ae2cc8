"""What the desks of a run share: its ranks, its verdict, its journal; and what a desk is.

A desk decides one part of a run. Desks know these books and not each other: the run gives each of them what concerns it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..trip.verdict import Verdict
from .effects import Note, Trouble
from .fact import Finding
from .journal import NO_RANK, Aside, Died, Entry, Fact, Left
from .options import Options
from .rank import Rank
from .report import RankState


class Desk:
    """What desks have in common. Beside this, ``take`` takes a message of a rank, and ``look`` looks what the time has brought.

    Both give effects, and what the run makes of it: ``Stop`` and ``Worry``.
    """

    __slots__ = ()

    def apply(self, entry: Entry) -> None:
        """Changes by a finding, if it is of this desk's kinds. What is applied twice counts once: in a replay, the inputs lead
        to findings again, and these are in the record, too."""

    def leave(self, rank: Rank) -> None:
        """The rank has ended."""


class Stop(NamedTuple):
    """A desk has found a reason for which all ranks are to stop."""

    reason: str
    culprit: int = NO_RANK
    tripped_at: float = 0.0


class Worry(NamedTuple):
    """A desk has found trouble of which somebody is told, if the run goes on."""

    trouble: Trouble
    text: str


@dataclass(slots=True)
class Books:
    id: str
    world_size: int
    options: Options
    desks: Sequence[Desk] = field(default=(), repr=False)
    ranks: dict[int, Rank] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    """Updated message by message, so that a message costs the same at 16 ranks and at 16,384."""
    away: set[int] = field(default_factory=set)
    """The ranks whose connection has ended, and that have not come back."""
    verdict: Verdict | None = None
    over: bool = False
    """Whether all ranks have ended, and nothing more is expected."""
    journal: list[Entry] = field(default_factory=list)
    """The entries since the ledger last took them away to have them recorded."""
    _departures: int = 0
    """How often a rank has ended."""

    def note(self, text: str, level: int = logging.INFO) -> Note:
        return Note(f"run {self.id}: {text}", level)

    def warn(self, text: str) -> Note:
        return self.note(text, logging.WARNING)

    def note_down(self, now: float, fact: Fact, rank: int = NO_RANK) -> None:
        self.journal.append(Entry(now, rank, fact))

    def find(self, now: float, finding: Finding, rank: int = NO_RANK) -> None:
        """Notes down what was found, and only thereby changes the run."""
        entry = Entry(now, rank, finding)
        self.journal.append(entry)
        self.apply(entry)

    def apply(self, entry: Entry) -> None:
        """The one way in which a finding changes the run: when it is found, and when it is replayed."""
        fact = entry.fact
        if isinstance(fact, Died):
            self.ranks[entry.rank].death = fact.how
        elif isinstance(fact, Aside):
            self.ranks[entry.rank].aside = fact.lines
        elif isinstance(fact, Left):
            rank = self.ranks[entry.rank]
            rank.last_memory, rank.leaked = fact.memory, fact.leaked
            self.leave(rank, fact.state)
        else:
            for desk in self.desks:
                desk.apply(entry)

    def leave(self, rank: Rank, state: RankState) -> None:
        self._departures += 1
        rank.state, rank.left = state, self._departures
        self.running.discard(rank.number)
        for desk in self.desks:
            desk.leave(rank)

    def locate(self, number: int) -> tuple[str, str]:
        """The host and the GPU of a rank."""
        rank = self.ranks.get(number)
        return ("", "") if rank is None else (rank.hello.host, rank.hello.gpu.id)
