"""How near readings are to overflow, by rank and batch or by module and batch, in no more cells than a screen shows. Pure.

A cell holds headroom: how many times the reading nearest to its dtype's largest number can double until it gets there; BAD
if a reading is inf or nan, NOTHING if there are no readings.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from rankwatch.shared.types.frame import MEASURED, FrameTable, State
from rankwatch.shared.words.text import describe_module

from ...record.numbers.digest import SCALE, Columns
from ...record.numbers.layout import Array
from ...record.numbers.rows import PartExtremes, Point, Series
from .bins import Bins, moved

BAD, NOTHING, MOST = -1.0, np.inf, 255.0
"""MOST: a larger headroom, such as that of zeros, counts as this."""

RECENT = 16
"""Cells before, of which the median is what is usual for a row."""

RANK_ROWS, MODULE_ROWS, COLUMNS, POINTS = 128, 100, 256, 1000

_BADNESS = np.zeros(256, np.uint8)
_BADNESS[[State.FINITE, State.INF, State.NAN]] = 1, 2, 3
_MEASURED = np.zeros(256, bool)
_MEASURED[list(MEASURED)] = True


class Grid(NamedTuple):
    """``cells[row][column]`` is headroom; None: nothing. Column ``c`` has the ``step`` batches from ``first + c * step`` on."""

    first: int
    step: int
    rows: list[str]
    cells: list[list[float | None]]
    hidden: int = 0
    """Rows left out for want of room."""
    keys: Sequence[tuple[str, str]] = ()
    """The module and phase of each row."""
    measure: str = "headroom"
    """What a cell holds: ``headroom``, or ``change`` (see ``as_changes``)."""


class RankGrid:
    """The worst headroom by rank and batch. Digests are added piece by piece; many ranks or batches share a cell."""

    def __init__(self, world_size: int, rows: int = RANK_ROWS, columns: int = COLUMNS) -> None:
        self._world_size, self._bins = world_size, Bins(columns)
        self._ranks_per_row = -(-world_size // rows)
        self._cells = np.full((-(-world_size // self._ranks_per_row), columns), NOTHING, np.float32)

    def add(self, digests: Array) -> None:
        """Adds digests with the columns rank, batch, headroom and bad."""
        digests = digests[(digests["rank"] < self._world_size) & (digests["batch"] >= 0)]
        if not len(digests):
            return
        self._make_room(int(digests["batch"].min()), int(digests["batch"].max()))
        rows = digests["rank"] // self._ranks_per_row
        columns = self._bins.of(digests["batch"])
        values = np.where(digests["bad"] > 0, np.float32(BAD), np.minimum(digests["headroom"], np.float32(MOST)))
        np.minimum.at(self._cells.reshape(-1), rows.astype(np.int64) * self._bins.count + columns, values)

    def mark(self, rank: int, batch: int) -> None:
        """A reading went bad in this batch, and its rank ended before it sent the batch."""
        digest = np.zeros(1, [("rank", "<u4"), ("batch", "<i8"), ("headroom", "<f4"), ("bad", "<u4")])
        digest["rank"], digest["batch"], digest["bad"] = rank, batch, 1
        self.add(digest)

    def grid(self) -> Grid:
        cells = self._cells[:, : self._bins.used]
        return Grid(self._bins.first, self._bins.step, [self._name(row) for row in range(len(cells))], _plain(cells))

    def _name(self, row: int) -> str:
        first = row * self._ranks_per_row
        last = min(first + self._ranks_per_row, self._world_size) - 1
        return str(first) if first == last else f"{first}-{last}"

    def _make_room(self, low: int, high: int) -> None:
        to = self._bins.fit(low, high)
        if to is not None:
            self._cells = moved(self._cells, to, np.minimum, NOTHING)


def module_grid(
    tables: Mapping[int, FrameTable],
    columns: Mapping[int, Columns],
    parts: Iterable[PartExtremes],
    stored: Sequence[int],
    *,
    pattern: str = "",
    tripped: Sequence[tuple[str, int]] = (),
    most: int = MODULE_ROWS,
) -> Grid:
    """The worst headroom by module and batch, modules in the order in which they run.

    Args:
        parts: of the batches ``stored``, which are in order.
        pattern: a pattern that the modules' names match, or a part of the names.
        tripped: modules, as reports name them, with the batch in which each went bad on a rank that never sent the batch.
        most: modules; if there are more, the ones nearest to overflow.
    """
    first, last = stored[0], max(stored[-1], *(batch for _, batch in tripped), 0)
    usual = statistics.median_low([after - before for before, after in pairwise(stored)] or [1])
    step = max(usual, -(-(last - first + 1) // COLUMNS))
    width = (last - first) // step + 1
    worst: dict[int, Array] = {}
    for part in parts:
        known = columns[part.table]
        if part.table not in worst:
            worst[part.table] = np.full((width, known.rows), -1, np.float32)
        with np.errstate(invalid="ignore"):
            shares = (part.abs_max * known.shares).astype(np.float32)
        shares[part.states != int(State.FINITE)] = -1
        shares[(part.states == int(State.INF)) | (part.states == int(State.NAN))] = np.inf
        places = (part.batches - first) // step
        begins = np.flatnonzero(np.diff(places, prepend=-1))
        into = places[begins]
        worst[part.table][into] = np.maximum(worst[part.table][into], np.maximum.reduceat(shares, begins, axis=0))
    names: dict[str, Array] = {}
    keys: dict[str, tuple[str, str]] = {}
    for number, shares in worst.items():
        start = 0
        for spec in tables[number].specs:
            end = start + len(spec.readings)
            if end > start and _matches(spec.module, pattern):
                name = describe_module(spec)
                keys[name] = spec.module, spec.phase.name.lower()
                of_module = shares[:, start:end].max(axis=1)
                names[name] = np.maximum(names[name], of_module) if name in names else of_module
            start = end
    for name, batch in tripped:
        if name in names and batch >= first:
            names[name][(batch - first) // step] = np.inf
    nearest = sorted(names, key=lambda name: -float(names[name].max()))[:most]
    shown = [name for name in names if name in set(nearest)]
    cells = _headroom(np.array([names[name] for name in shown], np.float32).reshape(len(shown), width))
    return Grid(first, step, shown, _plain(cells), len(names) - len(shown), [keys[name] for name in shown])


def as_changes(grid: Grid) -> Grid:
    """A grid whose cells hold the doublings above the median of the row's last cells before; 0: no more than that.

    Where dtypes end at 1e38 and beyond, all headroom looks alike.
    """
    return grid._replace(cells=[_changes_of(row) for row in grid.cells], measure="change")


def _changes_of(row: Sequence[float | None]) -> list[float | None]:
    past: deque[float] = deque(maxlen=RECENT)
    changes: list[float | None] = []
    for cell in row:
        if cell is None or cell == BAD:
            changes.append(cell)
            continue
        changes.append(round(max(0.0, statistics.median(past) - cell), 2) if past else 0.0)
        past.append(cell)
    return changes


def _matches(module: str, pattern: str) -> bool:
    return pattern in module or fnmatchcase(module, pattern)


def _headroom(shares: Array) -> Array:
    """From shares of a dtype's largest number times SCALE; a share of -1 means no reading, inf means inf or nan."""
    with np.errstate(divide="ignore"):
        headroom: Array = np.minimum(np.log2(SCALE) - np.log2(np.maximum(shares, 0)), MOST)
    headroom[shares < 0] = NOTHING
    headroom[np.isposinf(shares)] = BAD
    return headroom


def _plain(cells: Array) -> list[list[float | None]]:
    """Two decimals; None where there is nothing."""
    rounded = np.round(cells.astype(np.float64), 2)
    return [[value if value < NOTHING else None for value in row] for row in rounded.tolist()]


def thinned(series: Series, most: int = POINTS) -> list[Point]:
    """At most ``most`` points; each has the smallest, the largest and the worst of those that it replaces."""
    if len(series.batches) <= most:
        return series.points()
    begins = np.arange(0, len(series.batches), -(-len(series.batches) // most))
    # Of points of which some have no numbers, the others have the extremes.
    measured = _MEASURED[series.states]
    lows = np.fmin.reduceat(np.where(measured, series.abs_min, np.nan), begins)
    highs = np.fmax.reduceat(np.where(measured, series.abs_max, np.nan), begins)
    worst = np.maximum.reduceat(_BADNESS[series.states].astype(np.int64) * 256 + series.states, begins) % 256
    return Series(series.batches[begins], lows, highs, worst.astype(np.uint8)).points()
