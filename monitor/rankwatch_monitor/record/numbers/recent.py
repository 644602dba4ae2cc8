"""How the loss and the pace of a run went, gathered look by look from its newest digests. Pure."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from rankwatch.shared.types.frame import NO_NORM

from .layout import Array
from .losses import RunLosses

MOST_BATCHES = 512
"""The last batches that are kept."""


Means: TypeAlias = tuple[tuple[int, float], ...]


class Recent(NamedTuple):
    """The last batches in order. ``losses``: (batch, mean over the ranks that have one; nan if none of them is finite).

    ``norms``: of the gradients in the step before the batch, likewise. ``ends``: (batch, when its forward ended on one rank, by
    that rank's clock). ``in_turns``: where several losses take turns, each by its name, and ``losses`` is the first of them.
    """

    losses: Means = ()
    ends: tuple[tuple[int, float], ...] = ()
    in_turns: tuple[tuple[str, Means], ...] = ()
    norms: Means = ()


class RecentReader:
    """Digests in, the last batches out. A look sees only the newest batches; those of earlier looks are kept."""

    def __init__(self) -> None:
        self.losses = RunLosses()
        self._means: dict[str, dict[int, tuple[int, float]]] = {}
        """Of each loss by batch, of how many ranks, and their mean."""
        self._norms: dict[int, tuple[int, float]] = {}
        self._rank = -1
        self._ends: dict[int, float] = {}

    def take(self, digests: Array) -> Recent:
        if len(digests):
            for which, own in self.losses.split(digests):
                self._take_means(own, own["loss"], self._means.setdefault(which, {}))
            normed = digests[digests["norm"] != np.float32(NO_NORM)]
            self._take_means(normed, normed["norm"], self._norms)
            self._take_ends(digests)
        means = [(self.losses.name(which), _in_order(of)) for which, of in sorted(self._means.items())]
        losses = means[0][1] if means else ()
        return Recent(losses, tuple(sorted(self._ends.items())), tuple(means[1:] and means), _in_order(self._norms))

    def _take_means(self, digests: Array, numbers: Array, known: dict[int, tuple[int, float]]) -> None:
        batches, places = np.unique(digests["batch"], return_inverse=True)
        is_finite = np.isfinite(numbers)
        ranks, finite = np.bincount(places), np.bincount(places, is_finite)
        sums = np.bincount(places, np.where(is_finite, numbers, 0.0))
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


def _in_order(known: dict[int, tuple[int, float]]) -> Means:
    return tuple((batch, mean) for batch, (_, mean) in sorted(known.items()))


def _trim(by_batch: dict[int, tuple[int, float]] | dict[int, float]) -> None:
    for batch in sorted(by_batch)[:-MOST_BATCHES]:
        del by_batch[batch]
