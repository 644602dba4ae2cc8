"""Reads from a record the numbers that a run is judged by: those of a bounded part of its batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from rankwatch.shared.types.frame import NO_NORM, Kind, Phase

from ..decide.ending.judgement import FEW, LASTS, ByBatch, Grown, RunNumbers, WeightsJump
from .numbers.headroom import Readings
from .numbers.layout import Array
from .numbers.losses import LOSS, RunLosses
from .numbers.rows import EnvelopeKey
from .reader import RunRecord

SEGMENTS = 256
"""Segments of digests that are read, at most: a million parts of batches. Of a longer run, those in between lie apart."""

ENDS = 4096
"""Batches at each end that are taken one by one; as many medians stand for those in between."""

FIRST = 8
"""Envelopes of which a beginning is the median."""

IN_TURN = 16
"""Batches in which each weight is measured once, by the default of ``weights_every``."""

JUMPED = 2.0
"""A weight whose largest number changes so many times within a few batches: no training at its usual rate does that."""

RANKS = 1024
"""Ranks whose losses are compared, at most."""

KINDS, NEWEST = 4, 4096
"""Kinds of parts whose envelopes are looked at, and the newest envelopes among which these are looked for: by a budget, one batch
of very many is measured in full."""

APART = 4
"""A kind of part is still there if the end is not so many times as far from the last one as these are from each other."""

_COLUMNS = ("rank", "batch", "table", "loss", "norm", "started", "ended")


def read_numbers(record: RunRecord, steps: int | None) -> RunNumbers:
    """``steps``: optimizer steps of the run. Raises StoreError."""
    found = [digests for _, digests in record.some_segments(_COLUMNS, SEGMENTS)]
    if not found or sum(map(len, found)) < FEW:
        return RunNumbers()
    digests = np.concatenate(found)
    own = digests[digests["rank"] == digests["rank"][digests["batch"].argmax()]]
    own = own[np.unique(own["batch"], return_index=True)[1]]  # of each batch the first part: its forward
    norms = digests[(digests["norm"] != np.float32(NO_NORM)) & np.isfinite(digests["norm"])]
    kinds, losses = list(_kinds(record)), _losses(record, digests)
    weights = _Weights(record, kinds)
    return RunNumbers(
        losses={name: _series(of["batch"], of["loss"]) for name, of in losses.items()},
        of_ranks=lambda name, batch, count: _of_ranks(losses[name], batch, count),
        jump=weights.jump,
        norms=_series(norms["batch"], norms["norm"]),
        begins=_thinned(own["batch"], own["started"]),
        forwards=_thinned(own["batch"], own["ended"] - own["started"]),
        weights=weights.doublings,
        unchanged=_unchanged(record, kinds) if steps is not None and steps >= LASTS else None,
        outputs=[one for same in kinds for one in _outputs(record, same)],
    )


def _losses(record: RunRecord, digests: Array) -> dict[str, Array]:
    """By name: two losses that take turns are two curves."""
    known, losses = digests[np.isfinite(digests["loss"])], RunLosses()
    losses.look(known, record.table)
    split = list(losses.split(known))
    return {_name(losses.name(which)): own for which, own in split}


def _of_ranks(digests: Array, batch: int, count: int) -> dict[int, float]:
    """The loss of each rank, by the median of so many batches from this one on."""
    own = digests[(digests["batch"] >= batch) & (digests["batch"] < batch + count)]
    return {rank: float(np.median(own["loss"][own["rank"] == rank])) for rank in np.unique(own["rank"]).tolist()[:RANKS]}


def _name(of: str) -> str:
    return LOSS if of == LOSS else f"{LOSS} of {of}"


class _Weights:
    """The weights of the largest kind of part."""

    def __init__(self, record: RunRecord, kinds: list[list[EnvelopeKey]]) -> None:
        self._record = record
        found = [(_rows_of_weights(record, same[0]), same[0]) for same in kinds]
        self._rows, self._key = max(found, key=lambda one: len(one[0]), default=([], EnvelopeKey(0, 0, 0, 0)))
        rows = (
            [f"{spec.module}.{row.label}" for spec in record.table(self._key.table).specs for row in spec.readings]
            if found
            else []
        )
        self._names = [rows[place].lstrip(".") for place in self._rows]

    def doublings(self, first: int, last: int) -> float:
        """From one batch to another, the median over all: a bias near 0 may grow many times."""
        keys = self._record.nearest_envelopes(self._key, (first, last)) if self._rows else []
        if len(keys) < 2:
            return 0.0
        keys[1] = self._record.next_envelope(self._key, last) or keys[1]
        before, now = (self._record.envelope(key).high[self._rows].astype(np.float64) for key in keys)
        is_known = (before > 0) & (now > 0) & np.isfinite(now)
        growth = np.log2(now[is_known] / before[is_known])
        return float(np.median(growth)) if len(growth) else 0.0

    def jump(self, batch: int) -> WeightsJump | None:
        """From before this batch until each weight was measured again."""
        around = max(0, batch - 1), batch + IN_TURN
        keys = self._record.nearest_envelopes(self._key, around) if self._rows else []
        if len(keys) < 2 or keys[0].batch >= keys[1].batch:
            return None
        before, after = (self._record.envelope(key).high[self._rows].astype(np.float64) for key in keys)
        small = 0.1 * float(np.median(before))  # a bias near 0 may grow many times
        is_known = (before > small) & (after > small) & np.isfinite(before) & np.isfinite(after)
        times = np.where(is_known, after / np.where(is_known, before, 1.0), 1.0)
        jumped = np.maximum(times, 1.0 / times) >= JUMPED
        if not jumped.any():
            return None
        place = int(np.abs(np.log2(times)).argmax())
        count = int(jumped.sum()), len(self._rows)
        return WeightsJump(keys[0].batch, keys[1].batch, self._names[place], float(times[place]), *count)


def _rows_of_weights(record: RunRecord, key: EnvelopeKey) -> list[int]:
    rows = [(spec, reading) for spec in record.table(key.table).specs for reading in spec.readings]
    return [at for at, (spec, reading) in enumerate(rows) if reading.kind is Kind.PARAMETER and spec.phase is Phase.FORWARD]


def _series(batches: Array, values: Array) -> ByBatch:
    """The mean over the ranks in each batch."""
    if not len(batches):
        return ByBatch()
    numbers, places = np.unique(batches, return_inverse=True)
    return _thinned(numbers, np.bincount(places, values.astype(np.float64)) / np.bincount(places))


def _thinned(batches: Array, values: Array) -> ByBatch:
    """All of the first and of the last ENDS batches, and medians of those in between."""
    inner = len(batches) - 2 * ENDS
    if inner > ENDS:
        cuts = ENDS + np.linspace(0, inner, ENDS + 1).astype(int)
        middle = [float(np.median(values[at:end])) for at, end in pairwise(cuts)]
        values = np.concatenate([values[:ENDS], middle, values[-ENDS:]])
        batches = np.concatenate([batches[:ENDS], batches[cuts[:-1]], batches[-ENDS:]])
    return ByBatch(batches.tolist(), values.astype(np.float64).tolist())


def _kinds(record: RunRecord) -> Iterator[list[EnvelopeKey]]:
    """The first and the last envelopes of each kind of part that is still there at the end, in the order of the batches."""
    newest, by_kind = record.newest_envelopes(NEWEST), dict[tuple[int, int], list[EnvelopeKey]]()
    for key in newest:
        by_kind.setdefault((key.first_frame, key.table), []).append(key)
    there = [last for same in by_kind.values() if _is_there(last := same[:LASTS][::-1], newest[0].batch)]
    for last in there[:KINDS]:
        first = record.first_envelopes(last[0], FIRST)
        last = [key for key in last if key.batch > first[-1].batch]
        if len(last) >= FIRST:
            yield [*first, *last]


def _is_there(last: list[EnvelopeKey], end: int) -> bool:
    if len(last) < FIRST:
        return False
    apart = max(now.batch - before.batch for before, now in pairwise(last))
    return end - last[-1].batch <= max(LASTS, APART * apart)


def _unchanged(record: RunRecord, kinds: list[list[EnvelopeKey]]) -> int | None:
    """The first batch, if no smallest and no largest number of a weight has changed from there to the end."""
    is_known = False
    for same in kinds:
        rows = _rows_of_weights(record, same[0])
        if not rows:
            continue
        first, *rest = (record.envelope(key) for key in (same[0], *same[-FIRST:]))
        is_known = True
        for one in rest:
            if (one.high[rows] != first.high[rows]).any() or (one.low[rows] != first.low[rows]).any():
                return None
    return min(same[0].batch for same in kinds) if is_known else None


def _outputs(record: RunRecord, same: list[EnvelopeKey]) -> Iterator[Grown]:
    """Of one kind of part, the output that has grown the most."""
    readings = Readings(same[0].table, record.table(same[0].table))
    rows = [row for row, (_, reading) in enumerate(readings.rows) if reading.kind is Kind.OUTPUT]
    if not rows:
        return
    highs = np.array([record.envelope(key).high[rows] for key in same], np.float64)
    ends = [len(same) - FIRST, len(same)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # what was never finite
        highs[~np.isfinite(highs)] = np.nan
        first, last = np.nanmedian(highs[:FIRST], axis=0), np.nanmin(highs[ends[0] :], axis=0)
        growth = np.nan_to_num(np.where(first > 0, last / first, 0.0))
    row = int(growth.argmax())
    if growth[row] > 1.0:
        spec, _ = readings.rows[rows[row]]
        at = int(np.argmax(highs[:, row] >= last[row]))
        yield Grown(f"{spec.module or '(root)'} ({spec.module_class})", same[at].batch, float(first[row]), float(last[row]))
