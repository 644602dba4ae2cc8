"""Frameworks that rankwatch knows by name. Each file imports its own, and nothing else imports them."""

from __future__ import annotations

import os
from typing import Any


def lightning_callbacks() -> list[Any]:
    """What Lightning, which asks here by an entry point, adds to its callbacks: ours, if zero code is on in this process."""
    if os.environ.get("RANKWATCH_ATTACH") != "1" or os.environ.get("RANKWATCH_MODE") == "disabled":
        return []
    from .lightning import RankwatchCallback

    return [RankwatchCallback()]
