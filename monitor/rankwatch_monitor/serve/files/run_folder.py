"""A run's files: ``report.txt``, ``report.json``, ``trace/`` and the record; and ``latest``, a link to the newest run.

Detection and abort never depend on the disk: once the folder of all runs exists, a failed write is logged, and the run goes on.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from rankwatch.errors import UsageError
from rankwatch.shared.printable import printable
from rankwatch.shared.types.frame import Frame
from rankwatch.shared.words.text import format_trace

from ...decide.core.report import Report
from ...decide.next.how_it_went import judgement_of
from ...record.mounts import is_on_network
from ...record.reader import RunRecord
from ...record.replay import searched
from ...record.runs import folders, is_unfinished
from ...record.schema import FILE, StoreError
from ...record.store import note_judged
from ...views import as_json as json
from ...views import text as texts
from .claims import PART, Claims

log = logging.getLogger(__name__)

TRACE_LIMIT = 1 << 30
"""Bytes of traces of one run."""


def _write(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(body, encoding="utf-8")
    os.replace(part, path)


def _append(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(body)


class RunsFolder:
    """The folder that holds a collector's runs.

    Args:
        points_latest: whether ``latest`` names each run that begins; if not, only those given to ``point_latest_at``.

    Raises:
        UsageError: it cannot be made or written to.
    """

    def __init__(self, path: Path, *, points_latest: bool = True) -> None:
        self.path = path
        self._points_latest = points_latest
        self._traced: Counter[str] = Counter()
        self._claims = Claims(path)
        self._token = os.urandom(4).hex()  # other hosts may have a process of this number
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / f".writable.{self._token}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UsageError(
                f"cannot write to the runs folder {path}: {error.strerror}; choose another --runs-dir"
            ) from None

        if is_on_network(path):
            log.info(
                "%s is on a network file system: records are written without a write-ahead log, which needs one host", path
            )

    def claim(self, run: str) -> bool:
        """Whether a new run may have this name, which is its own from then on."""
        return self._claims.claim(run)

    def sweep(self, collector: str) -> None:
        """Removes what collectors that were killed left half made. ``collector``: the public key of this one, or empty."""
        self._claims.sweep(collector)

    @contextmanager
    def begin(self, run: str) -> Iterator[Path]:
        """Yields a folder for the record, which becomes the run's when it is left: a collector that is killed leaves no half
        record.

        Raises:
            OSError: the run's folder cannot be made, or is another's.
        """
        folder = self._claims.hold(run)
        part = folder / PART
        if part.exists():
            shutil.rmtree(part)
        part.mkdir()
        try:
            yield part
            (part / FILE).rename(folder / FILE)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        self._claims.settle(run)
        if self._points_latest:
            _try(self._point_latest_at, run)

    def point_latest_at(self, run: str) -> None:
        """Makes ``latest`` name this run, if it has a record."""
        if self.record_of(run).exists():
            _try(self._point_latest_at, run)

    def record_of(self, run: str) -> Path:
        return self.path / run / FILE

    def unfinished(self, collector: str) -> list[str]:
        """The runs of the collector of this name that are not over according to their records."""
        found = []
        for folder in folders(self.path):
            try:
                if is_unfinished(folder / FILE, collector):
                    found.append(folder.name)
            except StoreError as error:
                log.error("cannot read %s", error)
        return found

    def record_trace(self, run: str, rank: int, batch: int, frames: Sequence[Frame]) -> int:
        """Writes ``trace/batch-B.rank-R.txt``, in the Hugging Face detector's format. Later parts of a batch are appended.

        Returns:
            the bytes written.
        """
        text = format_trace(frames) + "\n"
        if self._traced[run] + len(text) > TRACE_LIMIT:
            if self._traced[run] <= TRACE_LIMIT:
                log.error("run %s: more than %d MiB of traces; further ones are not written", run, TRACE_LIMIT >> 20)
            self._traced[run] = TRACE_LIMIT + 1
            return 0
        self._traced[run] += len(text)
        is_first = not frames or frames[0].position.frame == 0
        _try(self._put, run, f"trace/batch-{batch}.rank-{rank}.txt", text, _write if is_first else _append)
        return len(text)

    def locate(self, report: Report) -> Report:
        """The report with the run's folder."""
        return replace(report, folder=printable(str((self.path / report.run).absolute())))

    def publish(self, report: Report, *, is_recorded: bool = True) -> Report:
        """Writes ``report.txt`` and ``report.json``, and returns the report with what its record knows beside the facts.

        ``is_recorded``: whether the record can be asked. One that another process holds would keep the writer waiting.
        """
        report = self._searched(report) if is_recorded else report
        judged = judgement_of(report)
        if judged is not None and judged.healthy is False:
            self._note_judged(report.run, judged.text)
        _try(self._put, report.run, "report.txt", texts.render(report))
        _try(self._put, report.run, "report.json", json.render(report))
        return report

    def _note_judged(self, run: str, text: str) -> None:
        """A list of runs reads no numbers."""
        try:
            note_judged(self.record_of(run), text)
        except StoreError as error:
            log.debug("a list will not say how run %s went: %s", run, error)

    def _searched(self, report: Report) -> Report:
        try:
            with RunRecord(self.record_of(report.run), by_writer=report.verdict is None) as record:
                return searched(report, record)
        except StoreError as error:  # the writer has logged it
            log.debug("nothing more is known of the run: %s", error)
            return report

    def _put(self, run: str, name: str, body: str, write: Callable[[Path, str], None] = _write) -> None:
        self._claims.try_again(run)
        write(self.path / run / name, body)

    def _point_latest_at(self, run: str) -> None:
        part = self.path / f".latest.{self._token}"
        with suppress(FileNotFoundError):
            part.unlink()
        part.symlink_to(run)
        os.replace(part, self.path / "latest")


def _try(action: Callable[..., None], *arguments: object) -> None:
    try:
        action(*arguments)
    except OSError as error:
        log.error("cannot write %s: %s; the run goes on without it", error.filename or arguments[0], error.strerror)
