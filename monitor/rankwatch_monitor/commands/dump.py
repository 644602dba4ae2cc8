"""``rankwatch dump``: the record of a run as JSON lines."""

from __future__ import annotations

import argparse
import sys

from ..views import dump
from . import arguments as types
from .records import open_record


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_run(parser)
    parser.add_argument(
        "--frames", action="store_true", help="print the batches too, frame by frame, as the ranks sent them"
    )


def main(arguments: argparse.Namespace) -> int:
    with open_record(types.run_folder(arguments.run)) as record:
        for line in dump.lines(record, frames=arguments.frames):
            sys.stdout.write(line + "\n")
    return 0
