"""How the loss and the pace of a run went, gathered look by look from its newest digests. Pure."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from .layout import Array
from .losses import RunLosses

MOST_BATCHES = 512
"""The last batches that are kept."""


Means: TypeAlias = tuple[tuple[int, float], ...]


class Recent(NamedTuple):
    """The last batches in order. ``losses``: (batch, mean over the ranks that have one; nan if none of them is finite).

    ``ends``: (batch, when its forward ended on one rank, by that rank's clock). ``in_turns``: where several losses take turns,
    each by its name, and ``losses`` is the first of them.
    """

    losses: Means = ()
    ends: tuple[tuple[int, float], ...] = ()
    in_turns: tuple[tuple[str, Means], ...] = ()


class RecentReader:
    """Digests in, the last batches out. A look sees only the newest batches; those of earlier looks are kept."""

    def __init__(self) -> None:
        self.losses = RunLosses()
        self._means: dict[str, dict[int, tuple[int, float]]] = {}
        """Of each loss by batch, of how many ranks, and their mean."""
        self._rank = -1
        self._ends: dict[int, float] = {}

    def take(self, digests: Array) -> Recent:
        if len(digests):
            for which, own in self.losses.split(digests):
                self._take_losses(own, self._means.setdefault(which, {}))
            self._take_ends(digests)
        means = [
            (self.losses.name(which), tuple((batch, mean) for batch, (_, mean) in sorted(of.items())))
            for which, of in sorted(self._means.items())
        ]
        return Recent(means[0][1] if means else (), tuple(sorted(self._ends.items())), tuple(means[1:] and means))

    def _take_losses(self, digests: Array, known: dict[int, tuple[int, float]]) -> None:
        batches, places = np.unique(digests["batch"], return_inverse=True)
        is_finite = np.isfinite(digests["loss"])
        ranks, finite = np.bincount(places), np.bincount(places, is_finite)
        sums = np.bincount(places, np.where(is_finite, digests["loss"], 0.0))
        with np.errstate(invalid="ignore"):
            means = sums / np.where(finite > 0, finite, np.nan)
        for batch, of, mean in zip(batches.tolist(), ranks.tolist(), means.tolist(), strict=True):
            if of >= known.get(batch, (0, 0.0))[0]:  # else the look saw only the last ranks of that batch
                known[batch] = of, mean
        _trim(known)

    def _take_ends(self, digests: Array) -> None:
        own = digests[digests["rank"] == self._rank]
        if not len(own):  # at the first look, or it is lost
            self._rank, self._ends = int(digests["rank"][digests["batch"].argmax()]), {}
            own = digests[digests["rank"] == self._rank]
        batches, first = np.unique(own["batch"], return_index=True)  # of each batch the first part: its forward
        for batch, ended in zip(batches.tolist(), own["ended"][first].tolist(), strict=True):
            self._ends.setdefault(batch, ended)
        _trim(self._ends)


def _trim(by_batch: dict[int, tuple[int, float]] | dict[int, float]) -> None:
    for batch in sorted(by_batch)[:-MOST_BATCHES]:
        del by_batch[batch]
