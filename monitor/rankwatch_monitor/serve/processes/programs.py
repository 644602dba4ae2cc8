"""The programs that a collector starts: the command of ``--on-verdict``, and ``rankwatch archive``. Each has its time."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

PATIENCE = 1.0
"""Seconds after which the one at the terminal is told what is waited for at the end."""

NOTHING = "it printed nothing"


class ProgramEnd(NamedTuple):
    """How a program ended. ``code`` is None if it was ended as it took too long, and ``error`` says why it could not start."""

    code: int | None = None
    printed: str = ""
    error: str = ""


class Programs:
    """Programs that may run at one time, each in a session of its own: Ctrl-C is the job's. For any thread."""

    def __init__(self) -> None:
        self.is_stopped = False
        self._running: set[subprocess.Popen[str]] = set()

    def run(
        self,
        command: str | Sequence[str],
        environment: Mapping[str, str],
        limit: float,
        *,
        given: str | None = None,
        niceness: int = 0,
    ) -> ProgramEnd:
        """Runs a program to its end, for at most ``limit`` seconds. A command that is text is the shell's."""
        try:
            process = subprocess.Popen(
                command,
                shell=isinstance(command, str),
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL if given is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
                errors="replace",
            )
        except OSError as error:
            return ProgramEnd(error=error.strerror or str(error))
        self._running.add(process)
        try:
            if niceness:
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
            if self.is_stopped:  # before it was in the set
                _kill(process)
            printed, _ = process.communicate(given, timeout=limit)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.communicate()
            return ProgramEnd()
        finally:
            self._running.discard(process)
        return ProgramEnd(process.returncode, printed.strip())

    def stop(self) -> None:
        """Ends all that run, with all that they have started, and each that would begin. For a signal's handler, too."""
        self.is_stopped = True
        for process in tuple(self._running):
            _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
