"""``rankwatch invite``: creates a connection file restricted to one job."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rankwatch.shared.link import connection as connections
from rankwatch.shared.printable import printable

from ..serve.door import control
from . import arguments as types


def add_options(parser: argparse.ArgumentParser) -> None:
    types.describe(parser, "The keys in the file can neither send data for the runs of other jobs nor change those runs.")
    parser.add_argument("job", metavar="JOB", help="the job's name, which its ranks will use")
    types.add_connection(parser)
    parser.add_argument("--output", metavar="FILE", type=Path, required=True, help="where to write the connection file")


def main(arguments: argparse.Namespace) -> int:
    connection = control.invite(connections.read(arguments.connection or types.usual_connection()), arguments.job)
    connections.write(connection, arguments.output)
    text = f"ranks of job {arguments.job} reach the collector by RANKWATCH_CONNECTION={arguments.output}"
    sys.stdout.write(printable(text) + "\n")
    return 0
