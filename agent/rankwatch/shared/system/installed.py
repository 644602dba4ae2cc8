"""The command that adds an extra to rankwatch."""

from __future__ import annotations


def to_add(extra: str) -> str:
    """For an empty name, the command that installs what rankwatch itself needs."""
    return f"pip install 'rankwatch[{extra}]'" if extra else "pip install rankwatch"
