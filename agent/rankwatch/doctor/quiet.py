"""Keeps the output of C++ libraries off the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def quiet(log: Path) -> Iterator[None]:
    """Redirects what gloo, NCCL and torch write from C++ to a file, so that it does not mix with the ranks' output.

    ``sys.stdout`` and ``sys.stderr`` still write to the terminal.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    streams = sys.stdout, sys.stderr
    outer = os.dup(1), os.dup(2)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(descriptor), "w") for descriptor in outer)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    try:
        yield
    finally:
        sys.stdout.close()
        sys.stderr.close()
        sys.stdout, sys.stderr = streams
        for descriptor, before in zip((1, 2), outer, strict=True):
            os.dup2(before, descriptor)
            os.close(before)
        os.close(file)
