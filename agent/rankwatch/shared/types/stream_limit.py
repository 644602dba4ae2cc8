"""How much of what a rank streams the collector has yet to handle, at most. The rank and the collector count alike."""

from __future__ import annotations

WINDOW = 64 << 10
"""Bytes, for a rank of a run of few ranks: four batches. A trip is received after the batches that its rank sent before, so with
more of them it is late; with fewer, a very fast training is slowed."""

LEAST = 16 << 10
"""A message counts as this many bytes at least: receiving a short one takes as long."""


def charge(size: int) -> int:
    """What a message of this size takes of the window."""
    return max(size, LEAST)
