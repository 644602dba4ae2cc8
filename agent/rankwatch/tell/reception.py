"""What a rank receives from its collector, within bounds: a broken or hostile collector must not slow the training."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import zmq

from ..errors import ProtocolError
from ..shared.link import wire
from ..shared.link.allowance import Allowance
from ..shared.types import messages

log = logging.getLogger(__name__)

MAX_RECEIVED_BYTES = 1 << 20
"""The largest message that a rank takes: what a collector sends is short."""

SHARE, BURST = 0.05, 0.25
"""CPU seconds a second, and at once, for what the collector sends: the interpreter that the thread holds is the training's.
When half of the burst is used up, all but the ABORT is dropped unread; when all of it is, nothing is received."""

PAUSE = 0.05
"""Seconds until the next look when all of it is used up."""

COMPLAINT_INTERVAL = 60.0
"""Seconds between two lines in the log about what the collector sends."""


class Reception:
    """Receives messages within ``SHARE`` of a core.

    Args:
        who: begins each line in the log.
        handle: called with the socket and each message.
        is_aborted: whether the ABORT has come: a repeated one may then be dropped too.
    """

    def __init__(
        self, who: str, handle: Callable[[zmq.Socket[bytes], messages.Message], None], is_aborted: Callable[[], bool]
    ) -> None:
        self._who = who
        self._handle = handle
        self._is_aborted = is_aborted
        self._work = Allowance(SHARE, BURST)
        self._complaints = Allowance(1 / COMPLAINT_INTERVAL, 1.0)
        self._has_heard = False

    def is_exhausted(self, now: float) -> bool:
        """Whether nothing is received for now."""
        return self._work.left(now) <= 0

    def receive(self, socket: zmq.Socket[bytes]) -> bool:
        """Handles what waits in the socket, as far as the allowance goes; returns whether the collector was heard."""
        self._has_heard = False
        before = time.thread_time()
        while (left := self._work.left(time.monotonic())) > 0:
            try:
                self._take(socket, socket.recv(zmq.NOBLOCK), is_short=left < 0.5)
            except zmq.Again:
                break
            finally:
                now = time.thread_time()
                self._work.spend(now - before)
                before = now
        return self._has_heard

    def complain(self, text: str) -> None:
        """Logs what is wrong with the collector, once in ``COMPLAINT_INTERVAL``."""
        if self._complaints.take(time.monotonic()):
            log.warning("%s: %s", self._who, text)

    def _take(self, socket: zmq.Socket[bytes], data: bytes, *, is_short: bool) -> None:
        """``is_short``: the collector sends more than there is time for."""
        if is_short and (self._is_aborted() or not wire.is_abort(data)):
            self._has_heard = True
            self.complain("the collector sends more than this rank has time for; all but an abort is dropped")
            return
        try:
            message = wire.decode(data)
        except ProtocolError as error:
            self.complain(f"the collector sent what this rank cannot read: {error}")
            return
        self._has_heard = True
        self._handle(socket, message)
