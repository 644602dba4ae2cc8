"""Parts of batches -> notices: underflow, gradients that become zero, outputs near overflow, buffers that turn bad."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..measure.tape import Cell
from ..shared.bounded import BoundedDict
from ..shared.types.frame import DTYPE_MAX, DTYPE_TINY, FrameSpec, Kind, Phase, ReadingSpec, State
from ..shared.types.notice import NEVER_FINITE, ZEROS, Notice, NoticeKind
from .batch import EVERY, BatchInProgress, BatchPart
from .leaps import Leaps

NEAR = 1 / 8
"""From this share of its dtype's max on, an output is near overflow, whether it grows or not."""

FAR = 1 / 256
"""Below this share, no output gets a notice, however it grows: in young trainings everything grows."""

HORIZON = 100
"""Batches. An output gets a notice if, growing on as it does now, it reaches its dtype's max within them."""

LOOKS = 3
"""Looks in a row that must find an output larger before it counts as growing, by the median of their paces: one jump is none."""

LARGE, TIMES = 1e3, 1e4
"""An output in bfloat16 is told that is so large, and so many times the largest at its first looks: beyond 1e3, neighbours are 4
apart and more. From next to nothing, a young layer may well grow as far."""

MAX_PAST = 1 << 16
"""Readings remembered. If every batch has different labels, the oldest ones are dropped."""

NOTICEABLE_ZEROS = 0.1
ZEROS_GROWTH = 0.05

_MADE = (Kind.OUTPUT, Kind.MARKED, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT, Kind.GRADIENT)


_Outputs = dict[tuple[str, str], tuple[FrameSpec, ReadingSpec, float]]


@dataclass(slots=True)
class _Past:
    """The history of a reading: since which batch it gets notices, and its growth (``paces``) between the last looks.

    Of a buffer: the batch and abs max when it was last finite, the batch (``grown``) and cell when it was first bad.
    """

    since: int = -1
    batch: int = -1
    value: float = 0.0
    grown: int = 0
    paces: tuple[float, ...] = ()
    first: float = 0.0
    bad: Cell | None = None


def is_looked_at(batch: BatchInProgress, number: int) -> bool:
    """Only each EVERY-th batch is looked at, or the next full one, and each of the first EVERY: these changes are slow."""
    return number < EVERY or number % EVERY == 0 or batch.is_first_full


class Health:
    """Looks at the readings of one rank, batch by batch."""

    def __init__(self) -> None:
        self._past = BoundedDict[tuple[NoticeKind, str, str], _Past](MAX_PAST)
        self._leaps = Leaps()

    def look(self, part: BatchPart) -> list[Notice]:
        """The notices of a part whose numbers have been read."""
        batch = part.first.batch
        jumps = self._leaps.look(part)
        if not is_looked_at(part.batch, batch):
            return jumps
        outputs: _Outputs = {}
        found = [notice for frame in part.frames for notice in self._look(batch, frame.spec, frame.cells, outputs)]
        found += [notice for spec, row, high in outputs.values() for notice in self._headroom(batch, spec, row, high)]
        found += [notice for spec, row, high in outputs.values() for notice in self._growth(batch, spec, row, high)]
        return jumps + _without_followers(found)

    def _look(self, batch: int, spec: FrameSpec, cells: list[Cell], outputs: _Outputs) -> Iterator[Notice]:
        if spec.phase is Phase.RECOMPUTE:
            return
        for row, cell in zip(spec.readings, cells, strict=True):
            high = cell.high
            if row.kind is Kind.GRADIENT and row.label.endswith(ZEROS):
                yield from self._zeros(batch, spec, row, high)
                continue
            if row.kind is Kind.BUFFER:
                yield from self._buffer(batch, spec, row, cell)
                continue
            if row.kind not in _MADE or not high > 0.0 or high == math.inf or row.dtype not in DTYPE_MAX:
                continue
            if high < DTYPE_TINY[row.dtype]:
                past = self._of(NoticeKind.UNDERFLOW, spec, row)
                past.since = batch if past.since < 0 else past.since
                yield _notice(NoticeKind.UNDERFLOW, spec, row, past.since, batch, high, 0.0)
            elif row.kind is Kind.OUTPUT:
                # If a module is called more than once, its largest output counts.
                largest = outputs.get((spec.module, row.label))
                if largest is None or high > largest[2]:
                    outputs[spec.module, row.label] = spec, row, high

    def _headroom(self, batch: int, spec: FrameSpec, row: ReadingSpec, high: float) -> Iterator[Notice]:
        past = self._of(NoticeKind.HEADROOM, spec, row)
        if batch > past.batch >= 0:
            pace = math.log2(high / past.value) / (batch - past.batch)
            past.paces = (*past.paces[1 - LOOKS :], pace) if pace > 0 else ()
        past.batch, past.value = batch, high
        growth = statistics.median(past.paces) if len(past.paces) == LOOKS else 0.0
        notice = _notice(NoticeKind.HEADROOM, spec, row, past.since, batch, high, growth)
        share = high / DTYPE_MAX[row.dtype]
        if share < FAR or (share < NEAR and notice.batches_left > HORIZON):
            past.since = -1
            return
        if past.since < 0:
            past.since = batch
            notice = _notice(NoticeKind.HEADROOM, spec, row, batch, batch, high, growth)
        yield notice

    def _growth(self, batch: int, spec: FrameSpec, row: ReadingSpec, high: float) -> Iterator[Notice]:
        if row.dtype != "bfloat16":  # what ends earlier has its headroom, what is wider its digits
            return
        past = self._of(NoticeKind.GROWN, spec, row)
        if past.grown < LOOKS:
            past.grown, past.first = past.grown + 1, max(past.first, high)
        elif high >= LARGE and high >= TIMES * past.first:
            past.since = batch if past.since < 0 else past.since
            yield _notice(NoticeKind.GROWN, spec, row, past.since, batch, high, math.log2(high / past.first))

    def _zeros(self, batch: int, spec: FrameSpec, row: ReadingSpec, share: float) -> Iterator[Notice]:
        past = self._of(NoticeKind.ZEROS, spec, row)
        if past.batch < 0:
            past.first = share
        elif share > past.value:
            past.grown += 1
            past.since = batch if past.since < 0 else past.since
        elif share < past.value:
            past.grown, past.since, past.first = 0, -1, share
        growth = (share - past.value) / (batch - past.batch) if batch > past.batch >= 0 else 0.0
        past.batch, past.value = batch, share
        if past.grown >= LOOKS and share >= NOTICEABLE_ZEROS and share - past.first >= ZEROS_GROWTH:
            yield _notice(NoticeKind.ZEROS, spec, row, past.since, batch, share, growth)

    def _buffer(self, batch: int, spec: FrameSpec, row: ReadingSpec, cell: Cell) -> Iterator[Notice]:
        """Told once, if two measurements in a row find it bad. A mask of -inf never was finite; one of nan is none."""
        past = self._of(NoticeKind.BUFFER, spec, row)
        if not cell.is_bad:
            if cell.state is State.FINITE:
                past.batch, past.value, past.bad = batch, cell.high, None
            return
        if past.bad is None:
            past.bad, past.grown = cell, batch
        elif past.bad is not cell and (past.batch >= 0 or cell.state is State.NAN) and past.since < 0:
            past.since = past.grown
            notice = _notice(NoticeKind.BUFFER, spec, row, past.since, batch, past.value, 0.0)
            yield notice if past.batch >= 0 else replace(notice, why=NEVER_FINITE)

    def _of(self, kind: NoticeKind, spec: FrameSpec, row: ReadingSpec) -> _Past:
        key = kind, spec.module, row.label
        past = self._past.get(key)
        if past is None:
            past = self._past[key] = _Past()
        return past


def _without_followers(found: list[Notice]) -> list[Notice]:
    """The notices, each value once: what a module made flows on unchanged through its parents and through further modules."""
    kept, seen = [], set()
    for notice in found:
        value = notice.kind, notice.dtype, notice.value
        if notice.kind not in (NoticeKind.UNDERFLOW, NoticeKind.HEADROOM, NoticeKind.GROWN) or value not in seen:
            kept.append(notice)
        seen.add(value)
    return kept


def _notice(
    kind: NoticeKind, spec: FrameSpec, row: ReadingSpec, since: int, batch: int, value: float, growth: float
) -> Notice:
    label = row.label.removesuffix(ZEROS)
    return Notice(kind, spec.module, spec.module_class, label, row.dtype, since, batch, value, growth)
