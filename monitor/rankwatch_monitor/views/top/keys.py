"""The keys of a terminal as they are pressed, and its changes of size. The terminal's settings are restored in any case."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NAMES = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"k": "up", b"p": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"j": "down", b"n": "down",
    b"\x1b[5~": "page-up", b"\x1b[6~": "page-down", b"\r": "enter", b"\n": "enter", b"\x1b[C": "enter", b"\x1bOC": "enter",
    b"\x1b": "back", b"b": "back", b"\x7f": "back", b"\x1b[D": "back", b"\x1bOD": "back", b"g": "growth", b"?": "help",
    b"q": "quit",
}  # fmt: skip

_MOST = max(map(len, _NAMES))


class Keyboard:
    """The keyboard of a terminal, as ``opened`` yields it."""

    def __init__(self, keyboard: int | None, news: int) -> None:
        self._keyboard, self._news = keyboard, news

    def wait(self, seconds: float) -> list[str]:
        """Waits for keys and returns their names; an empty list when the time is over or the size has changed."""
        sources = [source for source in (self._keyboard, self._news) if source is not None]
        ready = select.select(sources, [], [], max(0.0, seconds))[0]
        if self._news in ready:
            os.read(self._news, 4096)
        if self._keyboard is None or self._keyboard not in ready:
            return []
        pressed = os.read(self._keyboard, 4096)
        return parse(pressed) if pressed else ["quit"]  # the terminal is gone


def parse(pressed: bytes) -> list[str]:
    """The names of keys, from the bytes that a terminal sends for them. Unknown keys are ignored."""
    found = []
    while pressed:
        size = next((size for size in range(_MOST, 0, -1) if pressed[:size] in _NAMES and len(pressed) >= size), 0)
        if size:
            found.append(_NAMES[pressed[:size]])
        pressed = pressed[max(1, size) :]
    return found


@contextmanager
def opened() -> Iterator[Keyboard]:
    """While this is entered, keys arrive one by one and without echo. SIGTERM raises SystemExit, and the terminal is restored."""
    keyboard = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    read, write = os.pipe()
    os.set_blocking(write, False)

    def wake(number: int, frame: FrameType | None) -> None:
        os.write(write, b"\0")

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = termios.tcgetattr(keyboard) if keyboard is not None else None
    handlers = {number: signal.signal(number, by) for number, by in ((signal.SIGWINCH, wake), (signal.SIGTERM, end))}
    try:
        if keyboard is not None:
            tty.setcbreak(keyboard)
            attributes = termios.tcgetattr(keyboard)
            attributes[6][termios.VSUSP] = b"\0"  # ^Z would stop this process with the terminal unrestored
            termios.tcsetattr(keyboard, termios.TCSANOW, attributes)
        yield Keyboard(keyboard, read)
    finally:
        if keyboard is not None and before is not None:
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)
