"""Who meets whom, and who is to blame."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwatch.doctor.pairs import (
    Blame,
    Heat,
    Pair,
    blame,
    first_round,
    into_heats,
    remaining,
    second_round,
    slow_pairs,
    without_blamed,
)

Link = Callable[[Pair], bool]


def meet(units: int, link: Link, *, all_pairs: bool = True) -> tuple[list[list[Heat]], dict[Pair, bool]]:
    """All rounds, where ``link`` says whether two can speak with each other."""
    results: dict[Pair, bool] = {}
    rounds = [first_round(units)]
    results |= {pair: link(pair) for heat in rounds[0] for pair in heat}
    for following in (second_round, remaining) if all_pairs else (second_round,):
        rounds.append(following(units, results))
        results |= {pair: link(pair) for heat in rounds[-1] for pair in heat}
    return rounds, results


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
def test_nobody_is_asked_for_twice_in_a_heat_and_no_pair_meets_twice(network: tuple[int, Link], all_pairs: bool) -> None:
    units, link = network
    rounds, results = meet(units, link, all_pairs=all_pairs)
    pairs = [pair for heats in rounds for heat in heats for pair in heat]
    assert len(pairs) == len(set(pairs)) == len(results)
    assert all(0 <= left < right < units for left, right in pairs)
    for heats in rounds:
        for heat in heats:
            assert len({unit for pair in heat for unit in pair}) == 2 * len(heat)


@given(st.integers(2, 40))
def test_all_meet_in_the_first_round_in_at_most_two_heats(units: int) -> None:
    heats = first_round(units)
    assert {unit for heat in heats for pair in heat for unit in pair} == set(range(units))
    assert len(heats) == 1 + units % 2


@given(st.integers(3, 40), st.data())
def test_one_ill_unit_is_found_in_two_rounds(units: int, data: st.DataObject) -> None:
    unit = data.draw(st.integers(0, units - 1))
    _, results = meet(units, ill(unit), all_pairs=False)
    assert blame(results) == Blame(units=(unit,))
    assert without_blamed(units, blame(results)) == [other for other in range(units) if other != unit]


@given(st.integers(3, 12), st.data())
def test_one_broken_pair_is_found_when_all_meet(units: int, data: st.DataObject) -> None:
    left = data.draw(st.integers(0, units - 2))
    pair = left, data.draw(st.integers(left + 1, units - 1))
    _, results = meet(units, cut(pair))
    assert blame(results) == Blame(pairs=(pair,))


@given(st.integers(4, 12), st.data())
def test_ill_units_are_found_and_no_other_is_accused(units: int, data: st.DataObject) -> None:
    dead = data.draw(st.sets(st.integers(0, units - 1), max_size=units - 2))
    _, results = meet(units, ill(*dead))
    assert blame(results) == Blame(units=tuple(sorted(dead)))


@given(networks())
def test_those_left_over_can_all_speak_with_each_other(network: tuple[int, Link]) -> None:
    units, link = network
    _, results = meet(units, link)
    fit = without_blamed(units, blame(results))
    assert all(results.get((left, right), True) for left in fit for right in fit if left < right)


@given(networks())
def test_who_speaks_with_anybody_is_no_ill_unit_and_each_failure_is_explained(network: tuple[int, Link]) -> None:
    units, link = network
    _, results = meet(units, link)
    blamed = blame(results)
    healthy = {unit for pair, well in results.items() if well for unit in pair}
    assert not healthy & set(blamed.units)
    for pair, well in results.items():
        explained = pair in blamed.pairs or pair in blamed.unclear or bool(set(pair) & set(blamed.units))
        assert explained is not well


def test_the_second_round_mixes_suspects_with_good_ones() -> None:
    results = {(0, 1): False, (2, 3): True, (4, 5): True}
    (heat,) = second_round(6, results)
    assert heat == [(0, 2), (1, 3)]


def test_two_alone_cannot_say_which_of_them_it_is() -> None:
    _, results = meet(2, ill(1))
    assert blame(results) == Blame(unclear=((0, 1),))


def test_where_nobody_speaks_with_anybody_all_is_unclear() -> None:
    _, results = meet(4, lambda pair: False)
    assert len(results) == 6
    assert len(blame(results).unclear) == 6
    assert without_blamed(4, blame(results)) == [0]


@pytest.mark.parametrize(
    ("bandwidth", "slow"),
    [
        ({(0, 1): 10.0, (2, 3): 1.0}, []),  # two cannot say which of them is the exception
        ({(0, 1): 10.0, (2, 3): 2.6, (1, 2): 11.0}, []),
        ({(0, 1): 10.0, (2, 3): 2.4, (1, 2): 11.0}, [(2, 3)]),
    ],
)
def test_slow_pairs(bandwidth: dict[Pair, float], slow: list[Pair]) -> None:
    assert slow_pairs(bandwidth) == slow


def test_heats() -> None:
    assert into_heats([(0, 1), (1, 2), (2, 3), (0, 3)]) == [[(0, 1), (2, 3)], [(1, 2), (0, 3)]]
