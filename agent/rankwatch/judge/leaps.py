"""Sudden jumps of the loss and of the root's inputs -> one notice for each origin; and a loss that is 0 for good.

Cheap: it looks at a few readings a batch.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from ..shared.bounded import BoundedDict
from ..shared.types.frame import DTYPE_MAX, Kind, Phase, State
from ..shared.types.notice import Notice, NoticeKind
from .batch import BatchPart

PAST, LEAST = 32, 16
"""Batches that a reading is compared with, at most and at least."""

FACTOR = 100.0
"""A jump is so many times the largest number of these batches,"""

EVER = 2.0
"""and so many times the largest number ever: a loss that has become tiny may well be a hundred times larger again."""

SPREADS = 8.0
"""It lies so many times farther above their median, in doublings, than they themselves usually lie from it."""

ZEROS = 64
"""Batches in a row whose loss and gradients are exactly 0 before anything is said: a hinge may be 0 for a while."""

QUIET = 32
"""Batches after a jump in which there is no further notice: what follows comes from it."""

MAX_READINGS = 64
"""Readings that are followed."""

_FOLLOWED = Kind.LOSS, Kind.INPUT, Kind.KEYWORD


class Leaps:
    """Follows the loss and the root's inputs of one rank."""

    def __init__(self) -> None:
        self._past = BoundedDict[str, deque[float]](MAX_READINGS)
        self._largest = BoundedDict[str, float](MAX_READINGS)
        self._last = -QUIET
        self._zeros = 0
        """The batches in a row whose loss and gradients were 0."""

    def look(self, part: BatchPart) -> list[Notice]:
        """The notice of a part whose numbers have been read, if there is one."""
        found: list[Notice] = []
        batch = part.first.batch
        for frame in reversed(part.frames):
            if frame.spec.module or frame.spec.phase is not Phase.FORWARD:
                break  # the root and its loss come last
            for row, cell in zip(frame.spec.readings, frame.cells, strict=True):
                if row.kind is Kind.LOSS:
                    is_zero = cell.state is State.FINITE and cell.high == 0.0 == part.batch.norm()
                    self._zeros = self._zeros + 1 if is_zero else 0
                    if self._zeros == ZEROS:
                        about = frame.spec.module_class, row.label, row.dtype
                        return [Notice(NoticeKind.NOTHING_TO_LEARN, "", *about, batch - ZEROS + 1, batch, 0.0, 0.0)]
                if row.kind not in _FOLLOWED or row.dtype not in DTYPE_MAX or not 0.0 < cell.high < math.inf:
                    continue
                rise = self._rise(row.label, cell.high)
                if rise is not None:
                    found.append(
                        Notice(
                            NoticeKind.JUMP, "", frame.spec.module_class, row.label, row.dtype, batch, batch, cell.high, rise
                        )
                    )
        if not found or batch - self._last < QUIET:
            return []
        self._last = batch
        # The inputs were there before the loss.
        return [next((notice for notice in found if not notice.label.startswith("loss")), found[0])]

    def _rise(self, label: str, value: float) -> float | None:
        """The doublings of a jump above the largest of the last batches; None: it is no jump, and is remembered."""
        past = self._past.get(label)
        if past is None:
            past = self._past[label] = deque(maxlen=PAST)
        ever = self._largest.get(label, 0.0)
        self._largest[label] = max(ever, value)
        rise = None
        if len(past) >= LEAST and value > FACTOR * max(past) and value > EVER * ever:
            heights = [math.log2(one) for one in past]
            middle = statistics.median(heights)
            spread = statistics.median([abs(height - middle) for height in heights])
            if math.log2(value) - middle > SPREADS * spread:
                rise = math.log2(value) - max(heights)
        past.append(value)
        return rise
