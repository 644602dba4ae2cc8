"""Trips by rank -> the verdict: pure, the clock passed in.

Ranks of a data-parallel job run the same program, so (batch, eval, frame) orders them where clocks cannot. The smallest
tripped position is the culprit's, once every rank that still can has passed it or tripped itself, or the window is over.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rankwatch.frame import Position
from rankwatch.trip import Cause, Trip, classify


class Standing(enum.Enum):
    """What a rank can still contribute to the verdict."""

    LIVE = "live"
    """Running, or not yet connected: it is waited for."""
    GONE = "gone"
    """Dead or failed: what it did not tell before, it will never tell."""
    DONE = "done"
    """Ended cleanly: all that it ran was finite."""


class Certainty(enum.StrEnum):
    COMPLETE = "complete"
    PARTIAL = "partial"


class Witness(NamedTuple):
    """A rank as the election sees it."""

    standing: Standing
    progress: Position
    trip: Trip | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The culprit over all ranks. ``also``: the other ranks that tripped, in logical order. ``missing``: never answered."""

    rank: int
    trip: Trip
    cause: Cause
    evidence: str
    certainty: Certainty
    missing: tuple[int, ...]
    also: tuple[tuple[int, Trip], ...]
    world_size: int
    reason: str

    @property
    def answered(self) -> int:
        return self.world_size - len(self.missing)


def elect(
    witnesses: Mapping[int, Witness], world_size: int, since_first_trip: float, window: float
) -> tuple[Verdict | None, str]:
    """The verdict, or None while a rank may still tell of an earlier trip; and why, in words.

    Args:
        witnesses: the ranks that ever connected, by rank; at least one of them has tripped.
        since_first_trip: seconds since the collector heard of the first trip.
        window: seconds it waits for the ranks that have not answered.
    """
    trips = {rank: witness.trip for rank, witness in witnesses.items() if witness.trip is not None}
    order = sorted(trips, key=lambda rank: (trips[rank].position, rank))
    first = order[0]
    target = trips[first].position
    silent = [rank for rank in range(world_size) if not _has_answered(witnesses.get(rank), target)]
    waited_for = [rank for rank in silent if rank not in witnesses or witnesses[rank].standing is Standing.LIVE]
    if waited_for and since_first_trip < window:
        return None, f"waiting for {name_ranks(waited_for)} to pass frame {target.frame} of batch {target.batch}"
    if not silent:
        reason = "every rank has passed this frame or tripped itself"
    elif waited_for:
        reason = f"the decision window of {window:g} s is over and {name_ranks(silent)} did not answer"
    else:
        reason = f"{name_ranks(silent)} ended without an answer"
    cause, evidence = classify(trips[first])
    verdict = Verdict(
        rank=first,
        trip=trips[first],
        cause=cause,
        evidence=evidence,
        certainty=Certainty.PARTIAL if silent else Certainty.COMPLETE,
        missing=tuple(silent),
        also=tuple((rank, trips[rank]) for rank in order[1:]),
        world_size=world_size,
        reason=reason,
    )
    return verdict, reason


def is_waited_for(witness: Witness, target: Position) -> bool:
    """Whether this rank should be asked to tell when it passes ``target``."""
    return witness.standing is Standing.LIVE and not _has_answered(witness, target)


def name_ranks(ranks: list[int] | tuple[int, ...], most: int = 8) -> str:
    """``rank 3``, ``ranks 1, 2, 5``, or the first few and how many more."""
    shown = ", ".join(map(str, ranks[:most]))
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more}"


def name_spans(ranks: list[int], most: int = 8) -> str:
    """``rank 3``, ``ranks 0-3, 8``, or the first few spans and how many more ranks."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    shown = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans[:most])
    hidden = sum(map(len, spans[most:]))
    more = f" and {hidden} more" if hidden else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more}"


def _has_answered(witness: Witness | None, target: Position) -> bool:
    if witness is None:
        return False
    return witness.trip is not None or witness.standing is Standing.DONE or witness.progress > target
