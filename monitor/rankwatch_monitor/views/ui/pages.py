"""What each view of a run shows, as plain data, read from the run's record."""

from __future__ import annotations

import functools
import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankwatch.shared.cause import Trip, describe_module
from rankwatch.shared.frame import DTYPE_MAX, FrameTable

from ...record import reader as record
from ...record import replay as snapshot
from ...record.digest import Columns
from ...record.reader import ANY, Span
from ...record.replay import Snapshot
from ...record.store import FILE, StoreError
from .. import as_json as reports
from .. import diff, events, path, runs, sides
from ..compare import compare
from . import grids
from .grids import Grid, RankGrid

KEPT_RUNS = 64
"""Runs of which what was read is remembered."""

MAX_EVENTS = 2000
"""The last ones are shown."""

STALE = 10.0
"""Seconds without a word on where the ranks are after which a run that goes on is said to be without a collector."""


class Pages:
    """The runs in a folder. Every method may be called from any thread.

    Raises (as the methods do):
        LookupError: there is no such run, or nothing in it of what was asked for.
        UsageError: what was asked for makes no sense.
        StoreError: a record cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: OrderedDict[str, RunPages] = OrderedDict()
        self._lock = threading.Lock()

    def list(self) -> list[dict[str, Any]]:
        """Of each run what a list of them shows, the newest first."""
        found = []
        for folder in record.folders(self._folder):
            try:
                found.append(self.run(folder.name).in_list())
            except StoreError as error:
                found.append({"run": folder.name, "began": (folder / FILE).stat().st_mtime, "unreadable": str(error)})
        return sorted(found, key=lambda run: -run["began"])

    def run(self, name: str) -> RunPages:
        with self._lock:
            if name not in self._runs:
                if name in ("", ".", "..") or "/" in name or not (self._folder / name / FILE).is_file():
                    raise LookupError(f"there is no run {name} here")
                self._runs[name] = RunPages(self._folder / name)
            self._runs.move_to_end(name)
            if len(self._runs) > KEPT_RUNS:
                self._runs.popitem(last=False)
            return self._runs[name]


class RunPages:
    """One run. What does not change is read once, and of the digests what has come since."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._record = folder, folder / FILE
        self._lock = threading.RLock()
        self._version = ""
        self._snapshot: Snapshot | None = None
        self._ranks: RankGrid | None = None
        self._segment, self._taken = 0, 0

    def version(self) -> str:
        """Changes whenever the record does."""
        marks = []
        for name in (FILE, f"{FILE}-wal"):
            try:
                stat = (self._folder / name).stat()
                marks.append(f"{stat.st_mtime_ns:x}.{stat.st_size:x}")
            except FileNotFoundError:
                marks.append("")
        return "-".join(marks)

    def in_list(self) -> dict[str, Any]:
        return {**runs.to_dict(self._taken_now()), "began": self._began}

    def overview(self) -> dict[str, Any]:
        """The report, where the ranks are, and the worst headroom by rank and batch."""
        standings = record.read_standings(self._record)
        report, is_over = self._taken_now()
        verdict = report.verdict
        frames = verdict.trip.frames if verdict else ()
        return {
            "report": reports.to_dict(report),
            "is_over": is_over,
            "began": self._began,
            "silent_collector": not is_over and time.time() - standings.time > STALE,
            "standing": None if is_over or standings.run is None else standings.run._asdict(),
            "standings": [] if is_over else [standing._asdict() for standing in standings.ranks],
            "path": path.path_to(frames),
            "grid": self.ranks()._asdict(),
        }

    def ranks(self, batches: Span = ANY) -> Grid:
        """The worst headroom by rank and batch, of all batches or of some."""
        columns = ("rank", "batch", "headroom", "bad")
        with self._lock:
            if batches != ANY:
                zoomed = RankGrid(self._taken_now().report.world_size)
                for _, digests in record.read_segments(self._record, columns, batches=batches):
                    zoomed.add(digests[(digests["batch"] >= batches[0]) & (digests["batch"] <= batches[1])])
                return zoomed.grid()
            if self._ranks is None:
                self._ranks = RankGrid(self._taken_now().report.world_size)
            for number, digests in record.read_segments(self._record, columns, since=self._segment):
                fresh = digests[self._taken :] if number == self._segment else digests
                self._ranks.add(fresh)
                self._segment, self._taken = number, len(digests)
            for rank, trip in self._trips():
                self._ranks.mark(rank, trip.position.batch)
            return self._ranks.grid()

    def modules(self, rank: int | None, batches: Span = ANY, pattern: str = "") -> dict[str, Any]:
        """The worst headroom by module and batch, of a rank or over all of them."""
        kept = [batch for batch in record.kept_batches(self._record, rank) if batches[0] <= batch <= batches[1]]
        if not kept:
            raise LookupError("no such batch is kept " + ("over all ranks" if rank is None else f"as rank {rank} sent it"))
        tables, columns = self._tables()
        parts = record.read_rows(self._record, rank, columns, batches)
        tripped = [
            (describe_module(trip.frame.spec), trip.position.batch)
            for who, trip in self._trips()
            if rank in (None, who) and batches[0] <= trip.position.batch <= batches[1]
        ]
        return grids.module_grid(tables, columns, parts, kept, pattern=pattern, tripped=tripped)._asdict()

    def readings(self) -> list[dict[str, Any]]:
        """What there is to draw a line of: modules in execution order, each with its labels."""
        found: dict[tuple[str, str, str], dict[str, None]] = {}
        for table in self._tables()[0].values():
            for spec in table.specs:
                labels = found.setdefault((spec.module, spec.module_class, spec.phase.name.lower()), {})
                labels.update(dict.fromkeys(row.label for row in spec.readings))
        return [
            {"module": module, "class": module_class, "phase": phase, "labels": list(labels)}
            for (module, module_class, phase), labels in found.items()
        ]

    def series(
        self, ranks: Sequence[int | None], module: str, label: str, phase: str = "forward", batches: Span = ANY
    ) -> dict[str, Any]:
        """One reading over the batches, for each of these ranks; None: over all ranks, the smallest and the largest."""
        lines = []
        tables, columns = self._tables()
        places = [(number, row) for number, table in tables.items() for row in _rows_of(table, module, label, phase)]
        if not places:
            raise LookupError(f"no module {module or '(root)'} has a reading {label} in its {phase} here")
        for rank in ranks:
            points = [
                point
                for number, row in places
                for point in record.read_reading(self._record, rank, number, columns[number], row, batches)
            ]
            points.sort(key=lambda point: point.batch)
            lines.append({"rank": rank, "points": [reports.point(*point) for point in grids.thinned(points)]})
        dtype = _dtype_of(tables[places[0][0]], places[0][1])
        return {"dtype": dtype, "limit": DTYPE_MAX.get(dtype), "lines": lines}

    def culprit(self) -> dict[str, Any] | None:
        """The culprit's reading over the batches, of its rank and of all, where it is a module's and was on record before."""
        for rank, trip in self._trips():
            spec = trip.frame.spec
            try:
                found = self.series([None, rank], spec.module, trip.culprit.label, spec.phase.name.lower())
            except LookupError:
                return None
            # What trips ends its batch, and is in no summary.
            found["lines"][1]["points"].append(reports.point(trip.position.batch, math.inf, math.inf, trip.culprit.state))
            return found
        return None

    def diff(self, ranks: Sequence[int], batches: Sequence[int], other: RunPages | None = None) -> dict[str, Any]:
        """As ``rankwatch diff``."""
        folders = [self._folder, *([other._folder] if other else [])]
        left, right = sides.of(folders, ranks, batches)
        body: dict[str, Any] = json.loads(diff.to_json(compare(left.frames, right.frames), left.name, right.name))
        return body

    def kept(self, rank: int) -> list[int]:
        """The batches of a rank that are kept as it sent them."""
        return record.kept_batches(self._record, rank)

    def events(self) -> dict[str, Any]:
        """What happened, the last first."""
        found = [events.to_dict(*told) for told in record.read_events(self._record)]
        return {"events": found[: -MAX_EVENTS - 1 : -1], "hidden": max(0, len(found) - MAX_EVENTS)}

    @functools.cached_property
    def _began(self) -> float:
        return record.began_at(self._record)

    def _taken_now(self) -> Snapshot:
        with self._lock:
            version = self.version()
            if self._snapshot is None or version != self._version:
                self._snapshot, self._version = snapshot.take(self._folder), version
            return self._snapshot

    def _trips(self) -> list[tuple[int, Trip]]:
        verdict = self._taken_now().report.verdict
        return [] if verdict is None else [(verdict.rank, verdict.trip), *verdict.also]

    def _tables(self) -> tuple[dict[int, FrameTable], dict[int, Columns]]:
        tables = record.read_tables(self._record)
        return tables, {number: Columns(number, table) for number, table in tables.items()}


def _dtype_of(table: FrameTable, row: int) -> str:
    return [reading.dtype for spec in table.specs for reading in spec.readings][row]


def _rows_of(table: FrameTable, module: str, label: str, phase: str) -> list[int]:
    """The rows of a reading; more than one where a module is called more than once."""
    found, row = [], 0
    for spec in table.specs:
        for reading in spec.readings:
            if (spec.module, reading.label, spec.phase.name.lower()) == (module, label, phase):
                found.append(row)
            row += 1
    return found
