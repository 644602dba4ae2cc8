"""``rankwatch diff``: compares two batches."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rankwatch.errors import UsageError

from ..views.batches import diff
from ..views.batches.compare import compare
from . import arguments as types
from .records import open_records


def add_options(parser: argparse.ArgumentParser) -> None:
    types.describe(
        parser,
        "Give two runs, or --batch twice, or --rank twice. With fewer: the culprit's batch, against the last one before the "
        "trouble began. Of two runs or two ranks: rank 0, and the last batch in the record of both.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, or its name in rankwatch-runs")
    parser.add_argument("other", type=Path, nargs="?", metavar="OTHER_RUN", help="another run")
    number = types.whole("N", 0, 1 << 62)
    parser.add_argument("--batch", type=number, action="append", default=[], metavar="B", help="a batch; may be given twice")
    parser.add_argument("--rank", type=number, action="append", default=[], metavar="R", help="a rank; may be given twice")
    frames = types.whole("N", 1, 1 << 31)
    parser.add_argument("--frames", type=frames, default=20, metavar="N", help="readings to show (default: 20)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text, with all readings that differ")


def main(arguments: argparse.Namespace) -> int:
    folders = [types.named_run(run) for run in (arguments.run, arguments.other) if run is not None]
    with open_records(folders) as records:
        try:
            left, right = diff.sides(records, arguments.rank, arguments.batch)
        except diff.NothingToCompare as error:
            raise UsageError(f"{error}; give another run, or --batch or --rank twice") from None
    found = compare(left.frames, right.frames)
    body = diff.to_json(found, left.name, right.name) if arguments.json else ""
    sys.stdout.write(body or diff.render(found, left.name, right.name, arguments.frames))
    return 0
