"""A run seen live, while the collector writes its record: each look reads only new events and the newest batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rankwatch.shared.printable import printable

from ..decide.core.journal import Opened
from ..decide.core.options import Options
from ..decide.core.report import Report
from ..decide.core.run import Run
from ..decide.core.standing import RankStanding, RunStanding
from . import replay
from .numbers.headroom import Headroom, Readings, choose, last_batches, merge, pace_of, recent_of
from .numbers.layout import Array
from .numbers.recent import Recent, RecentReader
from .numbers.rows import EnvelopeKey
from .reader import RunRecord
from .schema import FILE, StoreError, explained
from .store import SEGMENT

NEWEST = 512
"""Newest envelopes that are considered: with every=K, only every K-th has more than the root."""

KINDS = 8
"""Kinds of parts whose headroom is read: the ones with the newest batches."""

MODULES = 64
"""Modules nearest to overflow in a view."""

BATCHES, MAX_SEGMENTS = 2, 9
"""The last batches of every rank that are read, and the most segments of digests that are read for them."""

FIRST_BATCHES, FIRST_SEGMENTS = 128, 32
"""The same at the first look, for the curves."""


@dataclass(frozen=True, slots=True)
class View:
    """A run at one moment.

    ``began``, ``last`` and ``standings_at`` are the Unix times of the first event, the last event and the standings (0: none).
    ``batches`` has the last stored batch of each rank; ``pace`` is in batches per second. ``tables`` has the frame tables of
    ``digests``, which are the newest ones. ``recent`` is how the loss and the pace went.
    """

    report: Report
    is_over: bool
    began: float
    last: float
    standings_at: float
    standing: RunStanding | None
    standings: Mapping[int, RankStanding]
    headroom: list[Headroom]
    batches: Mapping[int, int]
    pace: float | None
    digests: Array
    tables: Mapping[int, Readings]
    recent: Recent

    @property
    def is_decided(self) -> bool:
        """Whether it is known how the run ends."""
        return self.is_over or self.report.verdict is not None or bool(self.report.reason)


class Follower:
    """One run.

    Raises (as ``look`` does):
        StoreError: there is no readable record, or not yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / FILE
        self._run: Run | None = None
        self._last = 0
        self._began, self._ended = 0.0, 0.0
        self._report: Report | None = None
        self._headroom = HeadroomReader()
        self._recent: RecentReader | None = None

    def look(self) -> View:
        if not self._path.exists():
            raise StoreError(f"no run in {self.folder} yet")
        with RunRecord(self._path) as record:
            run = self._replay(record)
            standings = record.standings()
            digests = newest_digests(record, run.world_size)
            if self._report is None:
                report = replay.take(record).report if run.over else _with_frames(run, digests)
                self._report = replace(report, folder=printable(str(self.folder)))
            return View(
                report=self._report,
                is_over=run.over,
                began=self._began,
                last=self._ended,
                standings_at=standings.time,
                standing=standings.run,
                standings={standing.rank: standing for standing in standings.ranks},
                headroom=self._headroom.read(record),
                batches=last_batches(digests),
                pace=pace_of(digests),
                digests=digests,
                tables=self._headroom.tables,
                recent=self._take_recent(record, run.world_size, digests),
            )

    def _take_recent(self, record: RunRecord, world_size: int, digests: Array) -> Recent:
        if self._recent is None:
            self._recent = RecentReader()
            digests = record.newest_digests(min(FIRST_SEGMENTS, 1 + -(-FIRST_BATCHES * world_size // SEGMENT)))
        self._recent.losses.look(digests, record.table)
        return self._recent.take(digests)

    def _replay(self, record: RunRecord) -> Run:
        """The run, up to the newest event. It is not resumed, for no rank will ever speak to this copy."""
        with explained(self._path):
            self._take_events(record)
        if self._run is None:
            raise StoreError(f"no run in {self.folder} yet")
        return self._run

    def _take_events(self, record: RunRecord) -> None:
        for number, time, entry in record.events_after(self._last):
            if self._run is None:
                if not isinstance(opened := entry.fact, Opened):
                    raise ValueError("it does not begin with a run's beginning")
                self._run = Run(record.run, opened, Options(expects_job_end=opened.awaits_command))
                self._began = time
            self._run.replay(entry)
            self._last, self._ended, self._report = number, time, None


class Newest:
    """The run in the folder ``path``, or, in a folder of runs, the newest one at each look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._follower: Follower | None = None

    def look(self) -> View:
        """Raises StoreError when there is no readable record, or not yet."""
        latest = self._path / "latest"
        folder = (latest if latest.is_dir() else self._path).resolve()
        if self._follower is None or self._follower.folder != folder:
            self._follower = Follower(folder)
        return self._follower.look()


class HeadroomReader:
    """The headroom of a run's modules, look by look."""

    def __init__(self) -> None:
        self.tables: dict[int, Readings] = {}
        self._chosen: list[tuple[EnvelopeKey, EnvelopeKey | None]] = []
        self._found: list[Headroom] = []

    def read(self, record: RunRecord) -> list[Headroom]:
        """The headroom of the modules nearest to overflow, the nearest first. Raises StoreError."""
        keys = record.newest_envelopes(NEWEST)
        chosen = choose(keys)[:KINDS]
        if chosen != self._chosen:
            found: deque[Headroom] = deque()
            for key, before in chosen:
                past = (before.batch, record.envelope(before)) if before else None
                recent = [record.envelope(one) for one in recent_of(keys, key)]
                found += self._readings(record, key.table).nearest(key.batch, record.envelope(key), past, MODULES, recent)
            self._found, self._chosen = merge(found, MODULES), chosen
        return self._found

    def _readings(self, record: RunRecord, number: int) -> Readings:
        if number not in self.tables:
            self.tables[number] = Readings(number, record.table(number))
        return self.tables[number]


def newest_digests(record: RunRecord, world_size: int) -> Array:
    """The digests of about the last BATCHES batches of every rank, in the order in which the parts came."""
    return record.newest_digests(min(MAX_SEGMENTS, 1 + -(-BATCHES * world_size // SEGMENT)))


def _with_frames(run: Run, digests: Array) -> Report:
    """The report of a run's events, with the number of frames in the culprit's batch, which is known only from batches."""
    report = run.report()
    if report.verdict is None:
        return report
    culprit = replace(run.ranks[report.verdict.tripped])  # a copy: the run itself is replayed from events only
    for part in digests[digests["rank"] == report.verdict.tripped]:
        culprit.take(
            int(part["batch"]), int(part["step"]), int(part["first_frame"]), int(part["frames"]), float(part["loss"])
        )
    return replace(report, frames_in_batch=culprit.frames_around(report.verdict.trip))
