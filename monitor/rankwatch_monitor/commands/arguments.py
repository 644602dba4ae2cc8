"""The values of options and arguments: their defaults, parsers and limits."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from textwrap import fill
from typing import Any

from rankwatch.errors import UsageError
from rankwatch.shared.types import bad_step
from rankwatch.shared.types.bad_step import OnBadStep

MOST_NAMED = 8
"""Runs that an error names, of those that there are."""


ENDLESS = 1 << 31
"""A limit from here on is named only where it is passed."""

OF_A_RUN = "run.db", "report.txt"
"""Files of which a run's folder has one."""


def add_option(parser: argparse._ActionsContainer, name: str, **details: Any) -> None:
    """Adds an option whose name may be written with underscores too."""
    parser.add_argument(*dict.fromkeys((name, "--" + name[2:].replace("-", "_"))), **details)


def describe(parser: argparse.ArgumentParser, text: str) -> None:
    """Says more of a command at the head of its help."""
    parser.description = fill(f"{parser.description or ''} {text}".strip(), 100)


def env(option: str, default: str | None) -> str | None:
    """The option's variable; the default where it is not set, or empty."""
    return os.environ.get(f"RANKWATCH_{option.upper().replace('-', '_')}") or default


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds") from None
    if not 0.01 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text}: expected 0.01 to 3600 seconds")
    return value


def seconds_or_never(text: str) -> float:
    return 0.0 if text.strip() in ("0", "0.0") else seconds(text)


def on_bad_step(text: str) -> OnBadStep:
    try:
        return bad_step.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0.0 <= number <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a share from 0 to 1, such as 0.02")
    return number


def whole(name: str, least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.strip().isdecimal() or not least <= int(text) <= most:
            is_named = most < ENDLESS or (text.strip().isdecimal() and int(text) > most)
            limits = f"from {least} to {most}" if is_named else f"from {least} on"
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number {name} {limits}")
        return int(text)

    return parse


def patterns(text: str) -> tuple[str, ...]:
    from rankwatch.shared.types import fields, tuning  # here, so that commands without patterns start faster

    parts = _split(text, tuning.MAX_PATTERNS)
    if any(len(part) > fields.MAX_NAME for part in parts):
        raise argparse.ArgumentTypeError(f"expected patterns of at most {fields.MAX_NAME} characters")
    return parts


def batches(text: str) -> tuple[int, ...]:
    from rankwatch.shared.types import tuning

    return tuple(map(whole("for each batch", 0, 1 << 62), _split(text, tuning.MAX_TRACED)))


def listening(text: str) -> tuple[str, int]:
    """``HOST:PORT``, ``[IPV6]:PORT``, ``:PORT`` for this machine alone, or ``*:PORT`` for all interfaces (an empty host)."""
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: expected HOST:PORT, or :PORT for this machine alone")
    return ("" if host == "*" else host or "127.0.0.1"), int(port)


def _split(text: str, most: int) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    if len(parts) > most:
        raise argparse.ArgumentTypeError(f"{len(parts)} are over the limit of {most}")
    return parts


def one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        # argparse checks the type of a default that comes from the environment, but not its choices.
        if text not in words:
            raise argparse.ArgumentTypeError(f"{text!r}: expected {' or '.join(words)}")
        return text

    return parse


def add_connection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--connection",
        metavar="FILE",
        default=env("connection", None),
        help="the collector's connection file (default: RANKWATCH_CONNECTION, or else that of the run, or else "
        "rankwatch-runs/connection.json)",
    )


def add_runs_dir(parser: argparse._ActionsContainer) -> None:
    _add_runs(parser, "--runs-dir", metavar="DIR")


def add_archive(parser: argparse.ArgumentParser) -> None:
    """``URL``: the archive of the runs that are over."""
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        default=env("archive", None),
        help="the archive: a folder, or a URL such as s3://bucket/runs (default: RANKWATCH_ARCHIVE)",
    )


def add_runs(parser: argparse.ArgumentParser) -> None:
    """``RUNS_DIR``: the folder of all runs."""
    _add_runs(parser, "runs_dir", metavar="RUNS_DIR", nargs="?")


def _add_runs(parser: argparse._ActionsContainer, name: str, **details: Any) -> None:
    text = "the folder of all runs (default: rankwatch-runs)"
    parser.add_argument(name, type=Path, default=env("runs_dir", "rankwatch-runs"), help=text, **details)


def add_run(parser: argparse.ArgumentParser) -> None:
    """``RUN``: a run's folder, its name, or the folder of all runs; see ``run_folder``."""
    parser.add_argument(
        "run",
        type=Path,
        nargs="?",
        default=runs_folder() / "latest",
        metavar="RUN",
        help="the run's folder, or its name in rankwatch-runs (default: rankwatch-runs/latest)",
    )


def run_folder(path: Path) -> Path:
    """The run's folder; for the folder of all runs, that of the newest. ``latest`` is followed: it may soon be another run.

    Raises:
        UsageError: a name that is neither that of a folder nor that of a run.
    """
    path = named_run(path)
    path = path / "latest" if (path / "latest").is_dir() else path
    return path.parent / path.readlink() if path.is_symlink() else path


def named_run(path: Path) -> Path:
    """The path; a name that is not there may be that of a run in the folder of all runs. Raises UsageError if it is not."""
    if path.exists() or path.parent != Path():
        return path
    run = runs_folder() / path
    if run.is_dir():
        return run
    raise UsageError(no_run(path, run.parent))


def runs_folder() -> Path:
    """The folder of all runs, where a command is given none."""
    return Path(env("runs_dir", "rankwatch-runs") or "")


def usual_connection() -> Path:
    """The connection file of a collector that is given no other."""
    return runs_folder() / "connection.json"


def no_run(path: Path, runs: Path) -> str:
    """Says that there is no run at this path, and which ones there are: in it, beside it, or in the folder ``runs``.

    The names that are like this one come first, then the newest runs.
    """
    if path.is_dir() and (own := _runs_in(path)):
        those = "those" if own[1:] else "that"
        return f"{path} is no run's folder, but has {those} of {_some(own)}: give {path / own[0]}, say"
    what = "is a file, and no run's folder" if path.is_file() else "has no run in it" if path.is_dir() else ""
    said = f"{path} {what}" if what else f"no run {path}"
    where, names = next(((folder, names) for folder in (path.parent, runs) if (names := _runs_in(folder))), (runs, []))
    if not names[1:]:
        return f"{said}; in {where} there is {names[0] if names else 'none'}"
    near = get_close_matches(path.name, names)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{said}; in {where} there are {_some(list(dict.fromkeys([*near, *names])))}{hint}"


def _runs_in(folder: Path) -> list[str]:
    """The names of the runs in this folder, the one that was written last first."""
    written = {}
    try:
        for one in folder.iterdir():
            files = [one / name for name in OF_A_RUN if (one / name).exists()]
            if files and not (one.is_symlink() or one.name.startswith(".")):
                written[one.name] = max(file.stat().st_mtime_ns for file in files)
    except OSError:  # it is none, or may not be read
        return []
    return sorted(written, key=lambda name: (written[name], name), reverse=True)


def _some(names: list[str]) -> str:
    more = f", and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
