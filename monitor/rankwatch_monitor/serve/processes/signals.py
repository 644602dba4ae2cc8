"""What each signal to ``rankwatch run`` does. One table: what ends the command, what is ours, and all others go to the command.

A batch system and a user speak to the training by the process that they know: SLURM's ``--signal=B:USR1@90``, a ``kill -USR2``.
"""

from __future__ import annotations

import enum
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress


class Part(enum.Enum):
    """What becomes of a signal."""

    ENDS = enum.auto()
    """The first of these ends the command, the second kills it, the third ends the wait for its ranks."""
    OURS = enum.auto()
    """It is about this process alone, or nobody can take it."""
    PASSED_ON = enum.auto()
    """The command is sent the same, once. Nothing is decided by it, in whatever order it comes with the others."""


_PARTS = {
    Part.ENDS: ("SIGTERM", "SIGHUP", "SIGINT"),
    Part.OURS: (
        *("SIGKILL", "SIGSTOP"),  # nobody can take them
        *("SIGTSTP", "SIGTTIN", "SIGTTOU"),  # the terminal's, which stop all processes of the job alike
        *("SIGCHLD", "SIGPIPE"),  # what this process itself does brings them
        *("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS", "SIGXFSZ"),  # its own faults
    ),
}
_OF_NUMBER = {int(getattr(signal, name)): part for part, names in _PARTS.items() for name in names}


def part_of(number: int) -> Part:
    return _OF_NUMBER.get(number, Part.PASSED_ON)


def heeded() -> list[int]:
    """The signals that are handled here.

    Under nohup SIGHUP stays ignored, and the command inherits that; so with all others. But a shell's script has its background
    processes ignore SIGINT, and job scripts send it all the same.
    """
    always = signal.SIGTERM, signal.SIGINT
    mine = (number for number in signal.valid_signals() if part_of(number) is not Part.OURS)
    return sorted(number for number in mine if number in always or signal.getsignal(number) is signal.SIG_DFL)


_BYSTANDER = """
import os, signal, sys
for number in map(int, sys.argv[1:]):
    signal.signal(number, lambda number, frame: os.write(1, bytes([number])))
for number in signal.SIGTERM, signal.SIGHUP, signal.SIGINT:
    signal.signal(number, signal.SIG_IGN)
while os.read(0, 1):
    os.write(1, b"\\0")
"""

PATIENCE = 0.2
"""Seconds in which a batch system sends a signal to all processes of a job, one after another."""

ANSWER = 2.0
"""Seconds after these, within which the bystander says that it has run meanwhile. Else the command may get a signal twice."""


class Bystander:
    """A process that tells which signals come to all processes of the job, as from a terminal, or from SLURM's ``--signal``.

    The command has those already: a handler that saves a checkpoint must not run twice. It ends with this process.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._seen = Counter[int]()  # 0: its answers
        self._asked = 0
        with suppress(OSError):  # no more processes, say: the command is sent all signals
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BYSTANDER, *map(str, numbers)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
            )
        if self._process is not None and self._process.stdout is not None:
            os.set_blocking(self._process.stdout.fileno(), False)

    def has_seen(self, number: int) -> bool:
        """Whether this signal, which has come to us, has come to all.

        For a signal's handler, too. So that of another signal may run at any point of this, and take what has come.
        """
        until, process, asked = time.monotonic() + PATIENCE, self._process, 0
        while process is not None and process.stdout is not None and not self._seen[number]:
            if asked and self._seen[0] >= asked:  # what had come to it before, it has told
                break
            if not select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                if asked:
                    break
                until, asked = time.monotonic() + ANSWER, self._ask(process)
                continue
            try:
                said = os.read(process.stdout.fileno(), 64)
            except BlockingIOError:  # that handler has read it
                continue
            if not said:  # it was not ready yet, and has ended by the signal
                self._process = None
                return process.wait() == -number
            self._seen.update(said)
        has_seen = self._seen[number] > 0
        self._seen[number] -= has_seen
        return has_seen

    def _ask(self, process: subprocess.Popen[bytes]) -> int:
        """The number of the answer that shows that the bystander has run since: on a busy machine it may not for long."""
        self._asked += 1
        asked = self._asked
        with suppress(OSError):  # it has ended
            if process.stdin is not None:
                os.write(process.stdin.fileno(), b".")
        return asked

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with process:
                process.kill()
