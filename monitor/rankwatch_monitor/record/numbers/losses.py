"""Which loss a digest has, where several take turns: a GAN's two, or an actor's and a critic's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from rankwatch.shared.types.frame import LOSS_OF_SOME, NO_LOSS, OF_MODULE, FrameTable, Kind

from .layout import Array

LOSS = "loss"
"""The name of the only loss of a training."""


class RunLosses:
    """The losses of a run, by their frame tables. Each is known by what its label says beside ``loss``: nothing of the first."""

    def __init__(self) -> None:
        self._of: dict[int, str] = {}
        self._names: dict[str, str] = {"": LOSS}

    def look(self, digests: Array, table_of: Callable[[int], FrameTable]) -> None:
        """Learns the tables of digests with the columns ``table`` and ``loss``."""
        for number in np.unique(digests["table"][digests["loss"] != NO_LOSS]).tolist():
            if number and number not in self._of:
                self._take(number, table_of(number))

    def _take(self, number: int, table: FrameTable) -> None:
        rows = [(spec, row) for spec in table.specs for row in spec.readings if row.kind is Kind.LOSS]
        for spec, row in rows[:1]:
            self._of[number] = which = row.label.partition(OF_MODULE)[2]
            self._names[which] = which or spec.module_class  # as the newest table says: in the beginning nothing is known

    def split(self, digests: Array) -> Iterator[tuple[str, Array]]:
        """The digests of each loss that have one, the first loss first. Of which nothing is known, are of the first."""
        found = digests[digests["loss"] != NO_LOSS]
        if len(self._names) < 2:  # nearly all trainings
            yield from [("", found)] * bool(len(found))
            return
        known = np.array([self._of.get(number, "") for number in found["table"].tolist()], object)
        for which in self._drawn():
            if len(own := found[known == which]):
                yield which, own

    def name(self, which: str) -> str:
        return self._names[which] if len(self._drawn()) > 1 else LOSS

    def _drawn(self) -> list[str]:
        """But for the first batches of a GAN, say, of which it was not known which loss they had."""
        return sorted(which for which in self._names if which != LOSS_OF_SOME.partition(OF_MODULE)[2])
