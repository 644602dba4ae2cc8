"""What torchrun's summary says of a rank that an exception ended where no watch was there to report it."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path

from ..tell.abort import ERROR_FILE, SET_ASIDE, is_of_the_network, write_error_file


def report(error: BaseException) -> None:
    """Writes torchelastic's error file, unless somebody has: its summary, the last thing on the terminal, shows the traceback."""
    path = os.environ.get(ERROR_FILE, "")
    if not path or path.endswith(SET_ASIDE) or os.path.exists(path):
        return
    if isinstance(error, Exception) and not is_of_the_network(error) and not _is_child_of_rank(path):
        write_error_file("".join(traceback.format_exception(error)), time.time(), is_culprit=True)


def _is_child_of_rank(path: str) -> bool:
    """Whether the rank, whose environment has the same file, started this process: it may go on without."""
    try:
        environ = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return True  # not known
    return f"{ERROR_FILE}={path}".encode() in environ.split(b"\0")
