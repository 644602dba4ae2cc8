"""What a rank says of its end: torchelastic's error file, and a line on stderr. ``deadline.py`` ends it by force."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from ..errors import RankwatchError
from ..shared.system.log_lines import line
from ..shared.words import brief

log = logging.getLogger(__name__)

FOLLOWER_DELAY = 60
"""Seconds added to the timestamp in the error file of a rank that is not the culprit. torchrun shows the file with the
smallest timestamp as Root Cause; for a worker without a file it takes the time at which it noticed its end. This is later
than both."""

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
    """Whether an exception comes from a broken collective of the training: then another rank failed first."""
    if isinstance(error, RankwatchError):  # of the connection file, say
        return False
    return brief.is_of_the_network(words_of(error)) or type(error).__module__.startswith("torch.distributed")


def words_of(error: BaseException) -> str:
    """What the exception says; its class is the user's, and may fail at that."""
    try:
        return str(error)
    except Exception:
        log.debug("no words of %s", type(error).__name__, exc_info=True)
        return "<exception str() failed>"  # as in Python's own traceback


def say(text: str) -> None:
    """Writes one line to stderr, in one write, so that the ranks' lines do not mix."""
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed, or was at the start (None), or its disk is full
        sys.stderr.write(f"{line(text)}\n")
        sys.stderr.flush()
