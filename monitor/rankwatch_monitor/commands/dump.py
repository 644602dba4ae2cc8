"""``rankwatch dump``: the record of a run as JSON lines."""

from __future__ import annotations

import argparse
import sys

from rankwatch.errors import UsageError

from ..record.reader import RunRecord
from ..record.schema import FILE, StoreError
from ..views import dump
from . import arguments as types


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_run(parser)
    parser.add_argument(
        "--frames", action="store_true", help="print the batches too, frame by frame, as the ranks sent them"
    )


def main(arguments: argparse.Namespace) -> int:
    run = types.run_folder(arguments.run)
    try:
        with RunRecord(run / FILE) as record:
            for line in dump.lines(record, frames=arguments.frames):
                sys.stdout.write(line + "\n")
    except StoreError as error:
        raise UsageError(f"{error}; is {run} a run's folder?") from None
    return 0
