"""A process that a rank forks is no rank: it lets go of the rank's connection to the collector.

The kernel ends a connection when the last process that has it is gone. A rank that was killed would so seem to be connected
for as long as one of its data workers lives.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from socket import AF_INET, AF_INET6, SOCK_STREAM, getaddrinfo, socket

_collectors: set[tuple[str, int]] = set()
"""Host and port of those that this process has been connected to."""


def keep_from_children(address: str) -> None:
    """Connections to ``address`` (``tcp://HOST:PORT``) are not inherited by processes forked from now on."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not _collectors:
        os.register_at_fork(after_in_child=_let_go)
    with suppress(OSError):  # a name that does not resolve is not connected to either
        found = getaddrinfo(host, int(port), type=SOCK_STREAM)
        _collectors.update((str(place[0]), int(place[1])) for *_, place in found)


def _let_go() -> None:
    with suppress(OSError):  # a system without /proc
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if _peer_of(descriptor) in _collectors:
                os.dup2(nowhere, descriptor)  # not closed: ZeroMQ's objects, which the child has too, take it for theirs
        os.close(nowhere)


def _peer_of(descriptor: int) -> tuple[str, int] | None:
    """What a connection over IP leads to; None for all else."""
    with suppress(OSError):
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        with socket(fileno=os.dup(descriptor)) as connection:
            if connection.family in (AF_INET, AF_INET6):
                host, port, *_ = connection.getpeername()
                return host, port
    return None
