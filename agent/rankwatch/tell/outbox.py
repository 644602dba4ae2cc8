"""What a rank sends of its spool, and when: in order, as far as its window is open. Trips do not wait for the window. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from ..shared.types import messages
from ..shared.types.frame import FrameTable
from .spool import Spool, Spooled
from .window import Window

TABLES_SENT = 64
"""After this many tables, each is sent again when it is used: the collector retains only the last ones."""

Send: TypeAlias = Callable[[messages.Message], int]
"""Sends a message without blocking; returns its bytes, or 0 where it could not be sent."""


class Outbox:
    """For the link's thread."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._window = Window()
        self._tables_sent: set[str] = set()
        self._ahead = 0
        """The sequence number of the last message that went ahead of the spool."""

    def renew(self, welcome: messages.Welcome) -> None:
        """What the collector has not stored is sent again."""
        self._spool.acknowledge(welcome.seq)
        self._spool.sent = welcome.seq
        self._window.renew(welcome.window)
        self._tables_sent.clear()
        self._ahead = 0

    def take_ack(self, ack: messages.Ack) -> None:
        self._spool.acknowledge(ack.seq)
        self._window.handle(ack.handled)

    def send(self, send: Send) -> None:
        urgent = self._spool.urgent()  # before what is due: a trip that comes in between is looked at the next time
        while due := self._spool.due():
            pushed = self._last_pushed(due)
            for spooled in due:
                if not self._send_spooled(send, spooled, pushed):
                    self._send_ahead(send, urgent)
                    return

    def _last_pushed(self, due: list[Spooled]) -> int:
        """The trip, if only a few batches are held back before it: without them the collector would judge it by less."""
        streamed = 0
        for spooled in due:
            if streamed > self._window.push:
                break
            if isinstance(spooled.message, messages.Tripped):
                return spooled.message.seq
            streamed += spooled.table is not None
        return 0

    def _send_spooled(self, send: Send, spooled: Spooled, pushed: int) -> bool:
        message, table = spooled.message, spooled.table
        if table is not None and message.seq > pushed and not self._window.is_open:
            return False
        if table is not None and table.id not in self._tables_sent:
            if not send(messages.Table(table) if isinstance(table, FrameTable) else messages.Fingerprints(table)):
                return False
            if len(self._tables_sent) >= TABLES_SENT:
                self._tables_sent.clear()
            self._tables_sent.add(table.id)
        size = send(message)
        if size:
            self._spool.sent = message.seq
            if table is not None:
                self._window.send(message.seq, size)
        return size > 0

    def _send_ahead(self, send: Send, urgent: list[messages.Tripped | messages.LookedCloser]) -> None:
        """An abort does not wait for the batches that the window holds back."""
        for message in urgent:
            if message.seq > max(self._ahead, self._spool.sent):
                if not send(replace(message, seq=messages.AHEAD)):  # a CLOSEUP says nothing without its TRIP
                    return
                self._ahead = message.seq
