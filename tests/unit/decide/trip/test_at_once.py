"""Ranks that trip at one moment: whose own shard is bad, or that none of them is known to be the culprit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import makers
from desk import Desk, connected
from makers import INF, NAN, reading
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import OWN, Kind, Phase
from rankwatch.shared.types.trip import MAX_RERUN, BadWeight, Cause, GrownWeight, Trip
from rankwatch.shared.words.cause import advise
from rankwatch_monitor.decide.trip.verdict import Certainty, Verdict
from rankwatch_monitor.views import as_json, text


def weight_trip(is_here: bool | None = None, *, step: int = 3, gradients: bool = False, label: str = "weight") -> Trip:
    """A nan weight; ``is_here`` None: no bad weight was measured apart from the module's own."""
    bad = reading(label, NAN, kind=Kind.PARAMETER)
    weights = () if is_here is None else (BadWeight("layer", "Linear", bad, 2, is_here=is_here),)
    return replace(makers.trip(bad, at=(3, 0, 1), step=step), weights=weights, gradients=gradients)


def verdict_of(*trips: Trip | None) -> Verdict:
    """Of ranks that trip so, in the order of their numbers; None: the rank passes."""
    return desk_of(dict(enumerate(trips))).decided


def desk_of(trips: dict[int, Trip | None]) -> Desk:
    desk = connected(len(trips))
    for rank, trip in trips.items():
        desk.receive(rank, makers.beat(4, 0, 1) if trip is None else messages.Tripped(1, trip))
    return desk


def test_a_gathered_weight_is_blamed_on_the_rank_whose_shard_is_bad() -> None:
    found = verdict_of(weight_trip(False), weight_trip(False), weight_trip(True), weight_trip(False))
    assert (found.rank, found.alike, [rank for rank, _ in found.also]) == (2, (), [0, 1, 3])
    assert found.evidence.endswith("; all 4 ranks have it, and the bad values are in the shard of rank 2")


def loss_trip(*, is_given: bool) -> Trip:
    """A nan loss, of an operator that was given a nan, or that has made it of 0 and 0."""
    made = replace(makers.made_by("aten.cat.default" if is_given else "aten.div.Tensor"), output=reading("output", NAN))
    inputs = (reading("tensors", NAN),) if is_given else (reading("self", 0.0, low=0.0), reading("other", 0.0, low=0.0))
    made = replace(made, inputs=inputs, operands=() if is_given else (0.0, 0.0))
    return replace(makers.trip(reading("loss", NAN, kind=Kind.LOSS), at=(3, 0, 1), step=3), operator=made)


def test_a_loss_is_blamed_on_the_rank_that_has_made_what_the_others_were_given() -> None:
    given, made = loss_trip(is_given=True), loss_trip(is_given=False)
    found = verdict_of(given, given, made, given)
    assert (found.rank, found.alike, found.cause, [rank for rank, _ in found.also]) == (2, (), Cause.INVALID, [0, 1, 3])
    assert verdict_of(given, given).alike == (0, 1)
    assert verdict_of(given, made, made).alike == (1, 2)
    unknown = replace(given, operator=None)
    assert verdict_of(unknown, made).alike == (0, 1), "it may have made it as well"


def test_an_unknown_shard_comes_before_one_that_is_good() -> None:
    found = verdict_of(weight_trip(False), weight_trip(None))
    assert found.rank == 1
    assert found.evidence.endswith("both ranks have it, but no bad value is in the shards of rank 0")


@settings(max_examples=50, derandomize=True)
@given(order=st.permutations(range(4)), guilty=st.integers(0, 3))
def test_whose_shard_it_is_does_not_depend_on_the_order_of_arrival(order: list[int], guilty: int) -> None:
    desk = desk_of({rank: weight_trip(rank == guilty) for rank in order})
    assert (desk.decided.rank, desk.decided.certainty) == (guilty, Certainty.COMPLETE)


def test_an_election_waits_for_the_rank_that_may_trip_at_that_very_moment() -> None:
    desk = connected(2)
    desk.receive(0, messages.Tripped(1, weight_trip(False)))
    desk.receive(1, makers.beat(3, 0, 1))
    assert desk.verdict is None
    desk.receive(1, messages.Tripped(1, weight_trip(True)))
    assert desk.decided.rank == 1


@pytest.mark.parametrize(
    ("trip", "said"),
    [
        (weight_trip(), "all 3 ranks have it; which one made it is not known: gradients=True tells"),
        (weight_trip(gradients=True), "all 3 ranks have it; which one made it is not known, though gradients were watched"),
        (weight_trip(step=0), "look at the initialisation or the checkpoint; all 3 ranks have it"),
        (
            replace(
                makers.trip(reading("weight.grad", INF, kind=Kind.GRADIENT), at=(3, 0, 4), phase=Phase.BACKWARD),
                gradients=True,
            ),
            "all 3 ranks have it at once: each of them made it, or it was reduced over them before it was measured",
        ),
    ],
)
def test_what_came_to_all_ranks_alike_is_no_single_ranks(trip: Trip, said: str) -> None:
    found = verdict_of(trip, trip, trip)
    assert (found.rank, found.alike) == (0, (0, 1, 2))
    assert found.evidence.endswith(said)


def test_bad_data_on_all_ranks_are_of_no_single_shard() -> None:
    fed = replace(makers.trip(reading("input[0]", NAN, kind=Kind.INPUT)), root_inputs=(reading("input[0]", NAN),))
    assert verdict_of(fed, fed, fed).is_everywhere
    assert not verdict_of(fed, None, fed).is_everywhere
    assert not verdict_of(fed, makers.trip(reading("output", INF)), fed).is_everywhere
    assert not verdict_of(fed).is_everywhere


def guarded_trip(unfound: str = "", *, at: tuple[int, int, int] = (3, 0, 4), received: str = "") -> Trip:
    """A nan gradient before an optimizer step; ``unfound``: why it is not known where it came from."""
    trip = makers.trip(reading("weight.grad", NAN, kind=Kind.GRADIENT), at=at, phase=Phase.BACKWARD)
    return replace(trip, guarded=True, unfound=unfound, received=received, recurs=None if unfound else True)


def test_the_rank_whose_own_gradient_was_bad_comes_before_those_that_received_it() -> None:
    received = guarded_trip("run again, it was finite", received="all_reduce")
    found = verdict_of(received, guarded_trip(), received)
    assert (found.rank, found.alike, found.certainty) == (1, (), Certainty.COMPLETE)
    assert [rank for rank, _ in found.also] == [0, 2]


def test_a_gradient_whose_origin_no_rank_found_blames_none() -> None:
    found = verdict_of(guarded_trip(), guarded_trip())
    assert found.evidence.endswith("both ranks have it at once: each of them made it, as it ran its own batch again")
    found = verdict_of(*[guarded_trip("not run again: its tensors are sharded")] * 2)
    assert found.alike == (0, 1)
    assert found.evidence.endswith("both ranks have it; which one made it is not known")
    found = verdict_of(None, guarded_trip("not run again: its tensors are sharded"))
    assert (found.rank, found.alike) == (1, ())
    assert found.evidence.endswith("no other rank's gradients were bad: rank 1 made it")


def test_what_no_rank_has_made_in_a_backward_was_made_after_it() -> None:
    finite = replace(guarded_trip("run again, this rank's own gradient was finite", received="quantised"), recurs=False)
    found = verdict_of(finite, finite)
    assert (found.alike, found.certainty) == ((0, 1), Certainty.COMPLETE)
    assert "made after the backwards, by the reduction (quantised), or by code that changes .grad" in found.evidence
    assert "another rank" not in found.evidence
    assert advise(found.cause, found.trip, None).startswith("look at quantised, at the dtype that it sums in")
    found = verdict_of(finite, replace(finite, recurs=None))
    assert "it came from another rank" in found.evidence
    assert found.evidence.endswith("both ranks have it; which one made it is not known")
    assert advise(found.cause, found.trip, None).startswith("look at the other ranks")


@pytest.mark.parametrize(
    ("own", "collective", "is_of_the_sum"),
    [
        ((0.02, 0.03), "all_reduce", False),
        ((0.02, 4e4), "all_reduce", True),  # in float16, the sum of two may be inf
        ((0.02, None), "all_reduce", True),  # of an agent that does not tell
        ((0.02, 0.03), "quantised", True),
    ],
)
def test_a_sum_of_small_parts_is_not_what_made_an_inf(
    own: tuple[float | None, float | None], collective: str, is_of_the_sum: bool
) -> None:
    def trip(largest: float | None) -> Trip:
        rows = [] if largest is None else [reading(f"weight.grad{OWN}", kind=Kind.GRADIENT)._replace(abs_max=largest)]
        bad = makers.trip(*rows, reading("weight.grad", INF, kind=Kind.GRADIENT), at=(3, 0, 4), phase=Phase.BACKWARD)
        why = "run again, this rank's own gradient was finite"
        return replace(bad, guarded=True, unfound=why, received=collective, recurs=False)

    found = verdict_of(*map(trip, own))
    assert (found.rank, found.alike) == (0, (0, 1))
    assert (found.cause is Cause.REDUCTION) == ("by the reduction" in found.evidence) == is_of_the_sum
    assert found.evidence.endswith("both ranks have it")
    beside = "look at what changes .grad between the backward and the optimizer step"
    assert advise(found.cause, found.trip, None).startswith(beside) != is_of_the_sum


def test_what_one_rank_alone_has_came_from_no_other() -> None:
    finite = replace(guarded_trip("run again, this rank's own gradient was finite", received="all_reduce"), recurs=False)
    found = verdict_of(None, finite, None)
    assert (found.rank, found.alike, found.certainty) == (1, (), Certainty.COMPLETE)
    assert "another rank" not in found.evidence
    assert "the other ranks" not in advise(found.cause, found.trip, None)


def test_of_one_rank_whose_others_did_not_answer_it_is_not_said_that_it_made_it() -> None:
    desk = connected(2)
    desk.receive(
        0, messages.Tripped(1, guarded_trip("run again, this rank's own gradient was finite", received="all_reduce"))
    )
    desk.wait(2.1 + MAX_RERUN)
    assert (desk.decided.alike, desk.decided.certainty) == ((0,), Certainty.PARTIAL)
    assert desk.decided.who("") == "no single rank is known (rank 0 of 2 has it)"
    assert desk.decided.evidence.endswith("which rank made it is not known")


def test_ranks_that_trip_at_once_of_themselves_are_named_each() -> None:
    found = verdict_of(*[makers.trip(at=(3, 0, 1))] * 3)
    assert (found.rank, found.alike) == (0, (0, 1, 2))
    assert found.evidence.endswith("all 3 ranks have it at once")
    found = verdict_of(*[makers.trip(at=(3, 0, 1))] * 2, None)
    assert (found.rank, found.alike) == (0, ())
    assert "ranks" not in found.evidence


def grown(now: float, before: float = 1.0) -> GrownWeight:
    return GrownWeight("norm", "LayerNorm", "weight", before, now, 2, 1.5)


def test_weights_that_left_their_range_on_all_ranks_are_a_divergence() -> None:
    trip = replace(makers.trip(at=(3, 0, 1)), grown=grown(31.0), rates=(3.0, 0.1))
    found = verdict_of(trip, replace(trip, grown=grown(40.0)))
    assert (found.rank, found.cause, found.alike) == (None, Cause.DIVERGENCE, (0, 1))
    assert (
        "weight of norm (LayerNorm) had abs max 31, and 1 in batch 2. Look at the learning rate (3, 0.1 of" in found.evidence
    )
    for other in (grown(3.0), None, grown(1e30)):  # of one rank alone, as by a bit that flipped
        found = verdict_of(trip, replace(trip, grown=other))
        assert (found.rank, found.cause, found.alike) == (0, Cause.OVERFLOW, (0, 1))
    assert verdict_of(trip, None).cause is Cause.OVERFLOW


def test_another_weight_at_the_same_moment_is_another_one() -> None:
    found = verdict_of(weight_trip(), weight_trip(label="bias"), None)
    assert (found.rank, found.alike) == (0, ())
    found = verdict_of(weight_trip(), weight_trip(), None)
    assert found.alike == (0, 1)
    assert "; ranks 0-1, all that tripped, have it; which" in found.evidence


def test_the_report_calls_no_rank_the_culprit() -> None:
    desk = desk_of(dict(enumerate([weight_trip()] * 2)))
    abort = desk.sent(1, messages.Abort)[0]
    assert abort.rank == 0
    assert abort.reason.startswith("no single rank (ranks 0-1 of 2 at once), batch 3: layer (Linear), weight: nan")
    desk.receive(range(2), messages.Ack(1, abort=True))
    shown = text.render(desk.reports[0])
    assert "  culprit    no single rank (ranks 0-1 of 2 at once), batch 3 (optimizer step 3), frame 1" in shown
    assert "  also       rank 0 at the same frame: layer (Linear), weight: nan\n             rank 1 at the same" in shown
    parsed = as_json.to_dict(desk.reports[0])["verdict"]
    assert (parsed["rank"], parsed["alike_ranks"], [other["rank"] for other in parsed["also"]]) == (0, [0, 1], [1])
