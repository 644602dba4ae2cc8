"""The options of ``rankwatch replay``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MAX_REPEATS = 10_000


class ReplayOptions(NamedTuple):
    capsule: Path
    module: tuple[str, ...]
    precision: tuple[str, ...]
    device: tuple[str, ...]
    repeat: int
    stored_code: bool
    repro: Path | None
    json: bool


def add_options(parser: argparse.ArgumentParser, default: Path | None = None) -> None:
    """The options of ``python -m rankwatch.replay`` and of ``rankwatch replay``."""
    parser.add_argument(
        "capsule",
        type=Path,
        nargs="?",
        default=default or Path("rankwatch-runs", "latest"),
        metavar="CAPSULE",
        help="a run's folder, or a capsule (default: rankwatch-runs/latest)",
    )
    parser.add_argument(
        "--module",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="the module's class, or a function that makes the module, where it is imported under another name; OLD=NEW: the "
        "name here of a Python module of the training (may be given several times)",
    )
    parser.add_argument(
        "--precision",
        type=_list,
        default=("float16", "bfloat16", "float32", "float64"),
        metavar="DTYPE,...",
        help="run it in these dtypes, too (default: float16,bfloat16,float32,float64)",
    )
    parser.add_argument(
        "--device",
        type=_list,
        default=(),
        metavar="DEVICE,...",
        help="on these devices (default: its own, if it is here, and cpu)",
    )
    parser.add_argument("--repeat", type=_count, default=3, metavar="N", help="run it this often (default: 3)")
    parser.add_argument(
        "--stored-code",
        "--stored_code",
        action="store_true",
        help="run the copy of the user's code that is in the capsule, where it cannot be imported: only for capsules of your own",
    )
    parser.add_argument(
        "--repro",
        type=Path,
        metavar="FILE",
        help="the script to write, with a folder of its modules beside it (default: repro.py in the capsule)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def parse(argv: Sequence[str] | None) -> ReplayOptions:
    parser = argparse.ArgumentParser(
        prog="python -m rankwatch.replay",
        description="Runs the forward of a capsule again, and says whether it recurs, which operator makes the inf or nan, "
        "where it is finite, and which rows are enough. Exit code 0: it recurs; 1: it does not; 2: it cannot be run.",
    )
    add_options(parser)
    values = parser.parse_args(argv)
    return ReplayOptions(**{**vars(values), "module": tuple(values.module)})


def as_arguments(values: argparse.Namespace) -> list[str]:
    """The options as arguments for another process."""
    words = ["--repeat", str(values.repeat), "--precision", ",".join(values.precision)]
    words += [f"--module={one}" for one in values.module]
    words += ["--device", ",".join(values.device)] if values.device else []
    words += [f"--repro={values.repro}"] if values.repro is not None else []
    words += ["--stored-code"] if values.stored_code else []
    words += ["--json"] if values.json else []
    return [*words, "--", str(values.capsule)]


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _count(text: str) -> int:
    if not text.strip().isdecimal() or not 1 <= int(text) <= MAX_REPEATS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1 to {MAX_REPEATS}")
    return int(text)
