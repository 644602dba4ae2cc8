"""How a rank ends after a verdict: torchelastic's error file, a line on stderr, and the end by force at the deadline."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from ..errors import EXIT_ABORTED

FOLLOWER_DELAY = 60
"""Seconds added to the timestamp in the error file of a rank that is not the culprit. torchrun shows the file with the
smallest timestamp as Root Cause; for a worker without a file it takes the time at which it noticed its end. This is later
than both."""

_STDERR = 2  # sys.stderr may have been replaced by something without a file descriptor

BACKSTOP = 2.0
"""Seconds after the deadline until the process is ended from C, in case no Python thread can run any more."""

ERROR_FILE, SET_ASIDE = "TORCHELASTIC_ERROR_FILE", ".record"
"""The variable with the file's path, and the suffix that the path gets once the file is written."""


def write_error_file(reason: str, culprit_time: float, *, is_culprit: bool) -> None:
    """If torchrun started this process, writes ``reason`` to the file from which torchrun takes the cause of its end.

    ``culprit_time``: when the culprit tripped; 0: it did not.
    """
    path = os.environ.get(ERROR_FILE, "").removesuffix(SET_ASIDE)
    if not path:
        return
    timestamp = int(culprit_time or time.time()) if is_culprit else int(max(time.time(), culprit_time)) + FOLLOWER_DELAY
    # torchrun prints the call stack field; the first one under Root Cause.
    shown = (
        reason if is_culprit else f"{reason}\n(this rank only followed; it is dated later so that torchrun shows the cause)"
    )
    extra = {"py_callstack": shown, "timestamp": str(timestamp)}
    body = json.dumps({"message": {"message": reason, "extraInfo": extra}})
    part = Path(f"{path}.rankwatch")
    try:
        part.write_text(body)
        os.replace(part, path)  # torchrun may read it at any moment
        # torch's @record would overwrite the file, and torchrun's SIGTERM could leave half of it: torchrun crashes on that.
        os.environ[ERROR_FILE] = path + SET_ASIDE
    except OSError as error:
        say(f"cannot write torchelastic's error file {path}: {error.strerror}")


def is_of_the_network(error: BaseException) -> bool:
    """Whether an exception of the user's training comes from a broken collective: then another rank failed first."""
    text = str(error).lower()
    return "gloo" in text or "nccl" in text or "connection" in text or type(error).__module__.startswith("torch.distributed")


def say(text: str) -> None:
    """Writes one line to stderr, in one write, so that the ranks' lines do not mix."""
    with suppress(OSError, ValueError):  # stderr is closed, or its disk is full
        sys.stderr.write(f"rankwatch: {text}\n")
        sys.stderr.flush()


class Deadline:
    """Ends the process with exit code 77 if it still runs ``grace`` seconds after ``start``."""

    def __init__(self, reason: str, grace: float) -> None:
        self._reason = reason
        self._grace = grace

    def start(self) -> None:
        threading.Thread(target=self._wait, name="rankwatch-deadline", daemon=True).start()
        # If a C extension never releases the GIL, or the interpreter hangs at its shutdown, no Python thread can run.
        faulthandler.dump_traceback_later(self._grace + BACKSTOP, exit=True, file=_STDERR)

    def _wait(self) -> None:
        threading.Event().wait(self._grace)
        try:
            say(f"{self._reason}; this rank did not come back within {self._grace:g} s and is ended")
            _abort_process_groups()
        finally:
            os._exit(EXIT_ABORTED)


def _abort_process_groups() -> None:
    """Aborts collectives, so that peers see their connections end. Has a timeout: the groups may be what hangs."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    abort = getattr(distributed.distributed_c10d, "_abort_process_group", None)
    if abort is not None:
        thread = threading.Thread(target=abort, name="rankwatch-abort-groups", daemon=True)
        thread.start()
        thread.join(BACKSTOP / 4)
