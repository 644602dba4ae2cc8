"""The connection file, read again while the collector does not answer: it may have been started again with new keys."""

from __future__ import annotations

import logging
import os

from ..errors import ConnectionFileError
from ..shared.link import connection as connections
from ..shared.link.connection import Connection

log = logging.getLogger(__name__)

INTERVAL = 2.0
"""Seconds between two looks."""


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
