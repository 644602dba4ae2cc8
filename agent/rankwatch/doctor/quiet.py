"""Keeps the output of C++ libraries off the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path


@contextmanager
def quiet(log: Path) -> Iterator[None]:
    """Redirects what gloo, NCCL and torch write from C++ to a file, so that it does not mix with the ranks' output.

    ``sys.stdout`` and ``sys.stderr`` still write to the terminal.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with (
        open(log, "ab") as file,
        os.fdopen(os.dup(1), "w") as out,
        os.fdopen(os.dup(2), "w") as err,
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield
        finally:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
