"""What is put on record of a run: every fact its decisions rest on, in the order in which they came.

Batches are on record too, each once; beats only where an election rests on them. ``Run.replay`` makes a run from its entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from rankwatch.shared import messages
from rankwatch.shared.frame import BatchSummary, FrameTable

from .report import Outcome, RankState

NO_RANK = -1


@dataclass(frozen=True, slots=True)
class Opened:
    """The run began."""

    job: str
    restart: int
    world_size: int


class Trained(NamedTuple):
    """A part of a batch, with the frame table that its columns fit, and its number among its rank's messages."""

    seq: int
    summary: BatchSummary
    table: FrameTable


@dataclass(frozen=True, slots=True)
class Left:
    """The collector counts a rank out that did not say goodbye."""

    state: RankState


@dataclass(frozen=True, slots=True)
class Reached:
    """The positions that ranks had reached when one of them tripped, or when they answered the election.

    An election rests on them, and beats are not recorded. ``reported`` is each rank's last batch whose whole forward it had
    reported.
    """

    ranks: tuple[int, ...]
    positions: tuple[tuple[int, int, int], ...]
    reported: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Waited:
    """Time has passed, and something was decided by it."""


@dataclass(frozen=True, slots=True)
class JobInterrupted:
    """Somebody is ending the job's command by this signal: ranks that fail or vanish from now on do so because of it."""

    signal: str


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The command that the collector was started for has ended; None: the collector itself is to end.

    ``interrupted`` names the signal that somebody ended it by.
    """

    exit_code: int | None
    interrupted: str = ""


@dataclass(frozen=True, slots=True)
class Decided:
    """How the run ends, and whether its ranks are told to abort. A later decision replaces an earlier one."""

    outcome: Outcome
    reason: str
    abort: bool


@dataclass(frozen=True, slots=True)
class Closed:
    """The run is over."""


OwnEvent: TypeAlias = Opened | Left | Reached | Waited | JobInterrupted | JobEnded | Decided | Closed
Fact: TypeAlias = messages.Message | OwnEvent | Trained


class Entry(NamedTuple):
    """A fact; ``now`` is seconds of the collector's clock, ``rank`` the one it is about or comes from, or NO_RANK."""

    now: float
    rank: int
    fact: Fact


class Progress(NamedTuple):
    """What a run that goes on needs to know of a part of a batch: so many frames of it, in that message of its rank."""

    rank: int
    seq: int
    batch: int
    first_frame: int
    frames: int
