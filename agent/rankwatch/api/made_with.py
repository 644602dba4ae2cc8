"""With what a run was made, for its report: command, options, commit, versions, and a run of W&B that is open here."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import torch

from .. import __version__
from ..shared.types.config import FUNCTIONS, Config
from .aside import wandb_url

LIMIT = 1.0
"""Seconds for git, which the training waits for once: on a network's disk it may take longer, and is not needed."""

LONGEST = 500
"""Characters of a command, or of the options."""


def made_with(config: Config) -> tuple[str, ...]:
    """Lines such as ``commit: 1a0b0b1d, with changes``. What is not known has no line."""
    options = [
        f"{one.name}={getattr(config, one.name)}"
        for one in fields(config)
        if one.name not in (*FUNCTIONS, "connection") and getattr(config, one.name) != one.default
    ]
    versions = f"rankwatch {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    told = {
        "command": shlex.join(sys.argv)[:LONGEST],
        "options": ", ".join(options)[:LONGEST],
        "commit": _commit(),
        "versions": versions,
        "wandb": wandb_url(),
    }
    return tuple(f"{name}: {text}" for name, text in told.items() if text)


@cache
def _commit() -> str:
    """That of the script's repository."""
    script = Path(sys.argv[0] if sys.argv else "")
    folder = script.resolve().parent if script.is_file() else Path.cwd()
    head = _git(folder, "rev-parse", "--short=8", "HEAD")
    if not head:
        return ""
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return head if changes == "" else f"{head}, with changes" if changes else f"{head}, whether with changes is not known"


def _git(folder: Path, *words: str) -> str | None:
    """None: there is no git, or no repository, or no answer in time."""
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *words]
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
