"""``rankwatch demo``: a real training of two ranks that overflows on one of them."""

from __future__ import annotations

import argparse

from . import arguments as types
from .demo_job import run_demo


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_runs_dir(parser)


def main(arguments: argparse.Namespace) -> int:
    return run_demo(arguments.runs_dir)
