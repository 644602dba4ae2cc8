"""The doctor's options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

BACKENDS = ("auto", "gloo", "nccl")
SHORTEST, LONGEST = 0.1, 3600.0


class DoctorOptions(NamedTuple):
    """Times are in seconds."""

    timeout: float
    check_timeout: float
    backend: str
    all_pairs: bool
    nccl_debug: bool
    json: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m rankwatch.doctor`` and of ``rankwatch doctor``."""
    for name, default, what in (
        ("--timeout", 30.0, "time for all ranks to arrive"),
        ("--check-timeout", 10.0, "time limit of each check"),
    ):
        text = f"{what} (default: {default:g})"
        _add(parser, name, type=seconds, default=default, metavar="SECONDS", help=text)
    parser.add_argument(
        "--backend", choices=BACKENDS, default="auto", help="default: nccl where rank 0 has a GPU, else gloo"
    )
    _add(parser, "--all-pairs", action="store_true", help="test every pair of nodes (the default up to 8 nodes)")
    _add(parser, "--nccl-debug", action="store_true", help="explain what NCCL logs with NCCL_DEBUG=INFO")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def parse(argv: Sequence[str] | None) -> DoctorOptions:
    parser = argparse.ArgumentParser(
        prog="python -m rankwatch.doctor",
        description="Checks whether the ranks of a job can train together, and names the node that cannot. Start it as you start "
        "the training: torchrun --nproc-per-node 2 -m rankwatch.doctor, or by srun. Exit code 0: all is well; 1: a check failed.",
    )
    add_options(parser)
    return DoctorOptions(**vars(parser.parse_args(argv)))


def as_arguments(values: argparse.Namespace) -> list[str]:
    """The options as arguments for another process."""
    named = {f"--{field.replace('_', '-')}": getattr(values, field) for field in DoctorOptions._fields}
    return [name if value is True else f"{name}={value}" for name, value in named.items() if value is not False]


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds") from None
    if not SHORTEST <= value <= LONGEST:
        raise argparse.ArgumentTypeError(f"{text}: expected {SHORTEST:g} to {LONGEST:g} seconds")
    return value


def _add(parser: argparse.ArgumentParser, name: str, **details: object) -> None:
    names = dict.fromkeys((name, "--" + name[2:].replace("-", "_")))
    parser.add_argument(*names, **details)  # type: ignore[arg-type]
