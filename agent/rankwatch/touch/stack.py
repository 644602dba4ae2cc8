"""How the stack is read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import FrameType

from ..shared.bounded import BoundedDict
from .whose_code import is_installed, owner_of


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that called it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def calling(frame: FrameType) -> FrameType:
    """Of a frame of torch's or ours and of those that called it, the user's innermost one.

    Where none of the user's own is near: the innermost of an installed package, else of torch. Fast: each collective comes here.
    """
    here: FrameType | None = frame
    for _ in range(NEAR):
        if here is None:
            break
        file = here.f_code.co_filename
        is_users = _are_users.get(file)
        if is_users is None:
            is_users = _are_users[file] = not is_installed(file)
        if is_users:
            return here
        here = here.f_back
    near = list(islice(outwards(frame), NEAR))
    return min(near, key=lambda one: _distance_of(one.f_code.co_filename))


NEAR = 16
"""Frames: between a collective and the line of a script that shards its model lie about a dozen of torch's."""

_BETWEEN = "distributed_c10d.py", "c10d_logger.py", "contextlib.py", "module.py"
"""Files of torch and Python that stand between any two frames of interest."""

_are_users = BoundedDict[str, bool](4096)
"""By the file of the code."""


def _distance_of(file: str) -> int:
    owner = owner_of(file)
    if owner == "user":
        return 0
    return 2 if owner == "ours" or file.endswith(_BETWEEN) or file.startswith("<") else 1
