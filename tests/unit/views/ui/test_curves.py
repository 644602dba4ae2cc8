"""The curves of a run against a plain Python computation over the same digests."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwatch.shared.types.frame import NO_LOSS, NO_NORM
from rankwatch_monitor.record.numbers.layout import DIGEST, NO_MEMORY, Array
from rankwatch_monitor.views.ui.by_rank import Curve
from rankwatch_monitor.views.ui.curves import COLUMNS, Curves

Part: TypeAlias = dict[str, float]


def digests(*parts: Part) -> Array:
    return np.array([tuple(part[name] for name in COLUMNS) for part in parts], [(name, DIGEST[name]) for name in COLUMNS])


def batch(rank: int, number: int, loss: float = NO_LOSS, *, skew: float = 0.0, each: float = 0.5, **more: float) -> Part:
    started = 1e9 + skew + number * each
    known = {
        "rank": rank,
        "batch": number,
        "loss": loss,
        "started": started,
        "norm": NO_NORM,
        "memory": NO_MEMORY,
        "table": 0,
    }
    return {**known, **more}


def of(lines: list[Curve], name: str) -> dict[int, float | None]:
    return {point[0]: point[1] for line in lines if line.name == name for point in line.points}


@given(
    st.integers(2, 20),
    st.lists(
        st.lists(st.tuples(st.integers(0, 19), st.integers(0, 300), st.floats(0, 100, width=32)), min_size=1), max_size=4
    ),
)
def test_each_point_covers_the_batches_of_its_bin(world_size: int, pieces: list[list[tuple[int, int, float]]]) -> None:
    curves = Curves(world_size, (1,), bins=8)
    expected: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for piece in pieces:
        curves.add(digests(*(batch(*one) for one in piece)))
        for rank, number, loss in piece:
            if rank < world_size:
                expected[number].append((rank, loss))
    lines = curves.lines()["loss"]
    first, step = curves._bins.first, curves._bins.step
    bins: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for number, found in expected.items():
        bins[first + (number - first) // step * step] += found
    assert len(bins) <= 8
    mean = {at: sum(loss for _, loss in found) / len(found) for at, found in bins.items()}
    assert of(lines, "mean of the ranks") == pytest.approx(mean, rel=1e-3, abs=1e-9)
    own = {at: [loss for rank, loss in found if rank == 1] for at, found in bins.items()}
    mean_of_own = {at: sum(some) / len(some) for at, some in own.items() if some}
    assert of(lines, "rank 1") == pytest.approx(mean_of_own, rel=1e-3, abs=1e-9)
    for at, value, rank in next((line.points for line in lines if line.name == "highest"), []):
        assert value == pytest.approx(max(loss for _, loss in bins[at]), rel=1e-4)
        assert max(loss for by, loss in bins[at] if by == rank) == max(loss for _, loss in bins[at])


def test_a_loss_that_is_not_finite_is_a_point_without_a_number_with_its_rank() -> None:
    curves = Curves(3, (2,))
    curves.add(digests(batch(0, 0, 1.0), batch(2, 0, 3.0), batch(0, 1, 1.0), batch(2, 1, math.nan), batch(1, 2)))
    mean, own = (line for line in curves.lines()["loss"] if line.name != "lowest")
    assert mean.points == [[0, 2.0, None], [1, None, 2]]
    assert own == Curve("rank 2", 2, [[0, 3.0, None], [1, None, None]])


def test_the_rate_is_by_the_clock_of_each_rank() -> None:
    curves = Curves(3, ())
    skews = {0: 0.0, 1: -300.0, 2: 7200.0}
    curves.add(digests(*(batch(rank, number, skew=skew) for number in range(6) for rank, skew in skews.items())))
    assert of(curves.lines()["rate"], "median of the ranks") == pytest.approx(dict.fromkeys(range(5), 2.0), rel=1e-3)
    slow = Curves(3, ())
    slow.add(digests(*(batch(rank, number, each=2.0 if rank == 1 else 0.5) for number in range(6) for rank in range(3))))
    (slowest,) = (line for line in slow.lines()["rate"] if line.name == "slowest")
    assert slowest.points[3] == [3, 0.5, 1]


def test_what_is_not_known_has_no_point_and_memory_is_in_gib() -> None:
    curves = Curves(2, (1,))
    curves.add(digests(batch(0, 0), batch(1, 0), batch(0, 1, norm=3.0), batch(1, 1, norm=5.0, memory=2560)))
    curves.add(digests(batch(1, 2, norm=math.inf, memory=512)))
    lines = curves.lines()
    assert of(lines["norm"], "mean of the ranks") == {1: 4.0, 2: None}
    assert of(lines["norm"], "rank 1") == {1: 5.0, 2: None}
    assert of(lines["memory"], "rank 1") == {1: 2.5, 2: 0.5}
    assert lines["loss"] == []


def test_a_million_batches_and_a_run_without_any() -> None:
    assert not any(Curves(4, (0,)).lines().values())
    curves = Curves(1, (0,))
    for first in range(0, 1_000_000, 250_000):
        made = np.zeros(250_000, [(name, DIGEST[name]) for name in COLUMNS])
        made["batch"] = np.arange(first, first + 250_000)
        made["loss"], made["norm"] = 1.0, NO_NORM
        made["started"] = 1e9 + made["batch"] * 0.01
        curves.add(made)
    (line,) = curves.lines()["loss"]
    assert 256 < len(line.points) <= 512
    assert {point[1] for point in line.points} == {1.0}
    (rate,) = curves.lines()["rate"]
    assert all(point[1] == pytest.approx(100.0, rel=0.01) for point in rate.points)
