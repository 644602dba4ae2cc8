"""When a reading counts as having left its own range."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwatch_monitor.record.numbers.jumps import PAST, SETTLED, find_jumps


def jumped(*values: float) -> list[int]:
    """The batches in which the one reading jumped; the values are abs maxima, -1 where nothing was measured."""
    with np.errstate(invalid="ignore", divide="ignore"):
        column = np.log2(np.array([value if value > 0 else np.nan for value in values], np.float32)[:, None])
    return [int(batch) for batch in np.flatnonzero(find_jumps(column).jumped[:, 0])]


STEADY = [1.0, 1.2, 0.9, 1.1, 1.05, 0.95] * 7


def test_a_sudden_rise_is_a_jump_as_long_as_it_lasts() -> None:
    assert jumped(*STEADY, 1000.0, 900.0, 1.0) == [42, 43]
    assert jumped(*STEADY, 6.0) == []


def test_a_factor_above_the_median_is_given() -> None:
    column = np.log2(np.array([[1.0]] * 20 + [[1024.0]], np.float32))
    assert find_jumps(column).rises[20, 0] == pytest.approx(10.0)


def test_what_is_not_finite_is_a_jump_after_finite_numbers() -> None:
    assert jumped(*STEADY, float("inf")) == [42]
    assert jumped(*[float("inf")] * 30) == []
    assert jumped(*[float("inf")] * 30, 1.0, 1.0, float("inf")) == []


@pytest.mark.parametrize("factor", [1.01, 1.3, 2.0, 10.0])
def test_steady_growth_is_no_jump(factor: float) -> None:
    assert jumped(*(factor**n for n in range(-60, 60) if 1e-30 < factor**n < 1e30)) == []


def test_growth_after_a_steady_time_is_a_jump() -> None:
    found = jumped(*STEADY, *(1.3**n for n in range(1, 30)))
    assert found
    assert found[0] <= 42 + 10


def test_a_regular_spike_is_no_jump_once_it_is_known() -> None:
    found = jumped(*([*STEADY[:7], 100.0] * 8))
    assert found == [7, 15]


def test_a_weight_that_grows_from_zero_and_is_measured_every_16_steps_is_no_jump() -> None:
    bias = np.repeat(1e-3 * np.arange(1, 200, 16), 16)[:, None]
    weight = np.ones_like(bias)
    weight[100:] = 1e30
    values = np.log2(np.concatenate([bias, weight], axis=1)).astype(np.float32)
    found = find_jumps(values, np.array([True, True])).jumped
    assert not found[:, 0].any()
    assert np.flatnonzero(found[:, 1])[0] == 100


def test_noise_is_no_jump() -> None:
    values = 2.0 ** np.random.default_rng(0).normal(0.0, 1.0, (500, 200)).astype(np.float32)
    assert find_jumps(np.log2(values)).jumped.mean() < 3e-4


def test_too_little_history_is_no_jump() -> None:
    assert jumped(1.0, 1.0, 1e6) == []
    assert jumped(1.0, 1.0, 1.0, 1e6) == [3]
    assert jumped(1.0, 2.0, 3.0, 16.0) == []


def test_a_new_range_is_learned() -> None:
    found = jumped(*STEADY, *[64.0] * (2 * (PAST + SETTLED)))
    assert found[0] == 42
    assert found[-1] < 42 + SETTLED + PAST


def test_readings_that_were_not_measured_change_nothing() -> None:
    gaps = [value for one in STEADY for value in (one, -1.0, -1.0, -1.0)]
    assert jumped(*gaps, 1000.0) == [len(gaps)]


@given(st.lists(st.one_of(st.floats(1e-30, 1e30), st.just(float("inf")), st.just(-1.0)), max_size=80))
def test_no_number_makes_it_fail(values: list[float]) -> None:
    assert all(batch >= 3 for batch in jumped(*values))


@given(st.lists(st.floats(1e-3, 1e3), min_size=4, max_size=60), st.floats(1e-10, 1e10))
def test_units_do_not_matter(values: list[float], unit: float) -> None:
    column = np.log2(np.array(values, np.float32))[:, None]
    scaled = find_jumps(column + np.float32(np.log2(unit))).rises - find_jumps(column).rises
    assert np.nanmax(np.abs(scaled), initial=0.0) < 1e-3


@pytest.mark.parametrize("every", [1, 8, 64])
def test_growth_counts_by_the_batch_where_few_are_measured(every: int) -> None:
    calm = [1.0, 1.1, 0.9, 1.05] * 5
    batches = np.arange(0, (len(calm) + 1) * every, every)

    def is_jump(last: float) -> bool:
        column = np.log2(np.array([*calm, last], np.float32))[:, None]
        return bool(find_jumps(column, batches_of=batches).jumped[-1, 0])

    assert not is_jump(1.3**every)  # it may have grown since the last number
    assert is_jump(1e30)
