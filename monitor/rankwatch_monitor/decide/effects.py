"""What the ledger wants done: the only words between the decisions and the input and output around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from rankwatch.shared.frame import Frame
from rankwatch.shared.messages import Message

from .report import RankStanding, Report, RunStanding


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
    """Tell the operator."""

    text: str


@dataclass(frozen=True, slots=True)
class RecordTrace:
    """Keep the frames of a traced batch."""

    run: str
    rank: int
    batch: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Publish:
    """Write the report; show it to people too when it is ``news``."""

    report: Report
    news: bool


@dataclass(frozen=True, slots=True)
class Show:
    """Where a run is, for whoever watches, and those of its ranks that have connected, by rank. Each replaces the one before."""

    run: str
    standings: tuple[RankStanding, ...]
    standing: RunStanding


@dataclass(frozen=True, slots=True)
class IssueKey:
    """Give a control client the keys of a job."""

    peer: bytes
    job: str


Effect: TypeAlias = Send | SendAll | Note | RecordTrace | Publish | Show | IssueKey
