"""Figures in words. Pure."""

from __future__ import annotations


def describe_bandwidth(bytes_per_second: float) -> str:
    giga = bytes_per_second / 1e9
    return f"{giga:.2f} GB/s" if giga >= 0.1 else f"{1e3 * giga:.2f} MB/s"


def count(number: int, name: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {name}{'' if number == 1 else 's'}"
