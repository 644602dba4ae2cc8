"""From the trips of the ranks to the verdict: pure, the clock passed in.

The ranks of a data-parallel job run the same program, so (batch, eval, frame) orders them where clocks cannot. The stages of
a pipeline hand each micro-batch on, so (batch, eval, stage, frame) orders them. The culprit is the earliest trip in this
logical time, once every rank that can still report has passed that time or has tripped itself, or the window is over.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rankwatch.shared.cause import Cause, Trip, classify
from rankwatch.shared.frame import NO_STAGE, Phase, Position
from rankwatch.shared.str_enum import StrEnum
from rankwatch.shared.text import name_ranks

NO_SINGLE_RANK = "no single rank"
"""Who the culprit is where ranks went bad alike."""


class Liveness(enum.Enum):
    """What a rank can still contribute to the verdict."""

    LIVE = "live"
    """Running, or not yet connected: the election waits for it."""
    GONE = "gone"
    """Dead or failed: it will report no more."""
    DONE = "done"
    """Ended cleanly: all its readings were finite."""


class Certainty(StrEnum):
    COMPLETE = "complete"
    PARTIAL = "partial"


class LogicalTime(NamedTuple):
    """When a rank tripped, in the order that all ranks share.

    The stages of a pipeline run a micro-batch's forward one after the other; its backward then goes through the stages the
    other way round: ``turn`` is the stage, negated in backward. ``stage`` follows from the other fields.
    """

    batch: int
    eval: int
    is_backward: bool
    turn: int
    frame: int
    stage: int

    @property
    def position(self) -> Position:
        return Position(self.batch, self.eval, self.frame)


def logical_time_of(trip: Trip, stage: int) -> LogicalTime:
    """The logical time of a rank's trip. Without a pipeline the frame is enough: backward frames are counted on."""
    batch, evaluation, frame = trip.position
    is_backward = stage != NO_STAGE and trip.frame.spec.phase is not Phase.FORWARD
    return LogicalTime(batch, evaluation, is_backward, -stage if is_backward else stage, frame, stage)


class Witness(NamedTuple):
    """A rank as the election sees it. ``reported_batch``: the last batch whose whole forward it has reported."""

    liveness: Liveness
    progress: Position
    trip: Trip | None
    stage: int = NO_STAGE
    reported_batch: int = -1


@dataclass(frozen=True, slots=True)
class Verdict:
    """The first trip over all ranks.

    ``tripped`` is the rank of ``trip``, and ``also`` the others that tripped, in logical order. ``missing``: who did not answer.
    """

    tripped: int
    trip: Trip
    cause: Cause
    evidence: str
    certainty: Certainty
    missing: tuple[int, ...]
    also: tuple[tuple[int, Trip], ...]
    world_size: int
    reason: str

    @property
    def rank(self) -> int | None:
        """The culprit; None where no single rank is one."""
        return None if self.cause is Cause.DIVERGENCE else self.tripped

    @property
    def all_tripped(self) -> tuple[tuple[int, Trip], ...]:
        """Every rank that tripped with its trip, in logical order."""
        return ((self.tripped, self.trip), *self.also)

    @property
    def answered(self) -> int:
        return self.world_size - len(self.missing)


def elect(
    witnesses: Mapping[int, Witness],
    world_size: int,
    since_first_trip: float,
    window: float,
    unsure: Collection[int] | None = None,
) -> tuple[Verdict | None, str]:
    """The verdict, or None while a rank may still report an earlier trip; and why, in words.

    Args:
        witnesses: the ranks that ever connected, by number; at least one of them has tripped.
        since_first_trip: seconds since the collector received the first trip.
        window: seconds to wait for the ranks that have not answered.
        unsure: the ranks that may not have answered; None: any. ``witnesses`` may leave out a rank that is neither among
            these nor tripped.
    """
    trips = {rank: witness.trip for rank, witness in witnesses.items() if witness.trip is not None}
    times = {rank: logical_time_of(trip, witnesses[rank].stage) for rank, trip in trips.items()}
    order = sorted(trips, key=lambda rank: (times[rank], trips[rank].is_from_others, rank))
    first = order[0]
    target = times[first]
    unsure = range(world_size) if unsure is None else sorted(unsure)
    silent = [rank for rank in unsure if rank not in witnesses or not _has_answered(witnesses[rank], target)]
    waited_for = [rank for rank in silent if rank not in witnesses or witnesses[rank].liveness is Liveness.LIVE]
    if waited_for and since_first_trip < window:
        return None, describe_waiting(waited_for, target)
    if not silent:
        reason = f"every rank has passed this frame{_of_stage(target.stage)} or tripped itself"
    elif waited_for:
        reason = f"the decision window of {window:g} s is over and {name_ranks(silent)} did not answer"
    else:
        reason = f"{name_ranks(silent)} ended without an answer"
    cause, evidence = classify(trips[first])
    verdict = Verdict(
        tripped=first,
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


def is_waited_for(witness: Witness, target: LogicalTime) -> bool:
    """Whether this rank may still report a trip before ``target``."""
    return witness.liveness is Liveness.LIVE and not _has_answered(witness, target)


def describe_waiting(ranks: list[int], target: LogicalTime) -> str:
    """``waiting for ranks 1, 2 to pass frame 7 of batch 3``."""
    return f"waiting for {name_ranks(ranks)} to pass frame {target.frame} of batch {target.batch}{_of_stage(target.stage)}"


def _has_answered(witness: Witness, target: LogicalTime) -> bool:
    return witness.trip is not None or witness.liveness is Liveness.DONE or _has_passed(witness, target)


def _has_passed(witness: Witness, target: LogicalTime) -> bool:
    """Whether all that the rank runs before ``target`` was finite.

    A rank of another stage never comes to the target's frame. A rank of an earlier stage has passed with its own forward of
    the batch; a rank of a later stage with its forward of the batch before, since it waits for this batch in vain. For a
    backward, only ranks of the same stage are waited for: backwards overlap, and a rank reports them with its next forward
    or optimizer.
    """
    if witness.stage == target.stage:
        return witness.progress > (target.batch, target.eval, target.frame)
    comes_later = witness.stage > target.stage and not target.is_backward
    at, aim = witness.progress[:2], (target.batch, target.eval)
    if at > aim or (at == aim and comes_later):
        return True
    return not target.eval and not witness.progress.eval and witness.reported_batch >= target.batch - comes_later


def _of_stage(stage: int) -> str:
    return f" of stage {stage}" if stage != NO_STAGE else ""
