"""The election over a fake clock: the culprit is the same in whatever order messages arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import makers
from desk import Desk, connected
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import NO_STAGE, FrameTable, Moment, Phase, Position
from rankwatch_monitor.decide.core.options import Options
from rankwatch_monitor.decide.trip.verdict import Certainty, Liveness, Witness, elect, logical_time_of

FEW = settings(max_examples=50, derandomize=True)
"""The same examples each time."""

MANY = settings(max_examples=1000)


@dataclass(frozen=True)
class Life:
    """What one rank will do: trip at a position or not, and die after a number of steps or not."""

    trips_at: Position | None
    dies_at: int | None


FORWARD, FRAMES = 2, 3
POSITIONS = [Position(batch, 0, frame) for batch in range(3) for frame in range(FRAMES)]

TABLE = FrameTable(tuple(makers.frame().spec for _ in range(FORWARD)))
BACKWARD_TABLE = FrameTable((makers.frame(makers.reading("grad_input"), phase=Phase.BACKWARD).spec,) * (FRAMES - FORWARD))
LAST = 99
"""The sequence number of a rank's last message."""

lives = st.builds(Life, st.none() | st.sampled_from(POSITIONS), st.none() | st.integers(0, len(POSITIONS)))


def told_by(life: Life, *, beats: bool) -> list[messages.Message]:
    """All that a rank sends, in its order, after HELLO."""
    said: list[messages.Message] = []
    for step, position in enumerate(POSITIONS):
        if step == life.dies_at:
            return [*said, messages.Bye(LAST, "failed", "KeyError: 'x'")]
        if position == life.trips_at:
            return [*said, messages.Tripped(LAST, makers.trip(at=position))]
        if beats:
            said.append(makers.beat(position.batch, 0, position.frame + 1))
        if position.frame == FORWARD - 1:
            part = makers.summary(position.batch, of=TABLE)
            said += [messages.Table(TABLE), messages.Batch(2 * position.batch + 1, part)]
        elif position.frame == FRAMES - 1:
            part = makers.summary(position.batch, first=FORWARD, of=BACKWARD_TABLE)
            said += [messages.Table(BACKWARD_TABLE), messages.Batch(2 * position.batch + 2, part)]
    return [*said, messages.Bye(LAST, "finished", "")]


def what_is_told(steps: int, *, beats: bool) -> int:
    """How many of its steps a rank has reported: without beats, only whole parts of a batch."""
    return steps if beats else max(step for step in range(steps + 1) if step % FRAMES in (0, FORWARD))


def what_is_true(worlds: Sequence[Life], *, beats: bool) -> tuple[int, Position, set[int]] | None:
    """The culprit, its position, and the ranks that can never answer, worked out from the whole world."""
    trips = []
    for rank, life in enumerate(worlds):
        reached = len(POSITIONS) if life.dies_at is None else life.dies_at
        if life.trips_at is not None and POSITIONS.index(life.trips_at) < reached:
            trips.append((life.trips_at, rank))
    if not trips:
        return None
    target, culprit = min(trips)
    silent = {
        rank
        for rank, life in enumerate(worlds)
        if life.dies_at is not None
        and POSITIONS[: what_is_told(life.dies_at, beats=beats)].count(target) == 0
        and (life.trips_at is None or POSITIONS.index(life.trips_at) >= life.dies_at)
    }
    return culprit, target, silent


def check_culprit(worlds: list[Life], beats: bool, data: st.DataObject) -> None:
    """In whatever order messages arrive, the culprit is the one worked out from the whole world."""
    # Losses only count here: with abort_on_lost a loss would end the run, rightly, before a later trip arrives.
    desk = Desk(Options(heartbeat=100, decision_window=100, abort_on_lost=False))
    queues = {rank: [makers.hello(rank, len(worlds)), *told_by(life, beats=beats)] for rank, life in enumerate(worlds)}
    desk.receive_mixed(queues, data)
    truth = what_is_true(worlds, beats=beats)
    if truth is None:
        assert desk.verdict is None
        return
    culprit, target, silent = truth
    assert (desk.decided.rank, desk.decided.trip.position) == (culprit, target)
    assert set(desk.decided.missing) == silent
    assert desk.decided.certainty is (Certainty.PARTIAL if silent else Certainty.COMPLETE)


WORLDS = given(worlds=st.lists(lives, min_size=1, max_size=5), beats=st.booleans(), data=st.data())


@FEW
@WORLDS
def test_the_culprit_does_not_depend_on_the_order_of_arrival(worlds: list[Life], beats: bool, data: st.DataObject) -> None:
    check_culprit(worlds, beats, data)


@pytest.mark.slow
@MANY
@WORLDS
def test_the_same_in_many_worlds(worlds: list[Life], beats: bool, data: st.DataObject) -> None:
    check_culprit(worlds, beats, data)


STAGES = (4, 1, 2)
"""How many frames a micro-batch has on each stage of a pipeline."""


def told_by_stage(stage: int, life: Life) -> list[messages.Message]:
    """All that a rank of a stage sends after HELLO about its forwards, one micro-batch after the other."""
    table = FrameTable((TABLE.specs[0],) * STAGES[stage])
    said: list[messages.Message] = []
    for step, position in enumerate(positions_of(stage)):
        if step == life.dies_at:
            return [*said, messages.Bye(LAST, "failed", "KeyError: 'x'")]
        if position == life.trips_at:
            return [*said, messages.Tripped(LAST, makers.trip(at=position))]
        if position.frame == STAGES[stage] - 1:
            said += [messages.Table(table), messages.Batch(position.batch + 1, makers.summary(position.batch, of=table))]
    return [*said, messages.Bye(LAST, "finished", "")]


def positions_of(stage: int) -> list[Position]:
    return [Position(batch, 0, frame) for batch in range(3) for frame in range(STAGES[stage])]


@st.composite
def pipelines(draw: st.DrawFn) -> list[tuple[int, Life]]:
    """Ranks with their stages: one or two ranks for each stage."""
    world = []
    for stage in range(len(STAGES)):
        places = positions_of(stage)
        trips_at, dies_at = st.none() | st.sampled_from(places), st.none() | st.integers(0, len(places))
        world += [(stage, Life(draw(trips_at), draw(dies_at))) for _ in range(draw(st.integers(1, 2)))]
    return world


def check_culprit_of_pipeline(world: list[tuple[int, Life]], data: st.DataObject) -> None:
    desk = Desk(Options(heartbeat=100, decision_window=100, abort_on_lost=False))
    queues = {
        rank: [makers.hello(rank, len(world), stage=stage), *told_by_stage(stage, life)]
        for rank, (stage, life) in enumerate(world)
    }
    reached = {
        rank: (life.trips_at.batch, stage, life.trips_at.frame)
        for rank, (stage, life) in enumerate(world)
        if life.trips_at is not None
        and positions_of(stage).index(life.trips_at) < (99 if life.dies_at is None else life.dies_at)
    }
    desk.receive_mixed(queues, data)
    if not reached:
        assert desk.verdict is None
        return
    (batch, stage, frame), culprit = min((place, rank) for rank, place in reached.items())
    assert (desk.decided.rank, desk.decided.trip.position) == (culprit, (batch, 0, frame))
    silent = {
        rank
        for rank, (own, life) in enumerate(world)
        if life.dies_at is not None
        and rank not in reached
        and life.dies_at // STAGES[own] < batch + (own <= stage)  # the micro-batches that it has reported
    }
    assert set(desk.decided.missing) == silent


PIPELINES = given(world=pipelines(), data=st.data())


@FEW
@PIPELINES
def test_the_culprit_of_a_pipeline_does_not_depend_on_the_order_of_arrival(
    world: list[tuple[int, Life]], data: st.DataObject
) -> None:
    check_culprit_of_pipeline(world, data)


@pytest.mark.slow
@MANY
@PIPELINES
def test_the_same_in_many_pipelines(world: list[tuple[int, Life]], data: st.DataObject) -> None:
    check_culprit_of_pipeline(world, data)


def test_a_pipeline_is_ordered_by_stage_within_a_batch_and_its_backward_by_stage_from_the_end() -> None:
    forward = [logical_time_of(makers.trip(at=(3, 0, frame)), stage) for stage, frame in ((0, 9), (1, 2), (1, 5), (2, 0))]
    later = (2, 4, Phase.BACKWARD), (1, 8, Phase.RECOMPUTE), (1, 9, Phase.BACKWARD), (0, 11, Phase.BACKWARD)
    backward = [logical_time_of(makers.trip(at=(3, 0, frame), phase=phase), stage) for stage, frame, phase in later]
    places = [*forward, *backward, logical_time_of(makers.trip(at=(4, 0, 0)), 0)]
    assert places == sorted(places)
    alone = makers.trip(at=(3, 0, 5)), makers.trip(at=(3, 0, 6), phase=Phase.BACKWARD)
    assert logical_time_of(alone[0], NO_STAGE) < logical_time_of(alone[1], NO_STAGE)


@pytest.mark.parametrize(
    ("phase", "stage", "at", "told", "passed"),
    [
        (Phase.FORWARD, 0, (3, 0, 9), 3, True),  # it has handed this batch on
        (Phase.FORWARD, 0, (3, 0, 9), 2, False),  # it may still trip in this batch
        (Phase.FORWARD, 0, (4, 0, 0), 2, True),
        (Phase.FORWARD, 1, (3, 0, 6), 2, True),
        (Phase.FORWARD, 1, (3, 0, 5), 2, False),
        (Phase.FORWARD, 2, (2, 0, 4), 2, True),  # it waits for this batch
        (Phase.FORWARD, 2, (3, 0, 0), 2, True),
        (Phase.FORWARD, 2, (2, 0, 4), 1, False),  # the batch before is still on its way to that stage
        (Phase.FORWARD, 2, (2, 1, 4), 2, False),  # in an eval after that batch
        (Phase.BACKWARD, 2, (2, 0, 4), 2, False),
        (Phase.BACKWARD, 2, (3, 0, 4), 3, True),
        (Phase.BACKWARD, 0, (3, 0, 4), 3, True),
    ],
)
def test_who_has_passed_a_trip_of_another_stage(
    phase: Phase, stage: int, at: tuple[int, int, int], told: int, passed: bool
) -> None:
    trip = makers.trip(at=(3, 0, 5), phase=phase)
    witnesses = {
        0: Witness(Liveness.LIVE, Moment(0, *trip.position), trip, 1, 2),
        1: Witness(Liveness.LIVE, Moment(0, *at), None, stage, told),
    }
    found, reason = elect(witnesses, 2, 0.0, 2.0)
    assert (found is not None) is passed
    assert passed or reason == "waiting for rank 1 to pass frame 5 of batch 3 of stage 1"


def test_the_frames_of_a_batch_are_those_of_the_culprits_stage() -> None:
    desk = Desk()
    for rank in range(4):
        desk.receive(rank, makers.hello(rank, 4, stage=rank // 2))
    three = FrameTable((TABLE.specs[0],) * 3)
    for rank, table in ((0, three), (1, three), (3, TABLE)):
        desk.receive(rank, messages.Table(table), messages.Batch(1, makers.summary(0, of=table)))
    desk.receive(2, messages.Tripped(2, makers.trip(at=(0, 0, 1))), messages.Ack(2, abort=True))
    desk.wait(4.0)
    assert desk.reports[0].frames_in_batch == FORWARD
    assert [row.stage for row in desk.reports[0].ranks] == [0, 0, 1, 1]


@given(order=st.permutations(range(4)), again=st.lists(st.integers(0, 3), max_size=8))
def test_messages_sent_again_count_once(order: list[int], again: list[int]) -> None:
    desk = connected(4)
    trips = {rank: messages.Tripped(7, makers.trip(at=(2, 0, rank // 2))) for rank in range(4)}
    for rank in [*order, *again]:
        desk.receive(rank, trips[rank])
    assert (desk.decided.rank, [rank for rank, _ in desk.decided.also]) == (0, [1, 2, 3])


def test_equal_positions_are_all_named_lowest_rank_first() -> None:
    desk = connected(3)
    desk.receive(2, messages.Tripped(1, makers.trip(at=(4, 0, 1))))
    desk.receive(1, messages.Tripped(1, makers.trip(at=(4, 0, 1))))
    assert len(desk.sent(0, messages.Probe)) == 1  # the second trip is no earlier: it asks nobody again
    desk.receive(0, makers.beat(4, 0, 2))
    assert desk.decided.rank == 1
    assert [rank for rank, _ in desk.decided.also] == [2]
    assert desk.decided.certainty is Certainty.COMPLETE


@pytest.mark.parametrize(
    ("at", "certainty", "missing"), [((4, 0, 7), Certainty.PARTIAL, (1,)), ((5, 0, 1), Certainty.COMPLETE, ())]
)
def test_a_rank_that_closed_its_watch_is_known_to_be_finite_only_past_the_trip(
    at: tuple[int, int, int], certainty: Certainty, missing: tuple[int, ...]
) -> None:
    desk = connected(2)
    desk.receive(1, makers.beat(0, 0, 1), messages.Bye(1, "finished", "", makers.moment(*at)))
    desk.receive(0, messages.Tripped(1, makers.trip(at=(5, 0, 0))))
    assert (desk.decided.certainty, desk.decided.missing) == (certainty, missing)
    assert not missing or desk.decided.reason == "rank 1 closed its watch after batch 4"


FAULT = "switched itself off in batch 3 by an error of its own: KeyError('x')"


@pytest.mark.parametrize("is_first", [True, False])
def test_a_rank_whose_watch_switched_itself_off_is_not_waited_for_and_not_known_to_be_finite(is_first: bool) -> None:
    desk = connected(3)
    trip = messages.Tripped(1, makers.trip(at=(5, 0, 2)))
    told: list[tuple[int, messages.Message]] = [(1, messages.Off(1, FAULT)), (0, trip)]
    desk.receive(2, makers.beat(5, 0, 3))
    for rank, message in told if is_first else reversed(told):
        assert desk.verdict is None
        desk.receive(rank, message)
    assert (desk.decided.certainty, desk.decided.missing) == (Certainty.PARTIAL, (1,))
    assert desk.decided.reason == f"rank 1's watch {FAULT}"
    assert desk.sent(1, messages.Abort), "its process lives, and is stopped with the others"


def test_the_steps_of_a_rank_whose_watch_is_off_do_not_say_that_it_was_finite() -> None:
    desk = connected(2)
    stepped = messages.Beat(makers.moment(3, 0, 0, step=7), "forward", 0, 0, 1000.0)
    desk.receive(1, makers.beat(3, 0, 0), messages.Off(1, FAULT), stepped)
    desk.receive(0, messages.Tripped(1, makers.trip(at=(5, 0, 2))))
    assert (desk.decided.certainty, desk.decided.missing) == (Certainty.PARTIAL, (1,))


def test_a_watch_that_switches_itself_off_past_the_trip_was_finite_there() -> None:
    desk = connected(2)
    desk.receive(1, makers.beat(5, 0, 3), messages.Off(1, FAULT))
    desk.receive(0, messages.Tripped(1, makers.trip(at=(5, 0, 2))))
    assert desk.decided.certainty is Certainty.COMPLETE


def test_no_verdict_before_the_others_have_passed_and_they_are_asked_to_tell() -> None:
    desk = connected(2)
    desk.receive(0, messages.Tripped(1, makers.trip(at=(3, 0, 5))))
    assert desk.verdict is None
    assert desk.sent(1, messages.Probe) == [messages.Probe(makers.moment(3, 0, 5))]
    desk.receive(1, makers.beat(3, 0, 5))  # it is running that frame
    assert desk.verdict is None
    assert len(desk.sent(1, messages.Ack)) == 1
    desk.receive(1, makers.beat(3, 0, 6))
    assert desk.verdict is not None
    assert len(desk.sent(1, messages.Ack)) == 1  # instead it hears how the election ends
    assert len(desk.sent(1, messages.Abort)) == 1


def test_a_part_of_a_batch_tells_how_far_its_rank_has_come() -> None:
    for first, passed in ((0, False), (3, False), (4, True)):
        desk = connected(2)
        desk.receive(0, messages.Tripped(1, makers.trip(at=(3, 0, 5))))
        desk.receive(1, messages.Table(makers.table()), messages.Batch(1, makers.summary(3, first=first)))  # of two frames
        assert (desk.verdict is not None) is passed


def test_parts_that_come_late_do_not_take_a_rank_back() -> None:
    desk = connected(1)
    desk.receive(0, messages.Table(makers.table()))
    for seq, summary in enumerate((makers.summary(3), makers.summary(4), makers.summary(3, first=2)), 1):
        desk.receive(0, messages.Batch(seq, summary))
    record = desk.run.ranks[0]
    assert (record.last_batch, record.progress) == (4, makers.moment(4, 0, 2))


def test_a_beat_that_was_made_before_the_batch_it_follows_does_not_take_a_rank_back() -> None:
    desk = connected(3)
    desk.receive(0, messages.Tripped(1, makers.trip(at=(3, 0, 1))))
    desk.receive(1, messages.Table(makers.table()), messages.Batch(1, makers.summary(3)), makers.beat(3, 0, 1))
    desk.receive(2, makers.beat(3, 0, 2))
    assert desk.decided.certainty is Certainty.COMPLETE


ROOT_ALONE = FrameTable((makers.frame(module="").spec,))


@pytest.mark.parametrize(
    ("at", "module", "phase", "expected"),
    [
        ((2, 0, 1), "layer", Phase.FORWARD, 2),
        ((3, 0, 0), "layer", Phase.FORWARD, 2),
        # The root's frame is the last of a forward, also where only the root was reported.
        ((3, 0, 0), "", Phase.FORWARD, 1),
        ((2, 0, 3), "layer", Phase.BACKWARD, 4),
        ((2, 0, 9), "layer", Phase.BACKWARD, None),
        ((3, 0, 1), "", Phase.BACKWARD, None),
    ],
)
def test_the_frames_of_the_culprits_batch_are_those_of_the_last_one_like_it(
    at: tuple[int, int, int], module: str, phase: Phase, expected: int | None
) -> None:
    desk = connected(1)
    parts = [makers.summary(1), makers.summary(1, first=2), makers.summary(2), makers.summary(3, of=ROOT_ALONE)]
    desk.receive(0, messages.Table(makers.table()), messages.Table(ROOT_ALONE))
    desk.receive(0, *(messages.Batch(seq, part) for seq, part in enumerate(parts, 1) if part.batch <= at[0]))
    desk.receive(0, messages.Tripped(9, makers.trip(at=at, module=module, phase=phase)), messages.Ack(9, abort=True))
    assert desk.reports[0].frames_in_batch == expected


def test_when_the_window_is_over_the_missing_ranks_are_named() -> None:
    desk = connected(4, ranks=[0, 1, 2], decision_window=2.0)
    desk.receive(0, messages.Tripped(1, makers.trip(at=(3, 0, 5))))
    desk.receive(1, makers.beat(3, 0, 9))
    desk.wait(1.9)
    assert desk.verdict is None
    desk.wait(0.2)
    assert (desk.decided.certainty, desk.decided.missing) == (Certainty.PARTIAL, (2, 3))
    assert "decision window of 2 s" in desk.decided.reason


def test_a_later_trip_does_not_reopen_a_verdict() -> None:
    desk = connected(1)
    desk.receive(0, messages.Tripped(1, makers.trip(at=(3, 0, 5))))
    first = desk.verdict
    desk.receive(0, messages.Tripped(2, makers.trip(at=(1, 0, 0))))
    assert desk.verdict is first is not None
