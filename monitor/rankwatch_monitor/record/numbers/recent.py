"""How the loss and the pace of a run went, gathered look by look from its newest digests. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rankwatch.shared.types.frame import NO_LOSS

from .layout import Array

MOST_BATCHES = 512
"""The last batches that are kept."""


class Recent(NamedTuple):
    """The last batches in order. ``losses``: (batch, mean over the ranks that have one; nan if none of them is finite).

    ``ends``: (batch, when its forward ended on one rank, by that rank's clock).
    """

    losses: tuple[tuple[int, float], ...] = ()
    ends: tuple[tuple[int, float], ...] = ()


class RecentReader:
    """Digests in, the last batches out. A look sees only the newest batches; those of earlier looks are kept."""

    def __init__(self) -> None:
        self._losses: dict[int, tuple[int, float]] = {}
        """By batch, of how many ranks, and their mean."""
        self._rank = -1
        self._ends: dict[int, float] = {}

    def take(self, digests: Array) -> Recent:
        if len(digests):
            self._take_losses(digests[digests["loss"] != NO_LOSS])
            self._take_ends(digests)
        return Recent(
            tuple((batch, mean) for batch, (_, mean) in sorted(self._losses.items())), tuple(sorted(self._ends.items()))
        )

    def _take_losses(self, digests: Array) -> None:
        batches, places = np.unique(digests["batch"], return_inverse=True)
        is_finite = np.isfinite(digests["loss"])
        ranks, finite = np.bincount(places), np.bincount(places, is_finite)
        sums = np.bincount(places, np.where(is_finite, digests["loss"], 0.0))
        with np.errstate(invalid="ignore"):
            means = sums / np.where(finite > 0, finite, np.nan)
        for batch, of, mean in zip(batches.tolist(), ranks.tolist(), means.tolist(), strict=True):
            if of >= self._losses.get(batch, (0, 0.0))[0]:  # else the look saw only the last ranks of that batch
                self._losses[batch] = of, mean
        _trim(self._losses)

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
