"""Files of secrets: only their owner can use them, and that is the user of this process. Those of others are not trusted."""

from __future__ import annotations

import os
import stat

OPEN = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""Flags for a file that somebody else may have laid there: of a FIFO or a terminal, the opening waits for nobody."""


class NotPrivateError(Exception):
    """Others can use a file of secrets, or replace it."""


class NotOursError(NotPrivateError):
    """It is another user's, who may have laid it there."""


def check_private(descriptor: int, path: str | os.PathLike[str]) -> None:
    """Raises NotPrivateError, which says what is wrong with an open file of secrets, and what to do."""
    found = os.fstat(descriptor)
    folder = os.stat(os.path.dirname(os.path.abspath(path)))
    if not stat.S_ISREG(found.st_mode):
        raise NotPrivateError("is no regular file: name another one")
    if found.st_uid != os.geteuid():
        raise NotOursError(
            f"belongs to user {found.st_uid}, and this process to user {os.geteuid()}, who takes no keys from others: "
            "start both as one user"
        )
    if (mode := stat.S_IMODE(found.st_mode)) & 0o077:
        raise NotPrivateError(f"has mode {mode:04o}: others can read the keys in it; chmod 600 it")
    if folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
        raise NotPrivateError("lies in a folder in which all users can replace it: chmod +t that folder, or use another one")
