"""Callbacks for training frameworks. Each framework has its own file, which only its users import."""

from __future__ import annotations

import os
from typing import Any


def lightning_callbacks() -> list[Any]:
    """The entry point by which Lightning adds callbacks to a Trainer: one, where this process is watched without code."""
    if os.environ.get("RANKWATCH_ATTACH") != "1" or os.environ.get("RANKWATCH_MODE") == "disabled":
        return []
    from .lightning import RankwatchCallback

    return [RankwatchCallback()]
