"""An election looks closely at only a few of many ranks, with the same result as if it looked at all of them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

import makers
from rankwatch.shared.types.frame import BEGINNING, NO_STAGE, NOWHERE, Moment, Phase, Position
from rankwatch_monitor.decide.core.rank import Rank
from rankwatch_monitor.decide.core.report import RankState
from rankwatch_monitor.decide.trip.election import Election
from rankwatch_monitor.decide.trip.verdict import elect, is_waited_for, logical_time_of

WORLD = 6

positions = st.builds(Position, st.integers(0, 1), st.integers(0, 1), st.integers(0, 1))
steps = st.integers(0, 1)


@st.composite
def worlds(draw: st.DrawFn) -> dict[int, Rank]:
    """Ranks by number. At least one has tripped; some ranks of the world have never connected."""
    has_stages = draw(st.booleans())
    ranks = draw(st.sets(st.integers(0, WORLD - 1), min_size=2))
    tripped = draw(st.sets(st.sampled_from(sorted(ranks)), min_size=1, max_size=2))
    records = {}
    for rank in ranks:
        hello = makers.hello(rank, WORLD, stage=draw(st.integers(0, 2)) if has_stages else NO_STAGE)
        record = Rank(hello, b"%d" % rank, 0.0, state=draw(st.sampled_from(RankState)))
        record.progress = Moment(draw(steps), *draw(st.just(NOWHERE) | positions)).in_stage(record.hello.stage)
        record.reported_batch = draw(st.integers(-1, 1))
        if rank in tripped:
            at = draw(positions)
            record.trip = makers.trip(at=at, phase=draw(st.sampled_from([Phase.FORWARD, Phase.BACKWARD])), step=draw(steps))
        if draw(st.booleans()):
            record.fault = "switched itself off in batch 0"
        records[rank] = record
    return records


@given(worlds(), st.data())
def test_it_elects_as_if_it_had_looked_at_all(ranks: dict[int, Rank], data: st.DataObject) -> None:
    trips = {rank: record.trip for rank, record in ranks.items() if record.trip is not None}
    election = Election(WORLD, window=2.0, trips=trips)
    target = min(logical_time_of(record.trip, record.hello.stage) for record in ranks.values() if record.trip is not None)
    asked = election.aim(target, ranks, 0.0)
    assert asked == [record for record in ranks.values() if is_waited_for(record.witness(record.trip), target)]
    for rank, record in ranks.items():  # what they report meanwhile
        if record.progress > BEGINNING and data.draw(st.booleans()):
            later = Moment(data.draw(steps), *data.draw(positions)).in_stage(record.hello.stage)
            ranks[rank] = replace(record, progress=max(record.progress, later))
    for now in (0.0, 2.0):
        witnesses = {rank: record.witness(record.trip) for rank, record in ranks.items()}
        assert election.hold(ranks, now, final=False) == elect(witnesses, WORLD, now, 2.0)


def test_a_rank_of_an_earlier_stage_is_asked_until_it_has_reported_the_batch() -> None:
    trip = makers.trip(at=(3, 0, 5))
    tripped = Rank(makers.hello(0, 2, stage=1), b"0", 0.0, trip=trip, progress=Moment(0, *trip.position))
    further = Rank(makers.hello(1, 2, stage=0), b"1", 0.0, progress=Moment(0, 3, 0, 6), reported_batch=2)
    election = Election(2, window=2.0, trips={0: trip})
    assert election.aim(logical_time_of(trip, 1), {0: tripped, 1: further}, 0.0) == [further]
    found, reason = election.hold({0: tripped, 1: further}, 0.0, final=False)
    assert (found, reason) == (None, "waiting for rank 1 to pass frame 5 of batch 3 of stage 1")
    further.reported_batch = 3
    assert election.has_answer(further)
    election.take_answer(1)
    assert not election.has_answer(further)
    assert election.hold({0: tripped, 1: further}, 0.0, final=False)[0] is not None
