"""Which units meet in which wave, and which unit is at fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwatch.doctor.checks.pairs import (
    Blame,
    Pair,
    Wave,
    blame,
    first_round,
    into_waves,
    remaining,
    second_round,
    slow_pairs,
    without_blamed,
)

Link = Callable[[Pair], bool]


def meet(units: int, link: Link, *, all_pairs: bool = True) -> tuple[list[list[Wave]], dict[Pair, bool]]:
    """Runs all rounds; ``link`` decides whether two units can reach each other."""
    outcomes: dict[Pair, bool] = {}
    rounds = [first_round(units)]
    outcomes |= {pair: link(pair) for wave in rounds[0] for pair in wave}
    for following in (second_round, remaining) if all_pairs else (second_round,):
        rounds.append(following(units, outcomes))
        outcomes |= {pair: link(pair) for wave in rounds[-1] for pair in wave}
    return rounds, outcomes


def ill(*units: int) -> Link:
    return lambda pair: not set(pair) & set(units)


def cut(*pairs: Pair) -> Link:
    return lambda pair: pair not in pairs


@st.composite
def networks(draw: st.DrawFn) -> tuple[int, Link]:
    units = draw(st.integers(1, 12))
    broken = draw(st.sets(st.tuples(st.integers(0, 11), st.integers(0, 11))))
    dead = draw(st.sets(st.integers(0, 11)))
    return units, lambda pair: pair not in broken and not set(pair) & dead


@given(networks(), st.booleans())
def test_no_unit_is_twice_in_a_wave_and_no_pair_meets_twice(network: tuple[int, Link], all_pairs: bool) -> None:
    units, link = network
    rounds, outcomes = meet(units, link, all_pairs=all_pairs)
    pairs = [pair for waves in rounds for wave in waves for pair in wave]
    assert len(pairs) == len(set(pairs)) == len(outcomes)
    assert all(0 <= left < right < units for left, right in pairs)
    for waves in rounds:
        for wave in waves:
            assert len({unit for pair in wave for unit in pair}) == 2 * len(wave)


@given(st.integers(2, 40))
def test_all_meet_in_the_first_round_in_at_most_two_waves(units: int) -> None:
    waves = first_round(units)
    assert {unit for wave in waves for pair in wave for unit in pair} == set(range(units))
    assert len(waves) == 1 + units % 2


@given(st.integers(3, 40), st.data())
def test_one_ill_unit_is_found_in_two_rounds(units: int, data: st.DataObject) -> None:
    unit = data.draw(st.integers(0, units - 1))
    _, outcomes = meet(units, ill(unit), all_pairs=False)
    assert blame(outcomes) == Blame(units=(unit,))
    assert without_blamed(units, blame(outcomes)) == [other for other in range(units) if other != unit]


@given(st.integers(3, 12), st.data())
def test_one_broken_pair_is_found_when_all_meet(units: int, data: st.DataObject) -> None:
    left = data.draw(st.integers(0, units - 2))
    pair = left, data.draw(st.integers(left + 1, units - 1))
    _, outcomes = meet(units, cut(pair))
    assert blame(outcomes) == Blame(pairs=(pair,))


@given(st.integers(4, 12), st.data())
def test_ill_units_are_found_and_no_other_is_accused(units: int, data: st.DataObject) -> None:
    dead = data.draw(st.sets(st.integers(0, units - 1), max_size=units - 2))
    _, outcomes = meet(units, ill(*dead))
    assert blame(outcomes) == Blame(units=tuple(sorted(dead)))


@given(networks())
def test_the_remaining_units_can_all_reach_each_other(network: tuple[int, Link]) -> None:
    units, link = network
    _, outcomes = meet(units, link)
    fit = without_blamed(units, blame(outcomes))
    assert all(outcomes.get((left, right), True) for left in fit for right in fit if left < right)


@given(networks())
def test_a_unit_that_reaches_any_other_is_not_ill_and_each_failure_is_explained(network: tuple[int, Link]) -> None:
    units, link = network
    _, outcomes = meet(units, link)
    blamed = blame(outcomes)
    healthy = {unit for pair, well in outcomes.items() if well for unit in pair}
    assert not healthy & set(blamed.units)
    for pair, well in outcomes.items():
        explained = pair in blamed.pairs or pair in blamed.unclear or bool(set(pair) & set(blamed.units))
        assert explained is not well


def test_the_second_round_mixes_suspects_with_good_ones() -> None:
    outcomes = {(0, 1): False, (2, 3): True, (4, 5): True}
    (wave,) = second_round(6, outcomes)
    assert wave == [(0, 2), (1, 3)]


def test_between_two_units_the_ill_one_is_unknown() -> None:
    _, outcomes = meet(2, ill(1))
    assert blame(outcomes) == Blame(unclear=((0, 1),))


def test_when_no_unit_reaches_another_the_cause_is_unclear() -> None:
    _, outcomes = meet(4, lambda pair: False)
    assert len(outcomes) == 6
    assert len(blame(outcomes).unclear) == 6
    assert without_blamed(4, blame(outcomes)) == [0]


@pytest.mark.parametrize(
    ("bandwidth", "slow"),
    [
        ({(0, 1): 10.0, (2, 3): 1.0}, []),  # between two pairs, the exception is unknown
        ({(0, 1): 10.0, (2, 3): 2.6, (1, 2): 11.0}, []),
        ({(0, 1): 10.0, (2, 3): 2.4, (1, 2): 11.0}, [(2, 3)]),
    ],
)
def test_slow_pairs(bandwidth: dict[Pair, float], slow: list[Pair]) -> None:
    assert slow_pairs(bandwidth) == slow


def test_waves() -> None:
    assert into_waves([(0, 1), (1, 2), (2, 3), (0, 3)]) == [[(0, 1), (2, 3)], [(1, 2), (0, 3)]]
