"""The thread that writes to stdout and stderr: a pipe that nobody reads, or a full disk, keeps no abort waiting.

On a terminal the last line of stderr may be a status, which gives way to every text and comes back after it. Other processes
write to the same terminal and know nothing of it: it fills its line to the end, so that what they write begins a line of its own.
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

from rankwatch.shared.printable import printable

log = logging.getLogger(__name__)

MAX_WAITING = 10_000
"""Texts that may wait to be written; of further ones only the number is told."""

LAST_TEXTS = 2.0
"""Seconds that the last texts have, at the end, to be written."""

ERASE = "\r\x1b[K"
"""Back to the beginning of the line, and what is in it away."""

USUAL_WIDTH = 80

LOOK = 100
"""Milliseconds between looks at whether it is the end."""


class Printer(logging.Handler):
    """While it is entered, the log's lines and the texts of ``print`` are written one after another, in a thread."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._waiting: deque[tuple[TextIO, str]] = deque()
        self._forgone = 0
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
        """Writes what waits, and gives the log back."""
        logging.getLogger().handlers = self._replaced
        with self._changed:
            self._end = time.monotonic() + LAST_TEXTS
            self._changed.notify()
        self._thread.join()

    def print(self, stream: TextIO, text: str) -> None:
        """Lets ``text`` be written, after all that was told before."""
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                self._forgone += 1
                return
            if self._forgone:
                self._waiting.append((sys.stderr, f"rankwatch: {self._forgone} texts found no room here\n"))
                self._forgone = 0
            self._waiting.append((stream, text))
            self._changed.notify()

    def show(self, status: str) -> None:
        """Lets ``status`` stand in stderr's last line, a terminal's, in place of the one before."""
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
        """Writes a text where the status stands, and the status after it; one that has not changed is not drawn again."""
        if self._drawn and (text or status != self._drawn):
            self._write(sys.stderr, ERASE)
        if text:
            self._write(stream, text)
        if status and (text or status != self._drawn):
            width = width_of(sys.stderr)
            self._write(sys.stderr, ERASE + printable(status)[:width].ljust(width))
        self._drawn = status

    def _write(self, stream: TextIO, text: str) -> None:
        """As ``write`` does, but without holding on to a pipe: who is stuck in it cannot end."""
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
    """Writes to a stream whose disk may be full or whose reader may be gone; what matters is on record too."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        _complain(stream, error)


def width_of(terminal: TextIO) -> int:
    """How many columns it has."""
    try:
        return os.get_terminal_size(terminal.fileno()).columns or USUAL_WIDTH  # 0: nobody has told it
    except OSError:
        return USUAL_WIDTH


def _complain(stream: TextIO, error: OSError) -> None:
    if stream is not sys.stderr:
        log.error("cannot print the report: %s", error.strerror)
