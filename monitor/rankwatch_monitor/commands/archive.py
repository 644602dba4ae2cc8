"""``rankwatch archive``: adds a run to an archive of all runs, or merges the archive's small files."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from rankwatch.errors import UsageError
from rankwatch.shared.printable import printable
from rankwatch.shared.system.installed import to_add

from ..record.runs import read_row
from ..views.export.urls import shown
from . import arguments as types
from .records import open_record

NEEDED = "pyarrow", "fsspec"

_ONE_SLASH = re.compile(r"(?!file:)\w+:/")

SETTLED = 24 * 3600.0
"""Seconds after which a day's runs are mostly over, and its files may be merged."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="the run's folder, or its name in rankwatch-runs")
    types.add_archive(parser)
    parser.add_argument(
        "--merge",
        action="store_true",
        help="add no run, but make one file of all files of a job and a day, of days that have been over for a day",
    )


def main(arguments: argparse.Namespace) -> int:
    run, url = arguments.run, arguments.url
    if arguments.merge:
        if run and url != types.env("archive", None):
            raise UsageError(f"--merge adds no run, and takes one archive: rankwatch archive --merge {shown(url)}")
        run, url = None, run or url
    if not url or not (run or arguments.merge):
        raise UsageError("which run, and which archive? rankwatch archive RUN URL, or rankwatch archive --merge URL")
    check_archive(url)
    from rankwatch_fleet import archive  # only now: it imports pyarrow
    from rankwatch_fleet.layout import day_of

    if arguments.merge:
        merged = archive.merge(url, day_of(time.time() - SETTLED))
        _say(f"{merged.files} files merged into {merged.into} in {shown(url)}")
        return 0
    folder = types.run_folder(Path(run))
    with open_record(folder) as record:
        row = read_row(folder)
        if not row.is_over and row.is_alive:
            raise UsageError(f"run {row.run} is still running: archive it when it is over")
        path = archive.archive(record, url)
    _say(f"run {row.run} is archived: {path}")
    return 0


def check_archive(url: str) -> None:
    """Raises UsageError where no archive can be at this URL, or a library is missing."""
    for library in NEEDED:
        if find_spec(library) is None:
            raise UsageError(f"an archive needs {library}: {to_add('export')}")
    from ..views.export.target import folder_at  # pyarrow is imported when something is written

    folder_at(url)
    if "://" in url:
        return
    if _ONE_SLASH.match(url):
        raise UsageError(f"no archive can be at {url}: a URL has two slashes, as in s3://bucket/runs")
    path = Path(url).absolute()
    there = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    if not there.is_dir():
        raise UsageError(f"no archive can be at {url}: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"no archive can be at {url}: you may not write in {there}")


def _say(text: str) -> None:
    sys.stderr.write(f"rankwatch: {printable(text)}\n")
