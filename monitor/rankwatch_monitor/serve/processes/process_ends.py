"""How the processes of ranks on this host end: a rank that is killed cannot say so itself. No privileges are needed.

A process is followed by a descriptor of it, which the kernel makes readable when the process ends. Its status can be read as long
as nobody has waited for the process, so a thread does nothing else; newer kernels tell it later, too. Where a kernel or a
container allows none of this, nothing is told, and the rank is lost without a word.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import signal
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from rankwatch.shared.link.wake import Wake
from rankwatch.shared.system.exit_queue import has_queue

from ...decide.core.effects import FollowProcess
from ...decide.core.ledger import RankExited
from ...decide.ending.exit_text import describe_exit
from .out_of_memory import OomCounter, kernel_line

log = logging.getLogger(__name__)

MOST = 32
"""Processes that are followed, each by a descriptor: no host has as many ranks."""

MOST_REFUSED = 1024
"""Numbers of processes that cannot be followed, as they are in a container say: they are not tried again."""

_INFO = struct.Struct("=QQ11Ii")
"""``struct pidfd_info``: its mask first, the status last."""
_GET_INFO = 0xC000FF0B | _INFO.size << 16
"""``PIDFD_GET_INFO``, of Linux 6.13. It tells the status since 6.15."""
_HAS_STATUS = 1 << 3
_STATUS_FIELD = 49
"""Of /proc/PID/stat, after the name: the status of a process that has ended and was not waited for."""


class ExitWatch:
    """Calls ``tell``, in a thread of its own, of each process that has ended otherwise than with exit code 0."""

    def __init__(self, tell: Callable[[RankExited], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._new: deque[FollowProcess] = deque(maxlen=MOST)
        self._followed: dict[int, tuple[list[FollowProcess], OomCounter]] = {}
        """By descriptor: a process is a rank of several runs if it watches several models."""
        self._refused: set[int] = set()
        self._known: dict[int, int] = {}
        self._is_over = False
        self._wake = Wake()
        self._thread: threading.Thread | None = None

    def follow(self, process: FollowProcess) -> None:
        """Never blocks."""
        self._new.append(process)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rankwatch-exits", daemon=True)
            self._thread.start()
        self._wake()

    def take_status(self, pid: int, status: int) -> None:
        """Whoever started this process has waited for it, and knows its exit code, or minus its signal."""
        self._known[pid] = status

    def settle(self) -> None:
        """Tells of the processes that have ended by now."""
        with self._lock:
            self._look()

    def close(self) -> None:
        self._is_over = True
        self._wake()
        if self._thread is not None:
            self._thread.join()
        for descriptor in self._followed:
            os.close(descriptor)
        self._wake.close()

    def _run(self) -> None:
        while not self._is_over:
            try:
                with self._lock:
                    while self._new:
                        self._open(self._new.popleft())
                    self._look()
                    poll = _poll([self._wake.reader.fileno(), *self._followed])
                poll.poll()
                self._wake.drain()
            except Exception:
                log.exception("an error of ours while the end of a rank was looked at; the collector goes on without that")
                return

    def _open(self, process: FollowProcess) -> None:
        known = {ranks[0].pid: ranks for ranks, _ in self._followed.values()}
        if (ranks := known.get(process.pid)) is not None:
            if process not in ranks and has_queue(process.pid, process.incarnation):
                ranks.append(process)
            return
        if len(known) >= MOST or process.pid in self._refused:
            return
        if len(self._refused) >= MOST_REFUSED:
            self._refused.clear()
        self._refused.add(process.pid)
        with suppress(OSError):  # there is no such process, or none that may be followed
            descriptor = os.pidfd_open(process.pid)
            if has_queue(process.pid, process.incarnation):
                self._followed[descriptor] = [process], OomCounter(process.pid)
                self._refused.discard(process.pid)
            else:
                os.close(descriptor)

    def _look(self) -> None:
        for descriptor, _ in _poll(self._followed).poll(0):
            ranks, oom = self._followed.pop(descriptor)
            pid = ranks[0].pid
            status = self._status(pid, descriptor)
            os.close(descriptor)
            said = kernel_line(pid) or oom.look() if status == -signal.SIGKILL else ""
            for rank in ranks if status else ():
                self._tell(RankExited(rank.run, rank.rank, rank.incarnation, describe_exit(status, said)))

    def _status(self, pid: int, descriptor: int) -> int:
        """The exit code, or minus the signal; 0 where it is not known."""
        if pid in self._known:
            return self._known.pop(pid)
        with suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            if fields[0] in (b"Z", b"X"):
                return os.waitstatus_to_exitcode(int(fields[_STATUS_FIELD]))
        with suppress(OSError, ValueError):
            asked = bytearray(_INFO.pack(_HAS_STATUS, *[0] * 13))
            fcntl.ioctl(descriptor, _GET_INFO, asked)
            mask, *_, status = _INFO.unpack(asked)
            return os.waitstatus_to_exitcode(status) if mask & _HAS_STATUS else 0
        return 0


def _poll(descriptors: Iterable[int]) -> select.poll:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return poll
