"""How a run without a verdict went: how long and how fast, its loss, and what it came near to."""

from __future__ import annotations

from typing import NamedTuple

from rankwatch.shared.types.frame import Phase


class LossAt(NamedTuple):
    """The loss of a batch: the mean over the ranks of which it is known."""

    batch: int
    loss: float
    ranks: int


class LossInTurn(NamedTuple):
    """One of several losses that take turns, named after what it trains."""

    name: str
    first: LossAt
    last: LossAt


class NearestReading(NamedTuple):
    """The reading that came nearest to the end of its narrow dtype, which is ``times`` as large."""

    module: str
    module_class: str
    phase: Phase
    label: str
    dtype: str
    times: float
    rank: int
    batch: int


class GrownReading(NamedTuple):
    """The reading whose abs max over all ranks grew by the largest factor, from one batch to another."""

    module: str
    module_class: str
    phase: Phase
    label: str
    first_batch: int
    first: float
    last_batch: int
    last: float


class Course(NamedTuple):
    """``seconds``: from its first event to its last one. ``pace``: batches a second. ``steps``: optimizer steps between its first
    batch and its last one. None: not known. ``losses``: where several take turns, all of them; ``first_loss`` and ``last_loss``
    are those of the first one.
    """

    seconds: float
    pace: float | None
    first_loss: LossAt | None
    last_loss: LossAt | None
    nearest: NearestReading | None
    grown: GrownReading | None
    steps: int | None = None
    losses: tuple[LossInTurn, ...] = ()
