"""The learning rates of the optimizers: at first, at their highest, and lately. Facts for a loss that leaves its range."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from torch.optim import Optimizer

from ...shared.figures import figure
from ..events import StepDone

GROUPS = 16
"""Groups of an optimizer that are looked at: some have one for each parameter."""

SHOWN = 4
"""Rates that differ which a line has."""

TWICE = 2.0
"""A rate is told anew once it is so many times, or this part of, what was told."""

OFTEN = 64
"""Changes that are told at once. From there on a line is told once the batches have doubled: a rate may be restarted for ever."""


@dataclass(slots=True)
class _Rate:
    name: str
    first: tuple[int, float]
    most: tuple[int, float]
    told: float
    last: tuple[int, float]

    def describe(self) -> str:
        points = dict.fromkeys((self.first, self.most, self.last))
        return f"{self.name} {', '.join(f'{figure(rate)} in batch {batch}' for batch, rate in points)}"


class Rates:
    """Those of one model's optimizers."""

    events = (StepDone,)

    def __init__(self) -> None:
        self.line = ""
        """``SGD 1.2 in batch 0, 30 in batch 200, 0.1 in batch 399``; empty: nothing is known. For any thread."""
        self._rates: dict[tuple[int, int], _Rate] = {}
        self._changes = 0
        self._told_at = 0

    def on(self, event: StepDone) -> None:
        optimizer, batch = event
        is_news = False
        for number, group in enumerate(islice(optimizer.param_groups, GROUPS)):
            rate = group.get("lr")
            if isinstance(rate, (float, int)):  # one that lies on a device would have to be waited for
                is_news |= self._look(optimizer, number, batch, float(rate))
        if is_news:
            self._changes += 1
            if self._changes <= OFTEN or batch >= 2 * self._told_at:
                self._told_at = batch
                self.line = "; ".join(dict.fromkeys(one.describe() for one in islice(self._rates.values(), SHOWN)))

    def _look(self, optimizer: Optimizer, number: int, batch: int, rate: float) -> bool:
        """Whether it is to be told anew."""
        at = batch, rate
        known = self._rates.get((id(optimizer), number))
        if known is None:
            name = type(optimizer).__name__
            name += f" (group {number})" if len(optimizer.param_groups) > 1 else ""
            self._rates[id(optimizer), number] = _Rate(name, at, at, rate, at)
            return True
        known.most = at if rate > known.most[1] else known.most
        if known.told / TWICE < rate < known.told * TWICE or rate == known.told:
            return False
        known.told, known.last = rate, at
        return True
