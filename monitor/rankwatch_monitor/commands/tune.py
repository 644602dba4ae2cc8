"""``rankwatch tune``: changes options of the ranks while they train."""

from __future__ import annotations

import argparse
import sys

from rankwatch.errors import UsageError
from rankwatch.shared.link import connection as connections
from rankwatch.shared.printable import printable
from rankwatch.shared.types import messages
from rankwatch.shared.types.tuning import MAX_EVERY, NO_CHANGE, Check, Tuning

from ..serve.door import control
from . import arguments as types
from .records import connection_of


def add_options(parser: argparse.ArgumentParser) -> None:
    types.describe(parser, "An empty list ('') clears the list. Options that are not given do not change.")
    parser.add_argument("run", nargs="?", default="", metavar="RUN", help="the run's name, such as train-0 (default: all)")
    types.add_connection(parser)
    parser.add_argument("--every", metavar="K", type=types.whole("K", 1, MAX_EVERY), help="measure each K-th batch")
    for name, text in (("modules", "modules to measure; '' for all"), ("ignore", "module or module:label that never trip")):
        parser.add_argument(f"--{name}", metavar="PATTERN,...", type=types.patterns, help=f"patterns of {text}")
    batches = {"metavar": "N,...", "type": types.batches, "help": "batches to print and record frame by frame"}
    types.add_option(parser, "--trace-batch-nums", **batches)
    parser.add_argument("--check", choices=sorted(check.value for check in Check), help="when readings are judged")


def main(arguments: argparse.Namespace) -> int:
    tuning = Tuning(
        every=arguments.every,
        modules=arguments.modules,
        ignore=arguments.ignore,
        trace_batch_nums=arguments.trace_batch_nums,
        check=Check(arguments.check) if arguments.check else None,
    )
    if tuning == NO_CHANGE:
        raise UsageError("nothing to change: give --every, --modules, --ignore, --trace-batch-nums or --check")
    run = types.runs_folder() / (arguments.run or "latest")
    done = control.tune(connections.read(connection_of(run, arguments.connection)), messages.Tune(arguments.run, tuning))
    ranks = f"{done.ranks} rank{'s' if done.ranks != 1 else ''} of {', '.join(done.runs)}"
    sys.stdout.write(printable(f"changed for {ranks}: {tuning.describe()}") + "\n")
    for line in done.mistyped:
        sys.stderr.write(f"rankwatch: {printable(line)}\n")
    return 0
