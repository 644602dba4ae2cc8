"""The command line: ``rankwatch COMMAND``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from rankwatch import __version__
from rankwatch.errors import EXIT_ABORTED, EXIT_ERROR, EXIT_USAGE, RankwatchError

from .commands import collector, demo, diff, doctor, dump, export, invite, list, report, run, top, tune, ui

COMMANDS = {
    "run": run,
    "collector": collector,
    "top": top,
    "report": report,
    "list": list,
    "diff": diff,
    "dump": dump,
    "export": export,
    "ui": ui,
    "tune": tune,
    "invite": invite,
    "doctor": doctor,
    "demo": demo,
}

EPILOG = f"""\
exit codes: 0 fine; {EXIT_ERROR} error; {EXIT_USAGE} usage; {EXIT_ABORTED} a verdict was reached, the training aborted.
Options are also read from RANKWATCH_<OPTION>, such as RANKWATCH_RUNS_DIR."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="rankwatch: %(message)s")
    try:
        code: int = arguments.function(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # its reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except RankwatchError as error:
        sys.stderr.write(f"rankwatch: error: {error}\n")
        return error.exit_code
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rankwatch",
        description="Finds the first inf/nan of a distributed PyTorch training, and stops every rank.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rankwatch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        of_command = commands.add_parser(name, help=command.HELP)
        command.add_options(of_command)
        of_command.set_defaults(function=command.main)
    return parser


if __name__ == "__main__":
    sys.exit(main())
