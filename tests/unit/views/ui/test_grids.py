"""Cells against a plain Python computation over the same readings."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwatch.shared.types.frame import DTYPE_MAX, FrameSpec, FrameTable, Kind, Phase, ReadingSpec, State
from rankwatch_monitor.record.numbers.digest import Columns
from rankwatch_monitor.record.numbers.layout import Array
from rankwatch_monitor.record.numbers.rows import PartExtremes, Point, Series
from rankwatch_monitor.views.ui import grids
from rankwatch_monitor.views.ui.grids import BAD, Grid, RankGrid, as_changes, module_grid, thinned

COLUMNS = [("rank", "<u4"), ("batch", "<i8"), ("headroom", "<f4"), ("bad", "<u4")]


def digests(*parts: tuple[int, int, float, int]) -> Array:
    return np.array(list(parts), COLUMNS)


@given(
    st.integers(1, 20),
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 19), st.integers(0, 300), st.floats(0, 100, width=32), st.integers(0, 1)), min_size=1
        ),
        max_size=4,
    ),
)
def test_a_cell_holds_the_worst_of_the_ranks_and_batches_that_it_covers(
    world_size: int, pieces: list[list[tuple[int, int, float, int]]]
) -> None:
    made = RankGrid(world_size, rows=4, columns=8)
    expected: dict[tuple[int, int], float] = {}
    for piece in pieces:
        made.add(digests(*piece))
        for rank, batch, headroom, bad in piece:
            if rank < world_size:
                value = BAD if bad else headroom
                expected[rank, batch] = min(value, expected.get((rank, batch), math.inf))
    grid = made.grid()
    per_row = -(-world_size // 4)
    cells: dict[tuple[int, int], float] = {}
    for (rank, batch), value in expected.items():
        place = rank // per_row, (batch - grid.first) // grid.step
        cells[place] = min(value, cells.get(place, math.inf))
    told = {(y, x): v for y, row in enumerate(grid.cells) for x, v in enumerate(row) if v is not None}
    assert told.keys() == cells.keys()
    assert all(told[place] == pytest.approx(value, abs=0.006) for place, value in cells.items())
    assert all(len(row) <= 8 for row in grid.cells)


def test_rows_are_called_after_their_ranks() -> None:
    assert RankGrid(3).grid().rows == ["0", "1", "2"]
    assert RankGrid(1000).grid().rows[-1] == "992-999"


def test_marked_frames_are_bad() -> None:
    made = RankGrid(2)
    made.add(digests((0, 5, 3.0, 0), (1, 5, 4.0, 0)))
    made.mark(1, 6)
    assert made.grid()._replace(rows=[]) == grids.Grid(5, 1, [], [[3.0, None], [4.0, BAD]])


def spec(module: str, *dtypes: str, phase: Phase = Phase.FORWARD) -> FrameSpec:
    return FrameSpec(
        module, "Linear", tuple(ReadingSpec(Kind.OUTPUT, f"output[{i}]", d) for i, d in enumerate(dtypes)), phase=phase
    )


FORWARD = FrameTable((spec("a", "float16", "float32"), spec("b", "int64"), spec("c", "float16")))
BACKWARD = FrameTable((spec("c", "float16", phase=Phase.BACKWARD),))
TABLES = {1: FORWARD, 2: BACKWARD}
OF = {number: Columns(number, table) for number, table in TABLES.items()}


def rows(batch: int, highs: list[float], states: list[State], table: int = 1) -> PartExtremes:
    numbers = np.array([highs], OF[table].dtype)
    return PartExtremes(np.array([batch]), table, numbers, np.array([[int(state) for state in states]], np.uint8))


FINE, BROKEN, WHOLE = State.FINITE, State.INF, State.NOT_FLOAT


def test_modules_in_execution_order_with_the_reading_that_comes_nearest() -> None:
    parts = [
        rows(4, [DTYPE_MAX["float16"] / 4, 1e10, 7, 1], [FINE, FINE, WHOLE, FINE]),
        rows(4, [DTYPE_MAX["float16"] / 2], [FINE], table=2),
        rows(5, [1, 1, 7, math.inf], [FINE, FINE, WHOLE, BROKEN]),
    ]
    grid = module_grid(TABLES, OF, parts, [4, 5])
    assert grid.rows == ["a (Linear)", "b (Linear)", "c (Linear)", "c (Linear, backward)"]
    assert grid.keys == [("a", "forward"), ("b", "forward"), ("c", "forward"), ("c", "backward")]
    a, b, c, backward = grid.cells
    assert a == [pytest.approx(2, abs=0.01), pytest.approx(16, abs=0.01)]
    assert b == [None, None]
    assert c == [pytest.approx(16, abs=0.01), BAD]
    assert backward == [pytest.approx(1, abs=0.01), None]


def test_a_module_that_tripped_is_bad_in_its_batch() -> None:
    grid = module_grid(
        TABLES, OF, [rows(4, [1, 1, 1, 1], [FINE, FINE, WHOLE, FINE])], [4], tripped=[("c (Linear)", 5), ("gone (X)", 5)]
    )
    assert (grid.cells[0][1], grid.cells[2][1]) == (None, BAD)


def test_few_columns_few_rows_and_a_choice_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "COLUMNS", 10)
    parts = [rows(batch, [1, 1, 1, 2.0 + batch], [FINE, FINE, WHOLE, FINE]) for batch in range(0, 40, 2)]
    grid = module_grid(TABLES, OF, parts, range(0, 40, 2), most=1)
    assert (grid.first, grid.step, grid.rows, grid.hidden) == (0, 4, ["c (Linear)"], 2)
    assert len(grid.cells[0]) == 10
    assert module_grid(TABLES, OF, parts, range(0, 40, 2), pattern="[ab]").rows == ["a (Linear)", "b (Linear)"]
    wide = module_grid(TABLES, OF, parts, range(0, 40, 2), pattern="none")
    assert (wide.rows, wide.cells) == ([], [])


def test_batches_retained_far_apart_leave_no_stripes() -> None:
    parts = [rows(batch, [1, 1, 1, 1], [FINE, FINE, WHOLE, FINE]) for batch in (0, 8, 16)]
    assert [len(row) for row in module_grid(TABLES, OF, parts, [0, 8, 16]).cells] == [3, 3, 3]


@given(st.integers(0, 50), st.integers(1, 10))
def test_thinned_points_keep_the_extremes_and_the_worst(count: int, most: int) -> None:
    points = [Point(batch, 1.0 / (batch + 1), float(batch), State.NAN if batch == 7 else FINE) for batch in range(count)]
    series = Series(*map(np.array, zip(*points, strict=True))) if points else Series(*(np.zeros(0, int),) * 4)
    thin = thinned(series, most)
    assert len(thin) <= most
    assert max((point.abs_max for point in thin), default=0) == max(count - 1, 0)
    assert min((point.abs_min for point in thin), default=1) == (1 / count if count else 1)
    assert any(point.state is State.NAN for point in thin) == (count > 7)


def test_a_change_is_seen_against_the_cells_before() -> None:
    cells = [[100.0, 101.0, None, 99.0, 95.0, 110.0, BAD], [None, 5.0], []]
    grid = as_changes(Grid(0, 1, ["0", "1", "2"], cells))
    assert grid.cells == [[0.0, 0.0, None, 1.5, 5.0, 0.0, BAD], [None, 0.0], []]
    assert grid.measure == "change"
