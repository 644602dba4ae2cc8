"""``rankwatch stack``: where ranks of a run are now, in Python."""

from __future__ import annotations

import argparse
import sys

from rankwatch.shared.link import connection as connections
from rankwatch.shared.printable import printable
from rankwatch.shared.types.fields import MAX_RANKS
from rankwatch.shared.types.messages import ANY_RANK

from ..serve.door import control
from ..views.stalls import answered
from . import arguments as types
from .records import connection_of


def add_options(parser: argparse.ArgumentParser) -> None:
    types.describe(parser, "The training goes on. Of many ranks, the eight that are furthest behind are asked.")
    types.add_run(parser)
    parser.add_argument("--rank", type=types.whole("R", 0, MAX_RANKS - 1), metavar="R", help="ask this rank alone")
    types.add_connection(parser)


def main(arguments: argparse.Namespace) -> int:
    run = types.run_folder(arguments.run)
    rank = ANY_RANK if arguments.rank is None else arguments.rank
    for answer in control.stacks(connections.read(connection_of(run, arguments.connection)), run.name, rank):
        for line in answered(answer):
            sys.stdout.write(printable(line) + "\n")
        sys.stdout.flush()
    return 0
