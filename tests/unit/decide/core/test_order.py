"""Ranks that count batches unequally: the optimizer step orders them, and no verdict over them is called complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import makers
from desk import Desk, connected
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import FrameTable, Moment
from rankwatch_monitor.decide.core.options import Options
from rankwatch_monitor.decide.trip.verdict import Certainty

FRAMES, STEPS, ACCUMULATED = 2, 3, 2
"""The frames of a batch, the optimizer steps of a training, and the batches of each."""

TABLE = FrameTable(tuple(makers.frame().spec for _ in range(FRAMES)))
LAST = 99
"""The sequence number of a rank's last message."""


@dataclass(frozen=True)
class Life:
    """One more forward than the others in a step or not; the number of frames until the rank trips, dies or closes."""

    extra_in: int | None
    ends_after: int | None
    end: str


lives = st.builds(
    Life,
    extra_in=st.none() | st.integers(0, STEPS - 1),
    ends_after=st.none() | st.integers(0, FRAMES * ACCUMULATED * STEPS),
    end=st.sampled_from(["trips", "fails", "closes", "switches off"]),
)


def moments_of(life: Life) -> list[Moment]:
    """The moments of the frames that a rank runs."""
    steps = [step for step in range(STEPS) for _ in range(ACCUMULATED + (step == life.extra_in))]
    return [Moment(step, batch, 0, frame) for batch, step in enumerate(steps) for frame in range(FRAMES)]


def after(moment: Moment) -> Moment:
    return moment._replace(frame=moment.frame + 1)


def told_by(life: Life) -> list[messages.Message]:
    """All that a rank sends after HELLO."""
    said: list[messages.Message] = [messages.Table(TABLE)]
    reached = Moment(0, 0, 0, 0)
    for index, moment in enumerate(moments_of(life)):
        if index == life.ends_after:
            ends: dict[str, list[messages.Message]] = {
                "trips": [messages.Tripped(LAST, makers.trip(at=moment.position, step=moment.step))],
                "fails": [messages.Bye(LAST, "failed", "KeyError: 'x'", reached)],
                "closes": [messages.Bye(LAST, "finished", "", reached)],
                "switches off": [messages.Off(LAST, "switched itself off")],
            }
            return said + ends[life.end]
        reached = after(moment)
        said.append(messages.Beat(reached, "forward", 0, 0, 0.0))
        batch = moment.position.batch
        if moment.position.frame == FRAMES - 1:
            summary = makers.summary(batch, of=TABLE)._replace(optimizer_step=moment.step)
            said.append(messages.Batch(batch + 1, summary))
    return [*said, messages.Bye(LAST, "finished", "", reached)]


def trip_of(life: Life) -> Moment | None:
    moments = moments_of(life)
    is_tripped = life.end == "trips" and life.ends_after is not None and life.ends_after < len(moments)
    return moments[life.ends_after or 0] if is_tripped else None


def are_uneven(worlds: Sequence[Life], target: Moment) -> bool:
    """Whether two ranks have done the same batch before ``target``, each in another step."""
    steps: dict[int, set[int]] = {}
    for life in worlds:
        done = moments_of(life)[: life.ends_after]
        for moment in done:
            if moment.frame == FRAMES - 1 and moment < target:
                steps.setdefault(moment.batch, set()).add(moment.step)
    return any(len(found) > 1 for found in steps.values())


def check_verdict(worlds: list[Life], data: st.DataObject) -> None:
    desk = Desk(Options(heartbeat=100, decision_window=100, abort_on_lost=False))
    queues = {rank: [makers.hello(rank, len(worlds)), *told_by(life)] for rank, life in enumerate(worlds)}
    desk.receive_mixed(queues, data)
    trips = {rank: trip for rank, life in enumerate(worlds) if (trip := trip_of(life)) is not None}
    if not trips:
        assert desk.verdict is None
        return
    target, culprit = min((trip, rank) for rank, trip in trips.items())
    found = desk.decided
    assert (found.rank, found.trip.position, found.trip.optimizer_step) == (culprit, target.position, target.step)
    # The first frame of the training is passed only after it.
    ran = [[after(at) for at in moments_of(life)[: life.ends_after]] for life in worlds]
    passed = {rank: max(moments, default=None) for rank, moments in enumerate(ran)}
    unknown = {rank for rank, at in passed.items() if rank not in trips and (at is None or at <= target)}
    assert set(found.missing) == unknown
    if unknown or are_uneven(worlds, target):
        assert found.certainty is Certainty.PARTIAL
    if all(life.extra_in is None for life in worlds):
        assert not found.uneven
        assert found.certainty is (Certainty.PARTIAL if unknown else Certainty.COMPLETE)
    desk.check_records()


WORLDS = given(worlds=st.lists(lives, min_size=1, max_size=5), data=st.data())


@settings(max_examples=40, derandomize=True)
@WORLDS
def test_the_step_orders_ranks_that_count_batches_unequally(worlds: list[Life], data: st.DataObject) -> None:
    check_verdict(worlds, data)


@pytest.mark.slow
@settings(max_examples=250)
@WORLDS
def test_the_same_in_many_worlds(worlds: list[Life], data: st.DataObject) -> None:
    check_verdict(worlds, data)


def trained(desk: Desk, rank: int, *steps: int, first: int = 0) -> None:
    """The rank reports batches of these optimizer steps."""
    desk.receive(rank, messages.Table(TABLE))
    for batch, step in enumerate(steps, first):
        summary = makers.summary(batch, of=TABLE)._replace(optimizer_step=step)
        desk.receive(rank, messages.Batch(batch + 1, summary))


def test_one_more_forward_on_a_rank_does_not_make_another_one_the_culprit() -> None:
    desk = connected(2)
    trained(desk, 0, 0, 1, 2, 3)
    trained(desk, 1, 0, 0, 1, 2)  # it ran one forward more in the first step
    desk.receive(1, messages.Tripped(9, makers.trip(at=(4, 0, 1), step=3)))
    desk.receive(0, messages.Tripped(9, makers.trip(at=(4, 0, 0), step=4)))  # the all-reduce brought it here a step later
    assert (desk.decided.rank, desk.decided.certainty) == (1, Certainty.PARTIAL)
    assert desk.decided.missing == ()
    assert desk.decided.reason == (
        "ranks 0 and 1 count batches differently: batch 1 is of optimizer step 1 on rank 0, of 0 on rank 1"
    )


def test_batches_that_a_trip_overtook_make_its_verdict_partial() -> None:
    """They tell that ranks count differently, which the moment that rank 0 has reached does not."""
    desk = connected(2, heartbeat=1)
    desk.receive(0, messages.Beat(Moment(4, 5, 0, 2), "forward", 0, 0, 0.0))
    desk.receive(1, messages.Tripped(messages.AHEAD, makers.trip(at=(4, 0, 1), step=4)))
    before = desk.decided.certainty
    trained(desk, 1, 0, 1, 2, 3)
    trained(desk, 0, 0, 1, 1, 2)
    assert (before, desk.decided.certainty) == (Certainty.COMPLETE, Certainty.PARTIAL)
    assert desk.decided.reason.startswith("ranks 0 and 1 count batches differently: batch 2")


def test_the_odd_one_of_many_ranks_is_named() -> None:
    desk = connected(4)
    for rank in (0, 2, 3, 1):
        trained(desk, rank, *((0, 1, 2) if rank != 1 else (0, 0, 1)))
    desk.receive(0, messages.Tripped(9, makers.trip(at=(0, 0, 0), step=0)))
    odd = "rank 1 counts more batches than others: its batch 1 is of optimizer step 0, on rank 0 of 1"
    assert desk.decided.uneven == odd


def test_a_weight_that_is_bad_on_ranks_that_count_unequally_is_no_single_ranks() -> None:
    desk = connected(2)
    trained(desk, 0, 0, 1, 2)
    trained(desk, 1, 0, 0, 1, 2)
    weight = makers.reading("weight", makers.NAN)
    for rank, first in ((1, 4), (0, 3)):
        trip = replace(makers.trip(weight, at=(first, 0, 1), step=3), first_of_step=first)
        desk.receive(rank, messages.Tripped(9, trip))
    assert (desk.decided.alike, desk.decided.certainty) == ((0, 1), Certainty.PARTIAL)


@pytest.mark.parametrize(
    "steps",
    [
        [(0, 1, 2, 3), (0, 1)],  # one is behind
        [(0, 0, 0, 1, 1, 1), (0, 0, 0, 1)],  # accumulation
        [(0, 0, 0), (0, 0, 0)],  # an optimizer that torch does not know
    ],
)
def test_ranks_that_count_alike_are_not_called_unequal(steps: list[tuple[int, ...]]) -> None:
    desk = connected(2)
    for rank, of_rank in enumerate(steps):
        trained(desk, rank, *of_rank)
    desk.receive(1, messages.Tripped(9, makers.trip(at=(0, 0, 0), step=0)))
    assert (desk.decided.uneven, desk.decided.certainty) == ("", Certainty.COMPLETE)


def test_stages_with_and_without_something_to_optimize_are_not_called_unequal() -> None:
    desk = Desk()
    for rank in range(2):
        desk.receive(rank, makers.hello(rank, 2, stage=rank))
    trained(desk, 0, 0, 0, 0, 0)  # it is frozen
    trained(desk, 1, 0, 1, 2)
    desk.receive(1, messages.Tripped(9, makers.trip(at=(3, 0, 1), step=3)))
    assert (desk.decided.uneven, desk.decided.certainty) == ("", Certainty.COMPLETE)


def test_what_is_known_of_the_counts_is_known_to_the_next_collector() -> None:
    desk = connected(2)
    trained(desk, 0, 0, 1, 2)
    trained(desk, 1, 0, 0, 1)
    desk.check_records()
    records = desk.records["train-0"]
    again = desk.ledger.restore("train-0", records, [], desk.now)
    assert again.trips.counts.uneven == desk.run.trips.counts.uneven != ""
