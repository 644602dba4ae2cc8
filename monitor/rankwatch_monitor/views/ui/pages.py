"""The data of each view of a run, read from the run's record."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from rankwatch.errors import UsageError
from rankwatch.shared.printable import printable
from rankwatch.shared.types.frame import DTYPE_MAX, NARROW_DTYPES, FrameTable
from rankwatch.shared.types.trip import Trip
from rankwatch.shared.words.text import describe_module

from ...decide.core.report import Report
from ...decide.replicas.desync_text import describe_compared, describe_desync, describe_remedy, origins
from ...record import replay
from ...record.course import pace_over_all
from ...record.numbers.digest import Columns
from ...record.numbers.rows import ANY, BatchRange, Standings
from ...record.reader import RunRecord
from ...record.replay import Snapshot
from ...record.runs import folders, read_row
from ...record.schema import FILE, StoreError
from .. import as_json as reports
from .. import events, path, roles, runs
from ..batches import diff
from ..batches.compare import compare
from ..jsonable import plain
from . import curves, grids, sources
from .by_rank import DRAWN
from .curves import Curves
from .grids import Grid, RankGrid
from .sources import OF_GRID, NewDigests

RankRange: TypeAlias = tuple[int, int]
"""The first and the last rank."""

CACHED_RUNS = 64
"""Runs whose replay and grid are held in memory."""

LONGEST_NAME = 255
"""Letters of an unknown name that are repeated: no file has a longer one."""

MAX_EVENTS = 2000
"""Events in a view, the last ones."""

BEFORE, AFTER = 32, 8
"""Batches before and after those that were asked for, which are shown round them."""

MOST_DRAWN = 4
"""Ranks of a large run that have a line of their own, unless they are asked for."""

MEASURES = "headroom", "change"

STALE_AFTER = 10.0
"""Seconds without new standings that never mean that a running run has lost its collector."""


class Pages:
    """The runs in a folder. Every method may be called from any thread.

    Raises (as the methods do):
        LookupError: there is no such run, or it does not have what was asked for.
        UsageError: the question makes no sense.
        StoreError: a record cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: OrderedDict[str, RunPages] = OrderedDict()
        self._rows: dict[str, tuple[str, dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def list(self) -> list[dict[str, Any]]:
        """The runs of a list, the newest first."""
        found = []
        for folder in folders(self._folder):
            try:
                found.append(self._row(folder))
            except StoreError as error:
                with suppress(FileNotFoundError):  # it has been removed meanwhile
                    began = (folder / FILE).stat().st_mtime
                    found.append({"run": printable(folder.name), "began": began, "unreadable": str(error)})
        return sorted(found, key=lambda run: -run["began"])

    def _row(self, folder: Path) -> dict[str, Any]:
        """What a list shows of a run. That of a run that nobody writes any more is read once."""
        version = version_of(folder)
        if (known := self._rows.get(folder.name)) is not None and known[0] == version:
            return known[1]
        row = read_row(folder)
        shown = {**runs.to_dict(row), "began": row.began, "ended": row.ended}
        with RunRecord(folder / FILE) as record:
            shown["rate"] = None if shown["stalled"] else pace_over_all(record, row.world_size)
            shown["model"] = sources.model_of(record)
            shown["losses"] = sources.sparks(record)
            shown["cause"] = sources.cause_of(record) if row.is_over else ""
        if row.is_over or not row.is_alive:
            self._rows[folder.name] = version, shown
        return shown

    def run(self, name: str) -> RunPages:
        with self._lock:
            if name not in self._runs:
                if name in ("", ".", "..") or "/" in name or not _is_file(self._folder / name / FILE):
                    raise LookupError(f"there is no run {name[:LONGEST_NAME]} here")
                self._runs[name] = RunPages(self._folder / name)
            self._runs.move_to_end(name)
            if len(self._runs) > CACHED_RUNS:
                self._runs.popitem(last=False)
            return self._runs[name]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # no file system has names of 5,000 letters, or with a null in them
        return False


class RunPages:
    """One run. Each method reads the record that ``open`` returns; what was read before is not read again.

    The replay is remembered until the record changes; the grid of ranks and the curves take only digests that are new.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock, self._drawing = threading.RLock(), threading.Lock()
        self._began = 0.0
        self._forget()

    def _forget(self) -> None:
        self._replayed: tuple[tuple[int, ...], Snapshot] | None = None
        self._ranks: RankGrid | None = None
        self._of_ranks = NewDigests(OF_GRID)
        self._curves: Curves | None = None
        self._of_curves = NewDigests(curves.COLUMNS)

    def open(self) -> RunRecord:
        record = RunRecord(self._folder / FILE)
        with self._lock:
            if (began := record.began()) != self._began:  # the folder was removed, and there is another run of its name
                self._forget()
            self._began = began
        return record

    def version(self) -> str:
        return version_of(self._folder)

    def overview(self, record: RunRecord, measure: str = "") -> dict[str, Any]:
        """The report, where the ranks are and what their batches ``spent`` (between, forward, backward, step), the grid of
        ``ranks``, and whether ``diff`` has two sides of itself."""
        standings = record.standings()
        report, is_over = self._replay(record)
        verdict = report.verdict
        frames = verdict.trip.frames if verdict else ()
        return {
            "report": reports.to_dict(report),
            "is_over": is_over,
            "began": record.began(),
            "ended": standings.time,
            "model": sources.model_of(record),
            "silent_collector": not is_over and _are_stale(standings),
            "standing": None if is_over or standings.run is None else standings.run._asdict(),
            "standings": [] if is_over else [standing._asdict() for standing in standings.ranks],
            "spent": {one.rank: [*one.spent[1:]] for one in standings.ranks if one.spent.batches},
            "path": path.path_to(frames),
            "has_diff": verdict is not None and diff.is_possible(record, report),
            "order": [[one.row.rank, one.text, one.is_cause] for one in roles.in_order(report)],
            "replicas": _replicas(report),
            "grid": self.ranks(record, measure=measure)._asdict(),
        }

    def ranks(self, record: RunRecord, batches: BatchRange = ANY, measure: str = "") -> Grid:
        """The worst headroom by rank and batch, of all batches or of some.

        Args:
            measure: what a cell holds: ``headroom`` or ``change`` (see ``grids.as_changes``). By default it goes by the dtypes of
                the readings: the change where headroom says nothing.
        """
        return _measured(self._headroom(record, batches), measure, record.tables().values())

    def _headroom(self, record: RunRecord, batches: BatchRange) -> Grid:
        report, _ = self._replay(record)
        if batches != ANY:
            zoomed = RankGrid(report.world_size)
            for _, digests in record.segments(OF_GRID, batches=batches):
                zoomed.add(digests[(digests["batch"] >= batches[0]) & (digests["batch"] <= batches[1])])
            return zoomed.grid()
        with self._lock:
            if self._ranks is None:
                self._ranks = RankGrid(report.world_size)
            for digests in self._of_ranks.take(record):
                self._ranks.add(digests)
            for rank, trip in _trips(report):
                self._ranks.mark(rank, trip.position.batch)
            return self._ranks.grid()

    def curves(self, record: RunRecord, ranks: Sequence[int] = ()) -> dict[str, Any]:
        """The lines of ``Curves.lines``, and of the largest ``gradient`` where gradients are on record; the batches whose
        steps were left out, as ``skipped``; and the time by batch, as ``clock``.

        Args:
            ranks: those with a line of their own; by default those that have to do with how the run ended.
        """
        report, _ = self._replay(record)
        drawn = tuple(ranks) or _drawn(report)
        with self._drawing:  # its own lock: the overview need not wait for this
            with self._lock:
                if self._curves is None or self._curves.drawn != drawn:
                    self._curves, self._of_curves = Curves(report.world_size, drawn), NewDigests(curves.COLUMNS)
                made, new = self._curves, self._of_curves
            for digests in new.take(record):
                made.losses.look(digests, record.table)
                made.add(digests)
            lines, clock = made.lines(), made.clock()
        lines["gradient"] = sources.gradients(record)
        marked = [[one.batch, one.brief] for one in report.skipped]
        return {**{name: [line._asdict() for line in of] for name, of in lines.items()}, "skipped": marked, "clock": clock}

    def around(self, record: RunRecord, ranks: RankRange, batches: BatchRange, measure: str = "") -> dict[str, Any]:
        """The modules of a rank round these batches: of several ranks, of the worst one there.

        What is not stored as its rank sent it is shown over all ranks.
        """
        rank, notes = ranks[0], []
        if ranks[0] != ranks[1]:
            rank = self._worst(record, ranks, batches)
            notes.append(f"Of ranks {ranks[0]}-{ranks[1]}, rank {rank} is the worst there.")
        retained = record.sent_batches(rank)
        of: int | None = rank
        if not retained:
            retained, of = record.envelope_batches(), None
            notes.append(f"No batch is stored as rank {rank} sent it, so this is over all ranks.")
        near = retained[max(0, bisect_left(retained, batches[0]) - BEFORE) : bisect_right(retained, batches[1]) + AFTER]
        span = (near[0], max(near[-1], batches[1])) if near else batches
        return {**self.modules(record, of, span, measure=measure), "rank": of, "note": " ".join(notes)}

    def _worst(self, record: RunRecord, ranks: RankRange, batches: BatchRange) -> int:
        """The rank that tripped, or came nearest to overflow, in these batches."""
        for rank, trip in _trips(self._replay(record).report):
            if ranks[0] <= rank <= ranks[1] and batches[0] <= trip.position.batch <= batches[1]:
                return rank
        return sources.worst_rank(record, ranks, batches)

    def modules(
        self, record: RunRecord, rank: int | None, batches: BatchRange = ANY, pattern: str = "", measure: str = ""
    ) -> dict[str, Any]:
        """The worst headroom by module and batch, of a rank or over all of them. ``measure``: as in ``ranks``."""
        retained = record.envelope_batches() if rank is None else record.sent_batches(rank)
        retained = [batch for batch in retained if batches[0] <= batch <= batches[1]]
        if not retained:
            raise LookupError("no such batch is kept " + ("over all ranks" if rank is None else f"as rank {rank} sent it"))
        tables = record.tables()
        columns = _columns_of(tables)
        parts = record.extremes(rank, columns, batches)
        tripped = [
            (describe_module(trip.frame.spec), trip.position.batch)
            for who, trip in _trips(self._replay(record).report)
            if rank in (None, who) and batches[0] <= trip.position.batch <= batches[1]
        ]
        grid = grids.module_grid(tables, columns, parts, retained, pattern=pattern, tripped=tripped)
        return _measured(grid, measure, tables.values())._asdict()

    def readings(self, record: RunRecord) -> list[dict[str, Any]]:
        """The readings that a chart can show: modules in execution order, each with its labels."""
        found: dict[tuple[str, str, str], dict[str, None]] = {}
        for table in record.tables().values():
            for spec in table.specs:
                labels = found.setdefault((spec.module, spec.module_class, spec.phase.name.lower()), {})
                labels.update(dict.fromkeys(row.label for row in spec.readings))
        return [
            {"module": module, "class": module_class, "phase": phase, "labels": list(labels)}
            for (module, module_class, phase), labels in found.items()
        ]

    def series(
        self,
        record: RunRecord,
        ranks: Sequence[int | None],
        module: str,
        label: str,
        phase: str = "forward",
        batches: BatchRange = ANY,
    ) -> dict[str, Any]:
        """One reading over the batches for each of these ranks; rank None: the smallest and the largest over all ranks."""
        lines = []
        tables = record.tables()
        columns = _columns_of(tables)
        rows = [(number, row) for number, table in tables.items() for row in _rows_of(table, module, label, phase)]
        if not rows:
            raise LookupError(f"no module {module or '(root)'} has a reading {label} in its {phase} here")
        for rank in ranks:
            thin = grids.thinned(
                sources.joined([record.series(rank, columns[number], row, batches) for number, row in rows])
            )
            lines.append({"rank": rank, "points": [reports.point(*point) for point in thin]})
        dtype = _dtype_of(tables[rows[0][0]], rows[0][1])
        return {"dtype": dtype, "limit": DTYPE_MAX.get(dtype), "lines": lines}

    def culprit(self, record: RunRecord) -> dict[str, Any] | None:
        """The culprit's reading over the batches, of its rank and over all ranks; None if no earlier batch is stored."""
        for rank, trip in _trips(self._replay(record).report):
            spec = trip.frame.spec
            try:
                found = self.series(record, [None, rank], spec.module, trip.culprit.label, spec.phase.name.lower())
            except LookupError:
                return None
            # The batch that trips ends there, so no part of it has this reading; what other ranks have of it is another's.
            whole = found["lines"][0]
            whole["points"] = [point for point in whole["points"] if point[0] < trip.position.batch]
            found["lines"][1]["points"].append(reports.point(trip.position.batch, math.inf, math.inf, trip.culprit.state))
            return found
        return None

    def diff(
        self, record: RunRecord, ranks: Sequence[int], batches: Sequence[int], other: RunRecord | None = None
    ) -> dict[str, Any]:
        """As ``rankwatch diff``."""
        left, right = diff.sides([record, *([other] if other else [])], ranks, batches)
        body = diff.to_dict(compare(left.frames, right.frames), left.name, right.name)
        return {**plain(body), "ranks": [left.rank, right.rank], "batches": [left.batch, right.batch]}

    def events(self, record: RunRecord) -> dict[str, Any]:
        """The events, the last first."""
        found = [events.to_dict(time, entry) for time, entry in record.events()]
        return {"events": found[: -MAX_EVENTS - 1 : -1], "hidden": max(0, len(found) - MAX_EVENTS)}

    def _replay(self, record: RunRecord) -> Snapshot:
        mark = record.mark()
        with self._lock:
            if self._replayed is None or self._replayed[0] != mark:
                self._replayed = mark, replay.take(record)
            return self._replayed[1]


def version_of(folder: Path) -> str:
    """Changes whenever the record in the folder does."""
    marks = []
    for name in (FILE, f"{FILE}-wal"):
        try:
            stat = (folder / name).stat()
            marks.append(f"{stat.st_mtime_ns:x}.{stat.st_size:x}")
        except FileNotFoundError:
            marks.append("")
    return "-".join(marks)


def _replicas(report: Report) -> dict[str, Any]:
    """A line for each origin of desynced parameters and what to do, each parameter, and what was compared."""
    return {
        "lines": [
            {"text": describe_desync(origin, report.world_size), "try": describe_remedy(origin)}
            for origin in origins(report.desync).values()
        ],
        "rows": plain(report.desync),
        "hidden": report.desync_unkept,
        "compared": describe_compared(report.compared, report.world_size),
    }


def _trips(report: Report) -> list[tuple[int, Trip]]:
    """Every rank that tripped with its trip, the culprit first; then those of steps that were left out."""
    verdicts = [] if report.verdict is None else [report.verdict]
    return [tripped for one in (*verdicts, *(one.verdict for one in report.skipped)) for tripped in one.all_tripped]


def _drawn(report: Report) -> tuple[int, ...]:
    """The ranks with a line of their own: all of few; of many, the culprit and those with a role."""
    if report.world_size <= DRAWN:
        return tuple(range(report.world_size))
    return tuple([one.row.rank for one in roles.in_order(report)[:MOST_DRAWN] if one.text])


def _are_stale(standings: Standings) -> bool:
    """Whether the collector missed three heartbeats: it writes the standings once in each."""
    heartbeat = standings.run.heartbeat if standings.run is not None else 0.0
    return time.time() - standings.time > max(STALE_AFTER, 3 * heartbeat)


def _measured(grid: Grid, measure: str, tables: Iterable[FrameTable]) -> Grid:
    if measure not in ("", *MEASURES):
        raise UsageError(f"measure {measure}: expected {' or '.join(MEASURES)}")
    is_headroom = measure == "headroom" if measure else _has_narrow(tables)
    return grid if is_headroom else grids.as_changes(grid)


def _has_narrow(tables: Iterable[FrameTable]) -> bool:
    """Whether a reading has a dtype for which headroom says something. Without any reading nothing is known."""
    dtypes = {row.dtype for table in tables for spec in table.specs for row in spec.readings}
    return not dtypes.isdisjoint(NARROW_DTYPES) or dtypes.isdisjoint(DTYPE_MAX)


def _columns_of(tables: Mapping[int, FrameTable]) -> dict[int, Columns]:
    return {number: Columns(number, table) for number, table in tables.items()}


def _dtype_of(table: FrameTable, row: int) -> str:
    return [reading.dtype for spec in table.specs for reading in spec.readings][row]


def _rows_of(table: FrameTable, module: str, label: str, phase: str) -> list[int]:
    """The rows of a reading: one for each call of the module."""
    rows = [(spec.module, reading.label, spec.phase.name.lower()) for spec in table.specs for reading in spec.readings]
    return [row for row, name in enumerate(rows) if name == (module, label, phase)]
