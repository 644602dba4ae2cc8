"""``rankwatch demo``: a real torchrun training of two ranks on the CPU, which overflows on rank 1."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import sys

from rankwatch.errors import EXIT_ABORTED, EXIT_ERROR, UsageError
from rankwatch.shared.system.installed import to_add
from rankwatch.shared.system.log_lines import asked_for, write_log
from rankwatch.shared.system.on_terminal import as_shown

from ..serve.launcher import LISTEN, run_command
from ..serve.settings import Settings
from . import arguments as types

_QUIET = {"PYTHONWARNINGS": "ignore:Failed to initialize NumPy:UserWarning"}
"""torch warns that NumPy is missing. The demo does not need NumPy, and a newcomer would take the warning for a fault."""

_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_runs_dir(parser)


def main(arguments: argparse.Namespace) -> int:
    """Returns 0 when the demo's overflow was caught. Raises UsageError without torch."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError(f"the demo is a real training and needs torch: {to_add('agent')}")
    command = [sys.executable, *_TORCHRUN, "-m", "rankwatch.demo"]
    environ = {**os.environ, **_QUIET}
    write_log(asked_for())
    code = run_command(command, Settings(arguments.runs_dir, listen=LISTEN, job="demo"), environ)
    if code != EXIT_ABORTED:
        return code or EXIT_ERROR
    rankwatch = "rankwatch" if shutil.which("rankwatch") else shlex.quote(sys.argv[0])
    runs = shlex.quote(str(arguments.runs_dir))
    said = (
        "\nrankwatch: this was the demo: its planted overflow was caught, explained and stopped on all ranks\n"
        f"  next       {rankwatch} run -- torchrun --nproc-per-node 2 train.py  # your own\n"
        f"             {rankwatch} replay {runs}/latest  # in other precisions\n"
        f"             {rankwatch} ui {runs}  # the run as a page\n"
    )
    sys.stdout.write(as_shown(said, sys.stdout))
    return 0
