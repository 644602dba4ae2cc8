"""The thread that writes to stdout and stderr: a pipe that nobody reads, or a full disk, delays no abort.

On a terminal the last line of stderr may be a status line. It is erased before each text and drawn again after it. Other
processes write to the same terminal without knowing of it: the line is filled to its end, so that their text begins a new line.
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
from types import TracebackType
from typing import TextIO

log = logging.getLogger(__name__)

MAX_WAITING = 10_000
"""Texts that may wait to be written. Further ones are dropped and counted."""

LAST_TEXTS = 2.0
"""Seconds to write the texts that still wait at the end."""

ERASE = "\r\x1b[K"
"""Moves the cursor to the beginning of the line, and clears the line."""

USUAL_WIDTH = 80

LOOK = 100
"""Milliseconds after which a thread that waits for a pipe looks whether its time is over."""


class Printer(logging.Handler):
    """While this is entered, a thread writes the log's lines and the texts of ``print``, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._waiting: deque[tuple[TextIO, str]] = deque()
        self._dropped = 0
        self._status: str | None = None
        self._drawn = ""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
        """Makes ``status`` the status line: the last line of stderr, which is a terminal."""
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
            self._draw("" if is_last else self._drawn if status is None else status, stream, text)
            if is_last:
                return

    def _draw(self, status: str, stream: TextIO, text: str) -> None:
        """Writes a text in place of the status line, and the status line after it. An unchanged status is not drawn again."""
        if self._drawn and (text or status != self._drawn):
            self._write(sys.stderr, ERASE)
        if text:
            self._write(stream, text)
        if status and (text or status != self._drawn):
            width = width_of(sys.stderr)
            self._write(sys.stderr, ERASE + status[:width].ljust(width))
        self._drawn = status

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


def width_of(terminal: TextIO) -> int:
    """The columns of a terminal."""
    try:
        return os.get_terminal_size(terminal.fileno()).columns or USUAL_WIDTH  # 0: its size was never set
    except OSError:
        return USUAL_WIDTH


def _complain(stream: TextIO, error: OSError) -> None:
    if stream is not sys.stderr:
        log.error("cannot print the report: %s", error.strerror)
