"""Where the time of a rank's batches goes."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from .fields import integer, number

OF = 32
"""The last batches whose medians are told."""

Seconds = Annotated[float, number()]


class Spent(NamedTuple):
    """Medians of a rank's last batches, of which there were ``batches`` by now, at most OF; by the clock of its training thread.

    ``between``: from a step to the next forward, data, logs and evaluations among it. ``backward`` has what a rank waits there
    for the others. On a device, whatever waits for it has its time.
    """

    batches: Annotated[int, integer(0, OF)] = 0
    between: Seconds = 0.0
    forward: Seconds = 0.0
    backward: Seconds = 0.0
    step: Seconds = 0.0

    @property
    def whole(self) -> float:
        return self.between + self.forward + self.backward + self.step


NOT_SPENT = Spent()
"""It is not known."""
