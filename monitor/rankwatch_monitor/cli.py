"""The command line: ``rankwatch COMMAND``. A command's module is imported when the command is called, and not before."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from rankwatch import __version__
from rankwatch.errors import EXIT_ABORTED, EXIT_ERROR, EXIT_USAGE, RankwatchError

COMMANDS = {
    "run": "run a command under a collector of its own",
    "collector": "collect from the ranks of any number of runs, until SIGTERM",
    "top": "watch a run while it goes on: its ranks, its headroom, its notices, its verdict",
    "report": "print the report of a run again, or look at one rank or batch of it",
    "list": "the runs in a folder, and how they ended",
    "diff": "two batches side by side: of two ranks, of two runs, or one after the other",
    "dump": "the record of a run as JSON lines",
    "export": "the record of a run as Parquet or for TensorBoard",
    "ui": "a local web page over the runs in a folder, live and afterwards",
    "tune": "change options of the ranks while they train",
    "invite": "make a connection file that speaks for one job alone",
    "doctor": "check GPUs, network and collector before a training, and name who is to blame",
    "demo": "a real training of two ranks on the CPU that overflows on one of them",
}
"""Each command with its line of help; ``commands/NAME.py`` has ``add_options(parser)`` and ``main(arguments)``."""

EPILOG = f"""\
exit codes: 0 fine; {EXIT_ERROR} error; {EXIT_USAGE} usage; {EXIT_ABORTED} a verdict was reached, the training aborted.
Options are also read from RANKWATCH_<OPTION>, such as RANKWATCH_RUNS_DIR."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    try:
        arguments = _parser().parse_args(argv)
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="rankwatch: %(message)s")
        code: int = arguments.function(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # its reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except RankwatchError as error:
        sys.stderr.write(f"rankwatch: error: {error}\n")
        return error.exit_code
    except ImportError as error:  # of `resource` on Windows, say: the other commands work
        sys.stderr.write(f"rankwatch: error: this command needs {error.name}, which cannot be imported here: {error}\n")
        return EXIT_ERROR
    return code


class _CommandParser(argparse.ArgumentParser):
    """Imports its command, for the options, when there are arguments to parse."""

    def parse_known_args(self, *arguments: Any, **named: Any) -> Any:
        command = import_module(f".commands.{self.prog.split()[-1]}", __package__)
        command.add_options(self)
        self.set_defaults(function=command.main)
        return super().parse_known_args(*arguments, **named)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rankwatch",
        description="Finds the first inf/nan of a distributed PyTorch training, and stops every rank.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rankwatch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_CommandParser)
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())
