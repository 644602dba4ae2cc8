"""How the stack is read."""

from __future__ import annotations

from collections.abc import Iterator
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
    found, nearest, here = frame, _PLUMBING, frame
    for _ in range(NEAR):
        file = here.f_code.co_filename
        kind = _kinds.get(file)
        if kind is None:
            kind = _kinds[file] = _kind_of(file)
        if kind < nearest:
            if kind == _USERS:
                return here
            found, nearest = here, kind
        if here.f_back is None:
            break
        here = here.f_back
    return found


NEAR = 16
"""Frames: between a collective and the line of a script that shards its model lie about a dozen of torch's."""

_USERS, _PACKAGES, _TORCHS, _PLUMBING = range(4)
_BETWEEN = "distributed_c10d.py", "c10d_logger.py", "contextlib.py", "module.py"
"""Files of torch and Python that stand between any two frames of interest."""

_kinds = BoundedDict[str, int](4096)


def _kind_of(file: str) -> int:
    if not is_installed(file):
        return _USERS
    owner = owner_of(file)
    if owner == "user":
        return _PACKAGES
    return _PLUMBING if owner == "ours" or file.endswith(_BETWEEN) or file.startswith("<") else _TORCHS
