"""``rankwatch report``: the report of a run, from its folder or from its record."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rankwatch.errors import UsageError

from .. import arguments as types
from .. import snapshot
from ..report import json, text
from ..store import StoreError

HELP = "print the report of a run again"


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_run(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")


def main(arguments: argparse.Namespace) -> int:
    run = types.run_folder(arguments.run)
    path = run / ("report.json" if arguments.json else "report.txt")
    try:
        written = path.read_text(encoding="utf-8")
    except OSError as error:
        written = _report_so_far(run, error, as_json=arguments.json)
    sys.stdout.write(written)
    return 0


def _report_so_far(run: Path, error: OSError, *, as_json: bool) -> str:
    """What the record says of a run whose report is not written yet, or not any more."""
    try:
        report, is_over = snapshot.take(run)
    except StoreError as why:
        raise UsageError(f"no report in {run}: {error.strerror}; nor is it in its record: {why}") from None
    if as_json:
        return json.render(report)
    return text.render(report) if is_over or report.verdict else text.render_so_far(report)
