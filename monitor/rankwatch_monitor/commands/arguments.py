"""The values of options and arguments: their defaults, parsers and limits."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_option(parser: argparse.ArgumentParser, name: str, **details: Any) -> None:
    """Adds an option whose name may be written with underscores too."""
    parser.add_argument(*dict.fromkeys((name, "--" + name[2:].replace("-", "_"))), **details)


def env(option: str, default: str | None) -> str | None:
    return os.environ.get(f"RANKWATCH_{option.upper().replace('-', '_')}", default)


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


def whole(name: str, least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.strip().isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number {name} from {least} to {most}")
        return int(text)

    return parse


def patterns(text: str) -> tuple[str, ...]:
    from rankwatch.shared import fields, wire  # here, so that commands without patterns start faster

    parts = _split(text, wire.MAX_PATTERNS)
    if any(len(part) > fields.MAX_NAME for part in parts):
        raise argparse.ArgumentTypeError(f"expected patterns of at most {fields.MAX_NAME} characters")
    return parts


def batches(text: str) -> tuple[int, ...]:
    from rankwatch.shared import wire

    return tuple(map(whole("for each batch", 0, 1 << 62), _split(text, wire.MAX_TRACED)))


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


def on_lost(text: str) -> str:
    return _one_of(text, "abort", "wait")


def on_stall(text: str) -> str:
    return _one_of(text, "warn", "abort")


def on_desync(text: str) -> str:
    return _one_of(text, "note", "abort")


def _one_of(text: str, *words: str) -> str:
    # argparse checks the type of a default that comes from the environment, but not its choices.
    if text not in words:
        raise argparse.ArgumentTypeError(f"{text!r}: expected {' or '.join(words)}")
    return text


def add_connection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--connection",
        metavar="FILE",
        default=env("connection", None) or Path(env("runs_dir", "rankwatch-runs") or "", "connection.json"),
        help="the collector's connection file (default: RANKWATCH_CONNECTION, or else rankwatch-runs/connection.json)",
    )


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runs-dir",
        metavar="DIR",
        type=Path,
        default=env("runs_dir", "rankwatch-runs"),
        help="the folder of all runs (default: rankwatch-runs)",
    )


def add_runs(parser: argparse.ArgumentParser) -> None:
    """``RUNS_DIR``: the folder of all runs."""
    parser.add_argument(
        "runs_dir",
        type=Path,
        nargs="?",
        default=env("runs_dir", "rankwatch-runs"),
        metavar="RUNS_DIR",
        help="the folder of all runs (default: rankwatch-runs)",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """``RUN_DIR``: the folder of one run, or of all runs; see ``run_folder``."""
    parser.add_argument(
        "run",
        type=Path,
        nargs="?",
        default=Path(env("runs_dir", "rankwatch-runs") or "", "latest"),
        metavar="RUN_DIR",
        help="the run's folder (default: rankwatch-runs/latest)",
    )


def run_folder(path: Path) -> Path:
    """The run's folder; for the folder of all runs, that of the newest. ``latest`` is followed: it may soon be another run."""
    path = path / "latest" if (path / "latest").is_dir() else path
    return path.parent / path.readlink() if path.is_symlink() else path
