"""How the stack is read."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that called it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back
