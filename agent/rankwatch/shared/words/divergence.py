"""Whether a training diverged: batches before the trip, the losses of all ranks left their range alike. Pure.

The history of a rank is its loss, and the largest input of its root: where an input left its range, the data did it.
"""

from __future__ import annotations

import math
import statistics
import struct
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..bounded import BoundedDict
from ..figures import figure
from ..types.frame import DTYPE_MAX, BatchSummary, FrameTable, Kind, Phase
from ..types.trip import Cause, Trip
from .cause import classify
from .facts import is_grown_by_other_code
from .sentences import by_other_code

KEPT = 64
"""Batches of a rank's history."""

LEFT, FAR = 4.0, 7.0
"""Doublings above all earlier losses from which a loss has left their range, and that it must reach later on."""

PAST, NEWEST = 32, 8
"""Losses that a loss is compared with, and how many of the last ones are left out: a loss that grows slowly leaves as well."""

ABRUPT, YOUNG = 10.0, 3
"""A training that is older than YOUNG batches does not diverge by ABRUPT doublings from one batch to the next: a bit that
flipped does that, or a bad target."""

SUSTAINED = 2
"""Batches before the trip for which the loss of a training that is no longer young must have been out of its range."""

ALREADY = 1.0
"""Neither rule holds where the loss before was already so many doublings above all others: it was on its way."""

JUMPED = 3.0
"""Doublings of an input above the earlier ones: the data did it. And of the largest weight within a few optimizer steps."""

ALIKE = 1 / 3
"""When the loss of the first rank leaves, the others must have risen by this share of its doublings."""


SHOWN = 4
"""Learning rates that are told."""

MAX_TABLES = 64
"""Frame tables of which a process remembers the place of the loss."""

REPLACED = frozenset({Cause.OVERFLOW, Cause.INVALID, Cause.WEIGHT, Cause.GRADIENT, Cause.UPSTREAM, Cause.SINGULAR})
"""The causes of a trip that may be the end of a divergence."""


class LossRows:
    """Where a part has its loss and the inputs of its root.

    Attributes:
        label: the loss's, or where a model's loss is not known, the one of its largest output.
        is_loss: whether it is a loss.
    """

    def __init__(self, table: FrameTable) -> None:
        rows = [(spec, row) for spec in table.specs for row in spec.readings]
        root = [
            (place, spec, row)
            for place, (spec, row) in enumerate(rows)
            if not spec.module and spec.phase is Phase.FORWARD and row.dtype in DTYPE_MAX
        ]
        losses = [(place, spec, row) for place, spec, row in root if row.kind is Kind.LOSS]
        outputs = [(place, spec, row) for place, spec, row in root if row.kind is Kind.OUTPUT]
        # A model that returns its loss beside its logits.
        named = [one for one in outputs if one[2].label.rpartition(".")[2] == "loss"]
        chosen = losses or named or outputs
        self.is_loss = bool(losses or named)
        self.label = chosen[0][2].label if chosen else ""
        self.module_class = chosen[0][1].module_class if chosen else ""
        self._losses = [place for place, _, _ in chosen]
        self._inputs = [place for place, _, row in root if row.kind in (Kind.INPUT, Kind.KEYWORD)]
        self._format = f"<{table.typecode}"
        self._size = struct.calcsize(self._format)

    def __bool__(self) -> bool:
        return bool(self._losses)

    def largest(self, summary: BatchSummary) -> tuple[float, float]:
        """The abs max of the loss, and of the inputs (0: none was measured)."""
        return self._max(self._losses, summary.abs_max), self._max(self._inputs, summary.abs_max)

    def _max(self, places: Sequence[int], column: bytes) -> float:
        largest = 0.0
        for place in places:
            (value,) = struct.unpack_from(self._format, column, place * self._size)
            if not value <= largest:  # a nan counts as inf
                largest = value if value == value else math.inf
        return largest


class LossEntry(NamedTuple):
    step: int
    batch: int
    loss: float
    inputs: float


class LossHistory:
    """The losses of a rank's last batches, in the order in which they came."""

    __slots__ = ("_left_out", "_numbers", "rows")

    def __init__(self, left_out: Collection[int] = ()) -> None:
        self._left_out = left_out
        """The optimizer steps that were not taken: their losses lead to nothing."""
        self.rows: LossRows | None = None
        """Of the part whose loss was taken last."""
        self._numbers = array("d")

    def take(self, summary: BatchSummary, rows: LossRows) -> None:
        if not rows or (self.rows is not None and self.rows.is_loss > rows.is_loss):
            return
        if self.rows is not None and rows.is_loss > self.rows.is_loss:
            del self._numbers[:]  # from now on it is the loss itself
        self.rows = rows
        self._numbers.extend((summary.optimizer_step, summary.batch, *rows.largest(summary)))
        del self._numbers[: -4 * KEPT]

    def before(self, batch: int) -> list[LossEntry]:
        """The batches before this one; what was zero or not measured is left out."""
        numbers = self._numbers
        found = [
            LossEntry(int(numbers[at]), int(numbers[at + 1]), *numbers[at + 2 : at + 4]) for at in range(0, len(numbers), 4)
        ]
        return [one for one in found if one.batch < batch and one.loss > 0.0 and one.step not in self._left_out]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The loss of all ``ranks`` that were compared left its range in ``batch``.

    ``label`` is the loss's, or an output's of the root if the loss is not known. ``usual``, ``loss`` and ``last``: the median of
    the losses before, the first loss outside of their range, and the last loss before the trip, of batch ``last_batch``.
    """

    step: int
    batch: int
    module_class: str
    label: str
    is_loss: bool
    usual: float
    loss: float
    last: float
    last_batch: int
    ranks: int
    has_inputs: bool


def find_divergence(
    tripped: LossHistory, others: Collection[LossHistory], fed: Collection[LossHistory], batch: int
) -> Divergence | None:
    """The divergence that led to a trip in ``batch``; None: there was none, or it is not sure.

    Args:
        tripped: of the rank that tripped first.
        others: of other ranks of its stage.
        fed: of the ranks whose root is fed the training's data.
    """
    rows = tripped.rows
    if rows is None or _departure(_heights(own := tripped.before(batch))) is None:
        return None  # the usual case, and an abort waits for it
    all_entries = [own, *(other.before(batch) for other in others)]
    found = [(entries, _departure(_heights(entries))) for entries in all_entries]
    first = min(entries[at].step for entries, at in found if at is not None)
    rises = [_rise_in(entries, first) for entries, _ in found]
    known = [rise for rise in rises if rise is not None]
    is_alike = all(at is not None or not entries or entries[-1].step <= first for entries, at in found)
    if not is_alike or 2 * len(known) < len(found) or min(known) < ALIKE * max(known):
        return None
    if any(_was_fed_more(history.before(batch), first) for history in fed):
        return None
    at = next(place for place, entry in enumerate(own) if entry.step >= first)
    usual = 2.0 ** statistics.median(_heights(own)[: max(1, at)])
    return Divergence(
        first, own[at].batch, rows.module_class, rows.label, rows.is_loss, usual, own[at].loss, own[-1].loss, own[-1].batch,
        len(known), any(entry.inputs for entry in own),
    )  # fmt: skip


class OwnLosses:
    """The losses of a process that trains alone, without a collector."""

    def __init__(self) -> None:
        self._history = LossHistory()
        self._rows = BoundedDict[str, LossRows](MAX_TABLES)

    def take(self, table: FrameTable, summary: BatchSummary) -> None:
        rows = self._rows.get(table.id)
        if rows is None:
            rows = self._rows[table.id] = LossRows(table)
        self._history.take(summary, rows)

    def explain(self, trip: Trip) -> tuple[Cause, str]:
        """As ``classify``, but a divergence that ended with the trip is its cause."""
        cause, evidence = classify(trip)
        if cause not in REPLACED or trip.position.eval:
            return cause, evidence
        found = find_divergence(self._history, [], [self._history], trip.position.batch)
        return (cause, evidence) if found is None else (Cause.DIVERGENCE, end_of(found, trip, cause, evidence))


def end_of(found: Divergence, trip: Trip, cause: Cause, evidence: str) -> str:
    """The evidence of a divergence, and that of the trip at its end."""
    return f"{describe_divergence(found, trip)}; at the end ({cause.value}): {_rest(trip, evidence)}"


def _rest(trip: Trip, evidence: str) -> str:
    """The evidence without what the divergence says of the weights."""
    return evidence.removesuffix(f"; {by_other_code(trip)}") if is_grown_by_other_code(trip) else evidence


def have_weights_left(trips: Sequence[Trip]) -> bool:
    """Whether, on all of these ranks alike, the weights grew over an optimizer step as no training's do that converges."""
    grown = [trip.grown for trip in trips if trip.grown is not None and trip.grown.now > 0]
    rises = [math.log2(one.now / one.largest) for one in grown]
    return len(rises) == len(trips) and min(rises) >= JUMPED and min(rises) >= ALIKE * max(rises)


def end_of_weights(trips: Sequence[Trip], cause: Cause, evidence: str) -> str:
    """As ``end_of``, of weights that have left their range on all of these ranks."""
    grown = trips[0].grown
    assert grown is not None
    module = f"{grown.module or '(root)'} ({grown.module_class})"
    was = f"abs max {figure(grown.now)}, and {figure(grown.before)} in batch {grown.batch}"
    left = f"the weights left their range within a few optimizer steps on all {len(trips)} ranks"
    rest = _rest(trips[0], evidence)
    return f"{left}: {grown.label} of {module} had {was}. {_look(trips[0])}; at the end ({cause.value}): {rest}"


def describe_divergence(found: Divergence, trip: Trip | None = None) -> str:
    """The evidence in a sentence. ``trip``: the one at its end, if it is known."""
    what = "the loss" if found.is_loss else f"the {found.label} of the root (the loss is not known)"
    who = f" on all {found.ranks} ranks that were compared" if found.ranks > 1 else ""
    values = f"about {figure(found.usual)} before, {figure(found.loss)} in this batch"
    text = f"{what} left its range in batch {found.batch}{who}: {values}"
    if found.last_batch > found.batch:
        text += f", {figure(found.last)} in batch {found.last_batch}"
    fed = "; no input of the root had jumped" if found.has_inputs else ""
    return f"{text}{fed}. {_look(trip)}"


def _look(trip: Trip | None) -> str:
    rates = trip.rates if trip is not None else ()
    if trip is not None and trip.grown is not None and is_grown_by_other_code(trip):
        return by_other_code(trip)
    shown = ", ".join(f"{rate:.3g}" for rate in rates[:SHOWN]) + (", ..." if len(rates) > SHOWN else "")
    known = f" ({shown}{' of its groups' if len(rates) > 1 else ''})" if rates else ""
    return f"Look at the learning rate{known}, its warm-up and the clipping of gradients"


def _heights(entries: Sequence[LossEntry]) -> list[float]:
    return [math.log2(entry.loss) if math.isfinite(entry.loss) else 2000.0 for entry in entries]


def _departure(heights: Sequence[float]) -> int | None:
    """The first loss from which on all losses were outside of the range before it."""
    lowest = math.inf
    lows = [lowest := min(lowest, height) for height in reversed(heights)][::-1]
    for at in range(1, len(heights)):
        if lows[at] < _bound(heights, at):
            continue
        is_far = max(heights[at:]) - _top(heights, at) >= FAR
        if at < YOUNG or heights[at - 1] - _top(heights, at) >= ALREADY:
            return at if is_far else None
        is_abrupt = heights[at] - max(heights[at - YOUNG : at]) >= ABRUPT
        return at if is_far and not is_abrupt and len(heights) - at >= SUSTAINED else None
    return None


def _past(heights: Sequence[float], at: int) -> Sequence[float]:
    return heights[max(0, at - PAST) : max((at + 1) // 2, at - NEWEST)]


def _top(heights: Sequence[float], at: int) -> float:
    return max(_past(heights, at))


def _bound(heights: Sequence[float], at: int) -> float:
    past = _past(heights, at)
    return max(past) + max(LEFT, (max(past) - min(past)) / 2)


def _rise_in(entries: Sequence[LossEntry], step: int) -> float | None:
    """The doublings of the largest loss of this step above the losses before it; None: not known."""
    heights = _heights(entries)
    places = [at for at, entry in enumerate(entries) if entry.step == step]
    if not places or not places[0]:
        return None
    return max(heights[at] for at in places) - _top(heights, places[0])


def _was_fed_more(entries: Sequence[LossEntry], step: int) -> bool:
    """Whether an input of the root was larger than ever in this step or the two before it."""
    largest = 0.0
    for entry in entries:
        if entry.step > step:
            return False
        if entry.step >= step - 2 and largest and entry.inputs >= 2.0**JUMPED * largest:
            return True
        largest = max(largest, entry.inputs)
    return False
