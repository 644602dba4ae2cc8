"""The store that connects all ranks: who arrived, rank 0's orders, the answers. The only file of the agent that opens stores."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, TypeAlias

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ..shared.printable import cleaned
from .placement import Placement, StoreAddress

OnWait: TypeAlias = Callable[[list[int]], None]
"""Called now and then, while this rank waits, with the ranks that it waits for."""

SAY_EVERY = 5.0
"""Seconds between two calls of OnWait."""
FAREWELL = 5.0
"""Seconds that the rank with the store waits for the others to read the last order before it closes the store."""


class Rendezvous:
    """A rank's two connections to the store: one for orders, one for checks, which may hang and block their connection.

    Both connect at the start. The store resolves the name of each client that connects, and all others wait meanwhile: with a
    slow name service that takes seconds, which must not count as a check's time.

    Raises:
        RuntimeError: the store cannot be opened, or not be reached in ``timeout`` seconds.
    """

    def __init__(self, store: StoreAddress, name: str, timeout: float) -> None:
        self._name = f"rankwatch-doctor/{name}"
        self._timeout = timedelta(seconds=timeout)
        self._opened = self._connection(store.host, store.port, store.is_opened_here)
        self.address = store.host, self._opened.port
        self._store = PrefixStore(self._name, self._opened)
        self._check_connection: TCPStore | None = self._connection(*self.address, is_master=False)

    def store_for(self, check: str) -> Store:
        """The connection for checks, with keys of this check alone."""
        if self._check_connection is None:
            self._check_connection = self._connection(*self.address, is_master=False)
        return PrefixStore(f"{self._name}/{check}", self._check_connection)

    def abandon_check_connection(self) -> None:
        """A check that failed may still block it: the next check gets another one."""
        self._check_connection = None

    def arrive(self, placement: Placement) -> None:
        self._put(f"here/{placement.rank}", asdict(placement))

    def roll_call(self, world_size: int, timeout: float, on_wait: OnWait) -> dict[int, Placement]:
        return {
            rank: Placement(**body) for rank, body in self._collected("here", range(world_size), timeout, on_wait).items()
        }

    def order(self, number: int, body: dict[str, Any]) -> None:
        self._put(f"order/{number}", body)

    def next_order(self, number: int, patience: float) -> Any:
        self._store.wait([f"order/{number}"], timedelta(seconds=patience))
        return self._get(f"order/{number}")

    def answer(self, number: int, rank: int, body: dict[str, Any]) -> None:
        self._put(f"answer/{number}/{rank}", body)

    def answers(self, number: int, ranks: Sequence[int], timeout: float, on_wait: OnWait) -> dict[int, Any]:
        return self._collected(f"answer/{number}", ranks, timeout, on_wait)

    def leave(self, rank: int) -> None:
        self._put(f"left/{rank}", {})

    def wait_for_all_to_leave(self, ranks: Iterable[int]) -> None:
        self._collected("left", list(ranks), FAREWELL, lambda missing: None)

    def _collected(self, what: str, ranks: Sequence[int], timeout: float, on_wait: OnWait) -> dict[int, Any]:
        """What the ranks wrote under this key, of those that did so in time."""
        missing, deadline = list(ranks), time.monotonic() + timeout
        while missing and (left := deadline - time.monotonic()) > 0:
            try:
                self._store.wait([f"{what}/{rank}" for rank in missing], timedelta(seconds=min(left, SAY_EVERY)))
                missing = []
            except RuntimeError:  # one of them is late; where the store itself is gone, the next line raises
                missing = [rank for rank in missing if not self._store.check([f"{what}/{rank}"])]
            if missing and left > SAY_EVERY:
                on_wait(missing)
        late = set(missing)
        return {rank: self._get(f"{what}/{rank}") for rank in ranks if rank not in late}

    def _put(self, key: str, body: dict[str, Any]) -> None:
        self._store.set(key, json.dumps(body))

    def _get(self, key: str) -> Any:
        return cleaned(json.loads(self._store.get(key)))

    def _connection(self, host: str, port: int, is_master: bool) -> TCPStore:
        return TCPStore(host, port, None, is_master, self._timeout, wait_for_workers=False)
