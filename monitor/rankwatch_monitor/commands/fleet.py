"""``rankwatch fleet``: which hosts, GPUs, modules, causes and versions go bad, over all runs of an archive."""

from __future__ import annotations

import argparse
import shutil
import sys
from datetime import date
from pathlib import Path

from rankwatch.errors import UsageError
from rankwatch.shared.printable import page, printable
from rankwatch.shared.system.installed import to_add

from ..views.export.urls import shown
from . import arguments as types

EXIT_DAMAGED = 3
"""The exit code where files of the archive were left out."""

MOST_NAMED = 10
"""Damaged files that are named one by one."""


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_archive(parser)
    parser.add_argument("--since", metavar="DATE", type=_day, default=date.min, help="runs that began on this day or later")
    parser.add_argument("--until", metavar="DATE", type=_day, default=date.max, help="runs that began on this day or before")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of text")
    form.add_argument("--html", type=Path, metavar="FILE", help="write one HTML file")


def main(arguments: argparse.Namespace) -> int:
    if not arguments.url:
        raise UsageError("which archive? rankwatch fleet URL, or RANKWATCH_ARCHIVE")
    try:
        from rankwatch_fleet import query
    except ModuleNotFoundError as error:
        raise UsageError(f"this needs {error.name}: {to_add('fleet')}") from None
    from rankwatch_fleet import as_json as json
    from rankwatch_fleet import page as pages
    from rankwatch_fleet import text

    fleet = query.ask(arguments.url, arguments.since.isoformat(), arguments.until.isoformat())
    for file in fleet.damaged[:MOST_NAMED]:
        advice = f"move it away, and `rankwatch archive RUN {shown(arguments.url)}` again"
        sys.stderr.write(f"rankwatch: {printable(file)} is {query.DAMAGED}, and is left out: {advice}\n")
    if (more := len(fleet.damaged) - MOST_NAMED) > 0:
        sys.stderr.write(f"rankwatch: and {more} more files are left out\n")
    code = EXIT_DAMAGED if fleet.damaged else 0
    if arguments.html is not None:
        try:
            with arguments.html.open("x", encoding="utf-8") as file:
                file.write(pages.render(fleet))
        except FileExistsError:
            raise UsageError(f"{arguments.html} is there already: remove it, or choose another name") from None
        except OSError as error:
            raise UsageError(f"cannot write {arguments.html}: {error.strerror}") from None
        sys.stderr.write(f"rankwatch: {printable(str(arguments.html))} has all of the archive; any browser opens it\n")
        return code
    width = min(text.WIDTH, shutil.get_terminal_size().columns)
    sys.stdout.write(json.render(fleet) if arguments.json else page(text.render(fleet, width)))
    return code


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a day, such as 2026-01-31") from None
