"""The files that a process has open."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def open_files() -> set[tuple[str, str]]:
    """Those of this process: number and target (a pipe, a socket and the like have a number of their own there)."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own file
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


@contextmanager
def no_file_stays_open() -> Iterator[None]:
    """Fail where a file is open at the end that was not open before.

    The number of files says less: what earlier tests left to the garbage collector may be closed in between.
    """
    before = open_files()
    yield
    assert open_files() <= before
