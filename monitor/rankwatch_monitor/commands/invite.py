"""``rankwatch invite``: makes a connection file that speaks for one job alone."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rankwatch.shared import connection as connections

from ..serve import control
from . import arguments as types


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Who has the file can neither speak for other jobs' runs nor change them."
    parser.add_argument("job", metavar="JOB", help="the name of the job; its ranks take it over")
    types.add_connection(parser)
    parser.add_argument("--output", metavar="FILE", type=Path, required=True, help="where to write the connection file")


def main(arguments: argparse.Namespace) -> int:
    connection = control.invite(connections.read(arguments.connection), arguments.job)
    connections.write(connection, arguments.output)
    sys.stdout.write(f"ranks of job {arguments.job} reach the collector by RANKWATCH_CONNECTION={arguments.output}\n")
    return 0
