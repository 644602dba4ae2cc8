"""The file of a collector's secrets, which a running collector has locked: no other collector uses the same files."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from contextlib import suppress
from pathlib import Path

from rankwatch.shared.system.private import OPEN, check_private

log = logging.getLogger(__name__)

HELD = (errno.EAGAIN, errno.EACCES)
"""What a file system answers, where another process has the lock. All else means that it has no locks to give."""


class KeyFile:
    """The file at ``path``, made with mode 0600 where there is none, and locked until ``close``.

    It is open for writing: NFS turns ``flock`` into a lock of bytes, which needs that.

    Raises:
        BlockingIOError: another collector has locked it.
        OSError: it cannot be made or opened.
        NotPrivateError: others can use it, who may have laid it there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        while self._descriptor < 0:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | OPEN, 0o600)
            try:
                check_private(self._descriptor, path)
                _lock(self._descriptor, path)
            except BaseException:
                self.close()
                raise
            if not self._is_in_place:  # its holder removed it before it let go
                self.close()

    @property
    def is_empty(self) -> bool:
        return os.fstat(self._descriptor).st_size == 0

    def lines(self) -> list[str]:
        """Raises OSError and ValueError: it cannot be read."""
        return os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0).decode().splitlines()

    def write(self, lines: list[str]) -> None:
        """Replaces the lines. Raises OSError."""
        text = _joined(lines)
        self._put(text, 0)
        os.ftruncate(self._descriptor, len(text))

    def append(self, line: str) -> None:
        """Adds a line, or nothing. Raises OSError."""
        size = os.fstat(self._descriptor).st_size
        try:
            self._put(_joined([line]), size)
        except OSError:
            os.ftruncate(self._descriptor, size)  # half a line would spoil the file
            raise

    def remove(self, secret: str) -> None:
        """Removes the file, unless another one lies there, or other secrets than this first line."""
        with suppress(OSError, ValueError):
            if self._is_in_place and self.lines()[:1] in ([], [secret]):
                self.path.unlink()

    def close(self) -> None:
        """Lets go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except OSError:
            return False

    def _put(self, text: bytes, at: int) -> None:
        while text:
            written = os.pwrite(self._descriptor, text, at)
            text, at = text[written:], at + written


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            raise BlockingIOError(error.errno, error.strerror, str(path)) from None
        log.warning(
            "%s cannot be locked there (%s): start no second collector with this connection file", path, error.strerror
        )


def _joined(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
