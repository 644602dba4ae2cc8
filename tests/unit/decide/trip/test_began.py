"""From the jumps of all ranks to the one where it began."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import makers
from rankwatch.shared.types.frame import Kind
from rankwatch_monitor.decide.trip.began import (
    Began,
    Jump,
    ReadingName,
    TripOrigin,
    advise_began,
    describe_origin,
    find_began,
    leads,
)


def jump(batch: int, frame: int = 0, rank: int = 0, module: str = "layer", rise: float = 10.0, stage: int = -1) -> Jump:
    return Jump(batch, batch, stage, frame, 0, rank, ReadingName(module, "Linear", "output"), rise)


def began(*jumps: Jump, trip: tuple[int, int] = (83, 83), others: tuple[float, ...] = ()) -> Began | None:
    return find_began(jumps, trip, lambda jump: others)


def place(found: Began | None) -> tuple[int | None, int, str] | None:
    return None if found is None else (found.rank, found.batch, found.module)


def test_it_began_with_the_first_jump_that_leads_to_the_trip() -> None:
    later = [jump(81), jump(82), jump(82, 5, 1)]
    assert place(began(jump(80, 0, 1, "a"), jump(80, 3, 1), *later)) == (1, 80, "a")


def test_a_jump_that_was_over_long_before_the_trip_is_not_the_origin() -> None:
    spike = [jump(40, 0, module="a"), jump(40, 1, module="b"), jump(41, 0, module="a")]
    assert place(began(*spike, jump(82), jump(82, 1))) == (0, 82, "layer")
    assert began(*spike) is None


def test_a_jump_that_leads_nowhere_is_not_the_origin() -> None:
    assert place(began(jump(80, 0, 1, "lonely"), jump(81, 0), jump(81, 1), jump(82))) == (0, 81, "layer")


@pytest.mark.parametrize(
    ("full", "module", "batch"),
    [([0, 64], "layer", 64), ([0, 64, 80], "layer", None), ([], "layer", None), ([0, 64], "", None)],
)
def test_the_last_batch_of_which_more_than_the_root_was_measured_is_near(
    full: list[int], module: str, batch: int | None
) -> None:
    found = find_began([jump(64, module=module)], (83, 83), lambda jump: (), full)
    assert (found.batch if found is not None else None) == batch


def test_noise_of_another_reading_in_the_batch_before_is_not_the_origin() -> None:
    noise = [jump(82, 0, 0, "noisy"), jump(82, 3, 0, "also noisy")]
    assert place(began(*noise, jump(83, 2))) == (0, 83, "layer")


def test_weights_that_jump_first_follow_from_what_was_computed_in_the_batch_before() -> None:
    """They are measured every few batches only, so that they need not jump where their gradients do."""
    bias = [jump(83, 4, rank, "head")._replace(kind=Kind.PARAMETER) for rank in (0, 1)]
    loss = [jump(batch, 6, 1, "") for batch in (80, 81, 82)]
    assert place(began(*loss, *bias)) == (1, 80, "")
    assert place(began(*loss, *bias, jump(83, 4), jump(83, 5))) == (1, 80, "")  # what was computed with them
    assert place(began(*loss, *bias, jump(83, 3))) == (0, 83, "layer")
    assert place(began(*bias)) == (0, 83, "head")


def test_a_jump_right_before_the_trip_needs_no_other() -> None:
    assert place(began(jump(83))) == (0, 83, "layer")


def test_micro_batches_of_one_step_lie_next_to_each_other() -> None:
    first = [Jump(19, 76, -1, n, 0, 1, ReadingName("a", "Linear", "output"), 10.0) for n in (0, 1)]
    later = [Jump(20, 83, -1, n, 0, 0, ReadingName("a", "Linear", "output"), 10.0) for n in (0, 1)]
    assert place(began(*first, *later, trip=(21, 84))) == (1, 76, "a")


def test_stages_come_before_frames() -> None:
    assert place(began(jump(83, 9, 0, "early", stage=0), jump(83, 1, 1, "late", stage=1))) == (0, 83, "early")


def test_of_several_ranks_the_one_that_rose_most_is_named() -> None:
    assert place(began(jump(83, 0, 0, rise=3.0), jump(83, 0, 1, rise=9.0))) == (1, 83, "layer")


def test_it_is_alone_unless_another_replica_rose_alike() -> None:
    others = (0.1, 4.9), (0.1, 5.0), ()
    assert [(found := began(jump(83), others=rises)) and found.alone for rises in others] == [True, False, None]


def test_what_was_not_finite_has_no_factor() -> None:
    found = began(jump(83, rise=math.inf))
    assert found is not None
    assert found.factor == math.inf
    assert describe_origin(TripOrigin(found, 64, 2), 2).endswith("output of layer (Linear) was not finite")


def test_it_is_said_in_one_line() -> None:
    of = Began(1, 80, "", "Net", "input[0]", 950.0, True)
    assert describe_origin(TripOrigin(of, 64, 2), 2) == (
        "batch 80, rank 1: input[0] of the root (Net) jumped x950; the other ranks' did not"
    )
    unseen = describe_origin(TripOrigin(None, 64, 2), 2)
    assert unseen == "not seen: no measured reading jumped in the 64 batches before the trip"
    assert describe_origin(TripOrigin(of, 64, 16), 1024).endswith("; those of 15 other ranks that were looked at did not")
    assert describe_origin(TripOrigin(None, 64, 16), 1024).endswith("before the trip, of the 16 ranks that were looked at")
    assert "too few batches" in describe_origin(TripOrigin(None, 0, 2), 2)


@given(st.lists(st.builds(jump, st.integers(0, 83), st.integers(0, 5), st.integers(0, 3)), max_size=40), st.randoms())
def test_the_order_of_arrival_does_not_matter(jumps: list[Jump], random: object) -> None:
    found = began(*jumps)
    random.shuffle(jumps)  # type: ignore[attr-defined]
    assert began(*jumps) == found
    assert (found is None) <= all(jump.batch < 81 for jump in jumps)


def test_where_it_began_is_what_to_look_at() -> None:
    def advised(batch: int = 83, module: str = "", label: str = "input[0]", rank: int | None = 1) -> str:
        return advise_began(TripOrigin(Began(rank, batch, module, "Net", label, 255.0, True), 40, 2))

    assert advised() == "look at input[0] of batch 83 in rank 1's data: it is x255 what it usually is"
    assert "all ranks' data" in advised(82, rank=None)
    assert advised(80, label="loss", rank=None) == "look at what made the loss in batch 80: it is x255 what it usually is"
    assert "output of layer (Net) in batch 83 of rank 1" in advised(module="layer", label="output")
    thrown = Began(0, 7, "head", "Linear", "weight", 8.4e7, alone=False, is_parameter=True)
    assert advise_began(TripOrigin(thrown, 40, 2)) == (
        "look at the optimizer's step before batch 7 (its learning rate, its gradients), or at code that wrote to weight of "
        "head (Linear): it is x8.4e7 what it usually is"
    )
    assert "before batch 7 of rank 0 (" in advise_began(TripOrigin(replace(thrown, alone=True), 40, 2))
    assert advise_began(None) == advise_began(TripOrigin(None, 40, 2)) == ""


@pytest.mark.parametrize(
    ("at", "it_leads"),
    [
        ((1, 83, "layer", "output"), False),
        ((None, 83, "layer", "output"), False),
        ((0, 83, "layer", "output"), True),
        ((1, 82, "layer", "output"), True),
        ((1, 83, "before", "output"), True),
        ((1, 83, "layer", "input[0]"), True),
    ],
)
def test_it_leads_where_it_is_another_reading_than_the_culprit(at: tuple[int | None, int, str, str], it_leads: bool) -> None:
    rank, batch, module, label = at
    tripped = makers.trip(at=(83, 0, 4))
    origin = TripOrigin(Began(rank, batch, module, "Net", label, 255.0, True), 40, 2)
    assert leads(origin, 1, tripped) is it_leads
    assert leads(replace(origin, began=None), 1, tripped) is leads(None, 1, tripped) is False
