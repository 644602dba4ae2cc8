"""Which runs a reader of the meters receives, and for how long."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from rankwatch_monitor.decide.core.report import Outcome
from rankwatch_monitor.serve.metrics.meters import (
    LOOK_BACK,
    MAX_OVER,
    SHOWN_FOR,
    STEP,
    LoopCounts,
    Lows,
    Meters,
    least,
    with_low,
)
from standings import shown, standing


def told(meters: Meters, now: float) -> list[str]:
    return [gauged.shown.run for gauged in meters.read(now).runs]


def test_a_run_is_read_as_it_was_last_shown() -> None:
    meters = Meters(0.0)
    meters.show(shown(standing(batch=1)), 10.0)
    meters.show(shown(standing(batch=2)), 11.0)
    (gauged,) = meters.read(11.5).runs
    assert (gauged.shown.standings[0].batch, gauged.age, gauged.headroom) == (2, 0.5, None)


def test_the_last_few_runs_that_are_over_are_read_for_a_while() -> None:
    meters = Meters(0.0)
    meters.show(shown(run="long"), 0.0)
    for number in range(MAX_OVER + 3):
        meters.show(shown(run=f"short-{number}", over=True, outcome=Outcome.ABORTED), float(number))
    last = MAX_OVER + 2
    assert told(meters, last) == ["long", *(f"short-{number}" for number in range(3, MAX_OVER + 3))]
    assert told(meters, last + SHOWN_FOR) == ["long", f"short-{last}"]
    assert told(meters, last + SHOWN_FOR + 1) == ["long"]
    assert meters.read(last).ended == {Outcome.ABORTED: MAX_OVER + 3}


def test_runs_that_are_no_longer_read_take_no_memory() -> None:
    meters = Meters(0.0)
    for number in range(3 * MAX_OVER):
        run = f"run-{number}"
        meters.show(shown(run=run), number)
        meters.headroom(run, 1.0, number)
        meters.show(shown(run=run, over=True), number)
    meters.headroom("run-0", 1.0, 100.0)  # a slow disk reports it late
    assert len(meters._shown) == len(meters._lows) == MAX_OVER
    meters.show(shown(run="late", over=True), 2 * SHOWN_FOR)
    assert list(meters._shown) == ["late"]
    assert meters._lows == {}


def test_a_readout_does_not_change_later() -> None:
    meters = Meters(0.0)
    meters.show(shown(run="one"), 0.0)
    before = meters.read(0.0)
    meters.show(shown(run="one", over=True), 1.0)
    meters.show(shown(run="two"), 1.0)
    assert [(gauged.shown.run, gauged.shown.standing.over) for gauged in before.runs] == [("one", False)]
    assert not before.ended


def test_the_age_counts_from_the_last_turn_of_the_loop() -> None:
    meters = Meters(100.0)
    assert (meters.read(103.0).counts, meters.read(103.0).age) == (LoopCounts(), 3.0)
    meters.count(LoopCounts(messages=7, bytes=700), 105.0)
    assert (meters.read(105.25).counts.bytes, meters.read(105.25).age) == (700, 0.25)


def test_the_least_headroom_is_from_the_last_minute_or_else_from_the_last_step() -> None:
    meters = Meters(0.0)
    meters.show(shown(standing()), 0.0)

    def headroom(now: float) -> float | None:
        return meters.read(now).runs[0].headroom

    meters.headroom("train-0", 3.0, 0.0)
    meters.headroom("train-0", 9.0, 20.0)
    assert headroom(LOOK_BACK) == 3.0
    assert headroom(LOOK_BACK + 1) == 9.0
    assert headroom(10 * LOOK_BACK) == 9.0  # an evaluation may take long
    meters.headroom("train-0", math.inf, 11 * LOOK_BACK)
    assert headroom(11 * LOOK_BACK) == math.inf
    meters.headroom("another", 1.0, 0.0)
    assert "another" not in meters._lows


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0, 100)), min_size=1, max_size=60))
def test_the_least_of_the_last_minute_is_exact_to_a_step(tellings: list[tuple[float, float]]) -> None:
    lows: Lows = ()
    now, history = 0.0, []
    for pause, value in tellings:
        now += pause
        lows = with_low(lows, value, now)
        history.append((now, value))
        assert len(lows) <= LOOK_BACK / STEP + 2
        found = least(lows, now)
        assert found is not None
        assert found <= min(value for at, value in history if now - at <= LOOK_BACK - STEP)
        assert found >= min(value for at, value in history if now - at <= LOOK_BACK + STEP)
