"""What the ledger wants done: all that the deciding side says to the sockets, files and screens around it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from rankwatch.shared.str_enum import StrEnum
from rankwatch.shared.types.frame import BatchSummary, FrameTable
from rankwatch.shared.types.messages import Message

from .report import Report
from .standing import RankStanding, RunStanding


class Send(NamedTuple):
    """Send a message to a connected peer."""

    peer: bytes
    message: Message


class SendAll(NamedTuple):
    """Send one message to these connected peers, in this order."""

    peers: Sequence[bytes]
    message: Message


@dataclass(frozen=True, slots=True)
class Note:
    """Tell the operator. ``level``: as in ``logging``; a warning is trouble of a run that goes on, an error ends it."""

    text: str
    level: int = logging.INFO


@dataclass(frozen=True, slots=True)
class RecordTrace:
    """Write the frames of a traced batch to its file. They are made of it only then: it may have a hundred thousand."""

    run: str
    rank: int
    summary: BatchSummary
    table: FrameTable


@dataclass(frozen=True, slots=True)
class Publish:
    """Write the report; if it is ``news``, print it too."""

    report: Report
    news: bool


class Trouble(StrEnum):
    """What may be told of a run that goes on."""

    STALL = "stall"
    DESYNC = "desync"
    SKIP = "skip"
    """A step was left out."""
    COLLECTIVES = "collectives"
    """Members of a process group do not call the same."""


@dataclass(frozen=True, slots=True)
class Alert:
    """Tell somebody who does not read the log of trouble in a run that goes on. The report says what is known so far."""

    trouble: Trouble
    text: str
    report: Report


@dataclass(frozen=True, slots=True)
class Show:
    """Where a run and its connected ranks (in order) are now, for live views. Each one replaces the one before."""

    run: str
    standings: tuple[RankStanding, ...]
    standing: RunStanding


@dataclass(frozen=True, slots=True)
class IssueKey:
    """Give a control client the keys of a job."""

    peer: bytes
    job: str


@dataclass(frozen=True, slots=True)
class PointLatest:
    """From now on, this run is the one that ``latest`` names."""

    run: str


class EndProcess(NamedTuple):
    """End a rank's process by force, if it is on this host. ``incarnation``: see HELLO."""

    host: str
    pid: int
    incarnation: str


class FollowProcess(NamedTuple):
    """Tell how this process of a rank ends, if it is on this host. ``incarnation``: see HELLO."""

    run: str
    rank: int
    host: str
    pid: int
    incarnation: str


Effect: TypeAlias = (
    Send | SendAll | Note | RecordTrace | Publish | Alert | Show | IssueKey | PointLatest | EndProcess | FollowProcess
)
