"""How far each module is from its dtype's largest number, and how fast it approaches it: envelopes -> numbers. Pure."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rankwatch.shared.types.frame import NARROW_DTYPES, FrameSpec, FrameTable, Kind, Phase, ReadingSpec, State
from rankwatch.shared.types.notice import ZEROS

from .digest import Columns, Envelope, limit_of
from .layout import NO_ROW, Array
from .rows import EnvelopeKey

MADE = (Kind.PARAMETER, Kind.OUTPUT, Kind.MARKED, Kind.GRAD_OUTPUT, Kind.GRAD_INPUT, Kind.GRADIENT)
"""The kinds that a module itself makes. Its inputs are outputs of others, or masks that are huge on purpose."""

PACE_WINDOW = 30.0
"""Seconds: the pace is an average over the batches of this time."""

BACK = 16
"""Batches over which growth is measured, if the record has that many."""

RECENT = 8
"""Batches before, of which the median is what is usual for a reading."""

CALM, MOST_CHANGE = 8.0, 30.0
"""Doublings: how a change compares with a headroom, and from where on a change counts no more."""

FULL = 0.9
"""The share of the ranks that must have reported a batch before it replaces the one before."""


class Headroom(NamedTuple):
    """The reading of a module that is nearest to its dtype's largest number, over all ranks.

    ``times``: its dtype's largest number divided by it; 0 for an inf or nan. ``growth``: the factor by which it grows from
    batch to batch; None without an earlier batch. ``change``: its doublings above the median of the last batches before.
    """

    batch: int
    module: str
    module_class: str
    phase: Phase
    label: str
    dtype: str
    high: float
    rank: int
    state: State
    times: float
    growth: float | None
    change: float | None = None

    @property
    def is_narrow(self) -> bool:
        """Whether its dtype ends so early that the headroom says something; else the change does."""
        return self.dtype in NARROW_DTYPES

    @property
    def urgency(self) -> float:
        """Sort key, the most urgent largest: an inf or nan, then a small headroom or a great change."""
        if self.times <= 0.0:
            return math.inf
        return -math.log2(self.times) if self.is_narrow else _urgency_of(self.change or 0.0)


class Readings:
    """The rows of a frame table; ``number`` is the table's number in the record."""

    def __init__(self, number: int, table: FrameTable) -> None:
        self.columns = Columns(number, table)
        self.rows: list[tuple[FrameSpec, ReadingSpec]] = [(spec, row) for spec in table.specs for row in spec.readings]
        self._is_narrow = np.array([row.dtype in NARROW_DTYPES for _, row in self.rows], bool)
        self._limits = np.array([limit_of(row) if _is_made(spec, row) else np.inf for spec, row in self.rows], np.float64)

    def nearest(
        self, batch: int, now: Envelope, before: tuple[int, Envelope] | None, most: int, recent: Sequence[Envelope] = ()
    ) -> list[Headroom]:
        """The ``most`` modules nearest to overflow or with the greatest change, the most urgent first.

        Args:
            before: an earlier batch and its envelope.
            recent: the envelopes of the last batches before.
        """
        has_limit = np.isfinite(self._limits)
        shares = np.divide(np.maximum(now.high, 0.0), self._limits, out=np.zeros_like(self._limits), where=has_limit)
        shares[has_limit & ((now.state == State.INF) | (now.state == State.NAN))] = np.inf
        changes = _changes(now, recent)
        with np.errstate(divide="ignore"):
            urgency = np.where(self._is_narrow, np.log2(shares), _urgency_of(np.nan_to_num(changes)))
        urgency[np.isposinf(shares)] = np.inf
        urgency[shares == 0.0] = -np.inf
        found: dict[tuple[str, Phase], Headroom] = {}
        for row in np.argsort(-urgency, kind="stable").tolist():
            if len(found) == most or not shares[row] > 0.0:
                break
            spec, reading = self.rows[row]
            if (spec.module, spec.phase) not in found:
                found[spec.module, spec.phase] = Headroom(
                    batch, spec.module, spec.module_class, spec.phase, reading.label, reading.dtype,
                    float(now.high[row]), _rank(now, row), State(int(now.state[row])), float(1.0 / shares[row]),
                    _growth(batch, now, before, row), None if np.isnan(changes[row]) else float(changes[row]),
                )  # fmt: skip
        return list(found.values())

    def growth(self, now: Envelope, before: Envelope) -> Array:
        """For each row, the factor by which it is larger than before; 0 where the module does not make it, or it is not known."""
        known = np.isfinite(self._limits)
        for envelope in (now, before):
            known &= (envelope.state == State.FINITE) & np.isfinite(envelope.high) & (envelope.high > 0)
        highs, lows = (np.where(known, one.high, 1.0).astype(np.float64) for one in (now, before))
        factors: Array = np.where(known, highs / lows, 0.0)
        return factors


def choose(keys: Sequence[EnvelopeKey]) -> list[tuple[EnvelopeKey, EnvelopeKey | None]]:
    """For each kind of part, the newest envelope that has (nearly) all its ranks, and one some batches before it.

    Args:
        keys: the newest first.
    """
    of_kinds: dict[tuple[int, int], list[EnvelopeKey]] = {}
    for key in keys:
        of_kinds.setdefault((key.first_frame, key.table), []).append(key)
    chosen: list[tuple[EnvelopeKey, EnvelopeKey | None]] = []
    for same in of_kinds.values():
        full = [key for key in same if key.ranks >= FULL * max(key.ranks for key in same)]
        newest, *earlier = full
        before = min(earlier, key=lambda key: abs(newest.batch - BACK - key.batch), default=None)
        chosen.append((newest, before))
    return chosen


def recent_of(keys: Sequence[EnvelopeKey], newest: EnvelopeKey) -> list[EnvelopeKey]:
    """The last envelopes before this one of the same kind of part and of (nearly) as many ranks; ``keys``: newest first."""
    same = (key for key in keys if (key.first_frame, key.table) == (newest.first_frame, newest.table))
    return [key for key in same if key.batch < newest.batch and key.ranks >= FULL * newest.ranks][:RECENT]


def merge(found: Iterable[Headroom], most: int) -> list[Headroom]:
    """The newest headroom of each module, the most urgent first."""
    newest: dict[tuple[str, Phase], Headroom] = {}
    for one in found:
        other = newest.get((one.module, one.phase))
        if other is None or (one.batch, one.urgency) > (other.batch, other.urgency):
            newest[one.module, one.phase] = one
    return sorted(newest.values(), key=lambda one: (-one.urgency, one.times, one.module))[:most]


class RankBatch(NamedTuple):
    """A part of a batch of one rank, how long it took, and its reading nearest to its dtype's largest number.

    ``times``, ``dtype`` and ``change`` are as in Headroom. ``bad`` counts the inf and nan readings; if there are any, the
    reading is the first of them.
    """

    batch: int
    step: int
    seconds: float
    times: float
    bad: int
    module: str
    label: str
    dtype: str = ""
    change: float | None = None


def batches_of(rank: int, digests: Array, tables: Mapping[int, Readings], most: int) -> list[RankBatch]:
    """The last parts of batches of a rank, the newest first."""
    found = []
    own = digests[digests["rank"] == rank][::-1]
    for place, one in enumerate(own[:most]):
        past = own[place + 1 :][own[place + 1 :]["first_frame"] == one["first_frame"]][:RECENT]["headroom"]
        past = past[np.isfinite(past)]
        change = float(np.median(past) - one["headroom"]) if len(past) and np.isfinite(one["headroom"]) else None
        number, row = int(one["table"]), int(one["row"] if one["bad_row"] == NO_ROW else one["bad_row"])
        spec, reading = tables[number].rows[row] if number in tables and tables[number].rows else (None, None)
        found.append(
            RankBatch(
                int(one["batch"]), int(one["step"]), float(one["ended"] - one["started"]),
                2.0 ** min(float(one["headroom"]), 1023.0), int(one["bad"]),
                spec.module if spec else "", reading.label if reading else "", reading.dtype if reading else "", change,
            )
        )  # fmt: skip
    return found


def last_batches(digests: Array) -> dict[int, int]:
    """By rank, its last batch that has a digest."""
    ordered = digests[np.argsort(digests["batch"], kind="stable")]
    return dict(zip(ordered["rank"].tolist(), ordered["batch"].tolist(), strict=True))


def pace_of(digests: Array) -> float | None:
    """Batches per second of the furthest rank, by its own clock; None when that is not known yet."""
    if not len(digests):
        return None
    own = digests[digests["rank"] == digests["rank"][digests["batch"].argmax()]]
    own = own[np.unique(own["batch"], return_index=True)[1]]  # of each batch the first part: its forward
    own = own[own["ended"] >= own["ended"].max() - PACE_WINDOW]
    seconds = float(own["ended"].max() - own["ended"].min())
    return float(own["batch"].max() - own["batch"].min()) / seconds if seconds > 0 else None


def _urgency_of(changes: Any) -> Any:
    """Of doublings above the usual, on the scale of headroom: no change counts as a headroom of x256."""
    return np.minimum(changes, MOST_CHANGE) - CALM


def _changes(now: Envelope, recent: Sequence[Envelope]) -> Array:
    """The doublings of each row above its median in the last batches; nan: not known."""
    if not recent:
        return np.full(len(now.high), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of rows that were never finite
        past = np.log2(np.array([one.high for one in recent], np.float64))
        changes: Array = np.log2(now.high.astype(np.float64)) - np.nanmedian(
            np.where(np.isfinite(past), past, np.nan), axis=0
        )
    return np.where(np.isfinite(changes), changes, np.nan)


def _is_made(spec: FrameSpec, row: ReadingSpec) -> bool:
    return row.kind in MADE and spec.phase is not Phase.RECOMPUTE and not row.label.endswith(ZEROS)


def _rank(envelope: Envelope, row: int) -> int:
    is_bad = envelope.state[row] in (State.INF, State.NAN)
    return int(envelope.state_rank[row] if is_bad else envelope.high_rank[row])


def _growth(batch: int, now: Envelope, before: tuple[int, Envelope] | None, row: int) -> float | None:
    if before is None or batch <= before[0]:
        return None
    high, earlier = float(now.high[row]), float(before[1].high[row])
    if not (0.0 < high < math.inf and 0.0 < earlier < math.inf):
        return None
    return float((high / earlier) ** (1.0 / (batch - before[0])))
