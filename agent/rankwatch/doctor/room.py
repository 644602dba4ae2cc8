"""The store that all ranks meet in: who is here, rank 0's orders, and the answers. The only file that opens stores."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, TypeAlias

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from .place import Meeting, Place

Tell: TypeAlias = Callable[[list[int]], None]

TELL_AFTER = 5.0
"""Seconds after which rank 0 says whom it waits for, and again."""
FAREWELL = 5.0
"""Seconds that the rank which opened the store stays for the others to hear that all is over."""


class Room:
    """A rank's two connections to the store: one for orders, one for work that may hang and hold it.

    Both are made at the start. The store looks up the name of each client that connects, and all others wait meanwhile: where the
    name service is slow that takes seconds, which no check is to lose.

    Raises:
        RuntimeError: the store cannot be opened, or not be reached in ``timeout`` seconds.
    """

    def __init__(self, meeting: Meeting, name: str, timeout: float) -> None:
        self._name = f"rankwatch-doctor/{name}"
        self._timeout = timedelta(seconds=timeout)
        self._opened = self._connection(meeting.host, meeting.port, meeting.is_opened_here)
        self.address = meeting.host, self._opened.port
        self._store = PrefixStore(self._name, self._opened)
        self._line: TCPStore | None = self._connection(*self.address, is_master=False)

    def line(self, name: str) -> Store:
        """The connection for work."""
        if self._line is None:
            self._line = self._connection(*self.address, is_master=False)
        return PrefixStore(f"{self._name}/{name}", self._line)

    def abandon_line(self) -> None:
        """What failed may still hold it: the next work gets another one."""
        self._line = None

    def arrive(self, place: Place) -> None:
        self._put(f"here/{place.rank}", asdict(place))

    def roll_call(self, world_size: int, timeout: float, tell: Tell) -> dict[int, Place]:
        """Waits for all ranks; those that came. ``tell`` hears now and then of those that have not."""
        missing = set(self._missing("here", range(world_size), timeout, tell))
        return {rank: Place(**self._get(f"here/{rank}")) for rank in range(world_size) if rank not in missing}

    def order(self, number: int, body: dict[str, Any]) -> None:
        self._put(f"order/{number}", body)

    def next_order(self, number: int, patience: float) -> Any:
        self._store.wait([f"order/{number}"], timedelta(seconds=patience))
        return self._get(f"order/{number}")

    def answer(self, number: int, rank: int, body: dict[str, Any]) -> None:
        self._put(f"answer/{number}/{rank}", body)

    def answers(self, number: int, ranks: Sequence[int], timeout: float, tell: Tell) -> dict[int, Any]:
        """What the ranks answered; those that did not are not in it."""
        silent = set(self._missing(f"answer/{number}", ranks, timeout, tell))
        return {rank: self._get(f"answer/{number}/{rank}") for rank in ranks if rank not in silent}

    def leave(self, rank: int) -> None:
        self._put(f"left/{rank}", {})

    def wait_for_all_to_leave(self, ranks: Iterable[int]) -> None:
        self._missing("left", list(ranks), FAREWELL, lambda missing: None)

    def _missing(self, what: str, ranks: Sequence[int], timeout: float, tell: Tell) -> list[int]:
        """The ranks whose key has not come in time."""
        missing, deadline = list(ranks), time.monotonic() + timeout
        while missing and (left := deadline - time.monotonic()) > 0:
            try:
                self._store.wait([f"{what}/{rank}" for rank in missing], timedelta(seconds=min(left, TELL_AFTER)))
                return []
            except RuntimeError:  # too late for one of them; where the store itself is gone, the next line raises
                missing = [rank for rank in missing if not self._store.check([f"{what}/{rank}"])]
            if missing and left > TELL_AFTER:
                tell(missing)
        return missing

    def _put(self, key: str, body: dict[str, Any]) -> None:
        self._store.set(key, json.dumps(body))

    def _get(self, key: str) -> Any:
        return json.loads(self._store.get(key))

    def _connection(self, host: str, port: int, is_master: bool) -> TCPStore:
        return TCPStore(host, port, None, is_master, self._timeout, wait_for_workers=False)
