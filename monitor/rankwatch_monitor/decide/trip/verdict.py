"""From the trips of the ranks to the verdict: pure, the clock passed in.

The ranks of a data-parallel job run the same program, so (optimizer step, batch, eval, frame) orders them where clocks
cannot. The batch is counted from the step on: a rank may run a forward more in a step than the others. The stages of a
pipeline hand each micro-batch on, so (batch, eval, stage, frame) orders them. The culprit is the earliest trip in this
logical time, once every rank that can still report has passed that time or has tripped itself, or the window is over. What
the gradient guard finds is passed with the end of its step alone: before, no rank has looked at its gradients. Only a rank
that has passed that time was finite there: not one whose watch ended or broke before it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rankwatch.shared.str_enum import StrEnum
from rankwatch.shared.types.frame import BEGINNING, NO_STAGE, Moment, Phase
from rankwatch.shared.types.trip import Cause, Trip
from rankwatch.shared.words.cause import classify
from rankwatch.shared.words.divergence import REPLACED, Divergence, end_of_weights, have_weights_left
from rankwatch.shared.words.text import name_ranks, name_spans

from .at_once import put_together, rank_order, tell_apart, who_has_it

END = 1 << 62
"""In the place of a batch, eval or frame: after all others."""

NO_SINGLE_RANK = "no single rank"
"""Who the culprit is where ranks went bad alike."""


class Liveness(enum.Enum):
    """What a rank can still contribute to the verdict."""

    LIVE = "live"
    """Running, or not yet connected: the election waits for it."""
    OFF = "off"
    """Its watch has switched itself off by an error of its own: it will report no more."""
    GONE = "gone"
    """Dead or failed: it will report no more."""
    DONE = "done"
    """Closed its watch: it will report no more."""


class Certainty(StrEnum):
    COMPLETE = "complete"
    PARTIAL = "partial"


class LogicalTime(NamedTuple):
    """When a rank tripped, in the order that all ranks share.

    The stages of a pipeline run a micro-batch's forward one after the other; its backward then goes through the stages the
    other way round: ``turn`` is the stage, negated in backward. ``batch`` is counted from ``first_of_step`` on, if that is known
    (-1: it is not). ``stage``, and what follows it, is no part of the order.
    ``passed`` is the moment, as this rank counts, that another rank must have passed to be known to have no earlier trip:
    with its backwards as well if it ``settles``.
    """

    step: int
    batch: int
    eval: int
    is_backward: bool
    turn: int
    frame: int
    stage: int
    first_of_step: int
    passed: Moment
    settles: bool
    is_unfound: bool

    @property
    def order(self) -> tuple[int, ...]:
        return self[:6]


def logical_time_of(trip: Trip, stage: int) -> LogicalTime:
    """The logical time of a rank's trip. Without a pipeline the frame is enough: backward frames are counted on."""
    has_stage, is_backward = stage != NO_STAGE, trip.frame.spec.phase is Phase.BACKWARD
    at = passed = Moment(trip.optimizer_step, *trip.position).in_stage(stage)
    first = -1 if has_stage else trip.first_of_step
    if trip.guarded or trip.left_out is not None:  # what was seen in a forward is told with the guard's look, too
        looked = (at if trip.looked_at == BEGINNING else trip.looked_at).in_stage(stage)
        passed = Moment(looked.step, looked.batch, END, 0) if has_stage else Moment(looked.step, END, 0, 0)
        if trip.unfound:
            at, first = (looked._replace(eval=0, frame=END) if has_stage else passed), -1
    goes_back = has_stage and trip.frame.spec.phase is not Phase.FORWARD
    return LogicalTime(
        at.step, at.batch - max(first, 0), at.eval, goes_back, -stage if goes_back else stage, at.frame,
        stage, first, passed, is_backward and not trip.guarded, bool(trip.unfound),
    )  # fmt: skip


class Witness(NamedTuple):
    """A rank as the election sees it.

    ``reported_batch`` is the last batch whose whole forward it has reported; ``fault`` the error that switched its watch off.
    ``settled`` is the moment before which it does not trip in a backward either; None: as an agent that does not tell it.
    ``first_of_step``: an optimizer step, and the first batch since the one before; -1: not known.
    """

    liveness: Liveness
    progress: Moment
    trip: Trip | None
    stage: int = NO_STAGE
    reported_batch: int = -1
    fault: str = ""
    settled: Moment | None = None
    first_of_step: tuple[int, int] = (-1, -1)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The first trip over all ranks.

    ``tripped`` is the rank of ``trip``, and ``also`` the others that tripped, in logical order. ``missing`` are the ranks of
    which it is not known whether they were finite there. ``alike`` are ranks that tripped at once with one bad reading, which
    came to all of them: none of them is known to have made it; empty where one is. ``uneven`` says which ranks count otherwise.
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
    alike: tuple[int, ...] = ()
    uneven: str = ""
    divergence: Divergence | None = None

    @property
    def rank(self) -> int | None:
        """The culprit, or the lowest of the ranks that are ``alike``; None where the training diverged on all ranks."""
        return None if self.cause is Cause.DIVERGENCE else self.tripped

    @property
    def all_tripped(self) -> tuple[tuple[int, Trip], ...]:
        """Every rank that tripped with its trip, in logical order."""
        return ((self.tripped, self.trip), *self.also)

    @property
    def tripped_alike(self) -> tuple[int, ...]:
        """The ranks of which any close-up shows what went bad, the one of ``trip`` first: several, where no single one is the
        culprit."""
        if self.rank is not None and not self.alike:
            return (self.tripped,)
        return tuple(rank for rank, trip in self.all_tripped if _place(trip) == _place(self.trip))

    @property
    def is_everywhere(self) -> bool:
        """Whether all of several ranks tripped in one batch, each of the verdict's cause."""
        trips = [trip for _, trip in self.all_tripped]
        is_one_batch = len({trip.position[:2] for trip in trips}) == 1
        return len(trips) == self.world_size > 1 and is_one_batch and all(classify(one)[0] is self.cause for one in trips)

    @property
    def answered(self) -> int:
        return self.world_size - len(self.missing)

    def who(self, name: str) -> str:
        """Whom reports call the culprit; ``name`` is the full name of the rank ``tripped``."""
        if self.rank is None:
            return NO_SINGLE_RANK
        if len(self.alike) == 1:
            return f"{NO_SINGLE_RANK} is known ({name_spans(self.alike)} of {self.world_size} has it)"
        at_once = f"{name_spans(self.alike)} of {self.world_size} at once"
        return f"{NO_SINGLE_RANK} ({at_once})" if self.alike else name


def _place(trip: Trip) -> tuple[object, ...]:
    """Where a rank went bad, and in which reading."""
    spec = trip.frame.spec
    return trip.position[:2], spec.module, spec.phase, trip.culprit.label


def elect(
    witnesses: Mapping[int, Witness],
    world_size: int,
    since_first_trip: float,
    window: float,
    unsure: Collection[int] | None = None,
    uneven: str = "",
) -> tuple[Verdict | None, str]:
    """The verdict, or None while a rank may still report an earlier trip; and why, in words.

    Args:
        witnesses: the ranks that ever connected, by number; at least one of them has tripped.
        since_first_trip: seconds since the collector received the first trip.
        window: seconds to wait for the ranks that have not answered.
        unsure: the ranks that may not have answered; None: any. ``witnesses`` may leave out a rank that is neither among
            these nor tripped.
        uneven: which ranks count batches and optimizer steps otherwise than the others; empty: all count alike.
    """
    trips = {rank: witness.trip for rank, witness in witnesses.items() if witness.trip is not None}
    times = {rank: logical_time_of(trip, witnesses[rank].stage) for rank, trip in trips.items()}
    order = sorted(trips, key=lambda rank: (times[rank].order, rank_order(rank, trips[rank])))
    first = order[0]
    target = times[first]
    unsure = range(world_size) if unsure is None else sorted(unsure)
    silent = [rank for rank in unsure if rank not in witnesses or not has_answered(witnesses[rank], target)]
    waited_for = [rank for rank in silent if rank not in witnesses or witnesses[rank].liveness is Liveness.LIVE]
    if waited_for and since_first_trip < window:
        return None, describe_waiting(waited_for, target)
    doubts = [*_explain(silent, witnesses, window), *([uneven] if uneven else [])]
    reason = "; ".join(doubts) or f"every rank has passed this frame{_of_stage(target.stage)} or tripped itself"
    cause, _ = classify(trips[first])
    at_once = [rank for rank in order if times[rank].order == target.order]
    alike = who_has_it(first, at_once, trips, cause, world_size)
    is_told, which = tell_apart(alike, trips, cause, world_size, have_all_answered=not silent)
    trip = put_together(alike, trips, world_size, have_all_answered=not silent)
    cause, evidence = classify(trip)
    evidence = f"{evidence}; {which}" if which else evidence
    told = [trips[rank] for rank in alike]
    if len(alike) == world_size > 1 and not is_told and cause in REPLACED and have_weights_left(told):
        cause, evidence = Cause.DIVERGENCE, end_of_weights(told, cause, evidence)
    verdict = Verdict(
        tripped=first,
        trip=trip,
        cause=cause,
        evidence=evidence,
        certainty=Certainty.PARTIAL if doubts else Certainty.COMPLETE,
        missing=tuple(silent),
        also=tuple((rank, trips[rank]) for rank in order[1:]),
        world_size=world_size,
        reason=reason,
        alike=() if is_told else tuple(sorted(alike)),
        uneven=uneven,
    )
    return verdict, reason


def doubt(verdict: Verdict, uneven: str) -> Verdict:
    """The verdict, once the batches that came after it say that ranks count them differently."""
    reasons = [verdict.reason] if verdict.certainty is Certainty.PARTIAL else []
    return replace(verdict, certainty=Certainty.PARTIAL, reason="; ".join([*reasons, uneven]), uneven=uneven)


def _explain(silent: Sequence[int], witnesses: Mapping[int, Witness], window: float) -> list[str]:
    """Why it is not known whether these ranks were finite."""
    by_liveness: dict[Liveness, list[int]] = {}
    for rank in silent:
        liveness = witnesses[rank].liveness if rank in witnesses else Liveness.LIVE
        by_liveness.setdefault(liveness, []).append(rank)
    told = []
    if late := by_liveness.get(Liveness.LIVE):
        told.append(f"the decision window of {window:g} s is over and {name_ranks(late)} did not answer")
    if gone := by_liveness.get(Liveness.GONE):
        told.append(f"{name_ranks(gone)} ended without an answer")
    if off := by_liveness.get(Liveness.OFF):
        told.append(f"rank {off[0]}'s watch {witnesses[off[0]].fault}")
        told += [f"so did the watch of {name_ranks(off[1:])}"] if off[1:] else []
    if done := by_liveness.get(Liveness.DONE):
        batch = max(witnesses[rank].progress.position.batch for rank in done)
        when = f"after batch {batch}" if batch >= 0 else "before its first batch"
        told.append(f"{name_ranks(done)} closed {'its watch' if len(done) == 1 else 'their watches'} {when}")
    return told


def is_waited_for(witness: Witness, target: LogicalTime) -> bool:
    """Whether this rank may still report a trip before ``target``."""
    return witness.liveness is Liveness.LIVE and not has_answered(witness, target)


def describe_waiting(ranks: list[int], target: LogicalTime) -> str:
    """``waiting for ranks 1, 2 to pass frame 7 of batch 3``, or ``to end the step after batch 3``."""
    at = target.passed
    what = f"pass frame {at.frame} of batch {at.batch}"
    if at.batch == END:
        what = f"end optimizer step {at.step}"
    elif at.eval == END:
        what = f"end the step after batch {at.batch}"
    return f"waiting for {name_ranks(ranks)} to {what}{_of_stage(target.stage)}"


def has_answered(witness: Witness, target: LogicalTime) -> bool:
    """Whether it is known that this rank does not trip before ``target``."""
    return witness.trip is not None or _has_passed(witness, target)


def _has_passed(witness: Witness, target: LogicalTime) -> bool:
    """Whether all that the rank runs before ``target`` was finite.

    A rank of another stage never comes to the target's frame. A rank of an earlier stage has passed with its own forward of
    the batch; a rank of a later stage with its forward of the batch before, since it waits for this batch in vain. For a
    backward, only ranks of the same stage are waited for: backwards overlap, and a rank reports them with its next forward
    or optimizer.
    """
    if witness.stage == target.stage:
        at, passed = witness.progress, target.passed
        if target.settles and witness.settled is not None:
            at = witness.settled
        step, first = witness.first_of_step
        if at.step == passed.step == step and target.first_of_step >= 0:  # each counts from its own first batch on
            at = at._replace(batch=at.batch - first + target.first_of_step)
        return at > passed
    comes_later = witness.stage > target.stage and not target.is_backward
    position = witness.progress.position
    here, aim = position[:2], (target.batch, target.eval)
    if here > aim or (here == aim and comes_later):
        return True
    return not target.eval and not position.eval and witness.reported_batch >= target.batch - comes_later


def _of_stage(stage: int) -> str:
    return f" of stage {stage}" if stage != NO_STAGE else ""
