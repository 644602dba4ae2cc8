"""``rankwatch top``: a live view of a run."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from time import time

from rankwatch.errors import UsageError
from rankwatch.shared.system.installed import to_add

from ..record.follow import Newest
from ..record.schema import StoreError
from ..views.top import plain
from ..views.top.focus import Focus
from ..views.top.layout import Scene
from . import arguments as types

ON_TERMINAL, IN_LINES = 1.0, 10.0
"""Seconds between two updates, on a terminal and elsewhere."""

INTERRUPTED = 130


def add_options(parser: argparse.ArgumentParser) -> None:
    types.describe(
        parser,
        "Where stdout is no terminal, top prints a line for each interval in which something changed, until the run is over.",
    )
    types.add_run(parser)
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=types.seconds,
        help=f"seconds between two updates (default: {ON_TERMINAL:g}; {IN_LINES:g} where stdout is no terminal)",
    )
    parser.add_argument("--once", action="store_true", help="show the run once, and end")
    parser.add_argument("--node", metavar="HOST", default="", help="begin with the ranks of this node")
    parser.add_argument("--rank", metavar="R", type=types.whole("R", 0, 1 << 31), help="begin with this rank")


def main(arguments: argparse.Namespace) -> int:
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a name may have letters that the terminal lacks
    is_name = arguments.run.parent == Path() and arguments.run != types.runs_folder()
    newest = Newest(types.named_run(arguments.run) if is_name else arguments.run)  # a folder may come yet
    focus = Focus(arguments.node, arguments.rank)
    try:
        if arguments.once:
            _show_once(newest, focus)
        elif sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            _need_rich()
            from ..views.top import screen

            screen.watch(newest, focus, arguments.interval or ON_TERMINAL)
        else:
            plain.follow(newest, arguments.interval or IN_LINES)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _show_once(newest: Newest, focus: Focus) -> None:
    _need_rich()
    from ..views.top import screen

    try:
        view = newest.look()
    except StoreError as error:
        raise UsageError(f"{error}; give the folder of a run, or of all runs") from None
    complaint = Scene.of(view, time()).complaint(focus)
    if complaint:
        raise UsageError(complaint)
    screen.show_once(view, focus)


def _need_rich() -> None:
    if importlib.util.find_spec("rich") is None:
        raise UsageError(f"top draws with rich: {to_add('top')}; without it, `rankwatch top | cat` prints lines")
