"""The process that hears, in a rank's place, that the rank is to be ended: for ranks whose C extension keeps the GIL.

A collector on the rank's host needs none. On any other host, a timer of the kernel starts this process once the link's thread
has not turned for ``LISTEN_AFTER`` seconds. It says LISTEN, and on END it ends the rank by the rank's queue (``exit_queue.py``).
It is over when the link turns again, and when the rank's process is gone. Its stdin is a file in memory, from the rank: 8 bytes
that change as the link turns, and then its task.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path

import zmq

from ..errors import ProtocolError
from ..shared.link import connection as connections
from ..shared.link import wire
from ..shared.link.connection import Connection
from ..shared.link.sockets import dealer
from ..shared.system.exit_queue import end_process, has_queue
from ..shared.system.log_lines import write_lines_of_a_rank
from ..shared.system.native_call import NativeCall
from ..shared.types import messages
from ..shared.types.messages import LISTEN_AFTER
from .native_timer import NativeTimer

log = logging.getLogger(__name__)

TURN = 1.0
"""Seconds in which the link is counted as turning once, however often it does; and between two LISTENs."""

COUNT_BYTES = 8
STDIN = 0

_commands: list[ctypes.Array[ctypes.c_char]] = []
"""Each for as long as the process lives: the C library may be about to run it."""


class StandIn:
    """The rank's side: has the process started when the link's thread no longer turns.

    Where the system has no such timer or file, no process is ever started, and nothing else changes.
    """

    def __init__(self) -> None:
        self._turns = 0
        self._next = 0.0
        self._file = -1
        self._timer: NativeTimer | None = None

    def prepare(self, connection: Connection, run: str, hello: messages.Hello) -> None:
        """From now on, a process may be started that stands in for this rank of this run."""
        with suppress(OSError, AttributeError):
            if self._timer is None:
                self.close()  # an attempt that failed
                self._file = os.memfd_create("rankwatch-stand-in")
                command = ctypes.create_string_buffer(_command(os.getpid(), self._file).encode())
                _commands.append(command)
                self._timer = NativeTimer(NativeCall("system", ctypes.addressof(command)))
            task = {
                "connection": connections.render(connection), "run": run, "rank": hello.rank,
                "incarnation": hello.incarnation, "pid": hello.pid,
            }  # fmt: skip
            os.ftruncate(self._file, COUNT_BYTES)
            os.pwrite(self._file, json.dumps(task).encode(), COUNT_BYTES)
            self._timer.set(LISTEN_AFTER)  # the GIL may be kept before the link turns again

    def turn(self, now: float) -> None:
        """The link's thread turns."""
        if self._timer is None or now < self._next:
            return
        self._turns, self._next = self._turns + 1, now + TURN
        os.pwrite(self._file, self._turns.to_bytes(COUNT_BYTES, "little"), 0)
        self._timer.set(LISTEN_AFTER)

    def close(self) -> None:
        """From now on no process is started."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.delete()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _command(pid: int, file: int) -> str:
    """For the shell. The file is named by the rank's process, since no child inherits it."""
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = shlex.join([f"PYTHONPATH={path}", "RANKWATCH_MODE=disabled"])
    return f"env {settings} {shlex.quote(sys.executable)} -m {__name__} </proc/{pid}/fd/{file} >/dev/null &"


def stand_in(file: int) -> None:
    """What the process does. ``file``: the one that the rank gives it."""
    turns = os.pread(file, COUNT_BYTES, 0)
    task = json.loads(os.pread(file, 1 << 16, COUNT_BYTES))
    pid, incarnation = task["pid"], task["incarnation"]
    listen = wire.encode(messages.Listen(task["run"], task["rank"], incarnation))
    with zmq.Context() as context, dealer(context, connections.read(task["connection"])) as socket:
        while os.pread(file, COUNT_BYTES, 0) == turns and has_queue(pid, incarnation):
            with suppress(zmq.Again):  # not connected yet
                socket.send(listen, zmq.NOBLOCK)
            if socket.poll(int(1000 * TURN)) and _is_end(socket.recv(), incarnation):
                log.warning("rankwatch: rank %d is ended: its GIL is kept, and it cannot hear the abort", task["rank"])
                end_process(pid, incarnation)


def _is_end(data: bytes, incarnation: str) -> bool:
    try:
        return wire.decode(data) == messages.End(incarnation)
    except ProtocolError:  # from a newer collector, say: it is no END
        return False


if __name__ == "__main__":
    os.setsid()  # what ends the rank's group need not end this first
    logging.basicConfig(format="%(message)s")
    write_lines_of_a_rank(__name__)
    stand_in(STDIN)
