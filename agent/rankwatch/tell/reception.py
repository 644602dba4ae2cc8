"""What a rank receives from its collector, within bounds: a broken or hostile collector must not slow the training."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import zmq

from ..errors import ProtocolError
from ..shared.link import wire
from ..shared.link.allowance import Allowance
from ..shared.link.sockets import receive
from ..shared.types import messages

log = logging.getLogger(__name__)

MAX_RECEIVED_BYTES = 1 << 20
"""The largest message that a rank takes: what a collector sends is short."""

SHARE, BURST = 0.03, 0.25
"""CPU seconds a second, and at once, for what the collector sends: the interpreter that the thread holds is the training's. The
thread's turns take two percent of a core beside. When half of the burst is used up, all but the ABORT is dropped unread; when all
of it is, nothing is received."""

PER_MESSAGE, PER_BYTE = 2e-6, 1e-9
"""CPU seconds of ZeroMQ's own thread for a message that is received, mostly to decrypt it. That thread's own clock has
what this rank sends as well."""

PAUSE = 0.05
"""Seconds until the next look when all of it is used up."""

COMPLAINT_INTERVAL = 60.0
"""Seconds between two lines in the log about what the collector sends."""

TUNES_PER_SECOND, TUNES_AT_ONCE = 1.0, 10.0
"""Changes of options that are passed on; of more, the last one. Each has all changes of the run."""


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
        """Handles what waits in the socket, as far as the allowance goes; returns whether the collector was heard.

        Raises:
            ProtocolError: the collector has sent a message of several parts, and the socket is to be closed.
        """
        self._has_heard = False
        before = time.thread_time()
        while (left := self._work.left(time.monotonic())) > 0:
            try:
                data = receive(socket)
            except zmq.Again:
                break
            try:
                self._take(socket, data, is_short=left < 0.5)
            finally:
                now = time.thread_time()
                self._work.spend(now - before + PER_MESSAGE + PER_BYTE * len(data))
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


class Tunings:
    """Passes changes of options on to the watch, as often as a training bears."""

    def __init__(self, who: str, on_tune: Callable[[messages.Tune], None]) -> None:
        self._who = who
        self._on_tune = on_tune
        self._allowance = Allowance(TUNES_PER_SECOND, TUNES_AT_ONCE)
        self._waiting: messages.Tune | None = None

    def take(self, tune: messages.Tune) -> None:
        self._waiting = tune
        self.pass_on()

    def pass_on(self) -> None:
        """Passes on what waits, if it may be by now."""
        tune = self._waiting
        if tune is None or not self._allowance.take(time.monotonic()):
            return
        self._waiting = None
        try:
            self._on_tune(tune)
        except Exception:  # an ABORT must still be received
            log.exception("%s: an error of ours while the options were changed; training goes on", self._who)
