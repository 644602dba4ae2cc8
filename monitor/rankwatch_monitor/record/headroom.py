"""How far each module is from its dtype's largest number, and how fast it approaches it: envelopes -> numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rankwatch.shared.frame import FrameSpec, FrameTable, Kind, Phase, ReadingSpec, State
from rankwatch.shared.notice import ZEROS

from .digest import Columns, Envelope, limit_of
from .layout import NO_ROW, Array
from .rows import EnvelopeKey

MADE = (Kind.PARAMETER, Kind.OUTPUT, Kind.MARKED, Kind.GRAD_OUTPUT, Kind.GRAD_INPUT, Kind.GRADIENT)
"""The kinds that a module itself makes. Its inputs are outputs of others, or masks that are huge on purpose."""

PACE_WINDOW = 30.0
"""Seconds: the pace is an average over the batches of this time."""

BACK = 16
"""Batches over which growth is measured, if the record has that many."""

FULL = 0.9
"""The share of the ranks that must have reported a batch before it replaces the one before."""


class Headroom(NamedTuple):
    """The reading of a module that is nearest to its dtype's largest number, over all ranks.

    ``times``: its dtype's largest number divided by it; 0 for an inf or nan. ``growth``: the factor by which it grows from
    batch to batch; None without an earlier batch.
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


class Readings:
    """The rows of a frame table; ``number`` is the table's number in the record."""

    def __init__(self, number: int, table: FrameTable) -> None:
        self.columns = Columns(number, table)
        self.rows: list[tuple[FrameSpec, ReadingSpec]] = [(spec, row) for spec in table.specs for row in spec.readings]
        self._limits = np.array([limit_of(row) if _is_made(spec, row) else np.inf for spec, row in self.rows], np.float64)

    def nearest(self, batch: int, now: Envelope, before: tuple[int, Envelope] | None, most: int) -> list[Headroom]:
        """The ``most`` modules nearest to overflow, the nearest first. ``before``: an earlier batch and its envelope."""
        has_limit = np.isfinite(self._limits)
        shares = np.where(has_limit, np.maximum(now.high, 0.0) / self._limits, 0.0)
        shares[has_limit & ((now.state == State.INF) | (now.state == State.NAN))] = np.inf
        found: dict[tuple[str, Phase], Headroom] = {}
        for row in np.argsort(-shares, kind="stable").tolist():
            if len(found) == most or not shares[row] > 0.0:
                break
            spec, reading = self.rows[row]
            if (spec.module, spec.phase) not in found:
                found[spec.module, spec.phase] = Headroom(
                    batch, spec.module, spec.module_class, spec.phase, reading.label, reading.dtype,
                    float(now.high[row]), _rank(now, row), State(int(now.state[row])), float(1.0 / shares[row]),
                    _growth(batch, now, before, row),
                )  # fmt: skip
        return list(found.values())


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


def merge(found: Iterable[Headroom], most: int) -> list[Headroom]:
    """The newest headroom of each module, the nearest to overflow first."""
    newest: dict[tuple[str, Phase], Headroom] = {}
    for one in found:
        other = newest.get((one.module, one.phase))
        if other is None or (one.batch, -one.times) > (other.batch, -other.times):
            newest[one.module, one.phase] = one
    return sorted(newest.values(), key=lambda one: (one.times, one.module))[:most]


class RankBatch(NamedTuple):
    """A part of a batch of one rank, how long it took, and its reading nearest to its dtype's largest number.

    ``times`` is as in Headroom. ``bad`` counts the inf and nan readings; if there are any, the reading is the first of them.
    """

    batch: int
    step: int
    seconds: float
    times: float
    bad: int
    module: str
    label: str


def batches_of(rank: int, digests: Array, tables: Mapping[int, Readings], most: int) -> list[RankBatch]:
    """The last parts of batches of a rank, the newest first."""
    found = []
    for one in digests[digests["rank"] == rank][::-1][:most]:
        number, row = int(one["table"]), int(one["row"] if one["bad_row"] == NO_ROW else one["bad_row"])
        spec, reading = tables[number].rows[row] if number in tables and tables[number].rows else (None, None)
        found.append(
            RankBatch(
                int(one["batch"]), int(one["step"]), float(one["ended"] - one["started"]),
                2.0 ** min(float(one["headroom"]), 1023.0), int(one["bad"]),
                spec.module if spec else "", reading.label if reading else "",
            )
        )  # fmt: skip
    return found


def last_batches(digests: Array) -> dict[int, int]:
    """By rank, its last batch that has a digest."""
    ordered = digests[np.argsort(digests["batch"], kind="stable")]
    return dict(zip(ordered["rank"].tolist(), ordered["batch"].tolist(), strict=True))


def pace_of(digests: Array) -> float | None:
    """Batches per second of the furthest rank, by its own clock; None when that is not known yet."""
    begun = digests[digests["first_frame"] == 0]
    if not len(begun):
        return None
    own = begun[begun["rank"] == begun["rank"][begun["batch"].argmax()]]
    own = own[own["ended"] >= own["ended"].max() - PACE_WINDOW]
    seconds = float(own["ended"].max() - own["ended"].min())
    return float(own["batch"].max() - own["batch"].min()) / seconds if seconds > 0 else None


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
