"""Ends the poll of another thread."""

from __future__ import annotations

import socket
from contextlib import suppress


class Wake:
    """Call it, in any thread: the thread that polls ``reader`` wakes up, and drains it. It takes no lock and does not wait."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)

    def __call__(self) -> None:
        with suppress(OSError):  # it is full of calls already, or closed
            self._writer.send(b"\0")

    def drain(self) -> None:
        with suppress(BlockingIOError):
            while self.reader.recv(4096):
                pass

    def close(self) -> None:
        self.reader.close()
        self._writer.close()
