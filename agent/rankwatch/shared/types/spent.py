"""Where the time of a rank's batches goes."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from .fields import integer, number, string

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


MOST_EVERY = 64
"""Of so many batches at least one is measured in full under a budget. One of 64 costs 1.6 % of what all of them do: of more,
hardly anything would be saved, and the numbers of a module lie minutes apart."""


class Cost(NamedTuple):
    """What watching costs a rank, in seconds of a batch, and which K its budget asks for.

    ``every``: K; 0: not known yet, or there is no budget. ``full`` and ``between`` are the seconds in hooks of ours in a batch
    that is measured in full and in one that is not; ``bare`` is the rest of a batch. ``why``: why each batch must be full.
    """

    every: Annotated[int, integer(0, MOST_EVERY)] = 0
    full: Seconds = 0.0
    between: Seconds = 0.0
    bare: Seconds = 0.0
    why: Annotated[str, string(240)] = ""


NO_COST = Cost()
