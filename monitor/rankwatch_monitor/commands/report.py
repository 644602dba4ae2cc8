"""``rankwatch report``: the report of a run, from its folder or its record; or what is known of one rank or batch."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

from rankwatch.errors import UsageError
from rankwatch.shared.printable import page, printable
from rankwatch.shared.system.on_terminal import as_shown

from ..decide.core.report import Report
from ..record import replay
from ..record.reader import RunRecord
from ..record.runs import read_row
from ..record.schema import FILE, StoreError
from ..views import as_json as json
from ..views import text
from ..views.batches import batch, details, rank
from ..views.ui import single
from ..views.ui.pages import RunPages
from . import arguments as types
from .records import check_run, open_record, readable

log = logging.getLogger(__name__)

FRAMES = 21
"""Frames shown by default, as in a report."""


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_run(parser)
    number = types.whole("N", 0, 1 << 62)
    parser.add_argument("--rank", type=number, metavar="R", help="show what is known of this rank")
    parser.add_argument(
        "--batch",
        type=number,
        metavar="B",
        help="show this batch as --rank sent it (default: the culprit's rank, or rank 0)",
    )
    frames = types.whole("N", 1, 1 << 31)
    parser.add_argument("--frames", type=frames, metavar="N", help=f"show the last N frames (default: {FRAMES})")
    parser.add_argument("--all", action="store_true", help="show what is as it should be, too: all that report.txt has")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of text")
    form.add_argument("--html", type=Path, metavar="FILE", help="write one HTML file with charts, to attach to a ticket")
    parser.add_argument("--overwrite", action="store_true", help="let --html replace a file")


def main(arguments: argparse.Namespace) -> int:
    run = types.run_folder(arguments.run)
    is_whole = (arguments.rank, arguments.batch, arguments.frames) == (None, None, None)
    if arguments.html is not None:
        if not is_whole:
            raise UsageError("--html is of the whole run: leave out --rank, --batch and --frames")
        _write_html(run, arguments.html, may_replace=arguments.overwrite)
        return 0
    if arguments.overwrite:
        raise UsageError("--overwrite goes with --html FILE")
    if is_whole:
        sys.stdout.write(_on_screen(_whole(run, arguments), arguments))
        return 0
    with open_record(run) as record:
        sys.stdout.write(_on_screen(_details(record, arguments), arguments))
    return 0


def _on_screen(text: str, arguments: argparse.Namespace) -> str:
    return text if arguments.json else as_shown(text, sys.stdout)


def _write_html(run: Path, path: Path, *, may_replace: bool) -> None:
    """Raises UsageError where there is such a file already, which neither ``--overwrite`` nor the one who types gives up."""
    is_there = os.path.lexists(path)
    if is_there and not path.is_dir() and not (may_replace or _agrees(f"{path} exists: replace it?")):
        raise UsageError(f"{path} exists: name another file, or replace it by --overwrite")
    check_run(run)
    with readable():
        body = single.render(RunPages(run))
    try:
        with path.open("w" if is_there else "x", encoding="utf-8") as file:
            file.write(body)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    text = f"{path} has all of {run.resolve().name}; any browser opens it"
    sys.stderr.write(f"rankwatch: {printable(text)}\n")


def _agrees(question: str) -> bool:
    """Asks the one at the terminal, if there is one."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    try:
        sys.stderr.write(f"rankwatch: {printable(question)} [y/N] ")
        sys.stderr.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return False


def _details(record: RunRecord, arguments: argparse.Namespace) -> str:
    frames, as_json = arguments.frames or FRAMES, arguments.json
    if arguments.batch is not None:
        of_batch = details.of_batch(record, arguments.batch, arguments.rank)
        return batch.to_json(of_batch, frames) if as_json else batch.render(of_batch, frames)
    if arguments.rank is not None:
        of_rank = details.of_rank(record, arguments.rank)
        return rank.to_json(of_rank, frames) if as_json else rank.render(of_rank, frames)
    report, is_over = replay.take(record, course_so_far=True)
    return _render(record.path.parent, _shortened(report, frames), is_over, as_json=as_json)


def _shortened(report: Report, frames: int) -> Report:
    """The report, cut to the last ``frames`` frames."""
    if report.verdict is None:
        return report
    trip = report.verdict.trip
    return replace(report, verdict=replace(report.verdict, trip=replace(trip, frames=trip.frames[-frames:])))


def _whole(run: Path, arguments: argparse.Namespace) -> str:
    """The report of a run: for a screen from its record; else, and where that cannot be read, as the collector wrote it."""
    if not (arguments.all or arguments.json):
        try:
            with RunRecord(run / FILE) as record:
                report, is_over = replay.take(record, course_so_far=True)
            return _render(run, report, is_over, as_json=False, record=text.command_of(run.resolve()))
        except StoreError as error:
            log.debug("the record of %s cannot be read: %s", run, error)
    return _written(run, as_json=arguments.json)


def _written(run: Path, *, as_json: bool) -> str:
    """The report that the collector wrote; where there is none, a new one from the record."""
    path = run / ("report.json" if as_json else "report.txt")
    try:
        return page(path.read_text(encoding="utf-8", errors="backslashreplace"))
    except OSError as error:
        try:
            with RunRecord(run / FILE) as record:
                report, is_over = replay.take(record, course_so_far=True)
        except StoreError as why:
            check_run(run)
            raise UsageError(f"cannot read report.txt in {run} ({error.strerror}), nor the record: {why}") from None
        return _render(run, report, is_over, as_json=as_json)


def _render(run: Path, report: Report, is_over: bool, *, as_json: bool, record: str = "") -> str:
    is_decided = is_over or report.verdict is not None
    if as_json:
        return json.render(report, is_decided=is_decided or bool(report.reason))
    if is_decided:
        return text.render(report, text.FRAMES_ON_SCREEN if record else None, record)
    with readable():
        return text.render_so_far(report, is_alive=read_row(run).is_alive)
