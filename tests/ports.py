"""Ports for a job that must know a port before anybody listens there."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import cycle, islice

FIRST, BLOCKS, SIZE = 20_000, 250, 50
"""They end below 32,768, where Linux begins to hand out ports to whoever asks for any. A port from there that was found free may
be given to another process before somebody listens on it, or to the connection of a client that waits for it."""


def free_port() -> int:
    """A port on which nobody listens, and for which no other process of any test asks."""
    _, ports = _block(os.getpid())
    for port in islice(ports, SIZE):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return port
    raise RuntimeError(f"somebody listens on each of {SIZE} ports")


def address() -> str:
    """Where a collector may listen that will be started again: the same address."""
    return f"tcp://127.0.0.1:{free_port()}"


@cache
def _block(pid: int) -> tuple[socket.socket, Iterator[int]]:
    """The ports of this process, and the lock that holds them until the process ends: a name that the kernel keeps unique.

    The process id chooses them, since two launches under one port are one start for ranks that only know their port.
    """
    for number in range(pid, pid + BLOCKS):
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0rankwatch-tests-ports-{number % BLOCKS}")
        except OSError:
            lock.close()
            continue
        first = FIRST + SIZE * (number % BLOCKS)
        return lock, islice(cycle(range(first, first + SIZE)), pid // BLOCKS % SIZE, None)
    raise RuntimeError("all ports for tests are taken")
