"""Decodes long messages, of up to seconds each, in a thread of its own, so that an abort need not wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from rankwatch.errors import ProtocolError
from rankwatch.shared.link import wire
from rankwatch.shared.types import messages

from ...decide.replicas.comparison import MAX_TABLE_ROWS
from ...decide.replicas.table_layout import layout_of
from ..niceness import DECODING, yield_to_others
from .inbox import Letter


class Decoded(NamedTuple):
    """A message, or why there is none, and the seconds of CPU time that it took."""

    letter: Letter
    message: messages.Message | None
    error: str
    seconds: float


class DecoderThread:
    """``wake``: called in the thread when ``done`` has something new."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._letters: SimpleQueue[Letter | None] = SimpleQueue()
        self._done: SimpleQueue[Decoded] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rankwatch-decoder", daemon=True)
        self._thread.start()

    def submit(self, letter: Letter) -> None:
        self._letters.put(letter)

    def done(self) -> Iterator[Decoded]:
        """What was decoded since the last call."""
        while True:
            try:
                yield self._done.get_nowait()
            except Empty:
                return

    def close(self) -> None:
        self._letters.put(None)
        self._thread.join()

    def _run(self) -> None:
        yield_to_others(DECODING)
        while (letter := self._letters.get()) is not None:
            begun = time.thread_time()
            message, error = decode(letter)
            if isinstance(message, messages.Fingerprints) and len(message.table.rows) <= MAX_TABLE_ROWS:
                with suppress(Exception):  # the loop meets it again, and says so
                    layout_of(message.table)
            self._done.put(Decoded(letter, message, error, time.thread_time() - begun))
            self._wake()


def decode(letter: Letter) -> tuple[messages.Message | None, str]:
    """The message, or None and why there is none."""
    try:
        return wire.decode(letter.body), ""
    except (ProtocolError, MemoryError) as error:
        return None, str(error) or "there is no memory for it"
