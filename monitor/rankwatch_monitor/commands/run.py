"""``rankwatch run``: a command under its own collector."""

from __future__ import annotations

import argparse
import os

from rankwatch.errors import UsageError
from rankwatch.shared.system.log_lines import VARIABLE, write_log
from rankwatch.shared.types.bad_step import SKIP
from rankwatch.shared.types.config import is_disabled

from ..serve.launcher import LISTEN, replace_by, run_command
from . import arguments as types
from .collector import MEASURED, STOPPED, TOLD, add_collector_options, metered, settings_of

ON_BAD_STEP, BUDGET = "RANKWATCH_ON_BAD_STEP", "RANKWATCH_BUDGET"
"""The variables from which ranks take these options."""


def add_options(parser: argparse.ArgumentParser) -> None:
    groups = add_collector_options(parser, LISTEN, "address to listen on (default: a free port of this machine alone)")
    groups[TOLD].add_argument("--job", help="name of the job (default: the script's)")
    types.add_option(
        groups[TOLD],
        "--no-status",
        action="store_true",
        default=types.env("status", "1") == "0",
        help="show no status line where stderr is a terminal (or RANKWATCH_STATUS=0)",
    )
    types.add_option(
        groups[STOPPED],
        "--on-bad-step",
        type=types.on_bad_step,
        metavar="{abort,skip,skip=N/M}",
        help="what a step with an inf or nan does: it ends the run, or all ranks leave it out and train on, for at most N steps "
        f"of the last M (skip: {SKIP.most}/{SKIP.of}; default: RANKWATCH_ON_BAD_STEP, else as watch() says, else abort)",
    )
    types.add_option(
        groups[MEASURED],
        "--budget",
        type=types.share,
        metavar="SHARE",
        help="share of a step that watching may take: of so many batches one is measured in full (0: each is; default: "
        "RANKWATCH_BUDGET, else as watch() says)",
    )
    types.add_option(
        groups[MEASURED],
        "--rankwatch-config",
        metavar="FILE",
        help="TOML file with options of the ranks, such as trace_batch_nums = [149, 150] (default: RANKWATCH_CONFIG)",
    )
    types.add_option(
        groups[STOPPED],
        "--max-restarts",
        metavar="N",
        type=types.whole("N", 0, types.ENDLESS),
        default=types.env("max_restarts", "0"),
        help="start the command again, at most N times, where the report says that this helps: a rank was lost or hung, a "
        "connection broke, or a machine is suspected (default: 0)",
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="[--] CMD ...", help="the command, such as torchrun ..."
    )


def main(arguments: argparse.Namespace) -> int:
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise UsageError("nothing to run: rankwatch run -- torchrun --nproc-per-node 8 train.py")
    if is_disabled():
        replace_by(command)
    write_log(arguments.log_format)
    given = {ON_BAD_STEP: arguments.on_bad_step, BUDGET: arguments.budget}
    options = {name: str(value) for name, value in given.items() if value is not None}
    with metered(arguments) as meters:
        return run_command(
            command,
            settings_of(arguments),
            {**os.environ, VARIABLE: arguments.log_format, **options},
            meters=meters,
            status=not arguments.no_status,
            config=arguments.rankwatch_config,
            max_restarts=arguments.max_restarts,
        )
