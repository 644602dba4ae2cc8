"""``rankwatch demo``: a real two-rank torchrun training on the CPU that overflows on rank 1."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from rankwatch.errors import EXIT_ABORTED, EXIT_ERROR, UsageError

from ..decide.options import Options
from ..serve.launcher import run_command

_QUIET = {"PYTHONWARNINGS": "ignore:Failed to initialize NumPy:UserWarning"}
"""torch warns of a missing NumPy, which a newcomer would take for a fault, and which nothing here needs."""

_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run_demo(runs_dir: Path) -> int:
    """Runs the demo; 0 when its overflow was caught. Raises UsageError without torch."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError("the demo is a real training and needs torch: pip install 'rankwatch[agent]'")
    command = [sys.executable, *_TORCHRUN, "-m", "rankwatch.demo"]
    code = run_command(command, runs_dir=runs_dir, options=Options(), job="demo", environ={**os.environ, **_QUIET})
    if code != EXIT_ABORTED:
        return code or EXIT_ERROR
    sys.stdout.write("\nrankwatch: this was the demo: its planted overflow was caught, explained and stopped on all ranks\n")
    return 0
