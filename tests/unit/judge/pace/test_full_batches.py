"""Which batches are measured in full, by what they cost. No clock, and no tensor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwatch.judge.pace.full_batches import CLOSELY, FIRST, FullBatches, Pacing, Sample, fewest
from rankwatch.shared.types.spent import MOST_EVERY, Cost
from rankwatch.shared.types.tuning import Tuning

BUDGET = 0.02
FULL, BETWEEN = 1 / 16, 1 / 128
COSTLY = Sample(True, FULL, 1 + FULL), Sample(False, BETWEEN, 1 + BETWEEN)
"""With K = 6 their mean is 17 ms of a second. With K = 5 it is 18.8 ms: not within nine tenths of the budget."""


def trained(full: FullBatches, batches: range, cost: tuple[Sample, Sample] = COSTLY, now: float = 0.0) -> list[int]:
    """The full ones among these batches, each of which takes no time of the clock."""
    found = []
    for number in batches:
        is_full = full.is_full(number)
        found += [number] if is_full else []
        if full.is_timed(number):
            full.take(cost[not is_full], now)
        full.wait(now)
    return found


def test_without_a_budget_each_kth_batch_is_full() -> None:
    assert trained(FullBatches(4), range(10)) == [0, 4, 8]
    assert trained(FullBatches(), range(10)) == list(range(10))
    assert trained(FullBatches(4, BUDGET), range(10)) == [0, 4, 8]  # `every` was given: it wins


def test_the_first_batches_are_full_then_some_in_turn_and_then_as_many_as_the_budget_allows() -> None:
    full = FullBatches(None, BUDGET)
    assert trained(full, range(64)) == [*range(FIRST), 20, 22, 24, 26, 28, *range(30, 64, 6)]
    assert full.pacing is Pacing.BUDGET
    assert full.cost == Cost(6, FULL, BETWEEN, 1.0)


def test_where_the_graphs_of_a_full_batch_have_readings_whose_cost_nobody_knows_as_few_as_can_be_are_full() -> None:
    full = FullBatches(None, BUDGET)
    trained(full, range(64), (COSTLY[0], COSTLY[1]._replace(is_lean=True)))
    assert full.cost == Cost(MOST_EVERY, FULL, BETWEEN, 1.0)


def test_a_training_that_goes_on_has_its_full_batches_where_the_others_have_theirs() -> None:
    later, first = FullBatches(None, BUDGET), FullBatches(None, BUDGET)
    trained(later, range(103, 140)), trained(first, range(140))
    assert trained(later, range(140, 200)) == trained(first, range(140, 200)) == [*range(144, 200, 6)]


def test_a_rank_with_a_collector_awaits_its_proposal() -> None:
    full = FullBatches(None, BUDGET, patience=10.0)
    trained(full, range(40))
    assert (full.pacing, full.cost.every) == (Pacing.TURNS, 6)
    assert trained(full, range(40, 50), now=9.0) == [*range(40, 50, 2)]
    full.tune(Tuning(pace=8, pace_from=53))
    assert trained(full, range(50, 80), now=9.0) == [50, 52, 56, 64, 72]


def test_a_collector_that_proposes_nothing_is_not_awaited_for_long() -> None:
    full = FullBatches(None, BUDGET, patience=10.0)
    trained(full, range(40))
    assert trained(full, range(40, 60), now=10.0) == [40, 42, 48, 54]


def test_a_rank_that_comes_late_takes_what_was_proposed() -> None:
    full = FullBatches(None, BUDGET, patience=10.0)
    full.tune(Tuning(pace=8, pace_from=50))
    assert trained(full, range(96, 120)) == [96, 104, 112]


def test_a_batch_that_cannot_be_run_again_is_full() -> None:
    full = FullBatches(None, BUDGET)
    trained(full, range(10))
    full.refuse("its forward communicates")
    full.tune(Tuning(pace=8, pace_from=12))
    assert trained(full, range(10, 80)) == list(range(10, 80))
    assert full.cost == Cost(1, why="its forward communicates")
    given_ = FullBatches(4)
    given_.refuse("its forward communicates")
    assert trained(given_, range(10)) == [0, 4, 8]


def test_all_batches_are_full_for_a_while_after_something_odd() -> None:
    full = FullBatches(None, BUDGET)
    trained(full, range(100))
    full.look_closely(100)
    assert trained(full, range(101, 170)) == [*range(101, 100 + CLOSELY + 1), 156, 162, 168]
    full.tune(Tuning(closely_until=190))
    full.tune(Tuning(closely_until=180))  # an earlier one takes nothing back
    assert trained(full, range(170, 200)) == [*range(170, 191), 192, 198]


def test_an_every_that_is_given_meanwhile_wins() -> None:
    full = FullBatches(None, BUDGET)
    trained(full, range(100))
    full.look_closely(100)
    full.tune(Tuning(every=10))
    full.tune(Tuning(pace=3, pace_from=0))
    assert trained(full, range(101, 150)) == [110, 120, 130, 140]


@pytest.mark.parametrize(
    ("full", "between", "every"),
    [
        (0.02, 0.001, 1),  # all of it is within the budget
        (0.021, 0.001, 2),
        (0.10, 0.0, 5),
        (0.0524, 0.0193, 48),  # GPT-2's shape on one thread
        (0.02, 0.02, 1),
        (0.6, 0.5, MOST_EVERY),  # no K would do
        (9.0, 0.001, MOST_EVERY),
    ],
)
def test_the_smallest_k_within_the_budget(full: float, between: float, every: int) -> None:
    assert fewest(full, between, 1.0, BUDGET) == every


SECONDS = st.floats(1e-6, 10.0)


@given(SECONDS, SECONDS, SECONDS, st.floats(0.001, 0.5))
def test_the_mean_is_within_the_budget_and_with_one_less_it_is_not(
    full: float, share: float, bare: float, budget: float
) -> None:
    between = full * min(share, 1.0)
    every = fewest(full, between, bare, budget)

    def mean(k: int) -> float:
        return between + (full - between) / k

    assert every == MOST_EVERY or mean(every) <= budget * bare * (1 + 1e-9)
    assert every == 1 or mean(every - 1) > budget * bare * (1 - 1e-9)


@given(SECONDS, st.floats(0.0, 1.0), st.floats(0.02, 0.5))
def test_the_looks_of_each_64th_batch_which_no_median_shows_are_within_the_budget_too(
    bare: float, share: float, budget: float
) -> None:
    high = 4 * budget * bare
    low, rare = high * share, 64 * 0.002 * bare
    full = FullBatches(None, budget)
    trained(full, range(64), (Sample(True, high, bare + high), Sample(False, low, bare + low)))
    spent = (
        sum(high if full.is_full(number) else low for number in range(64, 64 + 64 * full.cost.every))
        + full.cost.every * rare
    )
    assert full.cost.every == MOST_EVERY or spent <= budget * bare * 64 * full.cost.every * (1 + 1e-9)


@given(st.lists(st.sampled_from(["batch", "tune", "pace", "closely", "refuse"]), max_size=60), st.integers(0, 5))
def test_whatever_comes_in_whatever_order_the_first_batches_are_full(events: list[str], patience: int) -> None:
    full, number, now, is_free = FullBatches(None, BUDGET, float(patience)), 0, 0.0, True
    for event in [*events, *["batch"] * 30]:
        now += 0.1
        match event:
            case "batch":
                is_full = full.is_full(number)
                assert is_full or number >= FIRST or not is_free
                if full.is_timed(number):
                    full.take(COSTLY[not is_full], now)
                full.wait(now)
                number += 1
            case "tune":
                full.tune(Tuning(every=3))
                is_free = False
            case "pace":
                full.tune(Tuning(pace=5, pace_from=number + 2))
                is_free = False
            case "closely":
                full.look_closely(number)
            case "refuse":
                full.refuse("its forward communicates")
