"""What each rank has in each batch (its loss, say), and the batches a second, in no more points than a screen shows. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rankwatch.shared.types.frame import NO_NORM

from ...record.numbers.layout import NO_MEMORY, Array
from ...record.numbers.losses import RunLosses
from .bins import Bins
from .by_rank import ByRank, Curve, Layer, Layers, short

BINS = 512

CLOCKS = 64
"""Groups of ranks that share a clock. Only times of one clock are compared: those of two hosts may be minutes apart."""


class _Number(NamedTuple):
    """A column of digests: what stands in it where there is no number, and a chart's unit."""

    column: str
    none: float
    unit: float = 1.0


NUMBERS = {
    "norm": _Number("norm", NO_NORM),
    "memory": _Number("memory", NO_MEMORY, unit=1 / 1024),  # GiB
}
"""By their names in a view, beside the losses."""

COLUMNS = ("rank", "batch", "started", "loss", "table", *[number.column for number in NUMBERS.values()])
"""The columns of a digest that are needed."""


class Curves:
    """Digests are added piece by piece.

    Args:
        drawn: the ranks with a line of their own, beside those over all ranks.

    Attributes:
        losses: which there are. Each has lines of its own.
    """

    def __init__(self, world_size: int, drawn: Sequence[int], bins: int = BINS) -> None:
        self.drawn = tuple(drawn)
        self._world_size = world_size
        self._bins = Bins(bins)
        self._per_clock = -(-world_size // CLOCKS)
        clocks = -(-world_size // self._per_clock)
        layers = {
            "batch": Layer(np.minimum, np.inf, (clocks,), "f8"),
            "time": Layer(np.minimum, np.inf, (clocks,), "f8"),
            "last_batch": Layer(np.maximum, -np.inf, (clocks,), "f8"),
            "last_time": Layer(np.maximum, -np.inf, (clocks,), "f8"),
        }
        self._clocks = Layers(layers, bins)
        self._numbers = {name: ByRank(world_size, drawn, self._bins) for name in NUMBERS}
        self.losses = RunLosses()
        self._of_losses: dict[str, ByRank] = {}

    def add(self, digests: Array) -> None:
        """Adds digests with the columns COLUMNS."""
        is_known = (digests["rank"] < self._world_size) & (digests["batch"] >= 0)
        if not is_known.all():  # a copy of digests costs as much as all else that is done with them
            digests = digests[is_known]
        if not len(digests):
            return
        self._make_room(int(digests["batch"].min()), int(digests["batch"].max()))
        bins = self._bins.of(digests["batch"])
        if (bins[1:] < bins[:-1]).any():
            order = np.argsort(bins, kind="stable")
            digests, bins = digests[order], bins[order]
        clocks = (digests["rank"] // self._per_clock).astype(np.int64) * self._bins.count + bins
        batches = digests["batch"].astype(np.float64)
        times = digests["started"].copy()  # a strided column is 20 times as slow
        self._clocks.fold("batch", clocks, batches)
        self._clocks.fold("time", clocks, times)
        self._clocks.fold("last_batch", clocks, batches)
        self._clocks.fold("last_time", clocks, times)
        for which, own in self.losses.split(digests):
            if which not in self._of_losses:
                self._of_losses[which] = ByRank(self._world_size, self.drawn, self._bins)
            self._of_losses[which].add(own["rank"], self._bins.of(own["batch"]), own["loss"])
        for name, number in NUMBERS.items():
            found = digests[number.column]
            has = found != found.dtype.type(number.none)
            if has.all():
                self._numbers[name].add(digests["rank"], bins, found * number.unit)
            elif has.any():
                self._numbers[name].add(digests["rank"][has], bins[has], found[has] * number.unit)

    def _make_room(self, low: int, high: int) -> None:
        to = self._bins.fit(low, high)
        if to is not None:
            self._clocks.move(to)
            for number in (*self._numbers.values(), *self._of_losses.values()):
                number.move(to)

    # --- what is drawn ------------------------------------------------------------------------------------------------

    def lines(self) -> dict[str, list[Curve]]:
        """The lines of the ``loss``, of each of NUMBERS, and of the ``rate``; without points there are none."""
        numbers = {name: number.lines() for name, number in self._numbers.items()}
        return {"loss": self._losses(), **numbers, "rate": self._rates()}

    def clock(self) -> list[tuple[int, float]]:
        """Batches, and the seconds from the first one to each: by one clock, the one that saw the most of them."""
        batches = self._clocks["batch"]
        of = int(np.isfinite(batches).sum(axis=1).argmax())
        batches, times = batches[of], self._clocks["time"][of]
        used = np.isfinite(batches)
        if not used.any():
            return []
        begin = times[used][0]
        found = [*zip(batches[used], times[used], strict=True)]
        found.append((self._clocks["last_batch"][of].max(), self._clocks["last_time"][of].max()))
        return [(int(batch), short(time - begin)) for batch, time in found]

    def _losses(self) -> list[Curve]:
        by_name = {self.losses.name(which): self._of_losses[which].lines() for which in sorted(self._of_losses)}
        if len(by_name) < 2:
            return [line for lines in by_name.values() for line in lines]
        return [line._replace(name=f"{name}, {line.name}") for name, lines in by_name.items() for line in lines]

    def _rates(self) -> list[Curve]:
        """Batches a second: the median of the ranks, and of many the slowest."""
        by_clock = np.array([self._rates_of(clock) for clock in range(len(self._clocks["batch"]))]).T
        usual, slowest = [], []
        for at, rates in enumerate(by_clock[: self._bins.used].tolist()):
            known = sorted(rate for rate in rates if math.isfinite(rate))
            if known:
                batch = self._bins.first + at * self._bins.step
                usual.append([batch, short(known[(len(known) - 1) // 2]), None])
                slowest.append([batch, short(known[0]), self._rank_of(rates.index(known[0]))])
        lines = [Curve("median of the ranks", None, usual), Curve("slowest", None, slowest)]
        return [line for line in lines[: min(self._world_size, 2)] if line.points]

    def _rates_of(self, clock: int) -> Array:
        """In each bin, by the time from its first batch to the first one of the next bin; in the last bin, to its last batch."""
        batch, time = self._clocks["batch"][clock], self._clocks["time"][clock]
        rates = np.full(self._bins.count, np.nan)
        used = np.flatnonzero(np.isfinite(batch))
        if not len(used):
            return rates
        last = used[-1]
        next_batch = np.append(batch[used[1:]], self._clocks["last_batch"][clock][last])
        next_time = np.append(time[used[1:]], self._clocks["last_time"][clock][last])
        with np.errstate(invalid="ignore", divide="ignore"):
            found = (next_batch - batch[used]) / (next_time - time[used])
        rates[used] = np.where(found > 0, found, np.nan)
        return rates

    def _rank_of(self, clock: int) -> int | None:
        return clock if self._per_clock == 1 else None
