"""The ledger over a fake clock: who is elected, who is aborted, who is lost, whatever the order things arrive in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import makers
from desk import Desk, peer
from rankwatch.shared import messages
from rankwatch.shared.frame import NO_STAGE, FrameTable, Phase, Position
from rankwatch.shared.notice import NoticeKind
from rankwatch_monitor.decide.effects import Note, Publish, RecordTrace, Send, Show
from rankwatch_monitor.decide.journal import NO_RANK, Entry, JobEnded, JobInterrupted, Left, Opened
from rankwatch_monitor.decide.ledger import Ledger, Malformed, Received, Tick
from rankwatch_monitor.decide.notices import MAX_NOTICES
from rankwatch_monitor.decide.options import Options
from rankwatch_monitor.decide.report import Outcome, RankState, RunStanding
from rankwatch_monitor.decide.run import MAX_TABLES
from rankwatch_monitor.decide.verdict import Certainty, Standing, Witness, elect, place_of

# --- the election ---------------------------------------------------------------------------------------------------------


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
"""The sequence number of what a rank says last."""

lives = st.builds(
    Life,
    trips_at=st.none() | st.sampled_from(POSITIONS),
    dies_at=st.none() | st.integers(0, len(POSITIONS)),
)


def told_by(life: Life, *, beats: bool) -> list[messages.Message]:
    """All that a rank sends, in its order, after HELLO."""
    said: list[messages.Message] = []
    for step, position in enumerate(POSITIONS):
        if step == life.dies_at:
            return [*said, messages.Bye(LAST, "failed", "KeyError: 'x'")]
        if position == life.trips_at:
            return [*said, messages.Tripped(LAST, makers.trip(at=position))]
        if beats:
            said.append(messages.Beat(Position(position.batch, 0, position.frame + 1), "forward", 0, 0, 0.0))
        if position.frame == FORWARD - 1:
            said += [
                messages.Table(TABLE),
                messages.Batch(2 * position.batch + 1, makers.summary(position.batch, of=TABLE)),
            ]
        elif position.frame == FRAMES - 1:
            part = makers.summary(position.batch, first=FORWARD, of=BACKWARD_TABLE)
            said += [messages.Table(BACKWARD_TABLE), messages.Batch(2 * position.batch + 2, part)]
    return [*said, messages.Bye(LAST, "finished", "")]


def what_is_told(steps: int, *, beats: bool) -> int:
    """How many of the steps that a rank has taken it tells of: without beats only whole parts of a batch."""
    return steps if beats else max(step for step in range(steps + 1) if step % FRAMES in (0, FORWARD))


def what_is_true(worlds: Sequence[Life], *, beats: bool) -> tuple[int, Position, set[int]] | None:
    """The culprit, where, and the ranks that can never answer for it, from a view of everything at once."""
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


@settings(max_examples=400, deadline=None)
@given(worlds=st.lists(lives, min_size=1, max_size=5), beats=st.booleans(), data=st.data())
def test_the_culprit_does_not_depend_on_the_order_of_arrival(worlds: list[Life], beats: bool, data: st.DataObject) -> None:
    # Losses are only recorded here (abort_on_lost would rightly end the run before a later trip is heard of).
    desk = Desk(Options(heartbeat=100, decision_window=100, abort_on_lost=False))
    queues = {rank: [makers.hello(rank, len(worlds)), *told_by(life, beats=beats)] for rank, life in enumerate(worlds)}
    while any(queues.values()):
        rank = data.draw(st.sampled_from([rank for rank, queue in queues.items() if queue]))
        desk.receive(rank, queues[rank].pop(0))
        if data.draw(st.booleans()):
            desk.now += data.draw(st.floats(0, 0.5))
            desk.handle(Tick())
    truth = what_is_true(worlds, beats=beats)
    if truth is None:
        assert desk.verdict is None
        return
    culprit, target, silent = truth
    assert desk.verdict is not None
    assert (desk.verdict.rank, desk.verdict.trip.position) == (culprit, target)
    assert set(desk.verdict.missing) == silent
    assert desk.verdict.certainty is (Certainty.PARTIAL if silent else Certainty.COMPLETE)


STAGES = (4, 1, 2)
"""How many frames a micro-batch has on each stage of a pipeline."""


def told_by_stage(stage: int, life: Life) -> list[messages.Message]:
    """All that a rank of a stage sends of its forwards, after HELLO: micro-batch after micro-batch."""
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
    """Ranks with their stages: one or two of each."""
    world = []
    for stage in range(len(STAGES)):
        places = positions_of(stage)
        trips_at, dies_at = st.none() | st.sampled_from(places), st.none() | st.integers(0, len(places))
        world += [(stage, Life(draw(trips_at), draw(dies_at))) for _ in range(draw(st.integers(1, 2)))]
    return world


@settings(max_examples=400, deadline=None)
@given(world=pipelines(), data=st.data())
def test_the_culprit_of_a_pipeline_does_not_depend_on_the_order_of_arrival(
    world: list[tuple[int, Life]], data: st.DataObject
) -> None:
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
    while any(queues.values()):
        rank = data.draw(st.sampled_from([rank for rank, queue in queues.items() if queue]))
        desk.receive(rank, queues[rank].pop(0))
    if not reached:
        assert desk.verdict is None
        return
    (batch, stage, frame), culprit = min((place, rank) for rank, place in reached.items())
    assert desk.verdict is not None
    assert (desk.verdict.rank, desk.verdict.trip.position) == (culprit, (batch, 0, frame))
    silent = {
        rank
        for rank, (own, life) in enumerate(world)
        if life.dies_at is not None
        and rank not in reached
        and life.dies_at // STAGES[own] < batch + (own <= stage)  # so many micro-batches it has told of
    }
    assert set(desk.verdict.missing) == silent


def test_a_pipeline_is_ordered_by_stage_within_a_batch_and_its_backward_by_stage_from_the_end() -> None:
    forward = [place_of(makers.trip(at=(3, 0, frame)), stage) for stage, frame in ((0, 9), (1, 2), (1, 5), (2, 0))]
    backward = [
        place_of(makers.trip(at=(3, 0, frame), phase=phase), stage)
        for stage, frame, phase in (
            (2, 4, Phase.BACKWARD),
            (1, 8, Phase.RECOMPUTE),
            (1, 9, Phase.BACKWARD),
            (0, 11, Phase.BACKWARD),
        )
    ]
    places = [*forward, *backward, place_of(makers.trip(at=(4, 0, 0)), 0)]
    assert places == sorted(places)
    assert place_of(makers.trip(at=(3, 0, 5)), NO_STAGE) < place_of(
        makers.trip(at=(3, 0, 6), phase=Phase.BACKWARD), NO_STAGE
    )


@pytest.mark.parametrize(
    ("phase", "stage", "at", "told", "passed"),
    [
        (Phase.FORWARD, 0, (3, 0, 9), 3, True),  # it handed this batch on
        (Phase.FORWARD, 0, (3, 0, 9), 2, False),  # and may yet trip in it, for all that is known
        (Phase.FORWARD, 0, (4, 0, 0), 2, True),
        (Phase.FORWARD, 1, (3, 0, 6), 2, True),
        (Phase.FORWARD, 1, (3, 0, 5), 2, False),
        (Phase.FORWARD, 2, (2, 0, 4), 2, True),  # it waits for this batch
        (Phase.FORWARD, 2, (3, 0, 0), 2, True),
        (Phase.FORWARD, 2, (2, 0, 4), 1, False),  # the batch before is still on its way there
        (Phase.FORWARD, 2, (2, 1, 4), 2, False),  # in an eval after it
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
        0: Witness(Standing.LIVE, trip.position, trip, 1, 2),
        1: Witness(Standing.LIVE, Position(*at), None, stage, told),
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


@settings(max_examples=100, deadline=None)
@given(order=st.permutations(range(4)), again=st.lists(st.integers(0, 3), max_size=8))
def test_messages_sent_again_count_once(order: list[int], again: list[int]) -> None:
    desk = Desk()
    desk.connect(4)
    trips = {rank: messages.Tripped(7, makers.trip(at=(2, 0, rank // 2))) for rank in range(4)}
    for rank in [*order, *again]:
        desk.receive(rank, trips[rank])
    assert desk.verdict is not None
    assert (desk.verdict.rank, [rank for rank, _ in desk.verdict.also]) == (0, [1, 2, 3])


def test_equal_positions_are_all_named_lowest_rank_first() -> None:
    desk = Desk()
    desk.connect(3)
    desk.receive(2, messages.Tripped(1, makers.trip(at=(4, 0, 1))))
    desk.receive(1, messages.Tripped(1, makers.trip(at=(4, 0, 1))))
    desk.receive(0, makers.beat(4, 0, 2))
    assert desk.verdict is not None
    assert desk.verdict.rank == 1
    assert [rank for rank, _ in desk.verdict.also] == [2]
    assert desk.verdict.certainty is Certainty.COMPLETE


def test_no_verdict_before_the_others_have_passed_and_they_are_asked_to_tell() -> None:
    desk = Desk()
    desk.connect(2)
    desk.receive(0, messages.Tripped(1, makers.trip(at=(3, 0, 5))))
    assert desk.verdict is None
    assert desk.sent(1, messages.Probe) == [messages.Probe(Position(3, 0, 5))]
    desk.receive(1, makers.beat(3, 0, 5))  # it runs that frame just now
    assert desk.verdict is None
    assert len(desk.sent(1, messages.Ack)) == 1
    desk.receive(1, makers.beat(3, 0, 6))
    assert desk.verdict is not None
    assert len(desk.sent(1, messages.Ack)) == 1  # what it hears instead is how the election ends
    assert len(desk.sent(1, messages.Abort)) == 1


def test_a_batch_summary_tells_that_its_batch_was_passed() -> None:
    desk = Desk()
    desk.connect(2)
    desk.receive(1, messages.Table(makers.table()), messages.Batch(1, makers.summary(3)))
    desk.receive(0, messages.Tripped(1, makers.trip(at=(3, 0, 1))))
    assert desk.verdict is not None


def test_a_part_of_a_batch_tells_how_far_its_rank_has_come() -> None:
    for first, passed in ((0, False), (3, False), (4, True)):
        desk = Desk()
        desk.connect(2)
        desk.receive(0, messages.Tripped(1, makers.trip(at=(3, 0, 5))))
        desk.receive(1, messages.Table(makers.table()), messages.Batch(1, makers.summary(3, first=first)))  # of two frames
        assert (desk.verdict is not None) is passed


def test_parts_that_come_late_do_not_take_a_rank_back() -> None:
    desk = Desk()
    desk.connect(1)
    desk.receive(0, messages.Table(makers.table()))
    for seq, summary in enumerate((makers.summary(3), makers.summary(4), makers.summary(3, first=2)), 1):
        desk.receive(0, messages.Batch(seq, summary))
    record = desk.ledger.runs["train-0"].ranks[0]
    assert (record.last_batch, record.progress) == (4, Position(4, 0, 2))


def test_a_beat_that_was_made_before_the_batch_it_follows_does_not_take_a_rank_back() -> None:
    desk = Desk()
    desk.connect(3)
    desk.receive(0, messages.Tripped(1, makers.trip(at=(3, 0, 1))))
    desk.receive(1, messages.Table(makers.table()), messages.Batch(1, makers.summary(3)), makers.beat(3, 0, 1))
    desk.receive(2, makers.beat(3, 0, 2))
    assert desk.verdict is not None
    assert desk.verdict.certainty is Certainty.COMPLETE


ROOT_ALONE = FrameTable((makers.frame(module="").spec,))


@pytest.mark.parametrize(
    ("at", "module", "phase", "expected"),
    [
        ((2, 0, 1), "layer", Phase.FORWARD, 2),
        ((3, 0, 0), "layer", Phase.FORWARD, 2),
        ((3, 0, 0), "", Phase.FORWARD, 1),  # the root is the last of its forward, in a batch that told of nothing else too
        ((2, 0, 3), "layer", Phase.BACKWARD, 4),
        ((2, 0, 9), "layer", Phase.BACKWARD, None),
        ((3, 0, 1), "", Phase.BACKWARD, None),
    ],
)
def test_the_frames_of_the_culprits_batch_are_those_of_the_last_one_like_it(
    at: tuple[int, int, int], module: str, phase: Phase, expected: int | None
) -> None:
    desk = Desk()
    desk.connect(1)
    parts = [makers.summary(1), makers.summary(1, first=2), makers.summary(2), makers.summary(3, of=ROOT_ALONE)]
    desk.receive(0, messages.Table(makers.table()), messages.Table(ROOT_ALONE))
    desk.receive(0, *(messages.Batch(seq, part) for seq, part in enumerate(parts, 1) if part.batch <= at[0]))
    desk.receive(0, messages.Tripped(9, makers.trip(at=at, module=module, phase=phase)), messages.Ack(9, abort=True))
    assert desk.reports[0].frames_in_batch == expected


def test_when_the_window_is_over_the_missing_ranks_are_named() -> None:
    desk = Desk(Options(decision_window=2.0))
    desk.connect(4, ranks=[0, 1, 2])
    desk.receive(0, messages.Tripped(1, makers.trip(at=(3, 0, 5))))
    desk.receive(1, makers.beat(3, 0, 9))
    desk.wait(1.9)
    assert desk.verdict is None
    desk.wait(0.2)
    assert desk.verdict is not None
    assert (desk.verdict.certainty, desk.verdict.missing) == (Certainty.PARTIAL, (2, 3))
    assert "decision window of 2 s" in desk.verdict.reason


def test_a_later_trip_does_not_reopen_a_verdict() -> None:
    desk = Desk()
    desk.connect(1)
    desk.receive(0, messages.Tripped(1, makers.trip(at=(3, 0, 5))))
    first = desk.verdict
    desk.receive(0, messages.Tripped(2, makers.trip(at=(1, 0, 0))))
    assert desk.verdict is first is not None


# --- the abort ------------------------------------------------------------------------------------------------------------


def test_abort_goes_to_every_rank_and_is_repeated_until_it_is_acknowledged() -> None:
    desk = Desk(Options(abort_repeat=0.5))
    desk.connect(2)
    desk.receive(0, messages.Tripped(1, makers.trip()))
    desk.receive(1, makers.beat(0, 0, 1))
    (abort,) = desk.sent(0, messages.Abort)
    assert isinstance(abort, messages.Abort)
    assert (abort.rank, abort.time, abort.grace) == (0, 1000.0, 10.0)
    assert desk.sent(1, messages.Abort) == [abort]
    desk.receive(0, messages.Ack(1, abort=True))
    desk.take()
    desk.wait(1.1)
    assert desk.sent(0, messages.Abort) == []
    assert desk.sent(1, messages.Abort) == [abort, abort]
    desk.receive(1, messages.Bye(1, "aborted", ""))
    desk.take()
    desk.wait(1.1)
    assert desk.sent(1, messages.Abort) == []


def test_a_rank_that_comes_late_is_told_at_once() -> None:
    desk = Desk(Options(decision_window=0.1))
    desk.connect(2, ranks=[0])
    desk.receive(0, messages.Tripped(1, makers.trip()))
    desk.wait(0.2)
    desk.connect(2, ranks=[1])
    assert len(desk.sent(1, messages.Abort)) == 1


def test_the_report_is_published_once_all_have_acknowledged_and_again_at_the_end() -> None:
    desk = Desk()
    desk.connect(2)
    desk.receive(0, messages.Tripped(1, makers.trip()))
    desk.receive(1, makers.beat(0, 0, 1))
    assert desk.reports == []
    desk.now += 0.25
    desk.receive(0, messages.Ack(1, abort=True))
    desk.receive(1, messages.Ack(1, abort=True))
    (report,) = desk.reports
    assert (report.outcome, report.acknowledged_in) == (Outcome.ABORTED, 0.25)
    desk.end(exit_code=1)
    last = desk.reports[-1]
    assert [row.state for row in last.ranks] == [RankState.ABORTED] * 2
    assert [e.news for e in desk.effects if isinstance(e, Publish)] == [True, False]
    assert desk.ledger.is_idle


def test_the_report_does_not_wait_for_ever_for_an_acknowledgement() -> None:
    desk = Desk(Options(acknowledge_window=1.0))
    desk.connect(1)
    desk.receive(0, messages.Tripped(1, makers.trip()))
    desk.wait(1.1)
    assert len(desk.reports) == 1
    assert not desk.reports[0].ranks[0].acknowledged


# --- failures and losses --------------------------------------------------------------------------------------------------


def test_a_failed_rank_stops_the_others_and_is_the_reason() -> None:
    desk = Desk()
    desk.connect(2)
    desk.receive(0, messages.Bye(1, "failed", "KeyError: 'x'"))
    (abort,) = desk.sent(1, messages.Abort)
    assert isinstance(abort, messages.Abort)
    assert (abort.rank, "rank 0 of 2" in abort.reason, "KeyError: 'x'" in abort.reason) == (-1, True, True)
    desk.receive(1, messages.Ack(0, abort=True))
    desk.end(exit_code=1)
    assert (desk.reports[-1].outcome, desk.verdict) == (Outcome.FAILED, None)
    assert [row.state for row in desk.reports[-1].ranks] == [RankState.FAILED, RankState.ABORTED]


def test_a_disconnected_rank_is_lost_after_three_silent_heartbeats() -> None:
    desk = Desk(Options(heartbeat=1.0))
    desk.connect(2)
    desk.receive(1, makers.beat(7, 0, 3, phase="backward"))
    desk.disconnect(1)
    for _ in range(4):
        desk.wait(0.7)
        desk.receive(0, makers.beat(8, 0, 0))
    assert desk.sent(0, messages.Abort) == []
    desk.wait(0.5)
    desk.receive(0, makers.beat(8, 0, 0))
    (abort,) = desk.sent(0, messages.Abort)
    assert isinstance(abort, messages.Abort)
    assert "rank 1 of 2 (node0, local rank 1) was lost" in abort.reason
    assert "last seen in batch 7, frame 3, phase backward" in abort.reason
    desk.end(exit_code=1)
    assert desk.reports[-1].outcome is Outcome.LOST


def test_of_ranks_that_died_one_after_another_the_first_is_named_whoever_was_heard_last() -> None:
    """As torchrun has it: one dies, and it ends the others."""
    desk = Desk()
    desk.connect(2)
    desk.wait(0.4)
    desk.receive(1, makers.beat(3, 0, 1))
    desk.disconnect(1)
    desk.wait(0.1)
    desk.disconnect(0)
    desk.wait(10)
    assert desk.reports[-1].outcome is Outcome.LOST
    assert "rank 1 of 2" in desk.reports[-1].reason
    assert desk.reports[-1].reason.endswith("; after it rank 0")


def test_a_silent_rank_whose_connection_stands_is_told_of_and_left_alone() -> None:
    desk = Desk(Options(heartbeat=1.0))
    desk.connect(1)
    desk.wait(60)
    notes = [effect.text for effect in desk.effects if isinstance(effect, Note)]
    assert sum("is silent, but still connected" in note for note in notes) == 1
    assert (desk.sent(0, messages.Abort), desk.reports) == ([], [])
    desk.receive(0, makers.beat(0, 0, 1))
    desk.wait(60)
    notes = [effect.text for effect in desk.effects if isinstance(effect, Note)]
    assert sum("is silent, but still connected" in note for note in notes) == 2


def test_many_silent_ranks_are_told_of_in_one_line() -> None:
    desk = Desk(Options(heartbeat=1.0))
    desk.connect(64)
    desk.receive(5, makers.beat(0, 0, 1))
    desk.wait(2)
    desk.receive(5, makers.beat(0, 0, 2))
    desk.wait(2)
    (note,) = [effect.text for effect in desk.effects if isinstance(effect, Note) and "silent" in effect.text]
    assert "ranks 0-4, 6-63 of 64 (node0, node1, node2, node3 and 28 more hosts) are silent, but still connected" in note


def test_a_large_world_beats_more_slowly_and_has_longer_to_answer() -> None:
    desk = Desk(Options(heartbeat=1.0, decision_window=2.0))
    desk.connect(16_384, ranks=[0])
    (welcome,) = desk.sent(0, messages.Welcome)
    assert isinstance(welcome, messages.Welcome)
    assert (welcome.heartbeat, welcome.decision_window) == (8.0, 4.0)
    desk.receive(0, messages.Tripped(1, makers.trip()))
    desk.wait(3.9)
    assert desk.verdict is None
    desk.wait(0.2)
    assert desk.verdict is not None


def test_a_record_that_makes_no_sense_leaves_no_half_of_a_run_behind() -> None:
    ledger = Ledger(Options())
    entries = [Entry(0.0, NO_RANK, Opened("train", 0, 1)), Entry(1.0, 5, Left(RankState.LOST))]
    with pytest.raises(KeyError):
        ledger.restore("train-0", entries, [], 2.0)
    with pytest.raises(ValueError, match="does not begin with a run's beginning"):
        ledger.restore("train-0", entries[1:], [], 2.0)
    assert ledger.runs == {}
    ledger.handle(Received(b"a", makers.hello()), 3.0)
    assert list(ledger.runs) == ["train-0"]


def test_a_world_that_there_is_no_room_for_is_told_at_its_first_hello() -> None:
    desk = Desk(Options(room=3))
    desk.connect(3, ranks=[0])
    assert not [effect for effect in desk.effects if isinstance(effect, Note) and "ulimit" in effect.text]
    desk.receive(0, makers.hello(0, 4, job="larger"))
    (note,) = [effect.text for effect in desk.effects if isinstance(effect, Note) and "ulimit" in effect.text]
    assert note.startswith("run larger-0: only 3 ranks can connect, for want of file descriptors")


def test_a_rank_that_died_first_is_the_reason_not_the_one_that_failed_of_it() -> None:
    desk = Desk()
    desk.connect(2)
    desk.receive(1, messages.Bye(1, "failed", "RuntimeError: connection closed by peer"))
    desk.end(exit_code=1)  # rank 0 was killed: it never acknowledged the abort
    report = desk.reports[-1]
    assert report.outcome is Outcome.LOST
    assert report.reason.startswith("rank 0 of 2 (node0, local rank 0) was lost")
    assert report.reason.endswith("then rank 1 of 2 (node0, local rank 1) failed: RuntimeError: connection closed by peer")


def test_on_lost_wait_lets_the_others_run_and_takes_the_rank_back() -> None:
    desk = Desk(Options(heartbeat=1.0, abort_on_lost=False))
    desk.connect(2)
    desk.disconnect(1)
    desk.wait(3.5)
    assert desk.sent(0, messages.Abort) == []
    assert [record.state for record in desk.ledger.runs["train-0"].ranks.values()] == [RankState.RUNNING, RankState.LOST]
    desk.connect(2)
    desk.receive(0, messages.Bye(1, "finished", ""))
    desk.receive(1, messages.Bye(1, "finished", ""))
    assert desk.reports[-1].outcome is Outcome.FINISHED


def test_a_lost_rank_does_not_hold_up_a_verdict() -> None:
    desk = Desk(Options(heartbeat=0.5, decision_window=60))
    desk.connect(2)
    desk.disconnect(1)
    desk.receive(0, messages.Tripped(1, makers.trip(at=(3, 0, 5))))
    for _ in range(4):
        desk.wait(0.5)
        desk.receive(0, makers.beat(3, 0, 5))
    assert desk.verdict is not None
    assert (desk.verdict.certainty, desk.verdict.missing) == (Certainty.PARTIAL, (1,))


# --- ends of runs, and runs beside each other -----------------------------------------------------------------------------


def test_a_run_whose_ranks_all_end_well_is_finished() -> None:
    desk = Desk()
    desk.connect(2)
    for rank in range(2):
        desk.receive(
            rank, messages.Table(makers.table()), messages.Batch(1, makers.summary(0)), messages.Bye(2, "finished", "")
        )
    (report,) = desk.reports
    assert (report.outcome, report.batches, report.reason) == (Outcome.FINISHED, 1, "")
    assert desk.ledger.is_idle


def test_a_command_that_fails_without_a_word_of_its_ranks_is_failed() -> None:
    desk = Desk(Options(job_end_is_told=True))
    desk.connect(1)
    desk.receive(0, messages.Bye(1, "ended", ""))
    assert desk.reports == []
    desk.end(exit_code=9)
    assert (desk.reports[-1].outcome, desk.reports[-1].reason) == (Outcome.FAILED, "the command ended with exit code 9")


@pytest.mark.parametrize(("bye", "code"), [("ended", 0), ("finished", 9)])
def test_a_rank_that_ended_is_believed_when_the_command_ended_well_or_it_said_so_itself(bye: str, code: int) -> None:
    desk = Desk(Options(job_end_is_told=True))
    desk.connect(1)
    desk.receive(0, messages.Bye(1, bye, ""))
    desk.end(exit_code=code)
    assert desk.reports[-1].outcome is Outcome.FINISHED


def test_a_collector_that_is_ended_does_not_call_the_ranks_lost() -> None:
    desk = Desk()
    desk.connect(2)
    desk.end(exit_code=None)
    (report, *_) = desk.reports
    assert (report.outcome, report.reason) == (Outcome.LOST, "the collector was ended while the run went on")
    assert [row.state for row in report.ranks] == [RankState.RUNNING] * 2


def test_the_last_rank_of_a_node_that_was_cut_off_is_lost_though_nobody_else_is_left_to_be_heard() -> None:
    desk = Desk()
    desk.connect(4)
    for _ in range(5):  # ranks 2 and 3 are silent from now on
        desk.wait(1)
        for rank in (0, 1):
            desk.receive(rank, makers.beat(3, 0, 0))
    desk.disconnect(2)
    desk.wait(4)
    for rank in (0, 1):
        desk.receive(rank, messages.Ack(0, abort=True), messages.Bye(9, "aborted", ""))
    desk.wait(5)
    desk.disconnect(3)
    desk.wait(20)
    states = [row.state for row in desk.reports[-1].ranks]
    assert states == [RankState.ABORTED] * 2 + [RankState.LOST] * 2


def test_what_becomes_of_ranks_whose_job_is_being_ended_is_no_failure() -> None:
    desk = Desk(Options(job_end_is_told=True))
    desk.connect(3)
    desk.handle(JobInterrupted("SIGINT"))
    desk.receive(1, messages.Bye(1, "failed", "RuntimeError: connection closed by peer"))
    desk.disconnect(0)
    desk.wait(10)
    assert desk.reports == []
    desk.handle(JobEnded(143, "SIGINT"))
    report = desk.reports[-1]
    assert (report.outcome, report.reason) == (Outcome.ABORTED, "stopped by SIGINT")


def test_of_ranks_that_ended_without_a_word_the_first_whose_connection_ended_is_named() -> None:
    desk = Desk(Options(job_end_is_told=True))
    desk.connect(3)
    desk.wait(1)
    desk.disconnect(1)
    desk.wait(0.1)
    desk.disconnect(0)  # torchrun ended it, and then itself
    desk.end(exit_code=1)
    report = desk.reports[-1]
    assert report.outcome is Outcome.LOST
    assert report.reason.startswith("rank 1 of 3 (node0, local rank 1) ended without a word")


@given(batches=st.lists(st.lists(st.sampled_from(["beat", "part"]), max_size=4), max_size=5), data=st.data())
def test_a_beat_tells_as_much_before_the_batches_that_it_came_after(batches: list[list[str]], data: st.DataObject) -> None:
    """The collector puts batches off, and no beat with them."""
    table, said = makers.table(), list[messages.Message]()
    for batch, sends in enumerate(batches):
        frame = 0
        for what in sends:
            if what == "part":
                summary = makers.summary(batch, first=frame)
                frame += len(table.specs)
                said.append(messages.Batch(len(said) + 1, summary))
            else:
                phase = data.draw(st.sampled_from(["forward", "backward", "optimizer"]))
                said.append(makers.beat(batch, 0, frame + data.draw(st.integers(0, 1)), phase=phase))
    beats_first = sorted(said, key=lambda message: isinstance(message, messages.Batch))
    known = []
    for order in (said, beats_first):
        desk = Desk()
        desk.connect(1)
        desk.receive(0, messages.Table(table), *order)
        record = desk.ledger.runs["train-0"].ranks[0]
        known.append((record.witness(), record.seq, record.last_batch, record.frames, record.forward_frames, record.stored))
    assert known[0] == known[1]


@pytest.mark.parametrize(("seconds", "outcome"), [(1, Outcome.ABORTED), (3, Outcome.LOST)])
def test_a_rank_that_failed_just_before_the_job_was_ended_did_so_by_the_same_signal(seconds: int, outcome: Outcome) -> None:
    desk = Desk(Options(job_end_is_told=True))
    desk.connect(3)
    desk.receive(1, messages.Bye(1, "failed", "RuntimeError: connection closed by peer"))
    failure = "rank 1 of 3 (node0, local rank 1) failed: RuntimeError: connection closed by peer"
    desk.disconnect(0)
    desk.wait(seconds)
    desk.handle(JobInterrupted("SIGTERM"))
    desk.handle(JobEnded(143, "SIGTERM"))
    report = desk.reports[-1]
    assert report.outcome is outcome
    assert report.reason.endswith(failure)
    assert report.reason.startswith("stopped by SIGTERM; just before, rank 1") == (outcome is Outcome.ABORTED)


def test_a_verdict_stands_though_the_job_is_ended_upon_it() -> None:
    desk = Desk(Options(job_end_is_told=True))
    desk.connect(1)
    desk.receive(0, messages.Tripped(1, makers.trip(at=(5, 0, 3))))
    desk.handle(JobInterrupted("SIGTERM"))
    desk.handle(JobEnded(143, "SIGTERM"))
    assert desk.verdict is not None
    assert not desk.reports[-1].reason.startswith("stopped")


def test_a_signal_is_named_as_the_reason_and_the_ranks_are_not_lost() -> None:
    desk = Desk(Options(job_end_is_told=True))
    desk.connect(1)
    desk.handle(JobEnded(1, "SIGTERM"))
    report = desk.reports[-1]
    assert (report.outcome, report.reason) == (Outcome.ABORTED, "stopped by SIGTERM")
    assert report.ranks[0].state is RankState.ABORTED


def test_a_trip_outranks_the_limit_that_another_rank_has_come_to() -> None:
    for trip_first in (True, False):
        desk = Desk()
        desk.connect(2)
        said: list[tuple[int, messages.Message]] = [
            (0, messages.Tripped(1, makers.trip(at=(5, 0, 3)))),
            (1, messages.Bye(1, "limit", "stopped after batch 5")),
        ]
        for rank, message in said if trip_first else reversed(said):
            desk.receive(rank, message)
        assert desk.verdict is not None


def test_a_limit_is_the_reason_when_nothing_else_happened() -> None:
    desk = Desk()
    desk.connect(2)
    for rank in range(2):
        desk.receive(rank, messages.Bye(1, "limit", "stopped after batch 5"))
    assert (desk.reports[-1].outcome, desk.reports[-1].reason) == (Outcome.ABORTED, "stopped after batch 5")


def test_a_rank_that_comes_back_after_the_run_is_over_is_still_told_to_stop() -> None:
    desk = Desk(Options(heartbeat=1.0))
    desk.connect(2)
    desk.disconnect(1)
    for _ in range(4):
        desk.wait(1.0)
        desk.receive(0, makers.beat(1, 0, 0))
    desk.receive(0, messages.Ack(1, abort=True), messages.Bye(1, "aborted", ""))
    assert desk.ledger.is_idle
    desk.take()
    desk.connect(2, ranks=[1])
    assert len(desk.sent(1, messages.Abort)) == 1
    assert list(desk.ledger.runs) == ["train-0"]


def test_a_pending_trip_is_decided_when_the_job_ends_before_some_rank_ever_came() -> None:
    desk = Desk()
    desk.connect(3, ranks=[0])
    desk.receive(0, messages.Tripped(1, makers.trip()))
    desk.end(exit_code=1)
    assert desk.verdict is not None
    assert (desk.verdict.certainty, desk.verdict.missing) == (Certainty.PARTIAL, (1, 2))


def test_what_a_peer_said_counts_after_it_has_gone() -> None:
    desk = Desk()
    desk.connect(1)
    desk.disconnect(0)
    desk.receive(0, messages.Tripped(1, makers.trip()))
    assert desk.verdict is not None


def test_a_failure_that_does_not_stop_the_others_is_still_the_reason() -> None:
    desk = Desk(Options(abort_on_lost=False))
    desk.connect(2)
    desk.receive(0, messages.Bye(1, "failed", "KeyError: 'x'"))
    desk.receive(1, messages.Bye(1, "finished", ""))
    assert desk.reports[-1].outcome is Outcome.FAILED
    assert "KeyError: 'x'" in desk.reports[-1].reason


def test_runs_are_kept_apart_by_job_and_restart() -> None:
    desk = Desk()
    desk.handle(Received(b"a", makers.hello(job="one")))
    desk.handle(Received(b"b", makers.hello(job="two")))
    desk.handle(Received(b"c", makers.hello(job="one", restart=1, incarnation="later")))
    assert list(desk.ledger.runs) == ["one-0", "two-0", "one-1"]
    desk.handle(Received(b"b", messages.Tripped(1, makers.trip())))
    assert [run.verdict is not None for run in desk.ledger.runs.values()] == [False, True, False]


def test_the_same_job_started_again_is_a_run_of_its_own() -> None:
    desk = Desk()
    desk.connect(2)
    desk.receive(0, messages.Bye(1, "finished", ""))
    desk.handle(Received(b"new", makers.hello(0, 2, incarnation="another")))
    assert list(desk.ledger.runs) == ["train-0", "train-0.2"]
    desk.receive(1, messages.Bye(1, "finished", ""))
    assert [run.over for run in desk.ledger.runs.values()] == [True, False]


def test_names_in_use_on_disk_are_not_used_again() -> None:
    ledger = Ledger(Options(), is_free=lambda name: name not in {"train-0", "train-0.2"})
    ledger.handle(Received(b"a", makers.hello()), 0.0)
    assert list(ledger.runs) == ["train-0.3"]


def test_a_reconnect_goes_on_where_it_was() -> None:
    desk = Desk()
    desk.connect(1)
    desk.receive(0, messages.Table(makers.table()), messages.Batch(5, makers.summary(3)))
    effects = desk.handle(Received(b"new connection", makers.hello()))
    assert effects == [Send(b"new connection", messages.Welcome("train-0", 1.0, 2.0, 5))]
    assert desk.handle(Received(peer(0), makers.beat(0, 0, 0))) == [
        Send(peer(0), messages.Error("you are not known here: say HELLO", "hello"))
    ]


def test_a_second_process_does_not_take_a_live_ranks_place() -> None:
    desk = Desk()
    desk.connect(1)
    impostor = Received(b"impostor", makers.hello(incarnation="another", pid=666))
    held = "rank 0 of run train-0 is held by process 100 on node0"
    assert desk.handle(impostor) == [
        Note(f"refused process 666 on node0: {held}"), Send(b"impostor", messages.Error(held, "none")),
    ]  # fmt: skip
    assert desk.handle(impostor) == [Send(b"impostor", messages.Error(held, "none"))]  # it goes on asking
    assert desk.ledger.runs["train-0"].report().ranks[0].rival == "process 666 on node0"
    assert desk.handle(Received(b"impostor", makers.beat(0, 0, 0))) == [
        Send(b"impostor", messages.Error("you are not known here: say HELLO", "hello"))
    ]


def test_another_world_size_is_another_run() -> None:
    desk = Desk()
    desk.connect(2)
    desk.handle(Received(b"x", makers.hello(0, 3, incarnation="another")))
    assert [run.world_size for run in desk.ledger.runs.values()] == [2, 3]


def test_another_major_version_and_a_rank_out_of_its_world_are_refused() -> None:
    desk = Desk()
    desk.connect(2)
    for hello in (makers.hello(1, 2, major=1), makers.hello(5, 2)):
        sent = [e.message for e in desk.handle(Received(b"x", hello)) if isinstance(e, Send)]
        assert [isinstance(message, messages.Error) and message.remedy for message in sent] == ["stop"]
    assert len(desk.ledger.runs) == 1


# --- what is kept and what is refused -------------------------------------------------------------------------------------


def test_traced_batches_are_recorded_by_rank() -> None:
    desk = Desk()
    desk.connect(2)
    desk.receive(1, messages.Table(makers.table()), messages.Batch(1, makers.summary(4, traced=True)))
    (trace,) = [effect for effect in desk.effects if isinstance(effect, RecordTrace)]
    assert (trace.run, trace.rank, trace.batch, len(trace.frames)) == ("train-0", 1, 4, 2)


def test_the_parts_of_a_traced_batch_are_recorded_one_by_one() -> None:
    desk = Desk()
    desk.connect(1)
    desk.receive(0, messages.Table(makers.table()), messages.Batch(1, makers.summary(4, traced=True)))
    desk.receive(0, messages.Batch(2, makers.summary(4, first=2, traced=True)))
    traces = [effect for effect in desk.effects if isinstance(effect, RecordTrace)]
    assert [[frame.position.frame for frame in trace.frames] for trace in traces] == [[0, 1], [2, 3]]


def test_a_batch_whose_table_is_not_known_is_asked_for_again() -> None:
    desk = Desk()
    desk.connect(1)
    desk.receive(0, messages.Batch(1, makers.summary(0)))
    assert desk.sent(0, messages.Error) == [messages.Error("the frame table of batch 0 is not known here", "hello")]
    desk.receive(0, makers.hello(), messages.Table(makers.table()), messages.Batch(1, makers.summary(0)))
    assert desk.ledger.runs["train-0"].ranks[0].last_batch == 0


@pytest.mark.parametrize("traced", [True, False])
def test_a_batch_that_does_not_fit_its_table_costs_its_sender_an_error(traced: bool) -> None:
    desk = Desk()
    desk.connect(1)
    good = makers.summary(0, traced=traced)
    wide = good._replace(abs_min=good.abs_min * 2, abs_max=good.abs_max * 2)
    empty = good._replace(abs_min=b"", abs_max=b"", states=b"")
    desk.receive(0, messages.Table(makers.table()), messages.Batch(2, wide), messages.Batch(3, empty))
    assert desk.sent(0, messages.Error) == [messages.Error("batch 0 does not fit its frame table", "none")] * 2
    assert desk.ledger.runs["train-0"].ranks[0].last_batch == -1


def test_of_many_tables_the_one_in_use_is_kept() -> None:
    desk = Desk()
    desk.connect(1)
    desk.receive(0, messages.Table(makers.table()))
    for number in range(MAX_TABLES + 10):
        desk.receive(0, messages.Table(FrameTable((makers.frame(module=f"m{number}").spec,))))
        desk.receive(0, messages.Batch(number + 1, makers.summary(number)))
    assert desk.sent(0, messages.Error) == []


def test_malformed_messages_are_counted_and_answered() -> None:
    ledger = Ledger(Options())
    assert ledger.handle(Malformed(b"x", "HELLO.rank: no"), 0.0) == [
        Note("refused a message: HELLO.rank: no"),
        Send(b"x", messages.Error("HELLO.rank: no", "none")),
    ]
    assert ledger.refused == 1


def test_a_peer_that_sends_nonsense_for_ever_does_not_fill_the_log() -> None:
    ledger = Ledger(Options())
    told = [effect for _ in range(5000) for effect in ledger.handle(Malformed(b"x", "no"), 0.0) if isinstance(effect, Note)]
    assert len(told) == 1003
    assert told[-1] == Note("refused a message: no (4096 refusals by now)")
    assert ledger.refused == 5000


def test_what_a_rank_has_no_business_to_send_is_refused() -> None:
    desk = Desk()
    desk.connect(1)
    desk.receive(0, messages.Abort("stop it", 0, 0.0, 1.0))
    assert desk.sent(0, messages.Error) == [messages.Error("a rank does not send Abort", "none")]
    assert desk.sent(0, messages.Abort) == []


def test_runs_that_are_over_are_forgotten_in_the_end() -> None:
    desk = Desk()
    for number in range(40):
        first = Received(b"%d" % number, makers.hello(job=f"job{number}", incarnation=str(number)))
        desk.handle(first)
        desk.handle(Received(b"%d" % number, messages.Bye(1, "finished", "")))
    desk.wait(0.1)
    assert len(desk.ledger.runs) == 16


# --- notices --------------------------------------------------------------------------------------------------------------


def noticed(seq: int, kind: NoticeKind = NoticeKind.HEADROOM, **changes: object) -> messages.Noticed:
    return messages.Noticed(seq, makers.notice(kind, **changes))


def test_a_notice_is_told_once_and_its_last_word_is_kept_of_each_rank() -> None:
    desk = Desk()
    desk.connect(2)
    desk.receive(0, noticed(1, value=100.0), noticed(2, value=200.0))
    desk.receive(1, noticed(1, value=300.0))
    notes = [effect.text for effect in desk.effects if isinstance(effect, Note) and "next to overflow" in effect.text]
    assert len(notes) == 1
    assert notes[0].startswith("run train-0: rank 0 of 2 (node0, local rank 0): next to overflow: layer (Linear), output: ")
    desk.end()
    assert [(rank, notice.value) for rank, notice in desk.reports[-1].notices] == [(1, 300.0), (0, 200.0)]


def test_a_notice_is_acknowledged_by_the_next_beat_and_counts_once() -> None:
    desk = Desk()
    desk.connect(1)
    desk.receive(0, noticed(4, value=1.0), noticed(4, value=2.0), makers.beat(0, 0, 1))
    assert desk.sent(0, messages.Ack) == [messages.Ack(4, abort=False)]
    desk.end()
    assert [notice.value for _, notice in desk.reports[-1].notices] == [1.0]


def test_notices_are_bounded_and_further_ones_are_counted() -> None:
    desk = Desk()
    desk.connect(2)
    for number in range(MAX_NOTICES + 3):
        desk.receive(number % 2, noticed(number + 1, module=f"m{number}"))
    desk.receive(0, noticed(9999, module="m0", value=77.0))  # one that is kept is still brought up to date
    desk.end()
    report = desk.reports[-1]
    assert (len(report.notices), report.notices_unkept) == (MAX_NOTICES, 3)
    assert 77.0 in {notice.value for _, notice in report.notices}


# --- options changed at run time ------------------------------------------------------------------------------------------


def tuned(desk: Desk, tune: messages.Tune) -> list[messages.Message]:
    """What a control client is answered."""
    effects = desk.handle(Received(b"control", tune))
    return [effect.message for effect in effects if isinstance(effect, Send) and effect.peer == b"control"]


def test_a_tuning_reaches_the_ranks_that_are_there_and_those_that_come() -> None:
    desk = Desk()
    desk.connect(3, ranks=[0, 1])
    assert tuned(desk, messages.Tune(every=10)) == [messages.Tuned(("train-0",), 2)]
    assert tuned(desk, messages.Tune("train-0", ignore=("*.rotary",))) == [messages.Tuned(("train-0",), 2)]
    merged = messages.Tune("train-0", every=10, ignore=("*.rotary",))
    for rank in (0, 1):
        assert desk.sent(rank, messages.Tune) == [messages.Tune("train-0", every=10), merged]
    desk.take()
    desk.connect(3, ranks=[2, 1])
    for rank in (1, 2):
        sent = [effect.message for effect in desk.effects if isinstance(effect, Send) and effect.peer == peer(rank)]
        assert sent[0] == merged  # before WELCOME, so that it holds from the first batch on
        assert isinstance(sent[1], messages.Welcome)
    assert "run train-0: options changed: every 10" in [e.text for e in tuning_notes(desk, messages.Tune(every=10))]


def tuning_notes(desk: Desk, tune: messages.Tune) -> list[Note]:
    return [e for e in desk.handle(Received(b"control", tune)) if isinstance(e, Note)]


def test_a_rank_without_a_connection_is_not_counted_as_told() -> None:
    desk = Desk()
    desk.connect(3)
    desk.disconnect(1)
    desk.receive(2, messages.Bye(1, "finished", ""))
    assert tuned(desk, messages.Tune(check="async")) == [messages.Tuned(("train-0",), 1)]
    assert [len(desk.sent(rank, messages.Tune)) for rank in range(3)] == [1, 0, 0]


def test_a_tuning_goes_to_the_run_that_is_named_or_to_all_that_are_under_way() -> None:
    desk = Desk()
    assert tuned(desk, messages.Tune(every=2)) == [messages.Error("no run is under way here", "none")]
    assert tuned(desk, messages.Tune("x", every=2)) == [messages.Error("no run x; no run is under way here", "none")]
    for name in ("one", "two", "three"):
        desk.handle(Received(name.encode(), makers.hello(job=name)))
    desk.handle(Received(b"three", messages.Bye(1, "finished", "")))
    assert tuned(desk, messages.Tune(every=2)) == [messages.Tuned(("one-0", "two-0"), 2)]
    assert tuned(desk, messages.Tune("two-0", every=3)) == [messages.Tuned(("two-0",), 1)]
    assert [run.tuning.every for run in desk.ledger.runs.values()] == [2, 3, 0]
    assert tuned(desk, messages.Tune("three-0", every=3)) == [
        messages.Error("no run three-0; under way here: one-0, two-0", "none")
    ]


def test_a_collector_may_begin_with_a_tuning() -> None:
    desk = Desk(Options(every=5))
    desk.connect(1)
    assert desk.sent(0, messages.Tune) == [messages.Tune("train-0", every=5)]


def test_a_rank_does_not_tune_and_a_control_client_does_nothing_else() -> None:
    desk = Desk()
    desk.connect(1)
    desk.receive(0, messages.Tune(every=2), messages.Tuned((), 0))
    assert desk.sent(0, messages.Error) == [
        messages.Error("a rank does not send Tune", "none"), messages.Error("a rank does not send Tuned", "none")
    ]  # fmt: skip
    (refused,) = desk.handle(Received(b"control", noticed(1)))
    assert refused == Send(b"control", messages.Error("you are not known here: say HELLO", "hello"))


def test_more_runs_than_a_collector_can_keep_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwatch_monitor.decide.ledger.MAX_RUNS", 2)
    desk = Desk()
    for number in range(3):
        job = makers.hello(job=f"job{number}", incarnation=str(number))
        desk.handle(Received(b"peer-%d" % number, job))
    assert list(desk.ledger.runs) == ["job0-0", "job1-0"]
    assert desk.effects[-1] == Send(b"peer-2", messages.Error("2 runs are under way here, and that is the most", "stop"))


def test_ranks_that_are_all_cut_off_at_once_are_not_lost() -> None:
    desk = Desk()
    desk.connect(2)
    desk.wait(5)  # silent, connections standing
    desk.disconnect(0)
    desk.disconnect(1)
    desk.wait(60)
    (run,) = desk.ledger.runs.values()
    assert {record.state for record in run.ranks.values()} == {RankState.RUNNING}
    desk.handle(Received(b"again", makers.hello(0, 2)))
    for second in range(5):  # the other one comes back later
        if second == 4:
            desk.receive(1, makers.beat(0, 0, 4))
        desk.handle(Received(b"again", makers.beat(0, 0, second)))
        desk.wait(1)
        assert run.ranks[1].state is RankState.RUNNING
    assert desk.sent(0, messages.Abort) == []


def test_a_rank_that_is_cut_off_while_another_is_heard_is_lost() -> None:
    desk = Desk()
    desk.connect(2)
    for second in range(8):
        desk.receive(0, makers.beat(0, 0, second))
        desk.wait(1)
        if second == 4:
            desk.disconnect(1)
    (run,) = desk.ledger.runs.values()
    assert run.ranks[1].state is RankState.LOST


def test_ranks_that_stay_cut_off_are_lost_in_the_end() -> None:
    desk = Desk(Options(cut_off_after=30))
    desk.connect(2)
    desk.wait(5)
    desk.disconnect(0)
    desk.disconnect(1)
    desk.wait(40)
    assert desk.reports[-1].outcome is Outcome.LOST


def test_a_run_whose_ranks_come_back_goes_on() -> None:
    desk = Desk(Options(abort_on_lost=False))
    desk.connect(1)
    desk.disconnect(0)
    desk.wait(5)
    assert desk.reports[-1].outcome is Outcome.LOST
    desk.handle(Received(b"again", makers.hello(0, 1)))
    (run,) = desk.ledger.runs.values()
    assert not run.over
    desk.handle(Received(b"again", messages.Bye(1, "finished", "")))
    desk.wait(1)
    assert [report.outcome.value for report in desk.reports[-1:]] == ["finished"]


# --- what is shown of a run -----------------------------------------------------------------------------------------------


def last_shown(desk: Desk) -> Show:
    return [effect for effect in desk.effects if isinstance(effect, Show)][-1]


def test_a_run_is_shown_once_a_heartbeat_and_at_its_end() -> None:
    desk = Desk(Options(heartbeat=1.0))
    desk.connect(2, ranks=[0])
    desk.receive(0, makers.beat(3, 0, 1))
    desk.wait(3)
    shown = [effect for effect in desk.take() if isinstance(effect, Show)]
    assert len(shown) == 3
    assert shown[-1].standing == RunStanding("train", 0, 2, 0, 0, None, False)
    assert [(rank.rank, rank.batch) for rank in shown[-1].standings] == [(0, 3)]
    desk.connect(2, ranks=[1])
    for rank in (0, 1):
        desk.receive(rank, messages.Bye(1, "finished", ""))
    (end,) = [effect for effect in desk.take() if isinstance(effect, Show)]
    assert end.standing == RunStanding("train", 0, 2, 0, 0, Outcome.FINISHED, True)
    assert {rank.state for rank in end.standings} == {RankState.FINISHED}
    desk.wait(3)
    assert not desk.take()


def test_each_rank_that_tripped_is_counted_once() -> None:
    desk = Desk()
    desk.connect(3)
    desk.receive(0, messages.Tripped(1, makers.trip(at=(1, 0, 0))), messages.Tripped(2, makers.trip(at=(2, 0, 0))))
    desk.receive(1, messages.Tripped(1, makers.trip(at=(1, 0, 0))))
    desk.end(exit_code=1)
    assert (last_shown(desk).standing.tripped, last_shown(desk).standing.outcome) == (2, Outcome.ABORTED)


def test_ranks_that_stall_are_counted_until_they_go_on() -> None:
    desk = Desk(Options(stall_after=10))
    desk.connect(2)
    for _ in range(13):
        for rank, batch in enumerate((7, 6)):
            desk.receive(rank, makers.beat(batch, 0, 0))
        desk.wait(1)
    assert last_shown(desk).standing.stalled == 1
    for rank in (0, 1):
        desk.receive(rank, makers.beat(8, 0, 0))
    desk.wait(2)
    assert last_shown(desk).standing.stalled == 0
