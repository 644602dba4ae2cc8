"""Looks in a record for where its trip came from: the last batches before it, of the culprit and some other ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np

from rankwatch.shared.types.frame import FrameSpec, Kind, Phase, ReadingSpec, State
from rankwatch.shared.types.notice import ZEROS
from rankwatch.shared.types.spent import MOST_EVERY
from rankwatch.shared.types.trip import Trip

from ..decide.core.report import Report
from ..decide.trip.began import WEIGHTS, Jump, ReadingName, TripOrigin, find_began
from .numbers.jumps import LEAST, find_jumps
from .numbers.layout import Array
from .numbers.rows import PartHistory
from .reader import RunRecord

BACK = 64
"""Batches before the trip that are looked at, and batches before of which more than the root was measured."""

RANKS = 16
"""Ranks that are looked at, at most."""

MAX_NUMBERS = 1 << 22
"""Numbers that are looked at, at most: with many readings, fewer ranks are."""

AT_ONCE = 64
"""Jumps of one batch of one rank that are retained: the first ones and the last one."""

_MADE = (Kind.PARAMETER, Kind.OUTPUT, Kind.MARKED, Kind.GRAD_OUTPUT, Kind.GRAD_INPUT, Kind.GRADIENT, Kind.LOSS)
"""The kinds that are news where they are inf. An input may be a mask, which is inf on purpose in some batches."""

_FED = Kind.INPUT, Kind.KEYWORD

BEFORE_ALL = -1
"""The frame of the root's inputs: they are there before any module runs."""


def find_origin(report: Report, record: RunRecord) -> TripOrigin:
    """The origin of the report's trip. Raises StoreError."""
    assert report.verdict is not None
    verdict = report.verdict
    trips = dict(verdict.all_tripped)
    last = verdict.trip.position.batch
    batches = max(0, last - BACK), last
    earlier = record.full_batches((batches[0] - BACK * MOST_EVERY, batches[0] - 1), BACK)
    histories: dict[int, _History] = {}
    numbers = 0
    chosen = _chosen(report)
    looked_at = [*((batch, batch) for batch in earlier), batches]
    steps = dict(chain.from_iterable(record.steps(chosen, some).items() for some in looked_at))
    for rank in chosen:
        stage = report.ranks[rank].stage
        parts = chain.from_iterable(record.history(rank, some) for some in looked_at)
        history = _History(rank, stage, parts, steps, trips.get(rank))
        numbers += history.values.size
        if histories and numbers > MAX_NUMBERS:
            break
        histories[rank] = history
    began = find_began(
        (jump for history in histories.values() for jump in history.jumps() if _is_before(jump, report)),
        (verdict.trip.optimizer_step, last),
        lambda jump: [
            rise
            for rank, history in histories.items()
            if rank != jump.rank and history.stage == jump.stage and (rise := history.rise_of(jump)) is not None
        ],
        [*earlier, *record.full_batches(batches, BACK)],
    )
    seen = max((history.batches_before(last) for history in histories.values()), default=0)
    return TripOrigin(began, seen if seen >= LEAST else 0, len(histories))


def _chosen(report: Report) -> list[int]:
    """The ranks to look at: those that tripped, then other replicas, then ranks of other stages."""
    verdict = report.verdict
    assert verdict is not None
    stage = report.ranks[verdict.tripped].stage
    tripped = [verdict.tripped, *(rank for rank, _ in verdict.also)][: RANKS // 2]
    replicas = [row.rank for row in report.ranks if row.stage == stage and row.rank not in tripped]
    of_stages = {row.stage: row.rank for row in reversed(report.ranks) if row.stage != stage}
    others = [rank for rank in of_stages.values() if rank not in tripped]
    room = RANKS - len(tripped) - len(others[: RANKS // 4])
    return [*tripped, *replicas[:room], *others[: RANKS // 4]]


def _is_before(jump: Jump, report: Report) -> bool:
    """Whether a jump comes before the trip. Of other ranks, those of the trip's batch may. What a step that was left out has seen
    leads to nothing."""
    verdict = report.verdict
    assert verdict is not None
    batch, _, frame = verdict.trip.position
    if jump.batch != batch and any(one.batch == jump.batch for one in report.skipped):
        return False
    return jump.batch < batch or jump.rank != verdict.tripped or jump.frame <= frame


class _Columns:
    """The readings of a frame table: their places in a history, and which of their numbers count."""

    def __init__(self, places: Sequence[int], rows: Sequence[ReadingSpec | None]) -> None:
        self.places: Array = np.array(places, np.int64)
        self._counts = np.array([row is not None for row in rows], bool)
        self._is_made = np.array([row is not None and row.kind in _MADE for row in rows], bool)

    def values(self, highs: Array, states: Array) -> Array:
        """log2 of each abs max; inf where it is not finite, nan where it says nothing."""
        values = np.where((states == State.FINITE) | (states == State.NOT_FLOAT), _log2(highs), np.nan)
        is_bad = (states == State.NAN) | ((states == State.INF) & self._is_made)
        return np.where(self._counts, np.where(is_bad, np.inf, values), np.nan).astype(np.float32)


class _History:
    """The readings of one rank in the last batches: log2 of the abs max of each reading (column) in each batch (row)."""

    def __init__(
        self,
        rank: int,
        stage: int,
        parts: Iterable[PartHistory],
        steps: Mapping[tuple[int, int], int],
        trip: Trip | None,
    ) -> None:
        self.rank, self.stage = rank, stage
        self._names: dict[ReadingName, int] = {}
        self._frames: list[int] = []
        self._kinds: list[Kind] = []
        self._calls: dict[tuple[int, str, int], int] = {}
        self._steps: dict[int, int] = {}
        tables: dict[tuple[int, int], _Columns] = {}
        rows: dict[int, list[tuple[Array, Array]]] = {}
        for part in parts:
            columns = tables.get((part.number, part.first_frame))
            if columns is None:
                columns = tables[part.number, part.first_frame] = self._take(enumerate(part.table.specs, part.first_frame))
            rows.setdefault(part.batch, []).append((columns.places, columns.values(part.abs_max, part.states)))
            self._steps[part.batch] = steps.get((rank, part.batch), part.batch)
        if trip is not None and not trip.position.eval:
            rows.setdefault(trip.position.batch, []).append(self._take_trip(trip))
            self._steps[trip.position.batch] = trip.optimizer_step
        self._batches = sorted(rows)
        self._rows = {batch: row for row, batch in enumerate(self._batches)}
        self.values = np.full((len(self._batches), len(self._names)), np.nan, np.float32)
        for row, batch in enumerate(self._batches):
            for places, values in rows[batch]:
                self.values[row, places] = values
        are_weights = np.array([kind in WEIGHTS for kind in self._kinds], bool)
        self._found = find_jumps(self.values, are_weights, np.array(self._batches, np.int64))

    def batches_before(self, batch: int) -> int:
        return sum(one < batch for one in self._batches)

    def rise_of(self, jump: Jump) -> float | None:
        """The doublings of the same reading in the same batch above its median; None: not known."""
        row, place = self._rows.get(jump.batch), self._names.get(jump.name)
        if row is None or place is None:
            return None
        rise = float(self._found.rises[row, place])
        return None if math.isnan(rise) else rise

    def jumps(self) -> Iterator[Jump]:
        names, frames = list(self._names), np.array(self._frames, np.int64)
        for row, batch in enumerate(self._batches):
            places = np.flatnonzero(self._found.jumped[row])
            places = places[np.argsort(frames[places], kind="stable")]
            for place in [*places[:AT_ONCE].tolist(), *places[AT_ONCE:][-1:].tolist()]:
                rise = float(self._found.rises[row, place])
                frame = self._frames[place]
                at = self._steps[batch], batch, self.stage, frame
                yield Jump(*at, place, self.rank, names[place], rise, self._kinds[place])

    def _take(self, specs: Iterable[tuple[int, FrameSpec]]) -> _Columns:
        """The columns of these frames. Each call of a module in a part has its own."""
        places: list[int] = []
        kinds: list[ReadingSpec | None] = []
        calls: Counter[tuple[str, int]] = Counter()
        for frame, spec in specs:
            of = spec.module, int(spec.phase)
            call = self._calls.setdefault((frame, *of), calls[of])
            calls[of] += 1
            for row in spec.readings:
                name = ReadingName(spec.module, spec.module_class, row.label, int(spec.phase), call)
                if name not in self._names:
                    self._names[name] = len(self._frames)
                    self._kinds.append(row.kind)
                    self._frames.append(BEFORE_ALL if not spec.module and row.kind in _FED else frame)
                places.append(self._names[name])
                kinds.append(None if spec.phase is Phase.RECOMPUTE or row.label.endswith(ZEROS) else row)
        return _Columns(places, kinds)

    def _take_trip(self, trip: Trip) -> tuple[Array, Array]:
        """The readings of the trip's batch: of its last frames, without what tripped, and of the root's inputs."""
        frames = [frame for frame in trip.frames if frame.position[:2] == trip.position[:2]]
        columns = self._take((frame.position.frame, frame.spec) for frame in frames)
        readings = [reading for frame in frames for reading in frame.readings]
        root = {name.label: place for name, place in self._names.items() if not name.module}
        inputs = [reading for reading in trip.root_inputs if reading.label in root]
        places = np.array([root[reading.label] for reading in inputs], np.int64)
        highs = np.array([reading.abs_max for reading in [*readings, *inputs]])
        states = np.array([reading.state for reading in [*readings, *inputs]], np.uint8)
        values = columns.values(highs[: len(readings)], states[: len(readings)])
        values[np.isposinf(values)] = np.nan
        known = np.where(states[len(readings) :] == State.FINITE, _log2(highs[len(readings) :]), np.nan)
        return np.concatenate([columns.places, places]), np.concatenate([values, known])


def _log2(highs: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.log2(highs.astype(np.float64))
    return np.where(np.isfinite(values), values, np.nan)
