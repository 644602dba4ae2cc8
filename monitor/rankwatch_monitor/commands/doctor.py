"""``rankwatch doctor``: checks whether ranks can train together: on this machine, or those of a job under torchrun or srun."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys

from rankwatch.doctor.doctor_options import add_options as add_doctor_options
from rankwatch.doctor.doctor_options import as_arguments
from rankwatch.errors import UsageError
from rankwatch.shared.system.installed import to_add

from . import arguments as types

MAX_LOCAL_RANKS = 1024


def add_options(parser: argparse.ArgumentParser) -> None:
    types.describe(
        parser,
        "On several nodes start it as you start the training: torchrun ... -m rankwatch.doctor, or srun rankwatch doctor. "
        "Exit code 0: all is well; 1: a check failed.",
    )
    nproc = types.whole("of ranks", 1, MAX_LOCAL_RANKS)
    parser.add_argument("--nproc", metavar="N", type=nproc, default=1, help="ranks to start on this machine (default: 1)")
    add_doctor_options(parser)


def main(arguments: argparse.Namespace) -> int:
    module = ["-m", "rankwatch.doctor", *as_arguments(arguments)]
    if arguments.nproc == 1:
        return subprocess.run([sys.executable, *module], check=False).returncode
    if "RANK" in os.environ or "SLURM_STEP_ID" in os.environ:
        raise UsageError("this is a rank of a job already: leave --nproc out")
    if importlib.util.find_spec("torch") is None:
        raise UsageError(f"several ranks need torch: {to_add('agent')}; without --nproc the rest is checked")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.nproc)]
    return subprocess.run([sys.executable, *torchrun, *module], check=False).returncode
