"""A process that a rank forks closes its copy of the rank's connection to the collector.

The kernel ends a connection only when its last process ends. So a killed rank would seem connected as long as one of its
data workers lives.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from socket import AF_INET, AF_INET6, SOCK_STREAM, getaddrinfo, socket

_collectors: set[tuple[str, int]] = set()
"""Host and port of each collector to which this process was connected."""


def keep_from_children(address: str) -> None:
    """Processes forked from now on do not inherit connections to ``address`` (``tcp://HOST:PORT``)."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not _collectors:
        os.register_at_fork(after_in_child=_disconnect_child)
    with suppress(OSError):  # a name that does not resolve has no connection
        found = getaddrinfo(host, int(port), type=SOCK_STREAM)
        _collectors.update((str(place[0]), int(place[1])) for *_, place in found)


def _disconnect_child() -> None:
    with suppress(OSError):  # a system without /proc
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if _peer_of(descriptor) in _collectors:
                os.dup2(nowhere, descriptor)  # not closed: the child's copies of ZeroMQ's objects still use the number
        os.close(nowhere)


def _peer_of(descriptor: int) -> tuple[str, int] | None:
    """The peer of an IP connection; None for any other descriptor."""
    with suppress(OSError):
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        with socket(fileno=os.dup(descriptor)) as connection:
            if connection.family in (AF_INET, AF_INET6):
                host, port, *_ = connection.getpeername()
                return host, port
    return None
