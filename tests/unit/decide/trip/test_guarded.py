"""Bad gradients that ranks find before an optimizer step, in any order of arrival: the verdict is on the first one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import makers
from desk import Desk, connected
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import Kind, Moment, Phase
from rankwatch.shared.types.trip import MAX_RERUN, Trip
from rankwatch_monitor.decide.core.options import Options
from rankwatch_monitor.decide.trip.verdict import Certainty

FORWARD, BACKWARD, STEPS = 2, 3, 3
"""Frames of a forward and of its backward; optimizer steps of a training."""

LAST = 99
"""The sequence number of a rank's last message."""

GRADIENT = makers.reading("weight.grad", makers.NAN, kind=Kind.GRADIENT)


@dataclass(frozen=True)
class Life:
    """How many forwards a rank runs in each step, and the one of the bad step whose backward makes a nan there; None: none.

    ``tells``: whether its agent tells what has been settled, and from where batches are counted.
    """

    forwards: tuple[int, ...]
    bad: int | None
    tells: bool = True


@dataclass(frozen=True)
class World:
    """``step`` is the bad one. ``reduces``: what one rank has, all ranks have. ``at_once``: one backward of all forwards."""

    lives: tuple[Life, ...]
    step: int
    reduces: bool
    at_once: bool

    @property
    def guilty(self) -> list[tuple[int, int]]:
        return sorted((life.bad, rank) for rank, life in enumerate(self.lives) if life.bad is not None)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    step, alike = draw(st.integers(0, STEPS - 1)), draw(st.integers(1, 4))
    lives = []
    for _ in range(draw(st.integers(2, 4))):
        forwards = tuple(alike + draw(st.integers(0, 1)) for _ in range(STEPS))
        lives.append(Life(forwards, draw(st.none() | st.integers(0, forwards[step] - 1))))
    return World(tuple(lives), step, draw(st.booleans()), draw(st.booleans()))


def told_by(world: World, rank: int) -> list[messages.Message]:
    """All that a rank sends after HELLO."""
    life, said = world.lives[rank], list[messages.Message]()
    first = 0
    for step, count in enumerate(life.forwards):
        end = Moment(step, first + count - 1, 0, FORWARD + BACKWARD)
        for batch in range(first, first + count):
            waits = Moment(step, first, 0, FORWARD)
            at = Moment(step, batch, 0, FORWARD)
            said.append(beat_of(at, min(at, waits) if world.at_once else at, first))
        said.append(beat_of(end, end, first))
        if step == world.step and (life.bad is not None or (world.reduces and world.guilty)):
            return [*said, messages.Tripped(LAST, trip_of(world, life, first, end))]
        first += count
        said.append(beat_of(end._replace(step=step + 1), end._replace(step=step + 1), first))
    return [*said, messages.Bye(LAST, "finished", "", Moment(STEPS, first - 1, 0, FORWARD + BACKWARD))]


def beat_of(moment: Moment, settled: Moment, first: int) -> messages.Beat:
    return messages.Beat(moment, "backward", 0, 0, 1000.0, first_of_step=first, settled=settled)


def trip_of(world: World, life: Life, first: int, end: Moment) -> Trip:
    """Where its rerun found it; else, what the guard saw, in the batch whose backward ran last."""
    last = first if world.at_once else end.batch
    batch = last if life.bad is None else first + life.bad
    trip = makers.trip(GRADIENT, at=(batch, 0, FORWARD + 1), step=end.step, phase=Phase.BACKWARD)
    unfound = "run again, this rank's own gradient was finite" if life.bad is None else ""
    received = "all_reduce" if unfound else ""
    return replace(trip, guarded=True, unfound=unfound, received=received, first_of_step=first, looked_at=end)


def verdict_in(world: World, data: st.DataObject, window: float) -> Desk:
    desk = Desk(Options(heartbeat=100, decision_window=window, abort_on_lost=False))
    ranks = range(len(world.lives))
    desk.receive_mixed({rank: [makers.hello(rank, len(ranks)), *told_by(world, rank)] for rank in ranks}, data)
    return desk


@settings(max_examples=150, derandomize=True)
@given(world=worlds(), data=st.data())
def test_the_first_one_is_named_however_slow_any_rank_is(world: World, data: st.DataObject) -> None:
    desk = verdict_in(world, data, window=100.0)
    if not world.guilty:
        assert desk.verdict is None
        return
    micro, rank = world.guilty[0]
    first = sum(world.lives[rank].forwards[: world.step])
    assert (desk.decided.rank, desk.decided.trip.position.batch) == (rank, first + micro)
    assert desk.decided.missing == ()
    desk.check_records()


@pytest.mark.slow
@settings(max_examples=500)
@given(world=worlds(), data=st.data(), window=st.sampled_from([0.1, 1.0]))
def test_no_other_one_is_named_as_if_all_had_answered(world: World, data: st.DataObject, window: float) -> None:
    desk = verdict_in(world, data, window)
    if desk.verdict is not None and desk.verdict.certainty is Certainty.COMPLETE:
        assert desk.verdict.rank == world.guilty[0][1]


def received() -> Trip:
    """What came to a rank in its optimizer step 3, of batches 12 to 15: in one backward, whose last one is of batch 12."""
    trip = makers.trip(GRADIENT, at=(12, 0, 19), step=3, phase=Phase.BACKWARD)
    return replace(trip, guarded=True, unfound="run again, it was finite", first_of_step=12, looked_at=Moment(3, 15, 0, 20))


def test_a_rank_that_has_not_looked_yet_is_waited_for_as_long_as_a_rerun_may_take() -> None:
    desk = connected(2)
    desk.receive(0, messages.Tripped(1, received()))
    slow = beat_of(Moment(3, 15, 0, 20), Moment(3, 15, 0, 20), 12)
    desk.keep_hearing(1, slow, times=int(MAX_RERUN), every=1.0)
    assert desk.verdict is None
    own = replace(received(), unfound="", position=makers.trip(at=(14, 0, 13)).position)
    own = replace(own, frames=(makers.frame(GRADIENT, at=(14, 0, 13), phase=Phase.BACKWARD),))
    desk.receive(1, messages.Tripped(1, own))
    assert (desk.decided.rank, desk.decided.certainty) == (1, Certainty.COMPLETE)


def test_who_is_waited_for_is_told_in_words() -> None:
    desk = connected(2)
    desk.receive(0, messages.Tripped(1, received()))
    assert desk.run.waiting == "waiting for rank 1 to end optimizer step 3"
    desk.receive(1, beat_of(Moment(4, 15, 0, 20), Moment(4, 15, 0, 20), 16))
    assert desk.decided.certainty is Certainty.COMPLETE


def test_an_older_agent_is_judged_as_before() -> None:
    """It tells neither where the guard looked, nor what has been settled."""
    desk = connected(2)
    old = replace(received(), first_of_step=-1, looked_at=makers.trip().looked_at)
    desk.receive(0, messages.Tripped(1, old))
    desk.receive(1, makers.beat(4, 0, 1))
    assert (desk.decided.tripped, desk.decided.certainty) == (0, Certainty.COMPLETE)


@pytest.mark.parametrize("settled", [(3, 12, 0, 2), (3, 13, 0, 1)])
def test_a_backward_that_is_to_come_is_waited_for(settled: Sequence[int]) -> None:
    """Of a step whose forwards are all over: a rank's place says nothing of their gradients."""
    desk = connected(2)
    trip = makers.trip(GRADIENT, at=(13, 0, 4), step=3, phase=Phase.BACKWARD)
    desk.receive(0, messages.Tripped(1, replace(trip, first_of_step=12)))
    desk.receive(1, beat_of(Moment(3, 15, 0, 2), Moment(*settled), 12))
    assert desk.verdict is None
    desk.receive(1, beat_of(Moment(3, 15, 0, 5), Moment(3, 14, 0, 2), 12))
    assert (desk.decided.rank, desk.decided.certainty) == (0, Certainty.COMPLETE)
