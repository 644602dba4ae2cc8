"""The thread that writes to stdout and stderr: a pipe that nobody reads, or a full disk, delays no abort.

Other processes, the ranks, write to the same terminal without knowing of it, and may have begun a line. So a text of ours begins
a new row wherever the cursor is, and the status line has the terminal's last row for itself: the other rows scroll above it.
"""

from __future__ import annotations

import io
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from typing import TextIO

from rankwatch.shared.system.standard_output import forgive

log = logging.getLogger(__name__)

MAX_WAITING = 10_000
"""Texts that may wait to be written. Further ones are dropped and counted."""

LAST_TEXTS = 2.0
"""Seconds to write the texts that still wait at the end."""

SAVE, RESTORE = "\x1b7", "\x1b8"
"""Where the cursor is, and in what colour it writes."""

MAKE_ROOM = "\x1bD\x1b[A"
"""Down and up again, in the same column: the cursor is not in the last row afterwards."""

FREE = f"{SAVE}\x1b[r{RESTORE}"
"""All rows scroll again."""

FEWEST_ROWS = 5
"""A terminal with fewer has no row to spare."""

USUAL_SIZE = os.terminal_size((80, 24))

LOOK = 100
"""Milliseconds after which a thread that waits for a pipe looks whether its time is over."""


class Printer(logging.Handler):
    """While this is entered, a thread writes the log's lines and the texts of ``print``, one after another.

    Args:
        is_shared: whether other processes write to the terminal, if it is one that knows more than lines.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        super().__init__()
        self._is_shared = is_shared
        self._changed = threading.Condition()
        self._waiting: deque[tuple[TextIO, str]] = deque()
        self._dropped = 0
        self._status: str | None = None
        self._room: os.terminal_size | None = None
        """The terminal's size when the status line got its row; None: it has none."""
        self._end = float("inf")
        self._replaced: list[logging.Handler] = []
        self._thread = threading.Thread(target=self._run, name="rankwatch-printer", daemon=True)

    def __enter__(self) -> Printer:
        root = logging.getLogger()
        self._replaced = root.handlers
        to_stderr = [handler for handler in root.handlers if type(handler) is logging.StreamHandler]
        root.handlers = [*(handler for handler in root.handlers if handler not in to_stderr), self]
        if to_stderr:
            self.setFormatter(to_stderr[0].formatter)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Writes the waiting texts, and restores the log's handlers."""
        logging.getLogger().handlers = self._replaced
        with self._changed:
            self._end = time.monotonic() + LAST_TEXTS
            self._changed.notify()
        self._thread.join()

    def print(self, stream: TextIO, text: str) -> None:
        """Queues ``text`` to be written."""
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                self._dropped += 1
                return
            if self._dropped:
                self._waiting.append((sys.stderr, f"rankwatch: {self._dropped} texts found no room here\n"))
                self._dropped = 0
            self._waiting.append((stream, text))
            self._changed.notify()

    def show(self, status: str) -> None:
        """Makes ``status`` the status line of stderr, which is a terminal."""
        with self._changed:
            self._status = status
            self._changed.notify()

    def emit(self, record: logging.LogRecord) -> None:
        self.print(sys.stderr, self.format(record) + "\n")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._status is not None or self._end < float("inf"))
                stream, text = self._waiting.popleft() if self._waiting else (sys.stderr, "")
                status, self._status = self._status, None
                is_last = not text and self._end < float("inf")
            if text:
                self._write(stream, f"{self._new_row(stream)}{text}")
            if is_last:
                self._write(sys.stderr, self._leave() + self._new_row(sys.stderr))
                return
            if status:
                self._write(sys.stderr, self._draw(status, size_of(sys.stderr)))

    def _new_row(self, stream: TextIO) -> str:
        """Spaces as wide as the terminal: from the first column they end in the same row, from any other in the next one."""
        return " " * size_of(stream).columns + "\r" if self._is_shared and is_terminal(stream) else ""

    def _draw(self, status: str, size: os.terminal_size) -> str:
        """The status line in the last row; the cursor stays where a rank has left it."""
        if size.lines < FEWEST_ROWS:
            return self._leave()
        room, self._room = "" if size == self._room else MAKE_ROOM, size
        row = f"\x1b[1;{size.lines - 1}r\x1b[{size.lines}H\x1b[0m\x1b[2K{status[: size.columns]}"
        return f"{room}{SAVE}{row}{RESTORE}"

    def _leave(self) -> str:
        """Gives the row back."""
        if self._room is None:
            return ""
        self._room = None
        lines = size_of(sys.stderr).lines
        return f"{SAVE}\x1b[{lines}H\x1b[2K{RESTORE}{FREE}"

    def _write(self, stream: TextIO, text: str) -> None:
        """As ``write`` does, but never blocks in a pipe: a thread that is blocked there cannot end."""
        try:
            descriptor = stream.fileno()
            body = text.encode(stream.encoding, "backslashreplace")
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            while body and time.monotonic() < self._end:
                if poll.poll(LOOK):
                    body = body[os.write(descriptor, body[: select.PIPE_BUF]) :]
        except io.UnsupportedOperation:  # a stream without a descriptor
            write(stream, text)
        except OSError as error:
            _complain(stream, error)


def write(stream: TextIO, text: str) -> None:
    """Writes to a stream whose disk may be full or whose reader may be gone. Nothing is lost: the record has it too."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        _complain(stream, error)


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal that knows more than lines."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def size_of(terminal: TextIO) -> os.terminal_size:
    """The columns and lines of a terminal."""
    try:
        columns, lines = os.get_terminal_size(terminal.fileno())
    except OSError:
        return USUAL_SIZE
    return os.terminal_size((columns or USUAL_SIZE.columns, lines or USUAL_SIZE.lines))  # 0: its size was never set


def _complain(stream: TextIO, error: OSError) -> None:
    forgive(stream)  # the exit code is the run's
    if stream is not sys.stderr:
        log.error("cannot print the report: %s", error.strerror)
