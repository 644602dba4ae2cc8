"""``rankwatch replay``: runs the forward in a run's capsule again, in a process of its own: this one never imports torch."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys

from rankwatch.errors import UsageError
from rankwatch.replay.replay_options import add_options as add_replay_options
from rankwatch.replay.replay_options import as_arguments
from rankwatch.shared.system.installed import to_add

from . import arguments as types


def add_options(parser: argparse.ArgumentParser) -> None:
    types.describe(
        parser,
        "Start it where the training's own modules can be imported. Its data and its launcher are not needed. "
        "Exit code 0: the inf or nan recurs; 1: it does not.",
    )
    add_replay_options(parser, types.runs_folder() / "latest")


def main(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("torch") is None:
        raise UsageError(f"replay runs the module, and needs torch: {to_add('agent')}")
    arguments.capsule = types.named_run(arguments.capsule)
    command = [sys.executable, "-m", "rankwatch.replay", *as_arguments(arguments)]
    quiet = {"RANKWATCH_MODE": "disabled"}  # the module may be watched by the code that it comes from
    return subprocess.run(command, check=False, env={**os.environ, **quiet}).returncode
