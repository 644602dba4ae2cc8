"""The link of a rank to a real collector; the training thread of the rank is the test."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rankwatch.shared.link import wire
from rankwatch.shared.link.connection import Connection
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import BEGINNING, NO_STAGE, Whereabouts
from rankwatch.tell.link import Link


def link_to(
    connection: Connection,
    rank: int = 0,
    world_size: int = 1,
    *,
    job: str = "train",
    progress: Callable[[], Whereabouts] = Whereabouts,
    on_abort: Callable[[messages.Abort], None] = lambda abort: None,
    on_tune: Callable[[messages.Tune], None] = lambda tune: None,
    source: str = "",
) -> Link:
    hello = messages.Hello(
        *wire.VERSION, job, 0, rank, world_size, rank, "host", 100 + rank, "cpu", "2.13.0", os.urandom(8).hex(), NO_STAGE
    )
    watch = SimpleNamespace(
        where=progress, on_abort=on_abort, on_stay=lambda seconds: None, has_raised=lambda: True, on_tune=on_tune
    )
    return Link(connection, hello, watch, source)


class Rank:
    """A link that writes down what it is told."""

    def __init__(self, connection: Connection, rank: int = 0, world_size: int = 1, source: str = "") -> None:
        self.moment = BEGINNING
        self.looks = 0
        """How often the link has asked for the moment."""
        self.aborted = threading.Event()
        self.abort: messages.Abort | None = None
        self.tunings: list[messages.Tune] = []
        told: dict[str, Any] = {"progress": self._progress, "on_abort": self._on_abort, "on_tune": self.tunings.append}
        self.link = link_to(connection, rank, world_size, source=source, **told)

    def _progress(self) -> Whereabouts:
        self.looks += 1
        return Whereabouts(self.moment, "forward", self.moment)

    def _on_abort(self, abort: messages.Abort) -> None:
        self.abort = abort
        self.aborted.set()
