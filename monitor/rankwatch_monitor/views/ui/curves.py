"""The loss and the batches a second of a run, by rank and batch, in no more points than a screen shows. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rankwatch.shared.frame import NO_LOSS

from ...record.layout import Array
from .bins import Bins, moved

BINS = 512

CLOCKS = 64
"""Groups of ranks that share a clock. Only times of one clock are compared: those of two hosts may be minutes apart."""

DRAWN = 8
"""Ranks that each have a line of their own, in a chart of the loss."""

COLUMNS = ("rank", "batch", "loss", "started")
"""The columns of a digest that are needed."""


class Curve(NamedTuple):
    """``points`` of [batch, number, rank or None]; a number that is None is an inf or nan. ``rank`` None: over all ranks."""

    name: str
    rank: int | None
    points: list[list[Any]]


class _Layer(NamedTuple):
    """An array with a value for each bin, the ufunc that joins two values, and the value of an empty bin."""

    fold: Any
    empty: float
    shape: tuple[int, ...]
    dtype: str


class Curves:
    """Digests are added piece by piece.

    Args:
        drawn: the ranks with a line of their own, beside those over all ranks.
    """

    def __init__(self, world_size: int, drawn: Sequence[int], bins: int = BINS) -> None:
        self.drawn = tuple(drawn)
        self._world_size = world_size
        self._bins = Bins(bins)
        self._per_clock = -(-world_size // CLOCKS)
        clocks, own = -(-world_size // self._per_clock), len(self.drawn)
        self._layers = {
            "low": _Layer(np.minimum, np.inf, (), "f8"),
            "high": _Layer(np.maximum, -np.inf, (), "f8"),
            "sum": _Layer(np.add, 0, (), "f8"),
            "count": _Layer(np.add, 0, (), "i8"),
            "bad": _Layer(np.minimum, world_size, (), "i8"),  # the lowest rank whose loss is not finite
            "own_sum": _Layer(np.add, 0, (own,), "f8"),
            "own_count": _Layer(np.add, 0, (own,), "i8"),
            "own_bad": _Layer(np.maximum, 0, (own,), "i8"),
            "batch": _Layer(np.minimum, np.inf, (clocks,), "f8"),
            "time": _Layer(np.minimum, np.inf, (clocks,), "f8"),
            "last_batch": _Layer(np.maximum, -np.inf, (clocks,), "f8"),
            "last_time": _Layer(np.maximum, -np.inf, (clocks,), "f8"),
        }
        self._values = {
            name: np.full((*layer.shape, bins), layer.empty, layer.dtype) for name, layer in self._layers.items()
        }
        self._highest = np.zeros(bins, np.int64)
        """The rank with the highest loss."""

    def add(self, digests: Array) -> None:
        """Adds digests with the columns COLUMNS."""
        is_known = (digests["rank"] < self._world_size) & (digests["batch"] >= 0)
        if not is_known.all():  # a copy of digests costs as much as all else that is done with them
            digests = digests[is_known]
        if not len(digests):
            return
        self._make_room(int(digests["batch"].min()), int(digests["batch"].max()))
        bins = self._bins.of(digests["batch"])
        clocks = (digests["rank"] // self._per_clock).astype(np.int64) * self._bins.count + bins
        self._fold("batch", clocks, digests["batch"].astype(np.float64))
        self._fold("time", clocks, digests["started"])
        self._fold("last_batch", clocks, digests["batch"].astype(np.float64))
        self._fold("last_time", clocks, digests["started"])
        has_loss = digests["loss"] != np.float32(NO_LOSS)
        if has_loss.any():
            self._add_losses(digests["rank"][has_loss].astype(np.int64), bins[has_loss], digests["loss"][has_loss])

    def _add_losses(self, ranks: Array, bins: Array, losses: Array) -> None:
        fine = np.isfinite(losses)
        self._fold("bad", bins[~fine], ranks[~fine])
        for at, rank in enumerate(self.drawn):
            own = ranks == rank
            places = at * self._bins.count + bins
            self._fold("own_sum", places[own & fine], losses[own & fine].astype(np.float64))
            self._fold("own_count", places[own & fine], 1)
            self._fold("own_bad", places[own & ~fine], 1)
        ranks, bins, losses = ranks[fine], bins[fine], losses[fine].astype(np.float64)
        before = self._values["high"].copy()
        self._fold("low", bins, losses)
        self._fold("high", bins, losses)
        self._fold("sum", bins, losses)
        self._fold("count", bins, 1)
        highest = (losses == self._values["high"][bins]) & (losses > before[bins])
        self._highest[bins[highest]] = ranks[highest]

    def _fold(self, name: str, places: Array, values: Any) -> None:
        self._layers[name].fold.at(self._values[name].reshape(-1), places, values)

    def _make_room(self, low: int, high: int) -> None:
        to = self._bins.fit(low, high)
        if to is None:
            return
        before = self._values["high"]
        self._values = {name: moved(self._values[name], to, *layer[:2]) for name, layer in self._layers.items()}
        highest = np.zeros_like(self._highest)
        fits = (to >= 0) & (to < self._bins.count)
        is_highest = fits & (before == self._values["high"][np.where(fits, to, 0)])
        highest[to[is_highest]] = self._highest[is_highest]
        self._highest = highest

    # --- what is drawn ------------------------------------------------------------------------------------------------

    def losses(self) -> list[Curve]:
        """The mean over the ranks, the lowest and the highest, and the mean of each drawn rank. Empty without a loss."""
        found: list[Curve] = []
        values = self._values
        if self._world_size > 1:
            with np.errstate(invalid="ignore", divide="ignore"):
                mean = values["sum"] / values["count"]
            bad = values["bad"] < self._world_size
            ranks = [int(rank) if is_bad else None for rank, is_bad in zip(values["bad"], bad, strict=True)]
            found.append(Curve("mean of the ranks", None, self._points(mean, bad, ranks)))
            if self._world_size > DRAWN:
                never = np.zeros_like(bad)
                found.append(Curve("lowest", None, self._points(values["low"], never)))
                found.append(Curve("highest", None, self._points(values["high"], never, self._highest.tolist())))
        for at, rank in enumerate(self.drawn):
            with np.errstate(invalid="ignore", divide="ignore"):
                mean = values["own_sum"][at] / values["own_count"][at]
            found.append(Curve(f"rank {rank}", rank, self._points(mean, values["own_bad"][at] > 0)))
        return [line for line in found if line.points]

    def rates(self) -> list[Curve]:
        """Batches a second: the median of the ranks, and of many the slowest."""
        by_clock = np.array([self._rates_of(clock) for clock in range(len(self._values["batch"]))]).T
        usual, slowest = [], []
        for at, rates in enumerate(by_clock[: self._bins.used].tolist()):
            known = sorted(rate for rate in rates if math.isfinite(rate))
            if known:
                batch = self._bins.first + at * self._bins.step
                usual.append([batch, _short(known[(len(known) - 1) // 2]), None])
                slowest.append([batch, _short(known[0]), self._rank_of(rates.index(known[0]))])
        lines = [Curve("median of the ranks", None, usual)]
        return [line for line in [*lines, Curve("slowest", None, slowest)][: min(self._world_size, 2)] if line.points]

    def _rates_of(self, clock: int) -> Array:
        """In each bin, by the time from its first batch to the first one of the next bin; in the last bin, to its last batch."""
        batch, time = self._values["batch"][clock], self._values["time"][clock]
        rates = np.full(self._bins.count, np.nan)
        used = np.flatnonzero(np.isfinite(batch))
        if not len(used):
            return rates
        last = used[-1]
        next_batch = np.append(batch[used[1:]], self._values["last_batch"][clock][last])
        next_time = np.append(time[used[1:]], self._values["last_time"][clock][last])
        with np.errstate(invalid="ignore", divide="ignore"):
            found = (next_batch - batch[used]) / (next_time - time[used])
        rates[used] = np.where(found > 0, found, np.nan)
        return rates

    def _rank_of(self, clock: int) -> int | None:
        return clock if self._per_clock == 1 else None

    def _points(self, numbers: Array, bad: Array, ranks: Sequence[int | None] | None = None) -> list[list[Any]]:
        points: list[list[Any]] = []
        for at, (number, is_bad) in enumerate(zip(numbers.tolist(), bad.tolist(), strict=True)):
            if is_bad or math.isfinite(number):
                value = None if is_bad else _short(number)
                points.append([self._bins.first + at * self._bins.step, value, ranks[at] if ranks else None])
        return points


def _short(number: float) -> float:
    return float(f"{number:.5g}")
