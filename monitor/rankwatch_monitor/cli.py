"""The command line: ``rankwatch COMMAND``. A command's module is imported when the command is called, and not before."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from rankwatch import __version__
from rankwatch.errors import EXIT_ABORTED, EXIT_ERROR, EXIT_USAGE, RankwatchError
from rankwatch.shared.system.standard_output import checked_output

COMMANDS = {
    "run": (
        "run a command under its own collector",
        "rankwatch run -- torchrun --nproc-per-node 8 train.py",
        "rankwatch run --on-stall abort --frames 20 -- torchrun --nproc-per-node 8 train.py",
    ),
    "collector": (
        "collect from the ranks of any number of runs, until SIGTERM",
        "rankwatch collector --listen 'tcp://*:27077' --connection-file shared/rankwatch.json",
    ),
    "top": (
        "watch a run live: its ranks, headroom, notices and verdict",
        "rankwatch top",
        "rankwatch top train-0 --node gpu07",
    ),
    "report": (
        "print the report of a run, or what is known of one of its ranks or batches",
        "rankwatch report",
        "rankwatch report train-0 --rank 1 --batch 25 --frames 5",
        "rankwatch report train-0 --html train-0.html",
    ),
    "list": ("list the runs in a folder, and how they ended", "rankwatch list --json"),
    "diff": (
        "compare two batches: of two ranks, of two runs, or of one rank",
        "rankwatch diff train-0",
        "rankwatch diff train-0 --rank 0 --rank 1",
        "rankwatch diff train-0 --rank 1 --batch 20 --batch 25",
        "rankwatch diff train-0 train-1",
    ),
    "stack": (
        "show where ranks are now: in which line, in which collective",
        "rankwatch stack",
        "rankwatch stack train-0 --rank 1",
    ),
    "export": (
        "export the record of a run to Parquet, TensorBoard or JSON lines",
        "rankwatch export train-0 --parquet train-0.parquet",
        "rankwatch export train-0 --tensorboard logs",
        "rankwatch export train-0 --jsonl --frames",
    ),
    "archive": (
        "add a run that is over to an archive of all runs, for rankwatch fleet",
        "rankwatch archive train-0 s3://bucket/runs",
        "rankwatch archive --merge s3://bucket/runs",
    ),
    "fleet": (
        "say which hosts, GPUs, modules and versions go bad in an archive of runs",
        "rankwatch fleet s3://bucket/runs",
        "rankwatch fleet runs --since 2026-01-01 --html fleet.html",
    ),
    "ui": ("serve a web page of the runs in a folder, live and afterwards", "rankwatch ui --port 8080"),
    "tune": ("change options of the ranks while they train", "rankwatch tune train-0 --every 10 --modules 'decoder.*'"),
    "invite": ("create a connection file restricted to one job", "rankwatch invite train --output train.json"),
    "replay": (
        "run the forward that made the inf or nan again, from the capsule that its rank wrote",
        "rankwatch replay rankwatch-runs/train-0",
    ),
    "doctor": (
        "check GPUs, network and collector before a training, and name what is at fault",
        "rankwatch doctor --nproc 8",
    ),
    "completion": (
        "print the script by which a shell completes commands, options and the names of runs",
        "rankwatch completion bash",
    ),
    "demo": ("run a real training of two ranks on the CPU, which overflows on one of them", "rankwatch demo"),
}
"""Each command with its line of help, and examples; ``commands/NAME.py`` has ``add_options(parser)`` and ``main(arguments)``."""

ADMINISTRATORS = "collector", "invite", "archive", "fleet"
"""Commands that one person of a site uses, which have their own heading."""

EPILOG = f"""\
commands for administrators:
{{commands}}

exit codes: 0 success; {EXIT_ERROR} error; {EXIT_USAGE} usage; {EXIT_ABORTED} rankwatch stopped the training.
Options are also read from RANKWATCH_<OPTION>, such as RANKWATCH_RUNS_DIR."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    _open_closed_streams()
    code: int = 0
    try:
        with checked_output():
            arguments = _parser().parse_args(_renamed(sys.argv[1:] if argv is None else argv))
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(_Lines("rankwatch: %(message)s"))
            logging.basicConfig(level=logging.INFO, handlers=[handler])
            code = arguments.function(arguments)
    except RankwatchError as error:
        _say_error(str(error))
        return error.exit_code
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        _say_error("a name that was given is longer than any file's")
        return EXIT_USAGE
    except ImportError as error:  # `resource` on Windows, say: the other commands still work
        from rankwatch.shared.system.installed import describe_missing

        _say_error(describe_missing("this command", error))
        return EXIT_ERROR
    return code


def _renamed(argv: Sequence[str]) -> Sequence[str]:
    """A command that has another name by now."""
    if argv[:1] != ["dump"]:
        return argv
    sys.stderr.write("rankwatch: `rankwatch dump` is `rankwatch export --jsonl` now\n")
    return ["export", "--jsonl", *argv[1:]]


def _say_error(text: str) -> None:
    from rankwatch.shared.printable import paragraph
    from rankwatch.shared.system.log_lines import is_json

    if is_json():
        logging.getLogger(__name__).error("%s", text)
    else:
        sys.stderr.write(f"rankwatch: error: {paragraph(text)}\n")


def _open_closed_streams() -> None:
    """Where a stream is closed, as by ``2>&-``, Python has None, and the next file would get the stream's descriptor."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with suppress(OSError):
                os.fstat(descriptor)
                continue
            os.open(os.devnull, os.O_RDWR)  # gets the lowest one that is free
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))  # noqa: SIM115


class _Lines(logging.Formatter):
    """Log lines have paths and errors of the system in them."""

    def format(self, record: logging.LogRecord) -> str:
        from rankwatch.shared.printable import paragraph

        return paragraph(super().format(record))


MOST_FLAGS = 8
"""Options in the usage that an error prints: more of them hide what was wrong."""

USUAL_FLAGS = (
    "--runs-dir", "--connection-file", "--stall-after", "--on-stall", "--on-desync", "--on-verdict", "--on-bad-step", "--frames",
)  # fmt: skip
"""Those that are shown of a command with more."""

_MISTYPED = re.compile(r"invalid choice: '([^']+)'|^unrecognized arguments: (?:.*? )??(-[^ =]+)")


class _Parser(argparse.ArgumentParser):
    """What is wrong stands before the usage, and below it what may have been meant. Options are not abbreviated: a script with an
    abbreviation would break with the next option that begins alike."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(
            *arguments, **{"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **named}
        )

    def error(self, message: str) -> NoReturn:
        from rankwatch.shared.printable import printable

        mistyped = [word for word in sys.argv[1:] if word.startswith("-")] if "required: COMMAND" in message else []
        message = f"unrecognized arguments: {' '.join(mistyped)}" if mistyped else message
        wrong = _MISTYPED.search(message)
        meant = self._meant(wrong[1] or wrong[2]) if wrong else ""
        hint = f"; did you mean {meant}?" if meant else ""
        self._print_message(f"{self.prog}: error: {printable(message)}{hint}\n", sys.stderr)
        self._print_message(self._short_usage(), sys.stderr)
        self.exit(EXIT_USAGE)

    def _short_usage(self) -> str:
        """The usage with few of the options, where there are many."""
        flags = [one for one in self._actions if one.option_strings and not one.required and one.dest != "help"]
        if len(flags) <= MOST_FLAGS:
            return self.format_usage()
        hidden = [one for one in flags if one.option_strings[0] not in USUAL_FLAGS]
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, [one for one in self._actions if one not in hidden], self._mutually_exclusive_groups)
        return f"{formatter.format_help()}{len(hidden)} more options: {self.prog} --help\n"

    def _meant(self, word: str) -> str:
        """The option, or the choice, that may have been meant: one that begins with this word, or else one that is like it."""
        options = [option for action in self._actions for option in action.option_strings]
        choices = [str(choice) for action in self._actions for choice in action.choices or ()]
        known = choices + options * word.startswith("-")
        begun = get_close_matches(word, [one for one in known if one.startswith(word)], 1, 0.0)
        return "".join(begun or get_close_matches(word, known, 1))


class _CommandParser(_Parser):
    """Imports its command when it parses arguments, and not before."""

    def load(self) -> None:
        command = import_module(f".commands.{self.prog.split()[-1]}", __package__)
        command.add_options(self)
        for action in self._actions:  # the spelling with underscores is understood, and shown nowhere
            action.option_strings = [one for one in action.option_strings if "_" not in one]
        self.set_defaults(function=command.main)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if "" in arg_strings and action.type in (None, Path) and action.nargs != argparse.REMAINDER:
            raise argparse.ArgumentError(action, "expected a value, not an empty one: is a variable of the shell not set?")
        return super()._get_values(action, arg_strings)

    def parse_known_args(self, *arguments: Any, **named: Any) -> Any:
        self.load()
        found, unknown = super().parse_known_args(*arguments, **named)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def _parser(*, lists_all: bool = False) -> argparse.ArgumentParser:
    """``lists_all``: the commands of administrators too stand among the others, as completion takes them from there."""
    parser = _Parser(
        prog="rankwatch",
        description="Finds the first inf or nan of a distributed PyTorch training, and stops every rank.",
        epilog=EPILOG.format(commands="\n".join(f"    {name:<10}{COMMANDS[name][0]}" for name in ADMINISTRATORS)),
    )
    parser.add_argument("--version", action="version", version=f"rankwatch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_CommandParser)
    for name, (text, *examples) in COMMANDS.items():
        epilog = "\n".join(["examples:" if examples[1:] else "example:", *(f"  {example}" for example in examples)])
        shown: dict[str, Any] = {"help": text} if lists_all or name not in ADMINISTRATORS else {}
        commands.add_parser(name, **shown, description=f"{text[0].upper()}{text[1:]}.", epilog=epilog)
    parser.set_defaults(whole=_whole_parser)  # only `completion` asks for it: it costs the imports of all commands
    return parser


def _whole_parser() -> argparse.ArgumentParser:
    """The parser with the options of all commands."""
    parser = _parser(lists_all=True)
    for action in parser._actions:
        for command in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            command.load()
    return parser


if __name__ == "__main__":
    sys.exit(main())
