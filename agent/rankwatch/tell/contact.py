"""The contact of a rank with its collector: whether the collector is silent, and where the collector is to be found.

While the collector does not answer, the connection file is read again: the collector may have been started again with new keys.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from ..errors import ConnectionFileError
from ..shared.link import connection as connections
from ..shared.link.connection import Connection
from ..shared.link.own_time import OwnTime
from ..shared.link.sockets import knock
from ..shared.system.resources import lack
from .fork import keep_from_children

log = logging.getLogger(__name__)

INTERVAL = 2.0
"""Seconds between two looks at the connection file."""

SILENT_HEARTBEATS = 3
"""After this many heartbeats without an answer, in which this rank ran, it reconnects."""

UNANSWERED = 1.0
"""Seconds without an answer, after which a rank that is not connected reads its connection file again."""

TAKEN_FOR_LOST = 30.0
"""Seconds without a word from a rank whose end nobody saw, after which it is lost: what a collector's options are by default."""

KNOCK = 1.0
"""Seconds in which a host that is reached refuses a connection to a port where nobody listens."""

RECONNECTING = 8
"""Descriptors of a further socket."""

ROOM_INTERVAL = 5.0
"""Seconds between two looks at whether there are that many."""


class ConnectionSource:
    """Where a rank's connection came from. ``source``: a path, or the text itself, or empty: nobody can say."""

    def __init__(self, source: str, connection: Connection) -> None:
        self._is_text = source.lstrip().startswith("{")
        self._path = "" if self._is_text or not source else os.path.abspath(source)  # the script may change its folder
        self._known = connection
        self._next = 0.0
        self._complaint = ""

    def renewed(self, now: float) -> Connection | None:
        """The connection of another collector, if the file has one by now. ``now``: seconds of any clock that only goes on."""
        if now < self._next:
            return None
        self._next = now + INTERVAL
        if self._is_text:
            self._complain(
                "its connection was given as text: if it was started again with new keys, ranks need the new text"
            )
        if not self._path:
            return None
        try:
            found = connections.read(self._path)
        except ConnectionFileError as error:
            if os.path.exists(self._path):
                self._complain(str(error))
            return None  # a collector that has ended took the file with it
        if found == self._known:
            return None
        self._known, self._complaint = found, ""
        return found

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self._complaint = text
            log.warning("rankwatch: the collector does not answer; %s", text)


class Contact:
    """The collector of one link. For the link's thread.

    Attributes:
        connection: to the collector that is heard, or looked for.
    """

    def __init__(self, who: str, connection: Connection, source: str) -> None:
        self.connection = connection
        self._who = who
        self._source = ConnectionSource(source, connection)
        self._own_time = OwnTime(time.monotonic())
        self._heard_at = self._own_time.read(time.monotonic(), 0.0)
        self._silent_for, self._listened_at = 0.0, time.monotonic()
        self._was_silent = False

    def listen(self, now: float, heartbeat: float, *, heard: bool) -> None:
        """What the collector sent is handled by now. It is not silent because this thread did not run."""
        own = self._own_time.read(now, heartbeat)
        if heard:
            self._heard_at = own
        self._silent_for, self._listened_at = own - self._heard_at, now

    def is_lost(self, heartbeat: float) -> bool:
        """Whether the collector, which was there, is to be looked for again."""
        if self._silent_for <= SILENT_HEARTBEATS * heartbeat:
            return False
        log.warning("%s: the collector at %s fell silent; trying to reach it again", self._who, self.connection.address)
        self._was_silent = True
        return True

    def time_to_return(self, heartbeat: float) -> float:
        """Seconds that a rank waits at its end for a collector that has left its last heartbeat without an answer.

        A network that loses packets stands still for seconds, and the collector waits for the rank as long. For any thread.
        """
        silent = self._silent_for + time.monotonic() - self._listened_at
        left = TAKEN_FOR_LOST - silent
        return left if silent >= heartbeat and left > 0 and not self._is_refused() else 0.0

    def _is_refused(self) -> bool:
        """Whether nobody listens where the collector was. False: somebody does, or the host was not reached."""
        try:
            knock(self.connection.address, KNOCK)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False

    def find(self) -> None:
        """The collector has taken this rank."""
        if self._was_silent:
            log.warning("%s: the collector is back", self._who)
        self._was_silent = False

    def is_renewed(self) -> bool:
        """Whether ``connection`` is to another collector from now on, while none answers."""
        if self._silent_for <= UNANSWERED:
            return False
        renewed = self._source.renewed(time.monotonic())
        if renewed is None:
            return False
        log.warning("%s: the connection file names another collector, at %s: trying to reach it", self._who, renewed.address)
        self.connection = renewed
        keep_from_children(renewed.address)
        return True

    def wait_for_room(self, is_over: Callable[[], bool]) -> None:
        """Waits until a further socket can be opened: ZeroMQ would end the process."""
        while (why := lack(RECONNECTING)) and not is_over():
            log.warning("%s: %s; trying again", self._who, why)
            time.sleep(ROOM_INTERVAL)
