"""What libraries write by themselves is kept off the output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def quiet(log: Path) -> Iterator[None]:
    """Sends to a file what gloo, NCCL and torch write from C++, so that the ranks' output does not mix; Python's goes out."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = sys.stdout, sys.stderr
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
        sys.stdout, sys.stderr = kept
        for descriptor, before in zip((1, 2), outer, strict=True):
            os.dup2(before, descriptor)
            os.close(before)
        os.close(file)
