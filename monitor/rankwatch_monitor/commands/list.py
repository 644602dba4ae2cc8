"""``rankwatch list``: the runs in a folder, and how they ended."""

from __future__ import annotations

import argparse
import sys

from rankwatch.errors import UsageError
from rankwatch.shared.system.colour import columns_of, is_coloured

from ..record.runs import read_rows
from ..views import runs
from . import arguments as types


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_runs(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def main(arguments: argparse.Namespace) -> int:
    if not arguments.runs_dir.is_dir():
        raise UsageError(f"no folder {arguments.runs_dir}: give the one that runs are recorded in")
    found = read_rows(arguments.runs_dir)
    if arguments.json:
        sys.stdout.write(runs.to_json(found))
    else:
        sys.stdout.write(runs.render(found, columns_of(sys.stdout), is_coloured=is_coloured(sys.stdout)))
    return 0
