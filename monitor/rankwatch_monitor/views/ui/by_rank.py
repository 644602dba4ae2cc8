"""A number that each rank has in each batch: over all ranks, and of some of them, in bins of batches. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...record.numbers.layout import Array
from .bins import Bins, moved

DRAWN = 8
"""Ranks that each have a line of their own, in a chart."""


class Curve(NamedTuple):
    """``points`` of [batch, number, rank or None]; a number that is None is an inf or nan. ``rank`` None: over all ranks."""

    name: str
    rank: int | None
    points: list[list[Any]]


class Layer(NamedTuple):
    """An array with a value for each bin, the ufunc that joins two values, and the value of an empty bin."""

    fold: Any
    empty: float
    shape: tuple[int, ...]
    dtype: str


class Runs(NamedTuple):
    """Equal places that follow upon each other: each of these places, and where its run starts."""

    places: Array
    starts: Array

    @classmethod
    def of(cls, places: Array) -> Runs:
        """``places``: in order."""
        starts = np.flatnonzero(np.diff(places, prepend=-1))
        return cls(places[starts], starts)


class Layers:
    """Arrays whose last axis are bins."""

    def __init__(self, layers: dict[str, Layer], bins: int) -> None:
        self._layers = layers
        self._values = {name: np.full((*layer.shape, bins), layer.empty, layer.dtype) for name, layer in layers.items()}

    def __getitem__(self, name: str) -> Array:
        return self._values[name]

    def fold(self, name: str, places: Array, values: Any) -> None:
        self._layers[name].fold.at(self._values[name].reshape(-1), places, values)

    def fold_runs(self, name: str, runs: Runs, values: Array) -> None:
        """The same, several times as fast, where the places are in order."""
        if len(values):
            fold, into = self._layers[name].fold, self._values[name].reshape(-1)
            into[runs.places] = fold(into[runs.places], fold.reduceat(values, runs.starts))

    def move(self, to: Array) -> None:
        """Each bin goes to a new place."""
        self._values = {name: moved(self._values[name], to, *layer[:2]) for name, layer in self._layers.items()}


class ByRank:
    """One number. ``drawn``: the ranks with a line of their own, beside those over all ranks."""

    def __init__(self, world_size: int, drawn: Sequence[int], bins: Bins) -> None:
        self._world_size = world_size
        self._drawn = tuple(drawn)
        self._bins = bins
        own = len(self._drawn)
        layers = {
            "low": Layer(np.minimum, np.inf, (), "f8"),
            "high": Layer(np.maximum, -np.inf, (), "f8"),
            "sum": Layer(np.add, 0, (), "f8"),
            "count": Layer(np.add, 0, (), "i8"),
            "bad": Layer(np.minimum, world_size, (), "i8"),  # the lowest rank whose number is not finite
            "own_sum": Layer(np.add, 0, (own,), "f8"),
            "own_count": Layer(np.add, 0, (own,), "i8"),
            "own_bad": Layer(np.maximum, 0, (own,), "i8"),
        }
        self._layers = Layers(layers, bins.count)
        self._highest = np.zeros(bins.count, np.int64)
        """The rank with the highest number."""

    def add(self, ranks: Array, bins: Array, numbers: Array) -> None:
        """``bins``: in order."""
        layers, fine = self._layers, np.isfinite(numbers)
        if not fine.all():
            layers.fold("bad", bins[~fine], ranks[~fine])
        for at, rank in enumerate(self._drawn):
            own = np.flatnonzero(ranks == rank)
            places, is_fine = at * self._bins.count + bins[own], fine[own]
            layers.fold("own_sum", places[is_fine], numbers[own][is_fine].astype(np.float64))
            layers.fold("own_count", places[is_fine], 1)
            layers.fold("own_bad", places[~is_fine], 1)
        if not fine.all():
            ranks, bins, numbers = ranks[fine], bins[fine], numbers[fine]
        numbers, runs = numbers.astype(np.float64), Runs.of(bins)
        before = layers["high"].copy()
        layers.fold_runs("low", runs, numbers)
        layers.fold_runs("high", runs, numbers)
        layers.fold_runs("sum", runs, numbers)
        layers.fold("count", runs.places, np.diff(runs.starts, append=len(bins)))
        is_higher = layers["high"] > before
        if is_higher.any():
            highest = np.flatnonzero(numbers == np.where(is_higher, layers["high"], np.nan)[bins])
            self._highest[bins[highest]] = ranks[highest]

    def move(self, to: Array) -> None:
        """Each bin goes to a new place."""
        before = self._layers["high"]
        self._layers.move(to)
        highest = np.zeros_like(self._highest)
        fits = (to >= 0) & (to < self._bins.count)
        is_highest = fits & (before == self._layers["high"][np.where(fits, to, 0)])
        highest[to[is_highest]] = self._highest[is_highest]
        self._highest = highest

    def lines(self) -> list[Curve]:
        """The mean over the ranks, the lowest and the highest, and the mean of each drawn rank. Empty without a number."""
        found: list[Curve] = []
        layers = self._layers
        if self._world_size > 1:
            with np.errstate(invalid="ignore", divide="ignore"):
                mean = layers["sum"] / layers["count"]
            bad = layers["bad"] < self._world_size
            ranks = [int(rank) if is_bad else None for rank, is_bad in zip(layers["bad"], bad, strict=True)]
            found.append(Curve("mean of the ranks", None, self._points(mean, bad, ranks)))
            if self._world_size > DRAWN:
                never = np.zeros_like(bad)
                found.append(Curve("lowest", None, self._points(layers["low"], never)))
                found.append(Curve("highest", None, self._points(layers["high"], never, self._highest.tolist())))
        for at, rank in enumerate(self._drawn):
            with np.errstate(invalid="ignore", divide="ignore"):
                mean = layers["own_sum"][at] / layers["own_count"][at]
            found.append(Curve(f"rank {rank}", rank, self._points(mean, layers["own_bad"][at] > 0)))
        return [line for line in found if line.points]

    def _points(self, numbers: Array, bad: Array, ranks: Sequence[int | None] | None = None) -> list[list[Any]]:
        points: list[list[Any]] = []
        for at, (number, is_bad) in enumerate(zip(numbers.tolist(), bad.tolist(), strict=True)):
            if is_bad or math.isfinite(number):
                value = None if is_bad else short(number)
                points.append([self._bins.first + at * self._bins.step, value, ranks[at] if ranks else None])
        return points


def short(number: float) -> float:
    return float(f"{number:.5g}")
