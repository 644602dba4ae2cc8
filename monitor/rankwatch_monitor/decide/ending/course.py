"""How a run without a verdict went: how long and how fast, its loss, and what it came near to."""

from __future__ import annotations

from typing import NamedTuple

from rankwatch.shared.types.frame import Phase

from .judgement import Signs


class LossAt(NamedTuple):
    """The loss of a batch: the mean over the ranks of which it is known."""

    batch: int
    loss: float
    ranks: int


class LossCourse(NamedTuple):
    """A loss, which where several take turns is named after what it trains.

    ``is_of_micro_batches``: an optimizer step uses the gradients of several.
    """

    name: str
    first: LossAt
    last: LossAt
    is_of_micro_batches: bool = False


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
    """``seconds``: from its first event, at the Unix time ``began`` (0: not known), to its last one. ``pace``: batches a second.
    ``steps``: optimizer steps between its first batch and its last one. ``signs``: what its numbers say of whether it went well.
    None: not known. ``first_loss`` and ``last_loss``: where several losses take turns, those of the first of ``losses``.
    """

    seconds: float
    pace: float | None
    first_loss: LossAt | None
    last_loss: LossAt | None
    nearest: NearestReading | None
    grown: GrownReading | None
    steps: int | None = None
    losses: tuple[LossCourse, ...] = ()
    signs: Signs | None = None
    began: float = 0.0
