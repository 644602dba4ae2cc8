"""``rankwatch completion``: the script by which a shell completes commands, options, files and the names of runs."""

from __future__ import annotations

import argparse
import sys

from rankwatch.errors import UsageError
from rankwatch.shared.system.installed import to_add

SHELLS = "bash", "zsh", "fish"

# A run's folder may have any name, so none of these lets the shell expand one. "dirs" in the name has bash put no space after a
# folder.
_RUNS = {
    "bash": """\
_rankwatch_run_dirs() {
  local run
  for run in "${RANKWATCH_RUNS_DIR:-rankwatch-runs}"/*/; do
    run="${run%/}"
    [[ -e "$run/run.db" && "${run##*/}" == "$1"* ]] && printf '%s\\n' "${run##*/}"
  done
  compgen -d -- "$1"
}""",
    "zsh": """\
_rankwatch_run_dirs() {
  local -a runs
  runs=("${RANKWATCH_RUNS_DIR:-rankwatch-runs}"/*/run.db(N:h:t))
  compadd -a runs
  _files -/
}""",
    "fish": """\
function __rankwatch_run_dirs
  set -l runs rankwatch-runs
  set -q RANKWATCH_RUNS_DIR; and set runs $RANKWATCH_RUNS_DIR
  for run in $runs/*/run.db
    basename (dirname $run)
  end
  __fish_complete_directories
end""",
}

_A_RUN = {
    "bash": "_rankwatch_run_dirs",
    "zsh": "_rankwatch_run_dirs",
    "fish": "(__rankwatch_run_dirs)",
    "preamble": _RUNS,
}

_BY_METAVAR = {
    "FILE": "file", "OUT": "file", "PATH": "file", "DIR": "directory", "RUNS_DIR": "directory",
    "RUN": _A_RUN, "OTHER_RUN": _A_RUN, "CAPSULE": _A_RUN,
}  # fmt: skip
"""What shtab completes for an argument: a word of its own, or a function for each shell."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell that the script is for")


def main(arguments: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise UsageError(f"completion scripts are made with shtab: {to_add('completion')}") from None
    parser: argparse.ArgumentParser = arguments.whole()
    _prepare(parser)
    sys.stdout.write(shtab.complete(parser, arguments.shell) + "\n")
    return 0


def _prepare(parser: argparse.ArgumentParser) -> None:
    """Says of each argument, in the way of shtab, what completes it. The parser is of no other use after that."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _prepare(command)
            continue
        metavar = str(action.metavar or "")
        if metavar in _BY_METAVAR:
            action.complete = _BY_METAVAR[metavar]  # type: ignore[attr-defined]
        elif metavar.startswith("{"):
            action.choices = metavar.strip("{}").split(",")
